"""End a process that cannot go on comparing, or a run that is interrupted, without losing a result."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from parity.machine.process import forks_ended
from parity.plugin.alone import exit_heard, exit_refused

if TYPE_CHECKING:
    from parity.plugin.item import ParityItem
    from parity.result import Result

# A worker says what it knows while it compares, so that no result is lost if it dies suddenly.
#
# A worker's results travel with the report of a finished item, but an item that kills its worker has no report. What a
# worker says is in a pipe before it goes on, and the controller reads that pipe to its end, however the worker ends.


@dataclass(frozen=True)
class Entry:
    """Describe the comparison that a worker is making.

    Attributes:
        node_id: the item's id.
        running: the record's line for it if it never ends. That is an error with an empty reason or, once there is a
            verdict, the verdict with a last note that the search for the cause, or a second look, was cut short.
        environment: the record's first line.
        limit: the message if the comparison takes longer than it may.
    """

    node_id: str
    running: str
    environment: str
    limit: str

    @property
    def has_verdict(self) -> bool:
        """Return whether a failure is known and only its second look or the search for its cause has not ended."""
        return bool(json.loads(self.running)["result"]["status"] != "error")

    def ended_by(self, cause: str, from_outside: bool = True) -> str:
        """Return the record's line for the comparison if this cause ends it, see ``ParityItem.cut_short``."""
        line = json.loads(self.running)
        result = line["result"]
        result["cut_short"] = from_outside
        if self.has_verdict:
            result["notes"][-1] += f": {cause}"
        else:
            result["reason"] = cause
        return json.dumps(line, ensure_ascii=False) + "\n"


class Notes:
    """What the controller has heard from one worker.

    Attributes:
        last: the worker's last entry, and the record's lines for the seeds of its item that are finished; None if the
            worker has begun no comparison.
    """

    def __init__(self) -> None:
        self.last: tuple[Entry, tuple[str, ...]] | None = None

    def hear(self, said: tuple[tuple[str, str, str, str], int, list[str]]) -> None:
        """Take what ``note_meanwhile`` has sent. execnet calls this in a thread of its own.

        Args:
            said: the fields of an entry, how many seeds of its item are finished, and the line of the last of them.
        """
        entry, count, line = said
        before = self.last[1] if self.last is not None else ()
        self.last = Entry(*entry), (*before[: max(0, count - 1)], *line)  # in one step, for the thread that reads it


# End whatever runs too long, even a hung CUDA kernel: while Python waits for one, threads run but no signal handlers.


# This long after the limit, faulthandler ends the process. It needs no interpreter lock, which code that hangs may hold
# so that no Python thread runs. A thread that does run gets ten times as long, since it may draw a large report.
GRACE_SECONDS = 30.0


@contextmanager
def time_limit(
    seconds: float, expired: Callable[[], None], stacks: Path | int, interrupt: Callable[[], None] | None = None
) -> Iterator[None]:
    """End the process if the context takes longer than the limit. Once the time is over, the context is never left.

    A process that is forked within the context ends where it would leave it, because it has no timers and the run is
    not its own.

    Args:
        seconds: the limit; 0 for none.
        expired: called in a thread of its own when the time is over; then the process ends with code 1.
        stacks: the file, or its open descriptor, for the threads' stacks if not even that thread can run.
        interrupt: if given, called first to make the code in the context raise. If that code leaves the context within
            ``GRACE_SECONDS``, the process goes on.
    """
    if not seconds:
        with forks_ended():
            yield
        return
    # Only locks, no event: an interruption may raise at any call of a function that is written in Python, and an event
    # whose ``set`` is interrupted holds its own lock forever.
    over = threading.Lock()  # held once the time is over, or once the context was left in time
    within = threading.Lock()  # held until the context is left
    leaving, grace = threading.Lock(), GRACE_SECONDS
    within.acquire()

    with open(stacks, "w", closefd=not isinstance(stacks, int)) as file:

        def end() -> None:
            with leaving:
                if interrupt is not None and within.locked():
                    interrupt()
            if interrupt is not None and within.acquire(timeout=grace):
                return
            if over.acquire(blocking=False):
                faulthandler.dump_traceback_later(10 * GRACE_SECONDS, exit=True, file=file)
                end_process(expired)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        until = seconds + (grace if interrupt is None else 2 * grace)
        faulthandler.dump_traceback_later(until, exit=True, file=file)
        timer.start()
        try:
            with forks_ended():
                yield
        finally:
            try:
                with leaving:  # an interruption that has begun raises here at the latest
                    within.release()
            finally:
                try:
                    if within.locked():
                        within.release()
                    over.acquire()  # waits forever if the time is over
                finally:
                    faulthandler.cancel_dump_traceback_later()
                    timer.cancel()


_EXIT = os._exit  # kept because ``os._exit`` is another function while a case runs


def end_process(last: Callable[[], None] = lambda: None) -> NoReturn:
    """End this process at once, after a last call, even if that call raises."""
    try:
        last()
    finally:
        _EXIT(1)


# An item's lines of the record, which travel with pytest's report of it.


_ENVIRONMENT = pytest.StashKey[str]()
_SENT = pytest.StashKey[bool]()
_PLANNED = pytest.StashKey[tuple[str, ...]]()


def of_item(item: ParityItem) -> dict[str, Any]:
    """Return the lines of an item's results; a process's first item also brings the environment."""
    lines: dict[str, Any] = {"results": of_results(item.results)}
    if not item.session.stash.get(_SENT, False):
        item.session.stash[_SENT] = True
        lines["environment"] = environment_line(item)
    return lines


def of_results(results: Sequence[Result]) -> list[str]:
    """Return a line for each result."""
    from parity.report import record

    return [record.result_line(result) for result in results]


def note_planned(session: pytest.Session, items: Sequence[ParityItem]) -> None:
    """Keep the ids of all items of the run, before those that the resumed run has finished are left out."""
    session.stash[_PLANNED] = tuple(item.key for item in items)


def planned(session: pytest.Session) -> tuple[str, ...]:
    """Return the ids of all items of the run, including those that the resumed run has finished."""
    return session.stash.get(_PLANNED, ())


def environment_line(item: ParityItem) -> str:
    """Return the record's first line, as this process would write it."""
    from parity.report import earlier, environment, record

    stash = item.session.stash
    if _ENVIRONMENT not in stash:
        ids = planned(item.session)
        options = item.options
        asked = earlier.asked(
            options.as_asked, ids, item.files_of_pairs(), item.config.invocation_params.dir, options.calibration
        )
        measured = environment.measure(
            item.kernels.backend, options.seeds, len(ids), item.limits, item.limits_compared(), asked
        )
        stash[_ENVIRONMENT] = record.environment_line(measured)
    return stash[_ENVIRONMENT]


# End a process that cannot compare any more, because a kernel hangs or has broken the CUDA context.
#
# A worker says so in the report of its last item, and xdist replaces the worker. Without workers, the run ends.


BROKEN_BY = pytest.StashKey[str]()
STDERR = pytest.StashKey[int]()
USE_WORKERS = "use -n 1 or more, so that a new worker replaces one that cannot continue"
RESUME = (
    "resume the run (--resume, or --parity-resume=yes), which compares this item in a worker and continues even if "
    "that worker ends"
)


def keep_stderr(config: pytest.Config) -> None:
    """Keep a descriptor of standard error that pytest will not capture, for the last messages."""
    try:
        config.stash[STDERR] = os.dup(2)
    except OSError:  # it is closed
        config.stash[STDERR] = os.open(os.devnull, os.O_WRONLY)
    config.add_cleanup(lambda: os.close(config.stash[STDERR]))


def announce(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Mark a report as the last one of its worker."""
    report.parity_last = True  # type: ignore[union-attr]


def is_last(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """Return whether a worker announced its end with this report."""
    return bool(getattr(report, "parity_last", False))


def summary_line(results: Sequence[Result]) -> str:
    """Return the text about an item that ended early: the reason or, if it failed, how and why no cause was found."""
    from parity.report import failure
    from parity.report.record import Item

    last = results[-1]
    return f"{failure.message(Item(tuple(results)))}\n{last.notes[-1]}" if last.status == "failed" else last.reason


class EndsAfterLastReport:
    """A pytest plugin that ends a worker after its last report.

    xdist takes this for a crash in the item, so it gives the item to no other worker.
    """

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if is_last(report):
            end_process()


def out_of_time(item: ParityItem, main_thread: int) -> None:
    """Report an item that hangs. The thread that watches it calls this, and the process ends when this returns.

    Args:
        item: the item, with the results of the seeds that were compared so far.
        main_thread: the identifier of the thread that hangs.
    """
    ended = "its worker was ended and replaced" if item.workplace.worker else _END_OF_RUN
    _end_with_item(item, f"{item.too_long}; {ended}", main_thread)


def exits_in_c(item: ParityItem) -> None:
    """Report an item whose C code calls ``exit``, and end this process with the exit code of a failure."""
    from parity.trace.whose import line_running

    at = line_running()
    cause = f"C code of the pair called exit, which ends the process{at and f' ({at})'}; {_END_OF_RUN}"
    end_process(lambda: _end_with_item(item, cause, threading.get_ident()))


_END_OF_RUN = f"this ends the run; {USE_WORKERS}"


def _end_with_item(item: ParityItem, cause: str, thread: int) -> None:
    """Report the item that ends this process.

    Without workers, the run ends too, so pytest finishes here and draws its summary and the report.
    """
    item.results.append(item.cut_short(cause, from_outside=False))
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=summary_line(item.results),
        when="call",
        sections=[("where it was", stack_of(thread))],
    )
    report.parity_lines = of_item(item)  # type: ignore[attr-defined]
    announce(report)
    show_output(item.config)
    item.ihook.pytest_runtest_logreport(report=report)
    if not item.workplace.worker:
        _record_as_not_compared(item)
        finish(item.session)


def stack_of(thread: int) -> str:
    """Return the current stack of a thread, formatted like a traceback."""
    return "".join(traceback.format_stack(sys._current_frames()[thread]))


def show_output(config: pytest.Config) -> None:
    """Stop capturing, so that everything printed from now on is visible."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)


def finish(session: pytest.Session) -> None:
    """Make pytest print its summary and the recorder draw the report."""
    session.config.hook.pytest_sessionfinish(session=session, exitstatus=pytest.ExitCode.TESTS_FAILED)
    sys.stdout.flush()


def _record_as_not_compared(ended_by: ParityItem) -> None:
    """Record an error for each item that follows the one that ends the run."""
    items = ended_by.session.items
    reason = f"not compared, because {ended_by.nodeid} ended the run; {USE_WORKERS}"
    recorder = ended_by.config.pluginmanager.getplugin(RECORDER)
    for item in items[items.index(ended_by) + 1 :]:
        if isinstance(item, type(ended_by)):
            item.results = [replace(item.without_comparison(reason), cut_short=True)]
            recorder.record(of_item(item))


def too_long(seconds: float, whose: str = "--parity-timeout, or --timeout of parity run") -> str:
    """Return the message that a comparison, or a file's collection, took longer than its limit."""
    return f"ran longer than {seconds:g} s ({whose})"


# A run that is asked to end early keeps its results and draws its report.
#
# Batch systems send SIGTERM some time before they kill a process, so SIGTERM is treated like Ctrl-C.


RECORDER = "parity-recorder"
RECORDED_ELSEWHERE = pytest.StashKey[bool]()  # set if another process writes this run's record
_ASKED_TO_END = pytest.StashKey[bool]()
_TIME_IS_UP = pytest.StashKey[bool]()
# One request may arrive as two signals: one sent to the process and one to its group (as ``timeout`` of the GNU core
# utilities does), or one of them forwarded by another process of the group. The second signal would interrupt the
# drawing of the report.
_ASKED_ONCE = 1.0  # seconds; too short for somebody to see that the first signal did not help
REASON = "interrupted before all of its seeds were compared"


def heed_signals(config: pytest.Config) -> None:
    """Make SIGTERM interrupt this process like Ctrl-C until pytest is done, and remember that a signal did so.

    In a worker, only Ctrl-C is handled, and SIGTERM ends it at once. Handlers that somebody else has set stay. Where
    Ctrl-C is ignored, as in a shell's background jobs, it stays ignored, except to interrupt a comparison whose time is
    up.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    is_ignored, asked_at = signal.getsignal(signal.SIGINT) is signal.SIG_IGN, -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if is_time_up(config):
            raise KeyboardInterrupt("its time is up")
        if number == signal.SIGINT and is_ignored:
            return
        before, asked_at = asked_at, time.monotonic()
        if asked_at - before < _ASKED_ONCE:
            return
        config.stash[_ASKED_TO_END] = True
        raise KeyboardInterrupt(signal.Signals(number).name)

    def give_back(number: signal.Signals, usual: Any) -> None:
        signal.signal(number, usual)

    of_ctrl_c = signal.SIG_IGN if is_ignored else signal.default_int_handler
    for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, of_ctrl_c)):
        is_ours = number == signal.SIGINT or not hasattr(config, "workerinput")
        if is_ours and signal.getsignal(number) is usual:
            signal.signal(number, interrupt)
            if number == signal.SIGINT:
                config.stash[_ASKED_TO_END] = False
            config.add_cleanup(partial(give_back, number, usual))


def is_asked_to_end(config: pytest.Config) -> bool:
    """Return whether a ``KeyboardInterrupt`` comes from a signal and not from the case. If unknown, return True."""
    return is_time_up(config) or config.stash.get(_ASKED_TO_END, True)


def interruption(config: pytest.Config) -> Callable[[], None] | None:
    """Return a function that interrupts the main thread from another thread; None where that is impossible.

    The main thread gets the signal of Ctrl-C, which also wakes code that sleeps in C.
    """
    config.stash[_TIME_IS_UP] = False
    if _ASKED_TO_END not in config.stash or not hasattr(signal, "pthread_kill"):
        return None
    main_thread = threading.get_ident()

    def interrupt() -> None:
        config.stash[_TIME_IS_UP] = True
        signal.pthread_kill(main_thread, signal.SIGINT)

    return interrupt


def is_time_up(config: pytest.Config) -> bool:
    """Return whether the current or last comparison was interrupted because its time was up."""
    return config.stash.get(_TIME_IS_UP, False)


def keep_finished_seeds(item: ParityItem) -> None:
    """Record the seeds that an interrupted item has compared, and that the item is incomplete.

    pytest does not report interrupted items. A worker's are recorded by ``keep_finished_seeds_of_workers``, because the
    controller no longer listens to workers.
    """
    recorder = item.config.pluginmanager.getplugin(RECORDER)
    if recorder is None or not (item.results or item.verdict):
        return
    if len(item.results) < len(item.options.seeds):
        item.results.append(item.cut_short(REASON))
    recorder.record(of_item(item))


def note_meanwhile(item: ParityItem) -> None:
    """Keep an item's seeds so far and what is known about the current one, in case this process is killed.

    A worker tells the controller. Without workers, the record has it until the item's own lines replace it.
    """
    channel, recorder = item.workplace.channel, item.config.pluginmanager.getplugin(RECORDER)
    environment = environment_line(item)  # queries the GPU, which is impossible after a comparison has broken it
    if channel is not None:
        (running,) = of_results([item.cut_short("")])
        entry = Entry(item.nodeid, running, environment, item.too_long)
        with suppress(OSError):  # the controller has ended, and so will this worker
            channel.send((astuple(entry), len(item.results), of_results(item.results[-1:])))
    elif recorder is not None:
        lines = of_results([*item.results, item.cut_short(f"{_DIED}; {RESUME}")])
        recorder.record_meanwhile(item.nodeid, environment, lines)


_DIED = "the process of this run ended while it was comparing this item"
WORKER = "its worker"  # followed by "died" or "ended"


def took_its_process_along(result: Result) -> bool:
    """Return whether a comparison ended because its process did, perhaps killed from outside."""
    told = result.reason or "".join(result.notes[-1:])
    return result.cut_short and any(what in told for what in (_DIED, f"{WORKER} died", f"{WORKER} ended"))


@contextmanager
def exits_refused(config: pytest.Config, ended: Callable[[], object]) -> Iterator[list[str]]:
    """Within the context, stop ``os._exit`` from ending a run without workers, and notice ``exit`` in C code.

    A worker may end, because another takes its place.

    Args:
        config: this process's configuration.
        ended: called if C code ends the process; it must not return.

    Yields:
        The calls of ``os._exit``.
    """
    if hasattr(config, "workerinput"):
        yield []
        return
    with exit_heard(ended), exit_refused() as calls:
        yield calls


def keep_finished_seeds_of_workers(config: pytest.Config, heard: Iterable[Notes], reported: Container[str]) -> None:
    """Record the seeds of the items that workers were comparing when the run was interrupted.

    Args:
        config: the configuration of the process that writes the record.
        heard: what each worker has said.
        reported: ids of the items whose results have arrived.
    """
    recorder = config.pluginmanager.getplugin(RECORDER)
    for notes in heard:
        if recorder is None or notes.last is None or notes.last[0].node_id in reported:
            continue
        entry, finished = notes.last
        if finished or entry.has_verdict:
            recorder.record({"environment": entry.environment, "results": [*finished, entry.ended_by(REASON)]})
