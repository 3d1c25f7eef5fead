"""A trace follows values, and a pass that differs from golden by a subtle mistake reuses golden's GEMMs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import parity
from parity import te
from parity.case.validate import check_case
from parity.judge.directions import subtle_hypotheses
from parity.measuring.hosts import HOSTS
from parity.mistakes.catalogue import hypotheses
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.replay import Outputs, Passes, outputs_with, tensors_with
from parity.passes.nominal_clock import Clock, work_of
from parity.passes.prepare import calls_of, prepare
from parity.trace.calls import Products, tracing
from parity.trace.trace import detached, edit

# A trace follows values even if a part of their memory is overwritten.


class Writer(nn.Module):
    """A module that makes a tensor of two halves, and uses it before and after the second half is written."""

    def forward(self, x):
        made = torch.zeros(2 * len(x), dtype=x.dtype)
        made[: len(x)].copy_(x)
        before = made.cos()
        made[len(x) :] = x.sin()
        return before, made.cos()


def traced():
    x = torch.tensor([1.0, 2.0])
    with tracing(Writer()) as trace:
        Writer.forward(Writer(), x)
    return x, trace, [call for call in trace.calls if call.name == "cos"]


def test_a_tensor_is_another_value_once_a_part_of_it_is_written():
    x, trace, (before, after) = traced()
    assert before.inputs != after.inputs
    assert torch.equal(trace.tensor(before.inputs[0]), torch.cat((x, torch.zeros(2))))
    assert torch.equal(trace.tensor(after.inputs[0]), torch.cat((x, x.sin())))


def test_what_wrote_a_part_of_a_value_made_it_what_it_is():
    _, trace, (before, after) = traced()
    assert trace.producer(before.inputs[0]).name == "copy"
    assert trace.producer(after.inputs[0]).name == "setitem"


def test_a_part_that_was_not_written_stays_the_value_that_it_was():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])

    class Scaler(nn.Module):
        def forward(self, x):
            first, second = x.sin().chunk(2)
            first.mul_(2.0)
            return first.cos(), second.cos()

    module = Scaler()
    with tracing(module) as trace:
        module(x)
    chunk = next(call for call in trace.calls if call.name == "chunk")
    _, second = (call for call in trace.calls if call.name == "cos")
    assert second.inputs == [chunk.outputs[1]]


# A pass that differs from golden by a subtle mistake reuses golden's GEMMs.


Gemm = Callable[..., Tensor]
GEMMS = {"mm": torch.mm, "addmm": torch.addmm, "bmm": torch.bmm, "baddbmm": torch.baddbmm}


class Counting(TorchDispatchMode):
    """A mode that notes the dtype of each GEMM that is really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in GEMMS:
            self.computed.append(result.dtype)
        return result


def operands_of(name: str) -> list[Tensor]:
    """Return the addend, if there is one, the left and the right operand, in FP64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 8, 16), (4, 8, 32), (4, 32, 16)] if "bmm" in name else [(8, 16), (8, 32), (32, 16)]
    wanted = shapes if "add" in name else shapes[1:]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in wanted]


def changed(x: Tensor, relative: float) -> Tensor:
    """Return the tensor plus a random change of this norm, relative to the tensor's."""
    change = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    return x + relative * x.norm() / change.norm() * change


def recorded(gemm: Gemm, *passes: list[Tensor]) -> tuple[Products, list[Tensor]]:
    products = Products()
    with products.recorded():
        return products, [gemm(*operands) for operands in passes]


def reused(products: Products, gemm: Gemm, *passes: list[Tensor]) -> tuple[list[Tensor], list[torch.dtype]]:
    """Return the results, and the dtypes of the GEMMs that were computed for them."""
    with Counting() as counting, products.reused():
        results = [gemm(*operands) for operands in passes]
    return results, counting.computed


@pytest.mark.parametrize("name", GEMMS)
def test_a_gemm_of_goldens_operands_takes_goldens_result(name: str) -> None:
    operands = operands_of(name)
    products, [golden] = recorded(GEMMS[name], operands)
    same = [operands[0].clone(), *operands[1:]]
    for given_again in (operands, same):
        [result], computed = reused(products, GEMMS[name], given_again)
        assert computed == []
        assert torch.equal(result, golden)


def test_what_is_written_to_a_result_does_not_reach_goldens() -> None:
    operands = operands_of("mm")
    products, [golden] = recorded(torch.mm, operands)
    before = golden.clone()
    [result], _ = reused(products, torch.mm, operands)
    result.zero_()
    [again], computed = reused(products, torch.mm, operands)
    assert computed == []
    assert torch.equal(again, before)


@pytest.mark.parametrize("name", GEMMS)
def test_a_left_operand_that_changed_a_little_costs_a_gemm_in_fp32(name: str) -> None:
    *addend, left, right = operands_of(name)
    products, _ = recorded(GEMMS[name], [*addend, left, right])
    _, computed = reused(products, GEMMS[name], [*addend, changed(left, 1e-3), right])
    assert computed == [torch.float32]


@given(st.sampled_from(sorted(GEMMS)), st.floats(-9.0, -2.0))
def test_rows_of_the_left_operand_that_are_scaled_scale_those_of_the_product(name: str, exponent: float) -> None:
    """Scale rows as another eps of a norm would; no GEMM is computed, and the addend stays."""
    *addend, left, right = operands_of(name)
    products, [golden] = recorded(GEMMS[name], [*addend, left, right])
    factors = 1.0 + 10**exponent * torch.rand(*left.shape[:-1], 1, generator=torch.Generator().manual_seed(1)).double()
    now = [*addend, factors * left, right]
    [result], computed = reused(products, GEMMS[name], now)
    whole = GEMMS[name](*now)
    assert computed == []
    assert (result - whole).norm() <= 1e-6 * (whole - golden).norm() + 1e-14 * whole.norm()


def test_a_change_that_scales_all_rows_but_one_element_costs_a_gemm() -> None:
    left, right = operands_of("mm")
    products, [golden] = recorded(torch.mm, [left, right])
    now = 1.001 * left
    now[-1, -1] += 1e-3
    [result], computed = reused(products, torch.mm, [now, right])
    assert computed == [torch.float32]
    assert (result - now @ right).norm() <= 1e-6 * (now @ right - golden).norm()


@given(st.sampled_from(sorted(GEMMS)), st.floats(-17.0, 0.5))
def test_the_result_is_that_of_the_whole_gemm(name: str, exponent: float) -> None:
    """Expect the whole GEMM's result, to one part in a million of its change, whatever the size of the change."""
    *addend, left, right = operands_of(name)
    products, [golden] = recorded(GEMMS[name], [*addend, left, right])
    now = [*addend, changed(left, 10**exponent), right]
    [result], _ = reused(products, GEMMS[name], now)
    whole = GEMMS[name](*now)
    rounding_in_fp64 = 1e-14 * whole.norm()
    assert (result - whole).norm() <= 1e-6 * (whole - golden).norm() + rounding_in_fp64


@pytest.mark.parametrize("place", ["addend", "left", "right"])
def test_a_gemm_that_changed_otherwise_is_computed_in_fp64(place: str) -> None:
    """Change the left operand by a lot, or another one by any amount."""
    operands = operands_of("addmm")
    products, _ = recorded(torch.addmm, operands)
    index, relative = {"addend": (0, 1e-6), "left": (1, 0.5), "right": (2, 1e-6)}[place]
    operands[index] = changed(operands[index], relative)
    [result], computed = reused(products, torch.addmm, operands)
    assert computed == [torch.float64]
    assert torch.equal(result, torch.addmm(*operands))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_what_fp32_does_not_hold_is_computed_in_fp64(scale: float) -> None:
    left, right = operands_of("mm")
    products, _ = recorded(torch.mm, [left, scale * right])
    _, computed = reused(products, torch.mm, [changed(left, 1e-3), scale * right])
    assert computed == [torch.float64]


def test_an_operand_that_was_written_to_since_is_not_goldens() -> None:
    left, right = operands_of("mm")
    products, _ = recorded(torch.mm, [left, right])
    left.mul_(2.0)
    [result], computed = reused(products, torch.mm, [left, right])
    assert computed == [torch.float64]
    assert torch.equal(result, left @ right)


def test_gemms_of_the_same_shapes_are_taken_in_their_order_and_another_one_is_computed() -> None:
    left, right = operands_of("mm")
    first, second = [left, right], [2.0 * left, right]
    products, golden = recorded(torch.mm, first, second)
    results, computed = reused(products, torch.mm, first, second, first)
    assert computed == [torch.float64]
    assert all(torch.equal(a, b) for a, b in zip(results, [*golden, golden[0]], strict=True))


def test_other_dtypes_are_left_alone() -> None:
    operands = [x.float() for x in operands_of("mm")]
    products, _ = recorded(torch.mm, operands)
    _, computed = reused(products, torch.mm, operands)
    assert computed == [torch.float32]


@pytest.mark.parametrize("host", ["gelu_mlp", "llama_layer"])
def test_every_subtle_mistake_changes_the_outputs_as_in_a_whole_pass(host: str) -> None:
    kernels, case = te.kernels("cpu"), HOSTS[host]
    checked = check_case(case, kernels.te)[0]
    prepared = prepare(case, checked, torch.float32, 0, kernels)
    products = Products()
    with products.recorded():
        trace = calls_of(prepared).trace
    mistakes = list(subtle_hypotheses(prepared, trace))
    computed: list[torch.dtype] = []
    for mistake in mistakes:
        with Counting() as counting, products.reused():
            by_parts = outputs_with(prepared, (mistake,), torch.float64)
        computed += counting.computed
        whole = outputs_with(prepared, (mistake,), torch.float64)
        assert (by_parts is None) == (whole is None)
        for name, output in (whole or {}).items():
            golden = prepared.golden.outputs[name]
            difference = (by_parts[name] - output).norm()  # type: ignore[index]
            assert difference <= 1e-6 * (output - golden).norm() + 1e-14 * golden.norm(), mistake.name
    assert torch.float32 in computed


@pytest.mark.parametrize("host", ["gelu_mlp", "llama_layer"])
def test_every_mistake_changes_the_outputs_as_in_a_whole_pass(host: str) -> None:
    kernels, case = te.kernels("cpu"), HOSTS[host]
    checked = check_case(case, kernels.te)[0]
    prepared = prepare(case, checked, torch.float32, 0, kernels)
    outputs = Outputs(prepared, torch.float64)
    mistakes = list(hypotheses(prepared, calls_of(prepared).trace))
    first = next(one for one in mistakes if one.title in ("activation", "norm-eps"))
    for made in [*((one,) for one in mistakes), *((first, other) for other in mistakes[::7])]:
        by_parts, whole = outputs.under(made), outputs_with(prepared, made, torch.float64)
        assert (by_parts is None) == (whole is None), made
        for name, output in (whole or {}).items():
            torch.testing.assert_close(by_parts[name], output, equal_nan=True, msg=str(made))  # type: ignore[index]


class OutOfSight(nn.Module):
    """A module that passes on a tensor in a way that no recorded call shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.from_numpy(self.first(x).detach().numpy()))
        return output


def test_a_module_that_hands_tensors_on_out_of_sight_runs_itself() -> None:
    given = {"call": None, "inputs": torch.randn(3, 4), "clock": Clock(), "scales_lookups": False}
    prepared: Any = SimpleNamespace(reference=OutOfSight(), **given)
    doubled = Hypothesis("", "", "", read=lambda parameters: {"first.weight": 2.0 * parameters["first.weight"]})
    whole = outputs_with(prepared, (doubled,), torch.float32)
    by_parts = Outputs(prepared, torch.float32).under((doubled,))
    assert whole is not None
    assert by_parts is not None
    assert torch.equal(by_parts["output"], whole["output"])


def test_on_probing_inputs_rows_of_tables_are_scaled_where_only_a_part_is_computed_again() -> None:
    @parity.pair("of_ids")
    def of_ids(te: Any) -> parity.Pair:
        layers = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8)
        weights = {f"{layer}.{name}": f"{layer}.{name}" for layer in (1, 2, 4) for name in ("weight", "bias")}
        weights["0.weight"] = "0.weight"
        ids = lambda rng: (rng.integers(2, 12, high=40),)  # noqa: E731
        return parity.Pair(nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers)), weights=weights, inputs=ids)

    kernels = te.kernels("cpu")
    prepared = prepare(of_ids, check_case(of_ids, kernels.te)[0], torch.float32, 0, kernels)
    assert prepared.lookups
    prepared = prepared.on_probes()
    prepared.clock.forward = work_of(lambda: outputs_with(prepared, (), torch.float64))
    outputs, moved = Outputs(prepared, torch.float64), []
    for mistake in hypotheses(prepared, calls_of(prepared).trace):
        began = prepared.clock.seconds
        by_parts = outputs.under((mistake,))
        moved.append(prepared.clock.seconds - began)
        whole = outputs_with(prepared, (mistake,), torch.float64)
        assert (by_parts is None) == (whole is None), mistake
        for name, output in (whole or {}).items():
            torch.testing.assert_close(by_parts[name], output, equal_nan=True, msg=mistake.name)  # type: ignore[index]
    assert min(moved) < 0.5 * prepared.clock.forward.seconds()


@pytest.mark.parametrize("host", ["gelu_mlp", "llama_layer", "model_with_loss"])
def test_every_mistake_changes_the_gradients_as_in_a_whole_pass(host: str) -> None:
    kernels, case = te.kernels("cpu"), HOSTS[host]
    checked = check_case(case, kernels.te)[0]
    prepared = prepare(case, checked, torch.float32, 0, kernels)
    passes = Passes(prepared)
    for mistake in list(hypotheses(prepared, calls_of(prepared).trace))[::3]:
        by_parts, whole = passes.under((mistake,)), tensors_with(prepared, (mistake,))
        assert (by_parts is None) == (whole is None), mistake
        for key, tensor in (whole or {}).items():
            assert by_parts is not None
            torch.testing.assert_close(by_parts[key], tensor, equal_nan=True, msg=f"{mistake.name}: {key}")


def _without_gradient_in_part(x: Tensor) -> Tensor:
    with torch.no_grad():
        size = x.abs().amax(-1, keepdim=True)
    return x / size


def _in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y.mul_(x.sin())
    y[:, 2] = 0.0
    return y.exp()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2.0 * gradient


class Between(nn.Module):
    """A function between two layers, whose outputs are added."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y + self.second(self.between(y))


@pytest.mark.parametrize("between", [torch.tanh, _without_gradient_in_part, _in_place, _Doubled.apply])
@pytest.mark.parametrize("what", ["other weights", "weights without gradient", "another activation", "a detached path"])
def test_gradients_are_those_of_the_module_however_it_computes(between: Callable[[Tensor], Tensor], what: str) -> None:
    module = Between(between).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    with tracing(module) as trace:
        module(x)
    layer = next(call for call in trace.calls if call.site[0] == "second" and call.name == "linear")
    name = "first.weight"
    made = {
        "other weights": Hypothesis("", "", "", read=lambda parameters: {name: 2.0 * parameters[name]}),
        "weights without gradient": Hypothesis("", "", "", read=lambda parameters: {name: parameters[name].detach()}),
        "another activation": Hypothesis("", "", "", (edit(layer, (), torch.sin),)),
        "a detached path": Hypothesis("", "", "", (detached(layer, layer.inputs[0]),)),
    }[what]
    given = {"call": None, "inputs": (x,), "input_names": ("x",), "clock": Clock(), "scales_lookups": False}
    given |= {"evaluation": False, "cotangents": {"output": torch.randn(3, 4, dtype=torch.float64)}}
    prepared: Any = SimpleNamespace(reference=module, **given)
    by_parts, whole = Passes(prepared).under((made,)), tensors_with(prepared, (made,))
    assert by_parts is not None
    assert whole is not None
    assert by_parts.keys() == whole.keys()
    for key, tensor in whole.items():
        torch.testing.assert_close(by_parts[key], tensor)
