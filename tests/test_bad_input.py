"""Inputs, weights and modules that leave nothing to compare, or less than it seems, are told; they never just pass."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.precision import PRECISIONS, why_unavailable
from parity.report import failure
from parity.report.items import Item
from parity.result import Result, from_json, to_json

te = parity.te.kernels("cpu").te
HERE = [name for name, precision in PRECISIONS.items() if why_unavailable(precision, parity.te.kernels()) is None]
FP8 = [name for name in HERE if PRECISIONS[name].recipe is not None]
TOKENS, WIDTH = 16, 32
IDENTITY = {"weight": "weight", "bias": "bias"}
every_precision = pytest.mark.parametrize("precision", HERE)


@pytest.fixture(autouse=True)
def _same_weights_each_time() -> None:
    torch.manual_seed(0)


def linear(**fields) -> parity.Pair:
    return parity.Pair(
        **{
            "reference": nn.Linear(WIDTH, WIDTH),
            "candidate": te.Linear(WIDTH, WIDTH),
            "inputs": lambda rng: rng.normal(TOKENS, WIDTH),
            "weights": IDENTITY,
            **fields,
        }
    )


def mlp(inputs) -> parity.Pair:
    return parity.Pair(
        reference=parity.reference.SwiGLUMLP(WIDTH, 2 * WIDTH),
        candidate=te.LayerNormMLP(WIDTH, 2 * WIDTH, normalization="RMSNorm", activation="swiglu", bias=False),
        inputs=inputs,
        weights={
            "norm.weight": "layer_norm_weight",
            parity.stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
            "down_proj.weight": "fc2_weight",
        },
    )


def both(call) -> dict:
    """The same function around the reference and the candidate."""
    return {"call_reference": call, "call_candidate": call}


def result_of(pair: parity.Pair, precision: str = "fp32") -> Result:
    (result,) = parity.compare(pair, [precision])
    assert from_json(to_json(result)) == result
    if not result.passed:
        assert "Traceback" not in failure.message(Item((result,)))
    return result


def findings(result: Result) -> set[str]:
    return {finding.code for finding in result.findings}


def assert_says(result: Result, status: str, *words: str) -> None:
    told = " ".join((result.reason, *result.notes, *(finding.message for finding in result.findings)))
    assert result.status == status, (result.status, told)
    assert all(word in told for word in words), told


class Wrapped(nn.Module):
    """A layer under the name ``layer``, for modules of which it is a part."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


WRAPPED = {"layer.weight": "layer.weight", "layer.bias": "layer.bias"}


def wrapped(kind: type[Wrapped], weights: dict | None = None, **fields) -> parity.Pair:
    return linear(
        reference=kind(nn.Linear(WIDTH, WIDTH)),
        candidate=kind(te.Linear(WIDTH, WIDTH)),
        weights={**WRAPPED, **(weights or {})},
        **fields,
    )


# NaN and Inf


@every_precision
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_or_inf_in_an_input_fails_as_the_references_own(precision, value):
    def inputs(rng):
        x = rng.normal(TOKENS, WIDTH)
        x[3, 5] = value
        return x

    result = result_of(linear(inputs=inputs), precision)
    assert_says(result, "failed", "the reference itself is not finite", "[3, 0]")
    assert findings(result) == {"PAR002"}


@every_precision
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_or_inf_in_a_weight_fails_as_the_references_own(precision, value):
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.data[3, 5] = value
    result = result_of(linear(reference=layer), precision)
    assert result.status == "failed"
    assert findings(result) == {"PAR002"}


class NanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * math.nan


@every_precision
def test_a_nan_that_only_the_backward_pass_makes_fails(precision):
    result = result_of(linear(call_candidate=lambda module, x: NanInBackward.apply(module(x))), precision)
    assert_says(result, "failed", "512 NaN and 0 Inf in d input", f"a faithful {precision} computation")
    assert findings(result) == {"PAR001"}


def test_a_nan_that_only_the_references_backward_pass_makes_fails_as_its_own():
    result = result_of(linear(call_reference=lambda module, x: NanInBackward.apply(module(x))))
    assert result.status == "failed"
    assert findings(result) == {"PAR002"}


# Huge and tiny values


@every_precision
@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_huge_and_tiny_activations_are_compared_like_others(precision, scale):
    result = result_of(mlp(lambda rng: scale * rng.normal(TOKENS, WIDTH)), precision)
    assert_says(result, "passed")


def test_probing_inputs_on_which_fp16_overflows_though_the_users_own_fit_are_left_out():
    result = result_of(mlp(lambda rng: 1e4 * rng.normal(TOKENS, WIDTH)), "fp16")
    assert_says(result, "passed", "not compared on probing inputs, where any float16 computation overflows: output")
    assert not any(tensor.probed for tensor in result.tensors)


def test_an_overflow_inside_an_fp16_computation_is_the_precisions_own():
    result = result_of(linear(inputs=lambda rng: 1e4 * rng.normal(TOKENS, WIDTH)), "fp16")
    assert_says(result, "failed", "the range of fp16 is too small")
    assert findings(result) == {"PAR003"}


def test_an_input_that_overflows_fp16_is_told_before_anything_runs():
    pair = linear(inputs=lambda rng: 6e4 * rng.normal(TOKENS, WIDTH))
    assert_says(result_of(pair, "fp16"), "error", "elements of the input overflow float16", "65504")
    assert_says(result_of(pair, "bf16"), "passed")


def test_a_weight_that_overflows_fp16_is_told_by_te_s_name():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.data[0, 0] = 1e5
    assert_says(
        result_of(linear(reference=layer), "fp16"), "error", "1 of 1024 elements of the weights for TE's weight"
    )


def test_an_input_that_vanishes_in_fp16_is_told():
    pair = linear(inputs=lambda rng: 1e-30 * rng.normal(TOKENS, WIDTH))
    assert_says(result_of(pair, "fp16"), "error", "every element of the input rounds to 0 in float16")


def test_a_candidate_three_times_too_large_does_not_pass_because_fp16_flushes_both_to_zero():
    pair = linear(call_reference=lambda module, x: 1e-9 * module(x), call_candidate=lambda module, x: 3e-9 * module(x))
    assert_says(result_of(pair, "fp16"), "error", "a candidate that returns 0 would pass")
    assert_says(result_of(pair, "bf16"), "failed")


def test_an_output_that_rounding_loses_among_others_is_noted():
    pair = linear(**both(lambda module, x: (module(x), 1e-9 * module(x))))
    assert_says(result_of(pair, "fp16"), "passed", "zeros would pass, too: output[1]")


# Constants and zeros


def norm_of(name: str, value: float) -> parity.Pair:
    """A norm of rows that all hold one number."""
    reference = nn.LayerNorm(WIDTH) if name == "LayerNorm" else nn.RMSNorm(WIDTH, eps=1e-5)
    reference.weight.data.uniform_(0.5, 1.5)
    return linear(
        reference=reference,
        candidate=getattr(te, name)(WIDTH),
        weights=IDENTITY if name == "LayerNorm" else {"weight": "weight"},
        inputs=lambda rng: torch.full((TOKENS, WIDTH), value),
    )


@every_precision
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_inputs_of_a_norm_are_compared(precision, norm, value):
    assert_says(result_of(norm_of(norm, value), precision), "passed")


@pytest.mark.parametrize("value", [0.3, 1e4 + 0.1])
def test_a_layer_norm_of_a_constant_whose_mean_rounds_is_told_as_ill_conditioned(value):
    result = result_of(norm_of("LayerNorm", value))
    assert_says(result, "failed", "rounding decides these numbers")
    assert findings(result) == {"PAR005"}


def test_a_mistake_on_well_conditioned_inputs_is_not_taken_for_ill_conditioned():
    result = result_of(linear(call_candidate=lambda module, x: 1.001 * module(x)))
    assert_says(result, "failed")
    assert "PAR005" not in findings(result)


@every_precision
def test_a_zero_gradient_in_both_passes_and_is_noted(precision):
    result = result_of(linear(**both(lambda module, x: module(torch.ones_like(x)))), precision)
    assert_says(result, "passed", "0 in the reference and in the candidate", "d input")


@every_precision
def test_a_gradient_that_the_reference_has_not_fails(precision):
    assert_says(result_of(linear(call_reference=lambda module, x: module(x.detach())), precision), "failed")


@every_precision
def test_a_gradient_that_the_candidate_has_not_fails(precision):
    result = result_of(linear(call_candidate=lambda module, x: module(x.detach())), precision)
    assert_says(result, "failed")
    assert [tensor.label for tensor in result.tensors if not tensor.passed] == ["d input"]


@every_precision
def test_outputs_and_gradients_that_are_all_zero_are_no_pass(precision):
    pair = mlp(lambda rng: torch.zeros(TOKENS, WIDTH))
    assert_says(result_of(pair, precision), "error", "a candidate that computes nothing would pass")


@every_precision
def test_an_output_that_is_zero_in_the_candidate_alone_fails(precision):
    assert_says(result_of(linear(call_candidate=lambda module, x: 0 * module(x)), precision), "failed")


def test_an_output_that_is_zero_in_the_reference_alone_fails():
    pair = linear(
        call_reference=lambda module, x: (module(x), 0 * x),
        call_candidate=lambda module, x: (module(x), 0 * x + 1e-6),
    )
    result = result_of(pair)
    assert_says(result, "failed")
    assert {tensor.name for tensor in result.tensors if not tensor.passed} == {"output[1]"}


# Few elements, or none


@every_precision
def test_an_empty_batch_is_no_pass(precision):
    for pair in (linear(inputs=lambda rng: rng.normal(0, WIDTH)), mlp(lambda rng: rng.normal(0, WIDTH))):
        assert_says(result_of(pair, precision), "error", "every output of the reference is empty")


def test_an_empty_output_among_others_is_compared_in_shape_and_noted():
    pair = linear(**both(lambda module, x: (module(x), x[:, :0])))
    assert_says(result_of(pair), "passed", "only the shape was compared: output[1]")


@pytest.mark.parametrize("precision", [name for name in HERE if name not in FP8])
def test_one_token_is_compared(precision):
    assert_says(result_of(linear(inputs=lambda rng: rng.normal(1, WIDTH)), precision), "passed")


@pytest.mark.parametrize("precision", FP8)
def test_one_token_in_fp8_is_te_s_own_error(precision):
    result = result_of(linear(inputs=lambda rng: rng.normal(1, WIDTH)), precision)
    assert_says(result, "error", "the candidate raised ValueError", "divisible by 8")


def test_a_scalar_output_is_compared():
    assert_says(result_of(linear(**both(lambda module, x: module(x).sum()))), "passed")


# What modules return


@pytest.mark.parametrize("returned", [lambda y: None, lambda y: y.argmax(-1), lambda y: (), lambda y: y > 0])
def test_a_reference_without_a_floating_point_output_is_no_pass(returned):
    result = result_of(linear(**both(lambda module, x: returned(module(x)))))
    assert_says(result, "error", "the reference returns no floating-point tensor")


def test_a_candidate_that_returns_nothing_is_told_with_both_shapes():
    result = result_of(linear(call_candidate=lambda module, x: None))
    assert_says(result, "error", "the candidate returns {} where the reference returns {'output': (16, 32)}")


def test_outputs_that_are_not_floating_point_are_noted_as_not_compared():
    pair = linear(**both(lambda module, x: (module(x), None, module(x).argmax(-1))))
    assert_says(result_of(pair), "passed", "1 of the reference's outputs hold no floating-point numbers")


def test_outputs_in_a_dict_are_compared_by_key():
    pair = linear(
        call_reference=lambda module, x: {"scores": module(x), "state": x, "nothing": None},
        call_candidate=lambda module, x: {"state": x, "scores": module(x)},
    )
    result = result_of(pair)
    assert_says(result, "passed")
    assert {tensor.label for tensor in result.tensors} >= {"output[scores]", "output[state]"}


@dataclasses.dataclass
class Scored:
    scores: Tensor
    state: tuple[Tensor, ...]
    note: str = ""


def test_outputs_in_a_dataclass_are_compared_by_field():
    pair = linear(**both(lambda module, x: Scored(module(x), (x, 2 * x))))
    result = result_of(pair)
    assert_says(result, "passed")
    assert {tensor.label for tensor in result.tensors} >= {"output[scores]", "output[state.0]", "output[state.1]"}


def test_a_dataclass_within_a_tuple_is_compared_too():
    pair = linear(
        call_reference=lambda module, x: (module(x), Scored(x, ())),
        call_candidate=lambda module, x: (module(x), Scored(2 * x, ())),
    )
    assert_says(result_of(pair), "failed")


def test_outputs_that_are_exchanged_in_a_dict_fail():
    pair = linear(
        call_reference=lambda module, x: {"scores": module(x), "state": x},
        call_candidate=lambda module, x: {"scores": x, "state": module(x)},
    )
    assert_says(result_of(pair), "failed")


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.float32), ("fp32", torch.float64)])
def test_a_candidate_that_returns_another_dtype_is_noted(precision, dtype):
    result = result_of(linear(call_candidate=lambda module, x: module(x).to(dtype)), precision)
    assert_says(result, "passed", f"the candidate returns output in {str(dtype).removeprefix('torch.')}")


@every_precision
def test_outputs_that_are_not_contiguous_are_compared(precision):
    assert_says(result_of(linear(**both(lambda module, x: module(x).t())), precision), "passed")


# What modules do besides


@every_precision
def test_a_module_that_writes_to_its_input_does_not_spoil_the_other(precision):
    assert_says(result_of(linear(**both(lambda module, x: module(x.mul_(2)))), precision), "passed")
    alone = result_of(linear(call_reference=lambda module, x: module(x.mul_(2))), precision)
    assert_says(alone, "failed")


def test_a_candidate_that_alone_writes_to_its_input_is_no_pass_though_its_outputs_agree():
    pair = linear(call_reference=lambda module, x: module(2 * x), call_candidate=lambda module, x: module(x.mul_(2)))
    assert_says(result_of(pair), "error", "the candidate changes input in place")


def test_a_candidate_that_puts_its_input_back_passes():
    pair = linear(
        call_reference=lambda module, x: module(x), call_candidate=lambda module, x: module(x.mul_(2).div_(2))
    )
    assert_says(result_of(pair), "passed")


def test_an_input_that_the_reference_alone_changes_is_noted():
    pair = linear(call_reference=lambda module, x: module(x.mul_(2)), call_candidate=lambda module, x: module(2 * x))
    assert_says(result_of(pair), "passed", "the reference changes input in place")


def test_an_input_that_holds_nan_is_not_taken_for_changed():
    def inputs(rng):
        mask = torch.full((TOKENS, WIDTH), math.nan)
        return {"x": rng.normal(TOKENS, WIDTH), "unused": mask}

    pair = linear(inputs=inputs, **both(lambda module, x, unused: module(x)))
    told = " ".join((result_of(pair).reason, *result_of(pair).notes))
    assert "in place" not in told


def test_a_candidate_that_is_plain_pytorch_is_noted_as_such():
    assert_says(result_of(linear(candidate=nn.Linear(WIDTH, WIDTH))), "passed", "PyTorch was compared with PyTorch")


def test_a_candidate_that_only_calls_functions_of_te_is_not():
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles = torch.zeros(TOKENS, 1, 1, WIDTH)
    pair = linear(
        reference=Rectified(),
        candidate=Rectified(),
        weights={},
        inputs=lambda rng: rng.normal(TOKENS, 1, 1, WIDTH),
        call_candidate=lambda module, x: apply_rotary_pos_emb(module(x), angles),
    )
    told = result_of(pair, "bf16").notes
    assert not any("with PyTorch" in note for note in told)


def test_a_module_that_writes_to_an_integer_input_does_not_spoil_the_other():
    class Counts(Wrapped):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.layer(x) * ids.add_(1)[:, None]

    pair = wrapped(Counts, inputs=lambda rng: (rng.normal(TOKENS, WIDTH), rng.integers(TOKENS, high=9)))
    assert_says(result_of(pair), "passed")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_delayed"])
def test_a_buffer_that_each_call_changes_does_not_carry_over_to_the_next(precision):
    class Counting(Wrapped):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__(layer)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x) * self.calls

    assert_says(result_of(wrapped(Counting), precision), "passed")


def test_a_batch_norm_in_training_mode_is_compared_and_keeps_its_statistics():
    class Normed(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(x))

    pair = linear(
        reference=Normed(nn.Linear(WIDTH, WIDTH)),
        candidate=Normed(te.Linear(WIDTH, WIDTH)),
        weights=WRAPPED | {"norm.weight": "norm.weight", "norm.bias": "norm.bias"},
    )
    assert_says(result_of(pair), "passed")
    assert bool((pair.reference.norm.running_mean == 0).all())


class Rectified(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


def test_modules_without_parameters_are_compared():
    assert_says(result_of(linear(reference=Rectified(), candidate=Rectified(), weights={})), "passed")


class Tied(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@every_precision
def test_a_parameter_that_two_layers_share_is_compared_once(precision):
    pair = linear(
        reference=Tied(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))),
        candidate=Tied(*(te.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))),
        weights={"first.weight": "first.weight"},
    )
    result = result_of(pair, precision)
    assert_says(result, "passed")
    assert [tensor.label for tensor in result.tensors if not tensor.probed] == ["output", "d input", "d first.weight"]


def test_a_parameter_that_only_the_reference_shares_is_an_error_of_the_map():
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (te.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    tied = Tied(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    pair = linear(reference=tied, candidate=Apart(), weights={"first.weight": "first.weight"})
    with pytest.raises(parity.UserError, match=r'"second\.weight".*filled by no entry'):
        parity.compare(pair, ["fp32"])


# Gradients that are not wanted, or not there


@pytest.mark.parametrize("precision", FP8)
def test_a_parameter_that_is_frozen_in_both_is_noted_and_no_mistake(precision):
    pair = linear()
    pair.reference.weight.requires_grad_(False)
    pair.candidate.weight.requires_grad_(False)
    assert_says(result_of(pair, precision), "passed", "frozen in the reference", "weight")


@pytest.mark.parametrize("precision", [name for name in HERE if name not in FP8])
def test_te_gives_the_bias_of_a_frozen_weight_no_gradient_outside_fp8_and_that_fails(precision):
    pair = linear()
    pair.reference.weight.requires_grad_(False)
    pair.candidate.weight.requires_grad_(False)
    result = result_of(pair, precision)
    assert_says(result, "failed", "no gradient for TE's bias")
    assert not any("TE's weight" in finding.message for finding in result.findings)


@every_precision
def test_modules_that_are_frozen_altogether_are_compared_in_outputs_and_input_gradients(precision):
    pair = linear()
    pair.reference.requires_grad_(False)
    pair.candidate.requires_grad_(False)
    result = result_of(pair, precision)
    assert_says(result, "passed", "frozen in the reference, so that no gradient was compared: weight, bias")
    assert [tensor.label for tensor in result.tensors if not tensor.probed] == ["output", "d input"]


def test_a_parameter_that_is_frozen_in_the_candidate_alone_fails_by_name():
    pair = linear()
    pair.candidate.weight.requires_grad_(False)
    assert_says(result_of(pair), "failed", "TE's weight")


def test_a_parameter_that_is_frozen_in_the_reference_alone_is_noted():
    pair = linear()
    pair.reference.weight.requires_grad_(False)
    assert_says(result_of(pair), "passed", "frozen in the reference, so that no gradient was compared: weight")


class WithUnused(Wrapped):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_parameter_that_neither_uses_is_noted():
    result = result_of(wrapped(WithUnused, {"unused": "unused"}))
    assert_says(result, "passed", "0 in the reference and in the candidate", "d unused")


@every_precision
def test_a_candidate_without_gradients_fails(precision):
    result = result_of(linear(call_candidate=lambda module, x: module(x).detach()), precision)
    assert result.status == "failed"
    assert "PAR004" in findings(result)


def test_modules_without_gradients_are_compared_in_their_outputs_and_that_is_noted():
    result = result_of(linear(**both(lambda module, x: module(x).detach())))
    assert_says(result, "passed", "d input, d weight, d bias")


# In the report and on the command line


PAIRS = """
import parity
import torch
from torch import nn

def declare(name, **fields):
    @parity.pair(name, precisions=["fp32"])
    def case(te):
        pair = dict(reference=nn.Linear(16, 16, bias=False), candidate=te.Linear(16, 16, bias=False),
                    inputs=lambda rng: rng.normal(8, 16), weights={"weight": "weight"})
        return parity.Pair(**(pair | fields))

def same(call):
    return dict(call_reference=call, call_candidate=call)

declare("empty", inputs=lambda rng: rng.normal(0, 16))
declare("nothing", **same(lambda module, x: None))
declare("not_finite", inputs=lambda rng: torch.full((8, 16), float("nan")))
declare("detached", **same(lambda module, x: module(x.detach())))
"""


def test_the_command_line_and_the_report_state_each_without_a_traceback(tmp_path: Path):
    (tmp_path / "bad_pairs.py").write_text(PAIRS)
    command = [sys.executable, "-m", "parity", "run", "bad_pairs.py", "-n", "0"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "1 passed, 3 failed" in ran.stdout or "3 failed, 1 passed" in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr
    report = (tmp_path / "reports" / "parity.md").read_text()
    for words in ("every output of the reference is empty", "no floating-point tensor", "PAR002"):
        assert words in ran.stdout
        assert words in report
    assert "0 in the reference and in the candidate, which proves nothing of it: d input (`detached" in report
