"""``parity kernels``: the whole table, by processes that replace each other where a kernel takes one down."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from parity import te
from parity.cpu import cuda
from parity.lab.kernel_table import measure, table
from parity.lab.kernel_table.measure import Outcome
from parity.lab.kernel_table.table import Comparison, compare, draw
from parity.machine.devices import CUDA_VISIBLE_DEVICES
from parity.report import environment
from parity.te import Backend
from parity.user_error import UserError

# All calls on one kind of kernels, by processes that replace each other where a kernel ends one or loses the GPU.


ENDED = Outcome(error="the process ended in this call")
TIME_OVER = Outcome(error="the time for all calls was over")
_NEVER_BEGUN = Outcome(error="no process came to this call")
_MOST_IN_VAIN = 3  # processes in succession that end in their first call
# Seconds from one outcome to the next after which a kernel is taken to hang. The first takes the import of TE, and some
# the compilation of a Triton kernel.
LONGEST_CALL = 120.0


def outcomes_of(start: Callable[[int], int | None], count: int, folder: Path) -> list[Outcome]:
    """Return the outcome of each call.

    Args:
        start: ``start(first)`` runs a process that makes the calls from this index on, writes each outcome into the
            folder, and returns its exit code: ``measure.GPU_LOST`` if the GPU fails every call after the last one. None
            where the time for all calls is over.
        count: of calls.
        folder: of the outcomes.
    """
    first = in_vain = 0
    missing = _NEVER_BEGUN
    while first < count and in_vain < _MOST_IN_VAIN:
        code = start(first)
        if code is None:
            missing = TIME_OVER
            break
        reached = next((i for i in range(first, count) if not measure.file(i, folder).exists()), count)
        in_vain = in_vain + 1 if reached == first else 0
        if reached < count and code != measure.GPU_LOST:
            measure.write(ENDED, reached, folder)
            reached += 1
        first = reached
    return [measure.read(i, folder) or missing for i in range(count)]


def run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, ends: float, longest: float = LONGEST_CALL
) -> int | None:
    """Run one process; its exit code, or None if the time for all calls was over before it ended.

    Args:
        command: of the process.
        environment: of the process.
        folder: of the outcomes that it writes.
        ends: ``time.monotonic()`` at which it is ended.
        longest: seconds without a new outcome after which it is ended.
    """
    with subprocess.Popen(command, env=environment) as process:
        made, since = _made(folder), time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=max(0.0, min(1.0, ends - time.monotonic())))
            now, before = time.monotonic(), made
            made = _made(folder)
            since = now if made != before else since
            if now >= ends or now - since >= longest:
                process.kill()
                code = process.wait()
                return None if now >= ends else code


def _made(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


# ``parity kernels``: the whole table, by one process for each kind of kernels.


def make_table(keyword: str, seed: int, report: Path, reference: Backend = "gpu", minutes: float | None = None) -> None:
    """Compare the kernels whose calls contain the keyword with the reference's, and write the report and its record.

    Args:
        keyword: of the calls.
        seed: of the inputs.
        report: markdown; the record has its name with ``.jsonl``.
        reference: ``gpu``; ``cpu`` tries the table without a GPU: both sides are the CPU kernels.
        minutes: after which calls that were not made are left out, with this reason; None for no limit.

    Raises:
        UserError: if there are no compiled kernels or no GPU here, no such calls, or the report cannot be written.
    """
    reason = te.why_no_gpu() if reference == "gpu" else None
    if reason is not None:
        raise UserError(
            f"the table of CPU kernels against real ones is missing, and cannot be made here: {reason}; run "
            "`parity kernels` on a machine with an NVIDIA GPU and TransformerEngine's compiled kernels, or try it "
            "with --reference cpu"
        )
    gpu = nearest_gpu(*torch.cuda.get_device_capability()) if reference == "gpu" else "hopper"
    ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
    comparisons = compare_backends(reference, gpu, keyword, seed, ends)
    measured = environment.measure(reference, [seed], len(comparisons))
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(draw(comparisons, measured, cuda.GPUS[gpu].name), encoding="utf-8")
        table.write(comparisons, measured, cuda.GPUS[gpu].name, report.with_suffix(".jsonl"))
    except OSError as error:
        raise UserError(f"cannot write {report}: {error.strerror}") from None


def nearest_gpu(major: int, minor: int) -> str:
    """Return the newest GPU in ``cuda.GPUS`` of at most this compute capability; the oldest if all are newer."""
    by_age = sorted(cuda.GPUS, key=_capability)
    older = [name for name in by_age if _capability(name) <= (major, minor)]
    return older[-1] if older else by_age[0]


def _capability(name: str) -> tuple[int, int]:
    return cuda.GPUS[name].major, cuda.GPUS[name].minor


def compare_backends(
    reference: Backend, emulated_gpu: str, keyword: str, seed: int, ends: float = math.inf
) -> list[Comparison]:
    """Make the calls on the reference's kernels and on the CPU's, and compare them.

    Args:
        reference: ``gpu``; ``cpu`` compares the CPU kernels with themselves in another process.
        emulated_gpu: a name in ``cuda.GPUS``.
        keyword: of the calls.
        seed: of the inputs.
        ends: ``time.monotonic()`` after which no more calls are made.
    """
    calls = measure.select(keyword)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / name for name in ("reference", "candidate")]
        for place in places:
            place.mkdir()
        with ThreadPoolExecutor() as threads:  # both kinds of kernels run side by side
            made = threads.map(
                lambda backend, place: outcomes_of(
                    lambda first: _run(backend, emulated_gpu, keyword, seed, place, first, ends), len(calls), place
                ),
                (reference, "cpu"),
                places,
            )
            outcomes = list(made)
    return [compare(call, *pair) for call, pair in zip(calls, zip(*outcomes, strict=True), strict=True)]


def _run(backend: str, emulated_gpu: str, keyword: str, seed: int, place: Path, first: int, ends: float) -> int | None:
    """Run a process that makes the calls from the first on; see ``processes.run``."""
    command = [sys.executable, "-m", measure.__name__, backend, keyword, str(seed), str(place), str(first)]
    environment = {**os.environ, cuda.GPU_VARIABLE: emulated_gpu}
    if backend == "cpu":
        environment[CUDA_VISIBLE_DEVICES] = ""  # the GPU and its memory are the other process's
    return run(command, environment, place, ends)
