"""The pytest item: one case at one precision and size. It compares all seeds, beside other workers or alone."""

from __future__ import annotations

import dataclasses
import fcntl
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
from _pytest.fixtures import TopRequest

from parity.machine.process import withheld
from parity.plugin import alone, ending
from parity.plugin.ending import time_limit
from parity.plugin.options import Options, Workplace, of
from parity.shown import raised
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.case.case import Case
    from parity.case.validate import CheckedSize
    from parity.judge.limits import OfPrecision, Table
    from parity.ranks.layout import Degrees
    from parity.result import DeviceError, Result, Switch
    from parity.te import Kernels, Precision
    from parity.te.attention_backend import AttentionBackend
    from parity.trace.effects import Disturbed

# An item that computes in several processes takes the cores of as many workers.


_ASKED_AGAIN = 0.02  # seconds; locks must be polled to wait for any of several, but only the queue's first item polls


class Slots:
    """Share as many slots as a run has workers. An item takes one for each of its processes.

    A slot is a file lock, because the kernel releases it however a worker dies. There is no deadlock: an item that has
    all of its slots waits for no other, and only the first item in the queue holds some while it waits for more.

    Args:
        folder: shared by the run's workers.
        count: how many slots there are.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    @contextmanager
    def taken(self, wanted: int) -> Iterator[None]:
        """Hold this many slots within the context, or all of them if there are fewer.

        Later items wait behind in the queue, so that an item that wants many slots gets them.
        """
        with ExitStack() as files:
            free = [files.enter_context(self._open_lock_file(f"slot-{number}")) for number in range(self.count)]
            missing = min(wanted, self.count)
            with self._open_lock_file("slots") as queue:
                fcntl.flock(queue, fcntl.LOCK_EX)
                while missing:
                    got = list(islice(filter(_is_taken, free), missing))
                    free = [slot for slot in free if slot not in got]
                    missing -= len(got)
                    if missing:
                        time.sleep(_ASKED_AGAIN)
            yield

    def _open_lock_file(self, name: str) -> IO[str]:
        return withheld((self.folder / name).open("w"))


def _is_taken(slot: IO[str]) -> bool:
    """Take a slot, and return whether it was free."""
    try:
        fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Let workers share a device, or use it alone for a while.
#
# The lock is a file lock, because the kernel releases it however a worker dies.


class DeviceLock:
    """One device's lock, the same for all workers that name the same file.

    Attributes:
        path: the lock's file; another file, its gate, is next to it.
        release_memory: called while this process does not use the device and another one uses it alone or waits to.
    """

    def __init__(self, path: Path, release_memory: Callable[[], None]) -> None:
        self.path, self.release_memory = path, release_memory

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share the device within the context: other workers may use it, too, but none may use it alone."""
        with self._open_lock_file("gate") as gate, self._open_lock_file("device") as device:
            if not _is_free(gate):
                self.release_memory()
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(device, fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
            try:
                yield
            finally:
                if not _is_free(gate):
                    self.release_memory()
                fcntl.flock(device, fcntl.LOCK_UN)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the device alone within the context. Workers that come later wait, so that this one gets its turn."""
        with self._open_lock_file("gate") as gate, self._open_lock_file("device") as device:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(device, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(device, fcntl.LOCK_UN)
                fcntl.flock(gate, fcntl.LOCK_UN)

    def _open_lock_file(self, part: str) -> IO[str]:
        return withheld(self.path.with_suffix(f".{part}").open("w"))


def _is_free(gate: IO[str]) -> bool:
    try:
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(gate, fcntl.LOCK_UN)
    return True


# Make one comparison in limited time, beside others on the device or alone, and repeat it if memory ran out.


RETRIED = "memory ran out while other items shared the device, so this item ran again with the device to itself"


def attempt(
    compare: Callable[[], Result],
    time_limit: Callable[[], AbstractContextManager[None]],
    need: Callable[[], int | None],
    workplace: Workplace,
    processes: int = 1,
) -> Result:
    """Compare and, if memory runs out, compare once more with no other worker on the device.

    Args:
        compare: makes the comparison.
        time_limit: limits each comparison and each call of ``need``, but not the wait for other workers.
        need: estimates how many bytes the comparison takes. If that exceeds the worker's share, it starts alone.
        workplace: this process's workplace.
        processes: how many processes the comparison uses; it waits for the cores of as many workers.

    Returns:
        The result; a skip with the reason if memory runs out again.
    """
    from parity.machine import devices
    from parity.passes import memory

    def run(alone: bool) -> Result:
        with _hold_cores(workplace, processes), _hold_device(workplace, alone), time_limit():
            return compare()

    def needed() -> int | None:
        with time_limit():  # it calls the pair's modules, which may hang
            return need()

    first = run(alone=workplace.share is not None and (needed() or 0) > workplace.share)
    if not _lacks_memory(first):
        return first
    memory.release()
    second = run(alone=True)
    if not _lacks_memory(second):
        return dataclasses.replace(second, notes=(*second.notes, RETRIED))
    memory.release()
    reason = (
        f"does not fit in memory, even in a second attempt with the device to itself: it needs about "
        f"{devices.in_words(needed())}, and {devices.in_words(devices.free())} are free; "
        f"{second.reason.rstrip('.')}; declare a smaller size, or compare it on a machine with more memory"
    )
    return dataclasses.replace(second, status="skipped", reason=reason)


def _lacks_memory(result: Result) -> bool:
    return result.status == "error" and result.device_error == "out of memory"


def _hold_cores(workplace: Workplace, processes: int) -> AbstractContextManager[None]:
    """Hold the cores of as many workers; do nothing if the run has no other workers."""
    if workplace.folder is None or workplace.workers == 1:
        return nullcontext()
    return Slots(workplace.folder, workplace.workers).taken(processes)


def _hold_device(workplace: Workplace, alone: bool) -> AbstractContextManager[None]:
    """Hold the device, alone or shared with other workers; do nothing if there is no lock file."""
    if workplace.lock is None:
        return nullcontext()
    from parity.passes import memory

    lock = DeviceLock(workplace.lock, memory.release)
    return lock.alone() if alone else lock.shared()


DETAILS = 2  # the number of -v from which on tracebacks are shown
_MARKS = pytest.StashKey[set[str]]()
_SOON = 0.001  # seconds; 0 would be no limit
NOT_FORKED = (
    "a forked process has neither PyTorch's threads nor a GPU: leave it out, or use -n 1, which compares in a process "
    "of its own and replaces it if a pair ends it"
)


_SEARCH = "the search for the cause"
# When a second look begins, it is known which statistics are beyond their limits. If the second look raises, that
# verdict counts: its numbers are shown, and the run does not pass. The result says that a correct port may have failed
# by chance.
_SECOND_LOOK = "the second look, which tells chance from a mistake,"


class ParityError(Exception):
    """Raised if an item has a result that did not pass; its text is the whole message."""


class ParityItem(pytest.Item):
    """Compare a case at one precision and size, seed after seed.

    Attributes:
        results: one for each seed that was compared so far; only one if the precision is not available.
        steps: for how many steps the pair is trained; 0 for a single pass.
        switch: how it is trained.
        ranks: the ranks over which the candidate is computed; None for one process.
        decoding: whether the candidate decodes what the pair calls it with.
        verdict: the failure of the seed that is being compared, until that comparison has ended; else None.
        unfinished: the part that has not ended then: the search for the cause, or a second look, which may even
            withdraw the verdict.
        disturbed: what other tests had changed and was undone; None if that is not known.
        workplace: where this process runs it.
        until: when pytest-timeout's limit for the item is over, on the monotonic clock, and how a message says so.
        too_long: how a message says that the current comparison took longer than it may.
    """

    def __init__(
        self,
        *,
        case: Case,
        checked: CheckedSize,
        precision: Precision,
        attention: AttentionBackend | None,
        steps: int = 0,
        switch: Switch = "",
        ranks: Degrees | None = None,
        decoding: bool = False,
        kernels: Kernels,
        options: Options,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.case, self.checked, self.precision, self.attention = case, checked, precision, attention
        self.kernels, self.options, self.steps, self.switch, self.ranks = kernels, options, steps, switch, ranks
        self.decoding = decoding
        self.results: list[Result] = []
        self.verdict: Result | None = None
        self.unfinished = _SEARCH
        self.disturbed: Disturbed | None = None
        self.until, self.too_long = (math.inf, ""), ending.too_long(options.timeout)
        self.obj, self.funcargs = case.factory, dict[str, Any]()
        self._fixtureinfo = self.session._fixturemanager.getfixtureinfo(self, None, None)
        self.fixturenames = self._fixtureinfo.names_closure
        self._request = TopRequest(self, _ispytest=True)  # type: ignore[arg-type]
        for mark in ("parity", precision.name, *case.marks):
            _register_mark(self.config, mark)
            self.add_marker(mark)
        if self.get_closest_marker("forked"):
            raise UserError(f"{case.path}:{case.line}: pair {case.name!r} has the mark forked, but {NOT_FORKED}")

    @property
    def workplace(self) -> Workplace:
        return of(self.config)

    @property
    def key(self) -> str:
        """The id of the item's results in a record."""
        return f"{self._from_start(self.path)}::{self.name}"

    @property
    def limits(self) -> str:
        """The file of the table of limits, relative to where pytest was started; empty for the packaged table."""
        return self._from_start(self.options.calibration) if self.options.calibration else ""

    def files_of_pairs(self) -> set[Path]:
        """Return the files that declare the run's pairs."""
        return {other.case.path for other in self.session.items if isinstance(other, ParityItem)}

    def limits_compared(self) -> tuple[OfPrecision, ...]:
        """Return how the limits compare with the packaged ones; empty if they are the packaged ones."""
        from parity.judge import limits
        from parity.judge.limits import load

        return limits.compared(load(self.options.calibration)) if self.options.calibration else ()

    def setup(self) -> None:
        """Set up the fixtures that are used without being arguments: those with ``autouse`` and ``usefixtures``."""
        self._request._fillfixtures()

    def runtest(self) -> None:
        from parity.judge.limits import load, packaged
        from parity.judge.over_seeds import judge_together
        from parity.report import failure
        from parity.report.record import Item
        from parity.result import strictly

        self.results.clear()
        getattr(self, "cancel_timeout", lambda: None)()  # of pytest-timeout; ``until`` ends the comparison
        calibration = load(self.options.calibration) if self.options.calibration else packaged()
        try:
            for seed in self.options.seeds:
                self.results.append(self._compare_seed(seed, calibration))
                if self.results[0].status == "skipped" or ending.is_time_up(self.config):
                    break
        except KeyboardInterrupt:
            ending.keep_finished_seeds(self)
            raise
        self.results[:] = judge_together(self.results)
        if self.options.strict:
            self.results[:] = map(strictly, self.results)
        if self.results[0].status == "skipped":
            pytest.skip(self.results[0].reason)
        item = Item(tuple(self.results))
        if item.bad:
            raise ParityError(failure.message(item, self.config.option.verbose >= DETAILS, self.limits))

    def _compare_seed(self, seed: int, calibration: Table) -> Result:
        from parity.passes import memory
        from parity.result import as_printable
        from parity.trace.whose import interrupted_at

        stash = self.config.stash
        if ending.BROKEN_BY in stash:
            broken = f"{stash[ending.BROKEN_BY]} broke the CUDA context of this process"
            return self.without_comparison(f"not compared, because {broken}; {ending.USE_WORKERS}")
        ending.note_meanwhile(self)
        try:
            with alone.threads_noted(self.config, self.nodeid):
                ranks = self.ranks.count if self.ranks else 1
                result = attempt(
                    lambda: self._compare_catching_errors(seed, calibration),
                    self._time_limit,
                    self._estimate_memory,
                    self.workplace,
                    ranks,
                )
        except KeyboardInterrupt as error:
            if not ending.is_time_up(self.config):
                raise
            memory.release()  # a pass may have left the reference half changed
            result = self.cut_short(f"{self.too_long}; {interrupted_at(error)}")
        self.verdict = None
        if self.disturbed is not None:
            from parity.comparison import with_side_effect_notes

            result = with_side_effect_notes(result, self.disturbed)
        if result.device_error == "broken":
            stash[ending.BROKEN_BY] = self.nodeid
        return as_printable(dataclasses.replace(result, path=self._from_start(self.path)))

    def _estimate_memory(self) -> int | None:
        """Estimate the bytes that a comparison needs; return None if they are unknown or the estimate raises."""
        from parity.passes import memory

        try:
            return memory.estimate(self.case, self.checked, self.kernels.te)
        except KeyboardInterrupt:
            if ending.is_asked_to_end(self.config):
                raise
            return None

    def _compare_catching_errors(self, seed: int, calibration: Table) -> Result:
        """Return the comparison's result, which is an error if anything raises.

        A failure is noted before the search for its cause begins, so that it is kept whatever happens in the search.
        """
        from parity.te.devices import classify
        from parity.trace.whose import way_there

        if self.verdict is not None:  # left by a first attempt, which ran out of memory
            self._note_verdict(None)
        try:
            with ending.exits_refused(self.config, partial(ending.exits_in_c, self)) as exits:
                result = self._judged_and_explained(seed, calibration)
            if exits and result.status in ("passed", "skipped"):  # a thread called it, or the pair's code caught it
                return self.without_comparison(f"the pair's code called {exits[0]}, which would have ended the run")
            return result
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and ending.is_asked_to_end(self.config):
                raise
            device_error, told = classify(error), f"raised {raised(error)}"
            if self.verdict is not None:
                notes = (*self.verdict.notes, f"{self.unfinished} {told}")
                return dataclasses.replace(self.verdict, notes=notes, device_error=device_error)
            return dataclasses.replace(self.without_comparison(told, device_error), traceback=way_there(error))

    def _judged_and_explained(self, seed: int, calibration: Table) -> Result:
        from parity.comparison import check_stages_at, explain_at, judge_at

        case = self.case
        if self.decoding:
            from parity.passes.decoded import decoded_case
            from parity.te.attention_backend import NotOffered

            try:
                case = decoded_case(case, self.checked, self.kernels)
            except NotOffered as error:
                return self.skipped(str(error))
        at = case, self.checked, self.precision, seed, self.kernels, calibration
        if self.steps:
            from parity.trainings.training import train_at

            result = train_at(*at, self.steps, self.switch, self.attention, self.options.diagnosis, self.ranks)
        elif self.ranks is not None:
            from parity.trainings.parallel import compare_over_ranks_at

            result = compare_over_ranks_at(*at, self.ranks, self.attention, self.options.diagnosis)
        else:
            comparison = judge_at(
                *at,
                self.attention,
                self.options.determinism,
                on_progress=self._note_look,
                unwritten=self.options.unwritten,
                probe_weights=self.options.probe_weights,
            )
            if comparison.is_unexplained and self.options.diagnosis is not None:
                self._note_verdict(comparison.result)
            result = explain_at(comparison, self.options.diagnosis)
            if self.options.stages:
                result = check_stages_at(comparison.request, result)
            if case.invariance:
                from parity.invariance import check_invariance_at

                result = check_invariance_at(comparison.request, result)
        if self.kernels.device.type == "cuda":
            import torch

            torch.cuda.synchronize()  # raises a kernel's error here, in the item that it belongs to
        return result

    def cut_short(self, cause: str, from_outside: bool = True) -> Result:
        """Return the result of the next seed if something ends its comparison now: the verdict, if there is one.

        Args:
            cause: what ends it.
            from_outside: whether the cause lies outside the comparison, so that a resumed run repeats it.
        """
        if self.verdict is None:
            return dataclasses.replace(self.without_comparison(cause), cut_short=from_outside)
        later = ", and no later seed was compared" if len(self.results) + 1 < len(self.options.seeds) else ""
        note = f"{self.unfinished} was cut short{later}"
        if self.unfinished == _SECOND_LOOK:
            note += "; the first look counts, so statistics may exceed their limits by chance"
        notes = (*self.verdict.notes, f"{note}: {cause}" if cause else note)
        return dataclasses.replace(self.verdict, notes=notes, cut_short=from_outside)

    def without_comparison(self, reason: str, device_error: DeviceError = "") -> Result:
        """Return an error, with this reason, as the result of the next seed."""
        from parity.result import Result, label_of_way

        ranks = self.ranks.label if self.ranks else ""
        return Result(
            case=self.case.name,
            precision=self.precision.name,
            size=dict(self.checked.size),
            size_label=label_of_way(self.checked.label, self.steps, self.switch, ranks),
            seed=self.options.seeds[min(len(self.results), len(self.options.seeds) - 1)],
            backend=self.kernels.backend,
            status="error",
            reason=reason,
            path=self._from_start(self.path),
            forced_attention=self.attention or "",
            device_error=device_error,
            ranks=ranks,
        )

    def note_failure(self, when: str, error: BaseException) -> None:
        """Add an error for a failure outside the comparisons, as in a fixture, unless some result is bad already."""
        if not any(result.status in ("failed", "error") for result in self.results):
            self.results.append(self.without_comparison(f"pytest's {when} of the item raised {raised(error)}"))

    def skipped(self, reason: str) -> Result:
        """Return the result of an item that pytest skips because of a mark or a conftest."""
        return dataclasses.replace(self.without_comparison(reason.removeprefix("Skipped: ")), status="skipped")

    def _time_limit(self) -> AbstractContextManager[None]:
        expired = partial(ending.out_of_time, self, threading.get_ident())
        stacks = self.workplace.stacks or self.config.stash[ending.STDERR]
        own, (until, of_pytest_timeout) = self.options.timeout or math.inf, self.until
        left = max(until - time.monotonic(), _SOON)
        seconds, self.too_long = min((own, ending.too_long(own)), (left, of_pytest_timeout))
        if seconds == math.inf or self.config.getoption("usepdb", False):
            seconds = 0.0
        interrupt = ending.interruption(self.config)
        return time_limit(seconds, expired, stacks, None if self.workplace.worker else interrupt)

    def _note_look(self, verdict: Result | None, decided: bool) -> None:
        """Keep the verdict of a first look until a second one has ended, and then the verdict of that one."""
        self._note_verdict(verdict, _SEARCH if decided else _SECOND_LOOK)

    def _note_verdict(self, verdict: Result | None, unfinished: str = _SEARCH) -> None:
        """Keep a failure where it survives the death of this process.

        Args:
            verdict: the failure; None if it was withdrawn.
            unfinished: the part of the comparison that has not ended.
        """
        self.verdict = verdict and dataclasses.replace(verdict, path=self._from_start(self.path))
        self.unfinished = unfinished
        ending.note_meanwhile(self)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return only the message of a failed comparison, but a traceback of an unexpected exception."""
        if isinstance(excinfo.value, ParityError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.case.line - 1, self.name

    def _from_start(self, path: Path) -> str:
        """Return the path relative to where pytest was started, from where the reports' commands work."""
        return Path(os.path.relpath(path, self.config.invocation_params.dir)).as_posix()


def _register_mark(config: pytest.Config, mark: str) -> None:
    """Register a mark with pytest, but only once, because pytest keeps duplicate lines."""
    known = config.stash.setdefault(_MARKS, set())
    if mark not in known:
        known.add(mark)
        config.addinivalue_line("markers", f"{mark}: items of parity")


class BrokenCase(pytest.Collector):
    """Stand for a case that cannot be compared, so that pytest reports it by its name among the others."""

    def __init__(self, *, error: Exception, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._error = error

    def collect(self) -> Iterator[ParityItem]:
        raise self._error
