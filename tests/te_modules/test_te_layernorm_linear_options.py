"""te.LayerNormLinear with each of its options is a norm and a linear layer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import plain
import pytest
from agreement import FP32_AND_BF16, assert_agree
from weight_maps import kinds, norm_weights

import parity
from parity.case.weight_map import WeightMap

IN, OUT = 64, 48
TOKENS = (2, 16)
EITHER_NORM = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])


def agree_with_norm_and_linear(
    normalization: str = "LayerNorm",
    weights: WeightMap | None = None,
    bias: bool = True,
    tokens: tuple[int, ...] = TOKENS,
    eps: float = 1e-5,
    precisions: tuple[str, ...] = FP32_AND_BF16,
    **options: Any,
) -> None:
    """``weights`` are those of the linear layer, by the same names on both sides if left out."""
    of_norm = norm_weights(normalization, "norm.", "layer_norm_", options.get("zero_centered_gamma", False))
    of_linear = {f"body.{kind}": kind for kind in kinds(bias)} if weights is None else weights

    def build(te: ModuleType) -> parity.Pair:
        reference = plain.Normed(
            plain.norm(normalization, IN, eps),
            plain.linear(IN, OUT, bias, options.get("return_bias", False)),
            returns_norm=options.get("return_layernorm_output", False),
        )
        candidate = te.LayerNormLinear(IN, OUT, eps=eps, bias=bias, normalization=normalization, **options)
        return parity.Pair(reference, candidate, lambda rng: rng.normal(*tokens, IN), dict(of_norm) | dict(of_linear))

    assert_agree(build, precisions)


@EITHER_NORM
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("zero_centered", [True, False])
def test_layernorm_linear_is_a_norm_and_a_linear_layer(normalization: str, bias: bool, zero_centered: bool) -> None:
    agree_with_norm_and_linear(normalization, bias=bias, zero_centered_gamma=zero_centered)


@pytest.mark.parametrize("tokens", [(24,), (2, 3, 4), (1,)], ids=str)
def test_layernorm_linear_takes_any_number_of_leading_dimensions(tokens: tuple[int, ...]) -> None:
    agree_with_norm_and_linear(tokens=tokens)


@EITHER_NORM
def test_eps_is_that_of_the_norm(normalization: str) -> None:
    agree_with_norm_and_linear(normalization, eps=0.5)


@EITHER_NORM
def test_return_layernorm_output_returns_it_with_its_gradient(normalization: str) -> None:
    agree_with_norm_and_linear(normalization, return_layernorm_output=True)


@pytest.mark.xfail(
    strict=True,
    reason="TransformerEngine itself drops this gradient without sequence parallelism (layernorm_linear.py, backward)",
)
@EITHER_NORM
def test_the_gathered_layernorm_output_has_its_gradient_on_one_device(normalization: str) -> None:
    agree_with_norm_and_linear(normalization, return_layernorm_output=True, return_layernorm_output_gathered=True)


@EITHER_NORM
def test_return_bias_leaves_the_bias_to_the_caller(normalization: str) -> None:
    agree_with_norm_and_linear(normalization, return_bias=True)


def test_all_that_can_be_returned_is_returned_in_order() -> None:
    agree_with_norm_and_linear(return_bias=True, return_layernorm_output=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("split", "names"),
    [(("query", "key", "value"), ("query", "key", "value")), ({"gate_": 32, "up_": 16}, ("gate", "up"))],
    ids=["equal", "sizes"],
)
def test_parameters_split_stacks_named_parameters(split: Any, names: tuple[str, ...], bias: bool) -> None:
    weights = {f"body.{kind}": parity.stack(*(f"{name}_{kind}" for name in names)) for kind in kinds(bias)}
    agree_with_norm_and_linear(weights=weights, bias=bias, parameters_split=split)


@EITHER_NORM
@pytest.mark.parametrize("returns_norm", [True, False])
@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
def test_layernorm_linear_agrees_in_fp8(normalization: str, returns_norm: bool, precision: str) -> None:
    agree_with_norm_and_linear(
        normalization, tokens=(4, 16), precisions=(precision,), return_layernorm_output=returns_norm
    )
