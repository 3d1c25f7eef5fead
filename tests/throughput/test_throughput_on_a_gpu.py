"""Test what only a GPU does, as far as a machine without one can tell: units, signs and which call is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parity.lab.kernel_table import measure as kernel_measure
from parity.lab.kernel_table.bench import KernelCall, Tape
from parity.lab.throughput import clock, measure, workload
from parity.lab.throughput.clock import Passes
from parity.lab.throughput.record import Spread, Times

CUDA = torch.device("cuda")
NOTHING = Passes(lambda: None, lambda i: i, lambda outputs, i: None, rotating_bytes=lambda: 300)


class Event:
    """A CUDA event; the one after another is 4 ms later."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.count += 1
        self.at = Event.count

    def elapsed_time(self, end: Event) -> float:
        return 4.0 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU as far as these tests need one; what it was asked for."""
    asked: list[str] = []

    def answer(name: str, value: Any = None) -> Any:
        return lambda *arguments: asked.append(name) or value

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", answer("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", answer("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", answer("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", answer("allocated", 1000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", answer("peak", 5000))
    properties = SimpleNamespace(uuid="ab-12", L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", answer("properties", properties))
    return asked


def test_events_tell_milliseconds_and_the_clock_seconds(gpu: list[str]) -> None:
    measured = clock.time_passes(NOTHING, warmup=1, repeats=3, clock=clock.clock_of(CUDA))
    assert measured.forward == Spread(0.004, 0.004, 0.004)
    assert measured.backward == Spread(0.004, 0.004, 0.004)
    assert measured.host is not None


def test_memory_is_the_peak_above_what_was_there_without_what_only_rotates(gpu: list[str]) -> None:
    begin = measure._restart_peak(CUDA)
    assert begin == 1000
    assert gpu[-2:] == ["reset", "allocated"]
    assert measure._memory_above(begin, NOTHING, CUDA) == 5000 - 1000 - 300


def test_clocks_are_asked_for_while_the_gpu_still_works(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.record, "gpu_state", lambda uuid: gpu.append(f"query {uuid}"))
    launched = Passes(lambda: None, lambda i: gpu.append("pass"), lambda outputs, i: None)
    spread = Spread(0.1, 0.1, 0.1)
    measure._loaded_state(launched, Times(spread, spread, 5), CUDA)
    assert gpu == ["pass", "pass", "pass", "properties", "query ab-12"]


def test_inputs_that_rotate_fill_the_last_cache_twice(gpu: list[str]) -> None:
    assert workload._sets(torch.zeros(1 << 18, dtype=torch.float16), CUDA) == 1 + 4
    assert workload._sets(torch.zeros(1 << 24, dtype=torch.uint8), CUDA) == 2


def test_a_kernel_call_is_timed_behind_a_sleeping_gpu(gpu: list[str]) -> None:
    call = KernelCall("", "", "", "", lambda where: gpu.append("call") or {})
    where: Any = SimpleNamespace(device=CUDA, tape=Tape())
    assert kernel_measure.gpu_seconds(call, where) == pytest.approx(0.004)
    assert gpu[:3] == ["sleep", "call", "synchronize"]
