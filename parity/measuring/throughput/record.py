"""Keep measurements as JSON lines: the environment, then rows, which include the state of the GPU."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from parity import data_files
from parity.machine import devices
from parity.report.environment import Environment, from_json, to_json

# Clocks, temperature and throttling of a GPU, as ``nvidia-smi`` reports them.


# The bits of NVML's "clocks event reasons" (nvml.h, nvmlClocksEventReason...) that mean that a busy GPU is slowed.
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}
_FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
# The field had the second name before driver 535.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU at one moment. A value that the driver does not report is None, as for a MIG slice.

    Attributes:
        sm_mhz, memory_mhz: the clocks.
        celsius: the chip's temperature.
        watts: the power drawn.
        throttles: the reasons why the clocks are lower than they could be; empty if they are not.
    """

    sm_mhz: float | None
    memory_mhz: float | None
    celsius: float | None
    watts: float | None
    throttles: tuple[str, ...] = ()


def gpu_state(uuid: str, ask: Callable[[Sequence[str]], str | None] = devices.ask) -> GpuState | None:
    """Return the state of the GPU with this UUID, or None if there is no ``nvidia-smi`` or it does not know the GPU.

    Args:
        uuid: the UUID as PyTorch gives it, ``GPU-...`` or without the prefix.
        ask: returns what ``nvidia-smi`` answers to arguments, or None for no answer.
    """
    device = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    for reasons in _REASONS:
        fields = ",".join((*_FIELDS, reasons))
        answer = ask([f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={device}"])
        if answer is not None:
            return parse_state(answer)
    return None


def parse_state(answer: str) -> GpuState | None:
    """Return the state from a text such as ``1980, 2619, 45, 310.20, 0x0000000000000004``, or None if it is not one."""
    cells = [cell.strip() for cell in answer.strip().split(",")]
    if len(cells) != len(_FIELDS) + 1:
        return None
    sm, memory, celsius, watts = map(_parse_number, cells[:-1])
    return GpuState(sm, memory, celsius, watts, _parse_throttles(cells[-1]))


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parse_throttles(mask: str) -> tuple[str, ...]:
    try:
        bits = int(mask, 16)
    except ValueError:
        return ()
    return tuple(reason for bit, reason in _THROTTLES.items() if bits & bit)


# The measurements as plain data: a row for each implementation of a workload, and the device's peaks.


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, and the quartiles around it, in seconds."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Return the spread of at least one measurement."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0])
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, lower, upper)


@dataclass(frozen=True)
class Times:
    """Hold the times of one implementation.

    Attributes:
        forward, backward: the times of a pass.
        repeats: how many passes were timed.
        host: seconds that the host takes to launch both passes while the GPU does nothing; None on a CPU.
    """

    forward: Spread
    backward: Spread
    repeats: int
    host: float | None = None

    @property
    def both(self) -> float:
        """Return the sum of both medians, in seconds."""
        return self.forward.median + self.backward.median

    @property
    def launch_bound(self) -> bool:
        """Return whether the GPU waits for the host: launching takes at least nine tenths of the passes' time."""
        return self.host is not None and self.host >= 0.9 * self.both


@dataclass(frozen=True)
class Peak:
    """The rate of the fastest large square matrix product on the device.

    Attributes:
        format: the operands' format: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``.
        flops: FLOPs a second; NaN if they could not be measured.
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
        precision: one of ``parity.te``, or ``tf32`` for a plain FP32 module whose products may use TF32.
        peak_format: the format whose peak bounds it, see ``Peak``; None for none.
        flops_forward, flops_backward: FLOPs of a pass's matrix products, the same for each implementation.
        times: the times of the passes; None if there are none.
        memory: bytes at the passes' peak, including the parameters; None on a CPU, where it is not measured.
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
        """Return the FLOPs of both passes."""
        return self.flops_forward + self.flops_backward


# The record of a measurement, JSON lines: the environment, the device's peaks, then each row as soon as it exists.


EMULATED = "TE's kernels are emulated on a CPU: these times say nothing about a GPU"


@dataclass(frozen=True)
class Record:
    """Hold what has been measured so far.

    Attributes:
        environment: the environment of the process that measured; None if it has not been written yet.
        peaks: the device's peaks.
        rows: the rows, in the order in which they were measured.
    """

    environment: Environment | None
    peaks: tuple[Peak, ...]
    rows: tuple[Row, ...]

    @property
    def is_emulated(self) -> bool:
        """Return whether TE ran on CPU kernels."""
        return self.environment is not None and self.environment.backend == "cpu"

    def peak_share(self, row: Row) -> float | None:
        """Return the FLOPs a second of both passes, divided by the format's peak, or None if either is missing.

        Emulated kernels have no share, since they do not compute in the formats that they emulate.
        """
        peaks = [peak.flops for peak in self.peaks if peak.format == row.peak_format and not peak.why_none]
        if row.times is None or not row.flops or not peaks or (self.is_emulated and row.implementation == "TE"):
            return None
        return row.flops / row.times.both / peaks[0]


def append(file: Path, content: Environment | Peak | Row) -> None:
    """Add a line to the file, where it is when this returns. The environment's line says if kernels were emulated."""
    if isinstance(content, Environment):
        emulated = content.backend == "cpu"
        line = {
            "environment": to_json(content),
            "emulated": emulated,
            "note": EMULATED if emulated else "",
        }
    elif isinstance(content, Peak):
        line = {"peak": _without_nan(dataclasses.asdict(content))}
    else:
        line = {"row": _without_nan(dataclasses.asdict(content))}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")


def read(file: Path) -> Record:
    """Return the content of the file, without lines that are damaged or cut short."""
    found = data_files.lines(file, _parse_line).contents if file.exists() else ()
    environments = [each for each in found if isinstance(each, Environment)]
    return Record(
        environments[-1] if environments else None,
        tuple(each for each in found if isinstance(each, Peak)),
        tuple(each for each in found if isinstance(each, Row)),
    )


def _parse_line(line: Any) -> Environment | Peak | Row:
    if "environment" in line:
        return from_json(line["environment"])
    content: Peak | Row = _PEAK.validate_python(line["peak"]) if "peak" in line else _ROW.validate_python(line["row"])
    return content


_PEAK, _ROW = TypeAdapter(Peak), TypeAdapter(Row)


def _without_nan(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with NaN and infinities, which JSON lacks, as text, which is read back as a number."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in entry.items()
    }
