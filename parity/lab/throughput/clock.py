"""Measures passes: by CUDA events on a GPU, by the host's clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from parity.lab.throughput.record import Spread, Times

Mark = TypeVar("Mark")


@dataclass(frozen=True)
class Clock(Generic[Mark]):
    """How time is taken on a device.

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
    """What is timed; ``i`` counts passes, for inputs that rotate.

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
        """Both passes, untimed."""
        self.clear()
        self.backward(self.forward(i), i)


def time_passes(passes: Passes, warmup: int, repeats: int, clock: Clock[Mark]) -> Times:
    """Forward and backward times over repeated passes.

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


def _host_seconds(passes: Passes, clock: Clock[Mark], tries: int = 3) -> float:
    """The least time until the host has launched both passes on a device that has nothing else to do."""
    seconds = []
    for i in range(tries):
        clock.finish()
        began = time.perf_counter()
        passes.run(i)
        seconds.append(time.perf_counter() - began)
    clock.finish()
    return min(seconds)
