"""``parity throughput``: each workload in turn, by a process that is replaced when a kernel ends it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parity.lab.throughput import measure, record, report
from parity.lab.throughput.measure import Plan, row_without
from parity.lab.throughput.workload import COMPILED, Implementation, Workload, implementations
from parity.machine.files import claimed
from parity.machine.process import spawned
from parity.progress import Following
from parity.user_error import UserError

NAME = "throughput"
_REPEATS = {"gpu": 30, "cpu": 5}


@dataclass(frozen=True)
class Settings:
    """Hold what is measured.

    Attributes:
        workloads: in this order.
        precisions: names of ``parity.te``.
        backend: whose kernels.
        repeats: timed passes; None for 30 on a GPU and 5 on a CPU.
        compiled: precisions in which the plain module is also measured under ``torch.compile``.
        minutes: after which nothing more is begun; None for no limit.
    """

    workloads: Sequence[Workload]
    precisions: tuple[str, ...]
    backend: measure.Asked
    repeats: int | None = None
    compiled: tuple[str, ...] = ()
    minutes: float | None = None


def run(settings: Settings, folder: Path) -> Path:
    """Measure, and write ``throughput.jsonl``, ``throughput.md`` and ``throughput.png`` into the folder.

    The report is drawn again after each workload, so that a run that is cut short leaves one.

    Returns:
        The report's path.

    Raises:
        UserError: if the backend cannot be had, the folder cannot be written to, or another run writes to it.
    """
    file = folder / f"{NAME}.jsonl"
    ends = math.inf if settings.minutes is None else time.time() + 60 * settings.minutes
    with claimed(file) as claim, _replaced_processes() as call:
        claim.begin(b"")
        formats = _formats(settings)
        why = call(measure.begin, settings.backend, formats, len(settings.workloads), file)
        environment = record.read(file).environment
        if environment is None:
            raise UserError(str(why or "the process that measures the device's peak was ended"))
        plan = Plan(settings.repeats or _REPEATS[environment.backend], ends)
        chosen = list(implementations(settings.precisions, settings.compiled, environment.backend == "gpu"))
        rounds = list(_rounds(settings.workloads, chosen))
        with Following("measuring", len(rounds)) as following:
            for workload, some in rounds:
                following.step(0, f"measuring {workload.name}")
                _measure(
                    workload, some, lambda *work: call(measure.measure_one, *work, plan, settings.backend, file), file
                )
                report.write(record.read(file), folder / f"{NAME}.md")
                following.step()
    return folder / f"{NAME}.md"


def _rounds(
    workloads: Sequence[Workload], chosen: Sequence[Implementation]
) -> Iterator[tuple[Workload, list[Implementation]]]:
    """Yield what is compiled comes after everything else: compilation takes longest, and time may end."""
    for is_compiled in (False, True):
        some = [each for each in chosen if (each.kind == COMPILED) == is_compiled]
        yield from ((workload, some) for workload in workloads if some)


def _formats(settings: Settings) -> list[str]:
    """Return those whose peaks are needed, be it on a GPU."""
    chosen = implementations(settings.precisions, settings.compiled, on_gpu=True)
    return list(dict.fromkeys(each.peak_format for each in chosen if each.peak_format is not None))


def _measure(workload: Workload, chosen: Sequence[Implementation], measure: Callable[..., object], file: Path) -> None:
    """Measure all implementations, in another process after each that was ended."""
    left = list(chosen)
    while left:
        answer = measure(workload, left)
        left = [each for each in left if (each.kind, each.precision) not in _made(workload, file)]
        if left and answer is not False:
            record.append(file, row_without(workload, left.pop(0), "the process ended in this measurement"))


def _made(workload: Workload, file: Path) -> set[tuple[str, str]]:
    """Return kinds and precisions of the rows that a workload has."""
    rows = record.read(file).rows
    of_workload = (row for row in rows if (row.workload, row.size) == (workload.case, workload.size_text))
    return {(row.implementation, row.precision) for row in of_workload}


@contextmanager
def _replaced_processes() -> Iterator[Callable[..., object]]:
    """Yield a function that calls another in a process, which serves until it is ended or returns False.

    The function returns None where the process ended.
    """
    pools: list[ProcessPoolExecutor] = []

    def call(function: Callable[..., object], *arguments: object) -> object:
        if not pools:
            pools.append(spawned(1))
        try:
            answer = pools[0].submit(function, *arguments).result()
        except BrokenProcessPool:
            pools.pop().shutdown()
            return None
        if answer is False:
            pools.pop().shutdown()
        return answer

    try:
        yield call
    finally:
        for pool in pools:
            pool.shutdown()
