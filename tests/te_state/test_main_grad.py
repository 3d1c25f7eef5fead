"""A weight gradient that TE adds to ``main_grad`` is compared like one in ``grad``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH = 64
MLP = {
    "0.weight": "layer_norm_weight",
    "0.bias": "layer_norm_bias",
    "1.weight": "fc1_weight",
    "1.bias": "fc1_bias",
    "3.weight": "fc2_weight",
    "3.bias": "fc2_bias",
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU("tanh"), nn.Linear(WIDTH, WIDTH))


class Microbatched(nn.Module):
    """Two microbatches, and whatever ``prepare`` does to the weight before them."""

    def __init__(self, te: Any, prepare: Any = lambda weight: None, **options: Any) -> None:
        super().__init__()
        self.linear = te.Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True)
        self.prepare, self.options = prepare, options

    def forward(self, x: Tensor) -> Tensor:
        self.prepare(self.linear.weight)
        return torch.cat([self.linear(part, **self.options) for part in x.chunk(2)])


def compare(reference: Any, candidate: Any, weights: dict[str, str], precision: str = "bf16") -> parity.Result:
    def factory(te: Any, batch: int) -> parity.Pair:
        return parity.Pair(reference(), candidate(te), lambda rng, batch: rng.normal(batch, WIDTH), weights)

    (result,) = parity.compare(parity.Case("main grad", factory, sizes=(dict(batch=32),)), [precision])
    return result


def microbatched(prepare: Any = lambda weight: None, **options: Any) -> parity.Result:
    return compare(
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda te: Microbatched(te, prepare, **options),
        {"weight": "linear.weight", "bias": "linear.bias"},
    )


def with_own_main_grad(weight: Any) -> None:
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def handed_over_by_a_hook(weight: Any) -> None:
    def hand_over(weight: Any) -> None:
        weight.grad = weight.main_grad.to(weight.dtype)

    if not hasattr(weight, "hooked"):
        weight.hooked = weight.register_post_accumulate_grad_hook(hand_over)


def overwriting(weight: Any) -> None:
    weight.overwrite_main_grad = True


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_delayed", "fp8_current"])
def test_a_module_without_main_grad_is_given_one(precision: str) -> None:
    fused = compare(mlp, lambda te: te.LayerNormMLP(WIDTH, WIDTH, fuse_wgrad_accumulation=True), MLP, precision)
    assert fused.passed


def test_an_operation_of_te_is_given_one_as_well() -> None:
    weights = {"weight": "weight", "bias": "bias"}
    assert compare(
        lambda: nn.Linear(WIDTH, WIDTH), lambda te: te.ops.Linear(WIDTH, WIDTH, accumulate_into_main_grad=True), weights
    ).passed


@pytest.mark.parametrize("prepare", [lambda weight: None, with_own_main_grad, handed_over_by_a_hook])
def test_microbatches_add_up_whoever_makes_main_grad(prepare: Any) -> None:
    assert microbatched(prepare).passed


@pytest.mark.parametrize(("prepare", "options"), [(overwriting, {}), (lambda w: None, dict(is_first_microbatch=True))])
def test_a_microbatch_that_overwrites_the_others_is_told(prepare: Any, options: dict[str, Any]) -> None:
    result = microbatched(prepare, **options)
    assert [finding.title for finding in result.findings] == ["gradient-accumulation"]


def test_a_weight_that_pytorch_uses_as_well_gets_both_parts() -> None:
    class Tied(nn.Module):
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + F.linear(x * x, self.linear.weight)

    weights = {"linear.weight": "linear.weight", "linear.bias": "linear.bias"}
    assert compare(
        lambda: Tied(nn.Linear(WIDTH, WIDTH)),
        lambda te: Tied(te.Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True)),
        weights,
    ).passed


def test_a_weight_that_is_not_used_has_no_gradient() -> None:
    class Unused(nn.Module):
        def __init__(self, te: Any) -> None:
            super().__init__()
            self.linear = te.Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.linear.weight.detach(), self.linear.bias)

    result = compare(lambda: nn.Linear(WIDTH, WIDTH), Unused, {"weight": "linear.weight", "bias": "linear.bias"})
    assert [finding.title for finding in result.findings] == ["no-gradient"]
