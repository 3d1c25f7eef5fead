"""A port whose parameters TE holds quantized, ``te.quantized_model_init``, is compared like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import parity

WIDTH = 128
RECIPES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
}


def compare(precision: str, recipe: str, dtype: torch.dtype, activation: str = "gelu") -> parity.Result:
    def factory(te: Any, batch: int) -> parity.Pair:
        from transformer_engine.common import recipe as recipes

        with te.quantized_model_init(enabled=True, recipe=getattr(recipes, recipe)()):
            port = te.LayerNormMLP(WIDTH, WIDTH, params_dtype=dtype, activation=activation)
        return parity.Pair(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU("tanh"), nn.Linear(WIDTH, WIDTH)),
            port,
            lambda rng, batch: rng.normal(batch, WIDTH),
            {
                "0.weight": "layer_norm_weight",
                "0.bias": "layer_norm_bias",
                "1.weight": "fc1_weight",
                "1.bias": "fc1_bias",
                "3.weight": "fc2_weight",
                "3.bias": "fc2_bias",
            },
        )

    (result,) = parity.compare(parity.Case("quantized", factory, sizes=(dict(batch=128),)), [precision])
    return result


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        *((precision, torch.bfloat16) for precision in RECIPES),
        ("fp8_delayed", torch.float32),
        ("fp8_current", torch.float32),
    ],
)
def test_parameters_of_either_dtype_are_trained_and_agree(precision: str, dtype: torch.dtype) -> None:
    result = compare(precision, RECIPES[precision], dtype)
    assert result.passed, (result.reason, result.margin, result.findings)


def test_a_mistake_is_found_in_such_a_port_as_well() -> None:
    result = compare("fp8_current", "Float8CurrentScaling", torch.float32, activation="relu")
    assert result.findings[0].title == "activation"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_precision_without_a_recipe_is_refused(precision: str) -> None:
    result = compare(precision, "DelayedScaling", torch.bfloat16)
    assert result.status == "error"
    assert "holds fc1_weight and 1 more quantized" in result.reason


def test_parameters_that_te_keeps_in_another_dtype_are_refused() -> None:
    """TE's block-scaled tensors stay in the dtype that they were made in."""
    result = compare("fp8_block", "Float8BlockScaling", torch.float32)
    assert result.status == "error"
    assert result.reason.endswith("build the module with params_dtype=torch.bfloat16")
