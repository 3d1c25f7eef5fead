"""te.LayerNormMLP with each of its options is a norm, two linear layers and an activation."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import plain
import pytest
import torch
from agreement import FP32_AND_BF16, assert_agree
from torch import Tensor
from weight_maps import mlp_weights, norm_weights

import parity
from parity import reference

HIDDEN, FFN = 64, 96
TOKENS = (2, 16)
ACTIVATIONS = (*reference.POINTWISE, *reference.GATES)
EITHER_NORM = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])


def agree_with_mlp(
    activation: str = "gelu",
    normalization: str = "LayerNorm",
    bias: bool = True,
    tokens: tuple[int, ...] = TOKENS,
    gate: Any = None,
    eps: float = 1e-5,
    precisions: tuple[str, ...] = FP32_AND_BF16,
    **options: Any,
) -> None:
    """``gate`` is the plain activation where the name alone does not tell it."""
    weights = dict(norm_weights(normalization, "norm.", "layer_norm_", options.get("zero_centered_gamma", False)))

    def build(te: ModuleType) -> parity.Pair:
        mlp = plain.MLP(HIDDEN, FFN, gate or activation, bias, bias_apart=options.get("return_bias", False))
        return parity.Pair(
            plain.Normed(
                plain.norm(normalization, HIDDEN, eps), mlp, returns_norm=options.get("return_layernorm_output", False)
            ),
            te.LayerNormMLP(
                HIDDEN, FFN, eps=eps, bias=bias, normalization=normalization, activation=activation, **options
            ),
            lambda rng: rng.normal(*tokens, HIDDEN),
            weights | dict(mlp_weights("body.", bias=bias)),
        )

    assert_agree(build, precisions)


@EITHER_NORM
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layernorm_mlp_is_a_norm_and_an_mlp(activation: str, bias: bool, normalization: str) -> None:
    agree_with_mlp(activation, normalization, bias)


@EITHER_NORM
def test_zero_centered_gamma_stores_the_gain_minus_one(normalization: str) -> None:
    agree_with_mlp("swiglu", normalization, bias=False, zero_centered_gamma=True)


@EITHER_NORM
def test_eps_is_that_of_the_norm(normalization: str) -> None:
    agree_with_mlp(normalization=normalization, eps=0.5)


@pytest.mark.parametrize("tokens", [(24,), (2, 3, 4), (1,)], ids=str)
def test_layernorm_mlp_takes_any_number_of_leading_dimensions(tokens: tuple[int, ...]) -> None:
    agree_with_mlp(tokens=tokens)


@EITHER_NORM
@pytest.mark.parametrize("gathered", [True, False])
def test_return_layernorm_output_returns_it_with_its_gradient(normalization: str, gathered: bool) -> None:
    agree_with_mlp(normalization=normalization, return_layernorm_output=True, return_layernorm_output_gathered=gathered)


def test_return_bias_leaves_the_second_bias_to_the_caller() -> None:
    agree_with_mlp(return_bias=True)


def test_all_that_can_be_returned_is_returned_in_order() -> None:
    agree_with_mlp(return_bias=True, return_layernorm_output=True)


def test_activation_params_are_those_of_the_clamped_swiglu() -> None:
    def gate(gate_half: Tensor, up: Tensor) -> Tensor:
        gate_half, up = gate_half.clamp(max=0.5), up.clamp(-0.5, 0.5)
        return gate_half * torch.sigmoid(1.2 * gate_half) * (up + 0.25)

    agree_with_mlp(
        "clamped_swiglu", gate=gate, activation_params={"limit": 0.5, "alpha": 1.2, "glu_linear_offset": 0.25}
    )


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_checkpoint_recomputes_the_same(activation: str, bias: bool) -> None:
    agree_with_mlp(activation, bias=bias, checkpoint=True)


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_layernorm_mlp_agrees_in_fp8(activation: str, precision: str, checkpoint: bool) -> None:
    agree_with_mlp(activation, tokens=(4, 16), precisions=(precision,), checkpoint=checkpoint)
