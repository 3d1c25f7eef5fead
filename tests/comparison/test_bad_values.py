"""Inputs and weights that leave nothing to compare, or less than it seems, are reported and never just pass."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import forked
import pytest
import torch
from bad_input import (
    FP8,
    HERE,
    IDENTITY,
    TOKENS,
    WIDTH,
    assert_says,
    both,
    every_precision,
    findings,
    linear,
    mlp,
    result_of,
    te,
)
from torch import Tensor, nn
from torch.nn import functional

import parity
from parity.search.reruns import non_finite
from parity.te import PRECISIONS


@pytest.fixture(autouse=True)
def _same_weights_each_time() -> None:
    torch.manual_seed(0)


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
    assert_says(result, "failed", "512 NaN and 0 Inf in d input", f"a correct {precision} computation")
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
    assert_says(
        result, "passed", "not compared on probing inputs, where a correct float16 computation overflows: output"
    )
    assert not any(tensor.probed for tensor in result.tensors)


def test_an_overflow_inside_an_fp16_computation_is_the_precisions_own():
    result = result_of(linear(inputs=lambda rng: 1e4 * rng.normal(TOKENS, WIDTH)), "fp16")
    assert_says(result, "failed", "the range of fp16 is too small")
    assert findings(result) == {"PAR003"}


def normed_squares(module: nn.Module, x: Tensor) -> Tensor:
    """Return a layer norm of a layer's squares, which overflow FP16 from 256 on where they are stored."""
    return functional.layer_norm(module(x).square(), (WIDTH,))


def test_probing_inputs_on_which_only_what_is_stored_step_by_step_overflows_are_left_out():
    result = result_of(linear(inputs=lambda rng: 100 * rng.normal(TOKENS, WIDTH), **both(normed_squares)), "fp16")
    assert_says(result, "passed", "not compared on probing inputs, where a correct float16 computation overflows")
    assert not any(tensor.probed for tensor in result.tensors)


def test_a_nan_on_probing_inputs_on_which_nothing_overflows_still_fails():
    def spoiled(module, x):
        y = normed_squares(module, x)
        return torch.where(x.abs().amax(-1, keepdim=True) < 1e-2, math.nan, y)

    pair = linear(inputs=lambda rng: 100 * rng.normal(TOKENS, WIDTH), call_reference=normed_squares)
    result = result_of(dataclasses.replace(pair, call_candidate=spoiled), "fp16")
    assert result.status == "failed"
    assert findings(result) == {"PAR001"}


def test_an_overflow_in_the_ports_own_lines_is_the_precisions_own():
    result = result_of(linear(inputs=lambda rng: 1000 * rng.normal(TOKENS, WIDTH), **both(normed_squares)), "fp16")
    assert_says(result, "failed", "the range of fp16 is too small")
    assert findings(result) == {"PAR003"}


def test_a_port_that_is_finite_where_a_faithful_one_overflows_cannot_be_judged_there():
    right, *_ = result_of(linear(), "fp16").tensors
    overflowing = dataclasses.replace(right.expected, infs=2)
    unjudged = dataclasses.replace(right, expected=overflowing, margin=math.inf, checks=())
    (finding,) = non_finite([unjudged], PRECISIONS["fp16"])
    assert finding.code == "PAR003"
    assert "0 NaN and 2 Inf in output, where the TE module is finite" in finding.message


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
    assert_says(result_of(pair, "bf16", diagnose=False), "failed")


def test_an_output_that_rounding_loses_among_others_is_noted():
    pair = linear(**both(lambda module, x: (module(x), 1e-9 * module(x))))
    assert_says(result_of(pair, "fp16"), "passed", "zeros would pass as well: output[1]")


# Constants and zeros


def norm_of(name: str, value: float) -> parity.Pair:
    """Return a pair of norms whose input is the same number everywhere."""
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
    assert_says(result, "failed", "Rounding decides these numbers")
    assert findings(result) == {"PAR005"}


def test_a_mistake_on_well_conditioned_inputs_is_not_taken_for_ill_conditioned():
    result = result_of(linear(call_candidate=lambda module, x: 1.001 * module(x)))
    assert_says(result, "failed")
    assert "PAR005" not in findings(result)


@every_precision
def test_a_zero_gradient_in_both_passes_and_is_noted(precision):
    result = result_of(linear(**both(lambda module, x: module(torch.ones_like(x)))), precision)
    assert_says(result, "passed", "0 in both the reference and the candidate", "d input")


@every_precision
def test_a_gradient_that_the_reference_has_not_fails(precision):
    pair = linear(call_reference=lambda module, x: module(x.detach()))
    assert_says(result_of(pair, precision, diagnose=False), "failed")


@every_precision
def test_a_gradient_that_the_candidate_has_not_fails(precision):
    result = result_of(linear(call_candidate=lambda module, x: module(x.detach())), precision, diagnose=False)
    assert_says(result, "failed")
    assert [tensor.label for tensor in result.tensors if not tensor.passed] == ["d input"]


@every_precision
def test_outputs_and_gradients_that_are_all_zero_are_no_pass(precision):
    pair = mlp(lambda rng: torch.zeros(TOKENS, WIDTH))
    assert_says(result_of(pair, precision), "error", "a candidate that computes nothing would pass")


@every_precision
def test_an_output_that_is_zero_in_the_candidate_alone_fails(precision):
    pair = linear(call_candidate=lambda module, x: 0 * module(x))
    assert_says(result_of(pair, precision, diagnose=False), "failed")


def test_an_output_that_is_zero_in_the_reference_alone_fails():
    pair = linear(
        call_reference=lambda module, x: (module(x), 0 * x),
        call_candidate=lambda module, x: (module(x), 0 * x + 1e-6),
    )
    result = result_of(pair, diagnose=False)
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


# Kinds of tensors


def test_gradients_that_an_embedding_stores_sparsely_are_compared():
    pair = parity.Pair(
        nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), te.Linear(WIDTH, WIDTH)),
        lambda rng: rng.integers(TOKENS, high=8),
        {name: name for name in ("0.weight", "1.weight", "1.bias")},
        fill=True,
    )
    result = result_of(pair)
    assert_says(result, "passed")
    assert "d 0.weight" in [tensor.label for tensor in result.tensors]


# The command line and the report say that there was nothing to compare.


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
    ran = forked.run("-m", "parity", "run", "bad_pairs.py", "-n", "0", folder=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "1 passed, 3 failed" in ran.stdout or "3 failed, 1 passed" in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr
    report = (tmp_path / "reports" / "parity.md").read_text()
    for words in ("every output of the reference is empty", "no floating-point tensor", "PAR002"):
        assert words in ran.stdout
        assert words in report
    assert "0 in both the reference and the candidate, which proves nothing: d input (`detached" in report
