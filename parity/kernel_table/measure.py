"""Makes the calls on one kind of kernels and keeps what comes back; run as a module, in a process of its own.

Each result is a file of its own, written at once: a kernel that ends the process loses no result but its own.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from parity import te
from parity.kernel_table.bench import bench
from parity.kernel_table.buffers import unpack
from parity.kernel_table.call import KernelCall


@dataclass(frozen=True)
class Outcome:
    """What one call made.

    Attributes:
        buffers: its results' plain tensors, on the CPU, by name.
        error: why there are none, in one line, or None.
    """

    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: str | None = None


def make(call: KernelCall, kernels: te.Kernels, seed: int) -> Outcome:
    """Make the call; an exception becomes its outcome. Inputs depend on the seed and on the call's name alone."""
    where = bench(kernels, zlib.crc32(call.name.encode()) ^ seed)
    reason = where.why_unavailable(call.quantizer) if call.quantizer is not None else None
    if reason is not None:
        return Outcome(error=reason)
    try:
        return Outcome(unpack(call.run(where)))
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def make_all(calls: Iterable[KernelCall], kernels: te.Kernels, seed: int, folder: Path) -> None:
    """Make the calls one after the other, and write each outcome into the folder."""
    for index, call in enumerate(calls):
        outcome = make(call, kernels, seed)
        torch.save({"buffers": outcome.buffers, "error": outcome.error}, folder / f"{index}.pt")


def read(index: int, folder: Path) -> Outcome:
    """The outcome of the call with this index, or the error that there is none."""
    file = folder / f"{index}.pt"
    if not file.exists():
        return Outcome(error="the process ended before or in this call")
    return Outcome(**torch.load(file, weights_only=True))


def _main(backend: str, keyword: str, seed: str, folder: str) -> None:
    from parity.kernel_table import catalogue

    make_all(catalogue.select(keyword), te.kernels("gpu" if backend == "gpu" else "cpu"), int(seed), Path(folder))


if __name__ == "__main__":
    _main(*sys.argv[1:])
