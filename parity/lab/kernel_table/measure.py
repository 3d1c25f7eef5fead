"""Makes the calls on one kind of kernels and keeps what comes back; run as a module, in a process of its own.

Each result is a file of its own, written at once: a kernel that ends the process loses no result but its own.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from parity import te
from parity.lab.kernel_table.bench import Bench, KernelCall, bench, unpack
from parity.te.device_errors import cuda_works
from parity.user_error import one_line

GPU_LOST = 3  # exit code
_TIMED = 5
_SLEEP_CYCLES = 4_000_000  # about 2 ms


@dataclass(frozen=True)
class Outcome:
    """What one call made.

    Attributes:
        buffers: its results' plain tensors, on the CPU, by name.
        error: why there are none, in one line, or None.
        seconds: of the GPU for the call on its inputs; None on the CPU.
    """

    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: str | None = None
    seconds: float | None = None


def make(call: KernelCall, kernels: te.Kernels, seed: int) -> Outcome:
    """Make the call; an exception becomes its outcome. Inputs depend on the seed and on the call's name alone."""
    where = bench(kernels, zlib.crc32(call.name.encode()) ^ seed)
    reason = where.why_unavailable(call.quantizer) if call.quantizer is not None else None
    if reason is not None:
        return Outcome(error=reason)
    try:
        outcome = Outcome(unpack(call.run(where)))
        return dataclasses.replace(outcome, seconds=gpu_seconds(call, where))
    except Exception as error:
        return Outcome(error=one_line(error))


def gpu_seconds(call: KernelCall, where: Bench) -> float | None:
    """Return the median time of the GPU for the call on the inputs that it had; None on the CPU.

    The GPU sleeps until the host has launched the call, so that small kernels follow each other without gaps.
    """
    if where.device.type != "cuda":
        return None
    seconds = []
    for _ in range(_TIMED):
        where.tape.rewind()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        call.run(where)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def make_all(calls: Sequence[KernelCall], first: int, kernels: te.Kernels, seed: int, folder: Path) -> bool:
    """Make the calls from an index on, and write each outcome into the folder; stops where the GPU is lost.

    Returns:
        Whether it came to the end: after an illegal access the GPU fails every call of the process.
    """
    for index in range(first, len(calls)):
        outcome = make(calls[index], kernels, seed)
        write(outcome, index, folder)
        if outcome.error is not None and not cuda_works():
            return False
    return True


def file(index: int, folder: Path) -> Path:
    """Where the outcome of the call with this index is."""
    return folder / f"{index}.pt"


def write(outcome: Outcome, index: int, folder: Path) -> None:
    """Whole or not at all, whenever the process is ended."""
    draft = folder / "draft"
    torch.save(vars(outcome), draft)
    draft.replace(file(index, folder))


def read(index: int, folder: Path) -> Outcome | None:
    """Return the outcome of the call with this index, or None if there is none."""
    if not file(index, folder).exists():
        return None
    return Outcome(**torch.load(file(index, folder), weights_only=True))


def _main(backend: str, keyword: str, seed: str, folder: str, first: str) -> int:
    from parity.lab.kernel_table import catalogue

    kernels = te.kernels("gpu" if backend == "gpu" else "cpu")
    return 0 if make_all(catalogue.select(keyword), int(first), kernels, int(seed), Path(folder)) else GPU_LOST


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
