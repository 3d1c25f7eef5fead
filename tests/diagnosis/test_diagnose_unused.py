"""A parameter that a port holds and does not use is told by that, one that the reference does not use by nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity

HIDDEN = 64
WEIGHTS = {
    "norm.weight": "mlp.layer_norm_weight",
    "norm.bias": "mlp.layer_norm_bias",
    "up.weight": "mlp.fc1_weight",
    "up.bias": "mlp.fc1_bias",
    "down.weight": "mlp.fc2_weight",
    "down.bias": "mlp.fc2_bias",
    "scale": "scale",
    "adapter.weight": "adapter.weight",
    "spare.weight": "spare.weight",
}


class Reference(nn.Module):
    """An MLP whose output is scaled channel by channel, beside an adapter; ``spare`` is not used."""

    def __init__(self, scale_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.adapter, self.spare = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.rand(scale_shape) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(x) + self.scale * self.down(nn.functional.relu(self.up(self.norm(x))))


class Port(nn.Module):
    def __init__(self, te: Any, scale_shape: tuple[int, ...], leave_out: str, activation: str = "relu") -> None:
        super().__init__()
        self.mlp = te.LayerNormMLP(HIDDEN, HIDDEN, activation=activation, return_bias=True)
        self.adapter, self.spare = te.Linear(HIDDEN, HIDDEN, bias=False), te.Linear(HIDDEN, HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.empty(scale_shape))
        self.leave_out = leave_out

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.mlp(x)
        if self.leave_out != "bias":
            y = y + bias
        if self.leave_out != "scale":
            y = y * self.scale
        return y if self.leave_out == "adapter" else y + self.adapter(x)


def found(
    precision: str, leave_out: str, scale_shape: tuple[int, ...] = (HIDDEN,), activation: str = "relu"
) -> list[str]:
    """What is told: the codes with the parameters that are named."""

    def factory(te: Any, **_: int) -> parity.Pair:
        return parity.Pair(
            Reference(scale_shape),
            Port(te, scale_shape, leave_out, activation),
            lambda rng, batch: rng.normal(batch, 16, HIDDEN),
            WEIGHTS,
        )

    (result,) = parity.compare(parity.Case("unused", factory, sizes=(dict(batch=4),)), [precision])
    named = [re.findall(r"fc2_bias|scale|adapter.weight|spare.weight", one.message) for one in result.findings]
    return [" ".join([one.code, *names]) for one, names in zip(result.findings, named, strict=True)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_a_bias_that_is_handed_out_and_not_added_is_dropped(precision: str) -> None:
    assert found(precision, "bias")[0] == "PAR241 fc2_bias"


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, 1, HIDDEN)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_scale_that_is_not_multiplied_by_gets_no_gradient(precision: str, shape: tuple[int, ...]) -> None:
    assert found(precision, "scale", shape) == ["PAR004 scale"]


def test_a_weight_whose_product_is_not_added_gets_no_gradient() -> None:
    assert found("fp32", "adapter") == ["PAR004 adapter.weight"]


def test_a_parameter_that_the_reference_does_not_use_is_not_told() -> None:
    assert found("fp32", "", activation="silu") == ["PAR202"]
