"""``parity kernels``: the whole table, by one process for each kind of kernels."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from parity import te
from parity.cpu import cuda
from parity.kernel_table import catalogue, measure, processes, record
from parity.kernel_table.table import Comparison, compare, draw
from parity.machine.devices import CUDA_VISIBLE_DEVICES
from parity.report import environment
from parity.te import Backend
from parity.user_error import UserError


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
        record.write(comparisons, measured, cuda.GPUS[gpu].name, report.with_suffix(".jsonl"))
    except OSError as error:
        raise UserError(f"cannot write {report}: {error.strerror}") from None


def nearest_gpu(major: int, minor: int) -> str:
    """The name in ``cuda.GPUS`` of the newest GPU of at most this compute capability; the oldest if all are newer."""
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
    calls = catalogue.select(keyword)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / name for name in ("reference", "candidate")]
        for place in places:
            place.mkdir()
        with ThreadPoolExecutor() as threads:  # both kinds of kernels run side by side
            made = threads.map(
                lambda backend, place: processes.outcomes(
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
    return processes.run(command, environment, place, ends)
