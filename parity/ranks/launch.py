"""Call a function on every rank of a group that communicates by gloo, and return what each returned.

A rank that raises, dies or hangs ends the launch, and the error says which rank it was and where; nothing is left
running. Ranks are forked by a server process that has imported PyTorch and TE and shares nothing else with this one:
TE's modules hold locks and caches, which a fork of this process would copy in the middle of use.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from parity.machine.process import end_with_parent
from parity.shown import raised

IMPORTED_BEFORE = ("parity.ranks.te_on_cpu",)
_BEGUN = ()  # what a rank sends before it calls the function
_TO_BEGIN = 300.0  # seconds that ranks may take to start, imports included
_GRACE = 0.5  # seconds in which other ranks may say why they failed as well, or where they are
_TOLD = 6000  # characters of a rank's output that an error repeats
# A rank may print without end, into a file. The launch looks at the file this often, and if it has become larger than
# this, only its first part is kept.
_LOOKS = 1.0  # seconds
_MOST_PRINTED, _KEPT = 64 << 20, 1 << 20  # bytes


@dataclass(frozen=True)
class RankFailure:
    """Say how one rank failed.

    Attributes:
        rank: the rank's number.
        how: ``raised``, ``died`` or ``hung``.
        what: the exception, the signal or exit code, or the time that it was given, in a few words.
        where: the traceback, innermost frame last; innermost frame first for a rank that hung or crashed.
    """

    rank: int
    how: Literal["raised", "died", "hung"]
    what: str
    where: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}: {self.what}\n{self.where}".rstrip()


class RanksFailed(RuntimeError):
    """Raised if a launch does not get a result from every rank.

    Attributes:
        failures: ranks that died, then the others in the order in which they failed, perhaps because of the first.
    """

    def __init__(self, ranks: int, failures: Sequence[RankFailure]) -> None:
        self.failures = tuple(failures)
        super().__init__(f"{len(failures)} of {ranks} ranks failed\n" + "\n\n".join(map(str, failures)))


def launch(
    function: Callable[..., Any],
    ranks: int,
    arguments: Sequence[Any] = (),
    *,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
    imported_before: Sequence[str] = IMPORTED_BEFORE,
) -> list[Any]:
    """Return what ``function(*arguments)`` returned on each rank, in the order of ranks.

    Args:
        function: a function of a module, not one within another function, since other processes have to find it. It
            runs in one thread, within the default process group, and what it returns is pickled.
        ranks: how many processes there are.
        arguments: the arguments, the same for all; a function learns its rank from ``torch.distributed``.
        timeout: how many seconds after all ranks have started those that have not returned count as hung.
        environment: variables to set in each rank, before anything that the server did not import is imported.
        imported_before: modules that the server imports, if this launch is the first and starts it.

    Raises:
        RanksFailed: if a rank raised, died or did not return in time.
    """
    context = _choose_context(imported_before)
    with tempfile.TemporaryDirectory(prefix="parity-ranks-") as folder:
        with _start_ranks(context, function, ranks, arguments, timeout, environment or {}, folder) as running:
            results, failures = _gather_results(running, timeout)
        for rank in range(ranks):
            for line in "" if failures else _read_output(folder, rank).splitlines():
                print(f"[rank {rank}] {line}")
    if failures:
        raise RanksFailed(ranks, failures)
    return [results[rank] for rank in range(ranks)]


def _choose_context(imported_before: Sequence[str]) -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imported_before))
    return context


# The process that launches.


@dataclass(frozen=True)
class _Rank:
    number: int
    process: BaseProcess
    answer: Connection
    folder: str


@contextmanager
def _start_ranks(
    context: BaseContext,
    function: Callable[..., Any],
    ranks: int,
    arguments: Sequence[Any],
    timeout: float,
    environment: Mapping[str, str],
    folder: str,
) -> Iterator[list[_Rank]]:
    """Yield the running ranks; all of them are ended afterwards."""
    running: list[_Rank] = []
    try:
        for number in range(ranks):
            answer, sent = context.Pipe(duplex=False)
            place = _Place(number, ranks, folder, timeout, dict(environment))
            process: BaseProcess = context.Process(  # type: ignore[attr-defined]
                target=_run_rank, args=(place, sent, function, tuple(arguments)), name=f"rank {number}", daemon=True
            )
            process.start()
            sent.close()
            running.append(_Rank(number, process, answer, folder))
        yield running
    finally:
        for rank in running:
            rank.process.kill()
        for rank in running:
            rank.process.join()
            rank.answer.close()


def _gather_results(running: Sequence[_Rank], timeout: float) -> tuple[dict[int, Any], list[RankFailure]]:
    """Return the results by rank, and the failures, beginning with ranks that died."""
    results: dict[int, Any] = {}
    failures: list[RankFailure] = []
    waiting = {rank.answer: rank for rank in running}
    not_begun = {rank.number for rank in running}
    end = time.monotonic() + _TO_BEGIN
    while waiting and (left := end - time.monotonic()) > 0:
        for rank in running:
            _shorten_file(_get_output_path(rank.folder, rank.number))
        for connection in wait(list(waiting), min(left, _LOOKS)):
            rank = waiting[connection]  # type: ignore[index]
            answer = _receive_answer(rank)
            if answer == _BEGUN:
                not_begun.discard(rank.number)
                if not not_begun and not failures:
                    end = time.monotonic() + timeout
                continue
            del waiting[rank.answer]
            if isinstance(answer, RankFailure):
                failures.append(answer)
                end = min(end, time.monotonic() + _GRACE)
            else:
                results[rank.number] = answer[0]
    if waiting and not failures:
        given = f"it had not returned after {timeout:g} s"
        failures += _describe_hung_ranks(
            list(waiting.values()), f"it had not begun after {_TO_BEGIN:g} s" if not_begun else given
        )
    # A rank may raise because it was talking to one that died, even if its error arrives first.
    return results, sorted(failures, key=lambda failure: failure.how != "died")


def _receive_answer(rank: _Rank) -> RankFailure | tuple[Any, ...]:
    try:
        answer: RankFailure | tuple[Any, ...] = pickle.loads(rank.answer.recv_bytes())
    except EOFError:
        rank.process.join()
        code = rank.process.exitcode or 0
        what = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return RankFailure(rank.number, "died", what, _read_output(rank.folder, rank.number)[-_TOLD:])
    except Exception as error:  # an object of a class that can be pickled, but not unpickled
        return RankFailure(rank.number, "raised", f"what it returned cannot be read: {raised(error)}", "")
    return answer


def _describe_hung_ranks(running: Sequence[_Rank], what: str) -> list[RankFailure]:
    """Ask ranks where they hang, and return their failures."""
    printed = {rank.number: _get_file_size(_get_output_path(rank.folder, rank.number)) for rank in running}
    if hasattr(signal, "SIGUSR1"):
        for rank in running:
            with suppress(ProcessLookupError, TypeError):
                os.kill(rank.process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(_GRACE)
    return [
        RankFailure(
            rank.number,
            "hung",
            what,
            _from_stack(_read_output(rank.folder, rank.number, printed[rank.number]))[:_TOLD],
        )
        for rank in running
    ]


def _from_stack(text: str) -> str:
    """Drop what a rank printed before the stack that it was asked for."""
    return text[max(0, text.find("Stack (most recent call first)")) :]


def _get_output_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.txt"


def _read_output(folder: str, rank: int, begin: int | None = None) -> str:
    """Return what a rank has printed from a byte on, or the end of it, at most ``_KEPT`` bytes."""
    file = _get_output_path(folder, rank)
    at = max(0, _get_file_size(file) - _KEPT) if begin is None else begin
    try:
        with file.open("rb") as opened:
            opened.seek(at)
            return opened.read(_KEPT).decode(errors="replace")
    except FileNotFoundError:  # it died before it printed anything
        return ""


def _get_file_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _shorten_file(file: Path) -> None:
    """Truncate a file that has become too large; a rank that prints goes on at the file's new end."""
    if _get_file_size(file) > _MOST_PRINTED:
        os.truncate(file, _KEPT)


# The process of a rank.


@dataclass(frozen=True)
class _Place:
    rank: int
    ranks: int
    folder: str
    timeout: float
    environment: dict[str, str]


def _run_rank(place: _Place, sent: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the launch ends ranks
    _print_to(_get_output_path(place.folder, place.rank))
    os.environ.update(place.environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.update(RANK=str(place.rank), LOCAL_RANK=str(place.rank), WORLD_SIZE=str(place.ranks))
    try:
        _join_process_group(place)
        sent.send_bytes(pickle.dumps(_BEGUN))
        answer: object = (function(*arguments),)
        content = pickle.dumps(answer)
    except BaseException as error:
        content = pickle.dumps(_make_failure(place.rank, error))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sent.send_bytes(content)
    threading.Event().wait()  # others may still talk to this rank; the launch ends it when all have answered


def _make_failure(rank: int, error: BaseException) -> RankFailure:
    return RankFailure(rank, "raised", raised(error), "".join(traceback.format_exception(error)))


def _print_to(file: Path) -> None:
    """Send this process's output to the file, including C++'s, and the stack if it crashes or is asked for it."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(2)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, 2, all_threads=False)


def _join_process_group(place: _Place) -> None:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place.folder}/store",
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=_TO_BEGIN + place.timeout),  # so that the launch times out before gloo does
    )
    torch.distributed.barrier()  # a rank that ends at once does not keep others from getting here
