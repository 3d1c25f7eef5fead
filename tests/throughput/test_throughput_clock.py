"""Test how passes are timed, on a clock that the tests move."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.lab.throughput.clock import Clock, Passes, time_passes
from parity.lab.throughput.record import Spread, Times


@dataclass
class Device:
    """A device whose passes take what the tests say; it remembers what it was asked."""

    forward: list[float]
    backward: list[float]
    now: float = 0.0
    calls: list[str] = field(default_factory=list)

    @property
    def clock(self) -> Clock[float]:
        return Clock(lambda: self.now, lambda start, end: end - start, lambda: self.calls.append("finish"), False)

    @property
    def passes(self) -> Passes:
        return Passes(self._clear, self._forward, self._backward)

    def _clear(self) -> None:
        self.now += 100.0
        self.calls.append("clear")

    def _forward(self, i: int) -> int:
        self.now += self.forward[i]
        self.calls.append(f"forward {i}")
        return i

    def _backward(self, outputs: int, i: int) -> None:
        assert outputs == i
        self.now += self.backward[i]
        self.calls.append(f"backward {i}")


def test_forward_and_backward_are_timed_apart_and_clearing_gradients_is_not() -> None:
    device = Device(forward=[50.0, 1.0, 2.0, 3.0], backward=[70.0, 10.0, 20.0, 30.0])
    measured = time_passes(device.passes, warmup=1, repeats=3, clock=device.clock)
    assert measured == Times(Spread(2.0, 1.5, 2.5), Spread(20.0, 15.0, 25.0), repeats=3)


def test_passes_go_through_the_inputs_and_the_device_is_waited_for_only_around_them() -> None:
    device = Device([1.0] * 4, [1.0] * 4)
    time_passes(device.passes, warmup=2, repeats=2, clock=device.clock)
    order = [call for call in device.calls if call != "clear" and not call.startswith("backward")]
    assert order == ["forward 0", "forward 1", "finish", "forward 2", "forward 3", "finish"]


def test_gradients_are_cleared_before_every_pass() -> None:
    device = Device([1.0] * 4, [1.0] * 4)
    time_passes(device.passes, warmup=2, repeats=2, clock=device.clock)
    assert device.calls.count("clear") == 4


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20))
def test_quartiles_lie_around_the_median_and_within_the_measurements(seconds: list[float]) -> None:
    spread = Spread.of(seconds)
    assert min(seconds) * (1 - 1e-12) <= spread.lower <= spread.median <= spread.upper <= max(seconds) * (1 + 1e-12)


@pytest.mark.parametrize(("host", "bound"), [(None, False), (0.001, False), (0.0095, True), (0.02, True)])
def test_passes_that_take_as_long_as_launching_them_are_launch_bound(host: float | None, bound: bool) -> None:
    measured = Times(Spread(0.004, 0.004, 0.004), Spread(0.006, 0.006, 0.006), repeats=5, host=host)
    assert measured.launch_bound == bound
