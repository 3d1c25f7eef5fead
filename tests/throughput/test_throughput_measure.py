"""What throughput measures, and with which clock and GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity import te
from parity.case.validate import check_case
from parity.measuring.kernel_table import table as kernel_table
from parity.measuring.kernel_table.bench import KernelCall, Tape
from parity.measuring.throughput import measure, record, workload
from parity.measuring.throughput.measure import Clock, Plan, time_passes
from parity.measuring.throughput.record import GpuState, Row, Spread, Times
from parity.measuring.throughput.workload import (
    COMPILED,
    EAGER,
    TE,
    Implementation,
    Passes,
    Workload,
    implementations,
    with_fused_attention,
)
from parity.reference import CoreAttention, LlamaLayer
from parity.te import PRECISIONS

# Test how passes are timed, on a clock that the tests control.


@dataclass
class Device:
    """A device whose passes take as long as the tests say, and which records the calls that it gets."""

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


# Clocks, temperature and throttling in the answers of nvidia-smi.


def test_an_answer_is_read_with_its_units_left_out() -> None:
    assert record.parse_state("1980, 2619, 45, 310.20, 0x0000000000000000\n") == GpuState(1980.0, 2619.0, 45.0, 310.2)


@pytest.mark.parametrize(
    ("mask", "throttles"),
    [
        ("0x0000000000000001", ()),  # idle
        ("0x0000000000000002", ()),  # clocks that a user has set
        ("0x0000000000000004", ("power cap",)),
        ("0x0000000000000048", ("hardware slowdown", "thermal slowdown (hardware)")),
        ("[N/A]", ()),
    ],
)
def test_only_what_slows_a_busy_gpu_is_throttling(mask: str, throttles: tuple[str, ...]) -> None:
    state = record.parse_state(f"1200, 2619, 88, 700.0, {mask}")
    assert state is not None
    assert state.throttles == throttles


def test_what_a_mig_slice_does_not_say_is_none() -> None:
    assert record.parse_state("[N/A], [N/A], 45, [N/A], [N/A]") == GpuState(None, None, 45.0, None)


def test_a_driver_that_does_not_know_the_new_field_is_asked_for_the_old_one() -> None:
    asked: list[str] = []

    def old_driver(arguments: Sequence[str]) -> str | None:
        asked.append(arguments[0])
        return None if "clocks_event_reasons" in arguments[0] else "1980, 2619, 45, 310.2, 0x4"

    state = record.gpu_state("ab-12", old_driver)
    assert state is not None
    assert state.throttles == ("power cap",)
    assert len(asked) == 2


def test_the_gpu_is_asked_for_by_its_uuid() -> None:
    seen: list[str] = []
    record.gpu_state("ab-12", lambda arguments: seen.append(arguments[-1]))
    record.gpu_state("MIG-cd", lambda arguments: seen.append(arguments[-1]))
    assert set(seen) == {"--id=GPU-ab-12", "--id=MIG-cd"}


def test_without_nvidia_smi_there_is_no_state() -> None:
    assert record.gpu_state("ab-12", lambda arguments: None) is None
    assert record.parse_state("No devices were found") is None


# One workload measured on the CPU: the implementations that are measured, and what happens to those that fail.


TINY = Path(__file__).with_name("tiny_pairs.py")
SIZE = dict(batch=16, hidden=16)
PLAN = Plan(repeats=2)


@pytest.fixture(scope="module")
def kernels() -> te.Kernels:
    return te.kernels("cpu")


def rows(kernels: te.Kernels, case: str, *chosen: tuple[str, str], plan: Plan = PLAN) -> list[Row]:
    asked = [Implementation(*each) for each in chosen]
    return list(measure.measure(Workload(TINY, case, SIZE), asked, plan, kernels))


def test_each_implementation_has_a_row_with_times_error_and_no_gpu_s_figures(kernels: te.Kernels) -> None:
    measured = rows(kernels, "tiny_linear", (EAGER, "bf16"), (TE, "bf16"), (TE, "fp8_delayed"))
    assert [row.name for row in measured] == ["eager bf16", "TE bf16", "TE fp8_delayed"]
    for row in measured:
        assert row.times is not None, row.why_none
        assert row.times.repeats == 2
        assert row.times.forward.median > 0
        assert row.times.backward.median > 0
        assert (row.memory, row.before, row.after, row.times.host) == (None, None, None, None)


def test_errors_are_those_of_the_precision(kernels: te.Kernels) -> None:
    measured = rows(kernels, "tiny_linear", (EAGER, "bf16"), (TE, "bf16"), (TE, "fp8_current"))
    eager, bf16, fp8 = (row.error or 0.0 for row in measured)
    assert 2**-11 < eager < 2**-7
    assert 2**-11 < bf16 < 2**-7
    assert 2**-7 < fp8 < 2**-3


def test_flops_are_those_of_module_flops_and_the_same_for_all(kernels: te.Kernels) -> None:
    for row in rows(kernels, "tiny_linear", (EAGER, "bf16"), (TE, "fp8_current")):
        assert (row.flops_forward, row.flops_backward) == (2 * 16 * 16 * 32, 4 * 16 * 16 * 32)


def test_flops_of_an_unknown_module_are_counted_by_watching_it(kernels: te.Kernels) -> None:
    (row,) = rows(kernels, "unknown_flops", (TE, "bf16"))
    assert (row.flops_forward, row.flops_backward) == (2 * 16 * 16 * 32, 4 * 16 * 16 * 32)


def test_a_failing_implementation_says_why_and_loses_no_other(kernels: te.Kernels) -> None:
    plain, port, fp32 = rows(kernels, "refuses_bf16", (EAGER, "bf16"), (TE, "bf16"), (EAGER, "fp32"))
    assert plain.why_none == "RuntimeError: no BF16 here"
    assert port.times is not None
    assert fp32.times is not None


def test_a_precision_that_the_gpu_lacks_is_told_in_te_s_words(kernels: te.Kernels) -> None:
    (row,) = rows(kernels, "tiny_linear", (TE, "mxfp8"))
    assert row.times is None
    assert "compute capability 10.0" in row.why_none


def test_compilation_that_fails_is_the_reason_for_no_times(
    kernels: te.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(module: torch.nn.Module) -> torch.nn.Module:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(measure, "compile_afresh", fails)
    (row,) = rows(kernels, "tiny_linear", (COMPILED, "bf16"))
    assert row.why_none == "RuntimeError: no C++ compiler"


def test_when_the_time_is_over_rows_say_so(kernels: te.Kernels) -> None:
    (row,) = rows(kernels, "tiny_linear", (EAGER, "bf16"), plan=Plan(repeats=2, ends=time.time() - 1))
    assert row.why_none == "the time for all measurements was over"


def test_a_workload_that_cannot_be_built_has_a_row_for_each(kernels: te.Kernels) -> None:
    broken = Workload(TINY, "tiny_linear", dict(batch=4, hidden=-1))
    asked = [Implementation(EAGER, "bf16"), Implementation(TE, "bf16")]
    found = list(measure.measure(broken, asked, PLAN, kernels))
    assert [bool(row.why_none) for row in found] == [True, True]


def test_within_a_dtype_the_compiled_module_comes_last_and_bf16_comes_first() -> None:
    found = [
        f"{each.kind} {each.precision}"
        for each in implementations(("fp32", "bf16", "fp8_block"), ("fp32", "bf16"), True)
    ]
    assert found == [
        *("eager bf16", "TE bf16", "TE fp8_block", "compiled bf16"),
        *("eager fp32", "eager tf32", "TE fp32", "compiled fp32", "compiled tf32"),
    ]


def test_only_a_gpu_has_tf32() -> None:
    assert "tf32" not in {each.precision for each in implementations(tuple(PRECISIONS), ("fp32",), on_gpu=False)}


@pytest.mark.parametrize("large", [True, False])
def test_every_built_in_workload_fits_its_case(kernels: te.Kernels, large: bool) -> None:
    """Check without allocating memory, since the large workloads take gigabytes."""
    for each in workload.built_in(large):
        assert check_case(dataclasses.replace(each.load(), sizes=[each.size]), kernels.te), each.name


def test_workloads_are_chosen_by_words_in_their_names() -> None:
    found = workload.select(workload.built_in(large=True), "rmsnorm, mlp")
    assert [each.case for each in found] == ["layernorm_mlp_swiglu", "rmsnorm"]


# Test the GPU's part as far as possible without a GPU: units, signs and the calls that are made.


CUDA = torch.device("cuda")
NOTHING = Passes(lambda: None, lambda i: i, lambda outputs, i: None, rotating_bytes=lambda: 300)


class Event:
    """A CUDA event that is 4 ms later than the one before."""

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
    """Replace the CUDA functions that these tests need, and return the list of their calls."""
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
    measured = time_passes(NOTHING, warmup=1, repeats=3, clock=measure.clock_of(CUDA))
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
    assert workload._count_input_sets(torch.zeros(1 << 18, dtype=torch.float16), CUDA) == 1 + 4
    assert workload._count_input_sets(torch.zeros(1 << 24, dtype=torch.uint8), CUDA) == 2


def test_a_kernel_call_is_timed_behind_a_sleeping_gpu(gpu: list[str]) -> None:
    call = KernelCall("", "", "", "", lambda where: gpu.append("call") or {})
    where: Any = SimpleNamespace(device=CUDA, tape=Tape())
    assert kernel_table.gpu_seconds(call, where) == pytest.approx(0.004)
    assert gpu[:3] == ["sleep", "call", "synchronize"]


# The attention with which plain modules are timed computes the same as the references' attention.


PADDING = torch.arange(24)[None] >= torch.tensor([[24], [17]])


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 5), (False, 5)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("key_is_padding", [None, PADDING], ids=["no padding", "padding"])
def test_it_is_the_reference_s_attention(
    causal: bool, window: int | None, groups: int, key_is_padding: torch.Tensor | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 24, n, 8, generator=generator).double() for n in (4, groups, groups))
    written_out = CoreAttention(causal, window)(query, key, value, key_is_padding)
    fused = with_fused_attention(CoreAttention(causal, window))(query, key, value, key_is_padding)
    sees_a_key = written_out.isfinite()  # a window may show a query only padding
    assert torch.allclose(fused[sees_a_key], written_out[sees_a_key], rtol=0, atol=1e-12)


def test_every_part_of_a_module_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LlamaLayer(32, 64, 4, 2).double()
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    written_out = layer(x)
    monkeypatch.setattr(CoreAttention, "forward", None)
    assert torch.allclose(with_fused_attention(layer)(x), written_out, rtol=0, atol=1e-12)
