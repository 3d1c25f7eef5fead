"""Measure passes by CUDA events on a GPU and by the host's clock on a CPU, and by them how fast the device can be."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from parity.lab.flops import linear
from parity.lab.throughput.record import Peak, Spread, Times
from parity.shown import one_line

Mark = TypeVar("Mark")


@dataclass(frozen=True)
class Clock(Generic[Mark]):
    """Say how time is taken on a device.

    Attributes:
        mark: a moment in the device's work.
        seconds: between two marks, once ``finish`` has been called.
        finish: waits until the device has done all its work.
        is_asynchronous: whether the host goes on while the device works.
    """

    mark: Callable[[], Mark]
    seconds: Callable[[Mark, Mark], float]
    finish: Callable[[], None]
    is_asynchronous: bool


def clock_of(device: torch.device) -> Clock[Any]:
    """Return the clock that measures what a device does."""
    if device.type == "cuda":
        return Clock(_cuda_mark, _cuda_seconds, torch.cuda.synchronize, is_asynchronous=True)
    return Clock(time.perf_counter, lambda start, end: end - start, lambda: None, is_asynchronous=False)


def _cuda_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Passes:
    """Hold what is timed; ``i`` counts passes, for inputs that rotate.

    Attributes:
        clear: called before each pass and not timed, to let gradients go.
        forward: ``forward(i)`` returns what ``backward`` needs.
        backward: ``backward(outputs, i)``.
        rotating_bytes: how much memory the backward passes have taken only because what they start from rotates.
    """

    clear: Callable[[], None]
    forward: Callable[[int], Any]
    backward: Callable[[Any, int], None]
    rotating_bytes: Callable[[], int] = lambda: 0

    def run(self, i: int) -> None:
        """Run both passes, untimed."""
        self.clear()
        self.backward(self.forward(i), i)


def time_passes(passes: Passes, warmup: int, repeats: int, clock: Clock[Mark]) -> Times:
    """Time forward and backward over repeated passes.

    The device is not waited for between the passes, so that launching one overlaps with the work of the one before, as
    in training.

    Args:
        passes: what is timed.
        warmup: passes before, at least 1; the first ones compile, choose algorithms and fill FP8 scales.
        repeats: timed passes, at least 1.
        clock: of the device.
    """
    for i in range(warmup):
        passes.run(i)
    clock.finish()
    marks = []
    for i in range(warmup, warmup + repeats):
        passes.clear()
        start = clock.mark()
        outputs = passes.forward(i)
        middle = clock.mark()
        passes.backward(outputs, i)
        marks.append((start, middle, clock.mark()))
        del outputs
    clock.finish()
    return Times(
        forward=Spread.of([clock.seconds(start, middle) for start, middle, _ in marks]),
        backward=Spread.of([clock.seconds(middle, end) for _, middle, end in marks]),
        repeats=repeats,
        host=_host_seconds(passes, clock) if clock.is_asynchronous else None,
    )


def _host_seconds(passes: Passes, clock: Clock[Mark]) -> float:
    """Return the least time until the host has launched both passes on a device that has nothing else to do."""
    seconds = []
    for i in range(3):
        clock.finish()
        began = time.perf_counter()
        passes.run(i)
        seconds.append(time.perf_counter() - began)
    clock.finish()
    return min(seconds)


# The device's measured peak: how fast large square matrix products run in each format.


PEAK_SIZES = {"cuda": (4096, 8192), "cpu": (256, 1024)}
_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
_REPEATS = {"cuda": 10, "cpu": 3}


def measure_peak(format: str, device: torch.device, clock: Clock[Mark]) -> Peak:
    """Return the best median over the device's sizes; a format that cannot be multiplied here comes with the reason.

    FP8 is E4M3 with a scale a tensor, by ``torch._scaled_mm`` with fast accumulation.
    """
    if format == "tf32" and device.type != "cuda":
        return Peak(format, float("nan"), why_none="a CPU has no TF32")
    best = Peak(format, 0.0)
    for size in PEAK_SIZES[device.type]:
        try:
            with allow_tf32(format == "tf32"):
                seconds = _seconds(_product(format, size, device), _REPEATS[device.type], clock)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return Peak(format, float("nan"), why_none=one_line(error))
        best = max(best, Peak(format, linear(size, size, size).forward / seconds, size), key=lambda peak: peak.flops)
    return best


@contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Let PyTorch compute FP32 products in TF32 on a GPU or forbid it, within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product(format: str, size: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a product of random operands: one of zeros draws less power and so runs faster."""
    a, b = (torch.randn(size, size, device=device).to(_DTYPES[format]) for _ in range(2))
    if format != "fp8":
        return lambda: a @ b
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=device.type == "cuda"
    )


def _seconds(product: Callable[[], Tensor], repeats: int, clock: Clock[Mark]) -> float:
    product()
    marks = [clock.mark()]
    for _ in range(repeats):
        product()
        marks.append(clock.mark())
    clock.finish()
    return Spread.of([clock.seconds(start, end) for start, end in itertools.pairwise(marks)]).median
