"""What was measured, as plain data: a row for each implementation of a workload, and the device's peaks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from parity.throughput.gpu_state import GpuState


@dataclass(frozen=True)
class Spread:
    """The middle of repeated measurements, and the quartiles around it; seconds."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Of at least one measurement."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0])
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, lower, upper)


@dataclass(frozen=True)
class Times:
    """Of one implementation.

    Attributes:
        forward, backward: of a pass each.
        repeats: how many passes were timed.
        host: seconds that the host takes to launch both passes while the GPU does nothing; None on a CPU.
    """

    forward: Spread
    backward: Spread
    repeats: int
    host: float | None = None

    @property
    def both(self) -> float:
        """The medians' sum, in seconds."""
        return self.forward.median + self.backward.median

    @property
    def launch_bound(self) -> bool:
        """Whether the GPU waits for the host: launching takes as long as the passes do, give or take a tenth."""
        return self.host is not None and self.host >= 0.9 * self.both


@dataclass(frozen=True)
class Peak:
    """The fastest that large square matrix products run on the device.

    Attributes:
        format: of the operands: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``.
        flops: a second; NaN where it could not be measured.
        size: rows and columns of the fastest products' operands.
        why_none: why it could not be measured, or empty.
    """

    format: str
    flops: float
    size: int = 0
    why_none: str = ""


@dataclass(frozen=True)
class Row:
    """One implementation of one workload.

    Attributes:
        workload: the case's name.
        size: its size in words.
        implementation: ``eager`` or ``compiled`` for the plain module, ``TE`` for the candidate.
        precision: of ``parity.precision``, or ``tf32`` for a plain FP32 module whose products are allowed TF32.
        peak_format: whose peak bounds it, see ``Peak``; None for none.
        flops_forward, flops_backward: of a pass's matrix products, the same for each implementation.
        times: None where there are none.
        memory: bytes, the parameters included, at the passes' peak; None on a CPU, where it is not measured.
        error: the worst output's relative L2 error, against the plain module in FP64 on the same rounded numbers.
        why_no_error: why the error is missing, or empty.
        before, after: clocks and temperature before the passes, and while the last of them ran; None on a CPU.
        why_none: why nothing was measured, or empty.
    """

    workload: str
    size: str
    implementation: str
    precision: str
    peak_format: str | None = None
    flops_forward: int = 0
    flops_backward: int = 0
    times: Times | None = None
    memory: int | None = None
    error: float | None = None
    why_no_error: str = ""
    before: GpuState | None = None
    after: GpuState | None = None
    why_none: str = ""

    @property
    def name(self) -> str:
        """``TE bf16``."""
        return f"{self.implementation} {self.precision}"

    @property
    def flops(self) -> int:
        """Of both passes."""
        return self.flops_forward + self.flops_backward
