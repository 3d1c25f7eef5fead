"""``is_first_microbatch``: weights are quantized once for all microbatches, and gradients start afresh at the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import gradient, te_on_cpu
from torch import Tensor, nn

HIDDEN, FFN, HEADS = 64, 96, 4
BF16 = torch.bfloat16
BUILD: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda te, **options: te.Linear(HIDDEN, HIDDEN, **options),
    "LayerNormLinear": lambda te, **options: te.LayerNormLinear(HIDDEN, HIDDEN, **options),
    "LayerNormMLP": lambda te, **options: te.LayerNormMLP(HIDDEN, FFN, **options),
    "TransformerLayer": lambda te, **options: te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **options
    ),
}
EACH_MODULE = pytest.mark.parametrize("name", BUILD)


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return BUILD[name](te_on_cpu(), params_dtype=BF16, **options)


def microbatch() -> Tensor:
    return torch.randn(16, 2, HIDDEN, dtype=BF16)


def forward(module: nn.Module, x: Tensor, is_first: bool | None, recipe_name: str = "Float8CurrentScaling") -> Tensor:
    te = te_on_cpu()
    from transformer_engine.common import recipe

    with te.autocast(enabled=True, recipe=getattr(recipe, recipe_name)()):
        return module(x, is_first_microbatch=is_first)


@EACH_MODULE
def test_microbatches_of_one_step_compute_what_whole_steps_compute(name: str) -> None:
    first, second, of_output = microbatch(), microbatch(), microbatch()
    cached, plain = build(name), build(name)
    for x, is_first in ((first, True), (second, False)):
        output, expected = forward(cached, x, is_first), forward(plain, x, None)
        assert torch.equal(output, expected)
        output.backward(of_output)
        expected.backward(of_output)
    for (parameter, value), other in zip(cached.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(gradient(value), gradient(other)), parameter


@EACH_MODULE
def test_delayed_scaling_is_as_near_with_cached_weights(name: str) -> None:
    """Its scale of the weights would have moved at the second microbatch, which moves results by FP8's rounding."""
    first, second = microbatch(), microbatch()
    cached, plain = build(name), build(name)
    for x, is_first in ((first, True), (second, False)):
        output, expected = forward(cached, x, is_first, "DelayedScaling"), forward(plain, x, None, "DelayedScaling")
        assert (output - expected).norm() < 0.1 * expected.norm()


@EACH_MODULE
def test_later_microbatches_use_the_first_ones_quantized_weights(name: str) -> None:
    module, x = build(name), microbatch()
    before = forward(module, x, True).detach()
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(-3.0)
    cached = forward(module, x, False).detach()
    renewed = forward(module, x, True).detach()
    assert torch.equal(cached, before)
    assert not torch.equal(renewed, before)


@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "bf16"])
@EACH_MODULE
def test_fused_accumulation_starts_afresh_at_the_first_microbatch(name: str, is_fp8: bool) -> None:
    module, plain = build(name, fuse_wgrad_accumulation=True), build(name)
    weights: dict[str, Any] = {key: parameter for key, parameter in module.named_parameters() if parameter.dim() == 2}
    for weight in weights.values():
        weight.main_grad = torch.full(weight.shape, 7.0)  # what an earlier step left behind
    of_output = microbatch()
    for is_first in (True, False):
        x = microbatch()
        for model, first in ((module, is_first), (plain, None)):
            output = forward(model, x, first) if is_fp8 else model(x, is_first_microbatch=first)
            output.backward(of_output)
    for key, weight in weights.items():
        expected = gradient(plain.get_parameter(key))
        assert (weight.main_grad - expected.float()).norm() < 2.0**-7 * expected.float().norm(), key
