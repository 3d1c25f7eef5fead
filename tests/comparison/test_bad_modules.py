"""Modules that leave nothing to compare, or less than it seems, or that have side effects, are reported."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from bad_input import (
    FP8,
    HERE,
    TOKENS,
    WIDTH,
    WRAPPED,
    Wrapped,
    assert_says,
    both,
    every_precision,
    findings,
    linear,
    result_of,
    te,
    wrapped,
)
from torch import Tensor, nn

import parity


@pytest.fixture(autouse=True)
def _same_weights_each_time() -> None:
    torch.manual_seed(0)


# What modules return


@pytest.mark.parametrize("returned", [lambda y: None, lambda y: y.argmax(-1), lambda y: (), lambda y: y > 0])
def test_a_reference_without_a_floating_point_output_is_no_pass(returned):
    result = result_of(linear(**both(lambda module, x: returned(module(x)))))
    assert_says(result, "error", "the reference returns no floating-point tensor")


class Returned:
    def __init__(self, y) -> None:
        self.y = y


def test_a_class_that_parity_does_not_look_into_is_named():
    result = result_of(linear(**both(lambda module, x: Returned(module(x)))))
    assert_says(result, "error", "the reference returns no floating-point tensor but Returned, so there is nothing")


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
    assert_says(result_of(pair, diagnose=False), "failed")


def test_outputs_that_are_exchanged_in_a_dict_fail():
    pair = linear(
        call_reference=lambda module, x: {"scores": module(x), "state": x},
        call_candidate=lambda module, x: {"scores": x, "state": module(x)},
    )
    assert_says(result_of(pair, diagnose=False), "failed")


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.float32), ("fp32", torch.float64)])
def test_a_candidate_that_returns_another_dtype_is_noted(precision, dtype):
    result = result_of(linear(call_candidate=lambda module, x: module(x).to(dtype)), precision)
    assert_says(result, "passed", f"the candidate returns output in {str(dtype).removeprefix('torch.')}")


@every_precision
def test_outputs_that_are_not_contiguous_are_compared(precision):
    assert_says(result_of(linear(**both(lambda module, x: module(x).t())), precision), "passed")


# Side effects of modules


@every_precision
def test_a_module_that_writes_to_its_input_does_not_spoil_the_other(precision):
    assert_says(result_of(linear(**both(lambda module, x: module(x.mul_(2)))), precision), "passed")
    alone = result_of(linear(call_reference=lambda module, x: module(x.mul_(2))), precision, diagnose=False)
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


# Gradients that are not wanted, or missing


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
    assert_says(result, "failed", "TE's bias got no gradient")
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
    assert_says(result, "passed", "0 in both the reference and the candidate", "d unused")


@every_precision
def test_a_candidate_without_gradients_fails(precision):
    result = result_of(linear(call_candidate=lambda module, x: module(x).detach()), precision)
    assert result.status == "failed"
    assert "PAR004" in findings(result)


def test_modules_without_gradients_are_compared_in_their_outputs_and_that_is_noted():
    result = result_of(linear(**both(lambda module, x: module(x).detach())))
    assert_says(result, "passed", "d input, d weight, d bias")


class Loss(nn.Module):
    def __init__(self, linear: nn.Module, cross_entropy) -> None:
        super().__init__()
        self.linear, self.cross_entropy = linear, cross_entropy

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.cross_entropy(self.linear(x), labels)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_loss_that_te_returns_with_one_dimension_is_the_same_number(smoothing):
    def plain(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)

    def ported(logits: Tensor, labels: Tensor) -> Tensor:
        loss = te.parallel_cross_entropy(logits, labels, smoothing, True)
        assert loss.shape == (1,)
        return loss

    def inputs(rng) -> tuple[Tensor, Tensor]:
        return rng.normal(2, 16, WIDTH), rng.integers(2, 16, high=64)

    pair = parity.Pair(
        Loss(nn.Linear(WIDTH, 64, bias=False), plain),
        Loss(te.Linear(WIDTH, 64, bias=False), ported),
        inputs,
        {"linear.weight": "linear.weight"},
        fill=True,
    )
    assert [result.status for result in parity.compare(pair, ["fp32", "bf16"])] == ["passed", "passed"]


def test_several_numbers_in_another_shape_are_told_with_both_shapes():
    pair = linear(
        call_reference=lambda module, x: module(x).sum(0), call_candidate=lambda module, x: module(x).sum(0, True)
    )
    assert_says(result_of(pair), "error", "the candidate returns {'output': (1, 32)} where the reference returns")


# What modules do to their weights


def _step(module: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        module(x.detach()).square().mean().backward()
    torch.optim.SGD(module.parameters(), lr=1e-2).step()
    return module(x)


def _unit_rows(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.weight.div_(torch.linalg.vector_norm(module.weight, dim=-1, keepdim=True))
    return module(x)


def test_a_reference_that_trains_its_own_weights_is_told_to_train_a_copy():
    result = result_of(linear(**both(_step)))
    assert_says(result, "error", "the reference changes its parameter weight in place", "copy.deepcopy")


def test_weights_that_every_pass_makes_the_same_may_be_written_to():
    assert result_of(linear(call_reference=_unit_rows, call_candidate=_unit_rows)).passed
