"""Branches that a gate scales before they are added, as in Llama 3.2's cross-attention layers; the gate comes first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, LAYERS = 64, 2


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


class Layer(nn.Module):
    """Two gated branches; ``mistake`` says what a port does otherwise."""

    def __init__(self, linear: Any, mistake: str) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(linear(WIDTH, 2 * WIDTH), nn.SiLU(), linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.gates = nn.ParameterList(nn.Parameter(torch.rand(1) + 0.4) for _ in self.branches)
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        squashed = {"no tanh": lambda gate: gate, "sigmoid": torch.sigmoid}.get(self.mistake, torch.tanh)
        for i, (branch, gate) in enumerate(zip(self.branches, self.gates, strict=True)):
            y = branch(x)
            if self.mistake == "norm before the gate" and i == 0:
                y = rms_norm(y)
            y = squashed(gate) * y
            x = y if self.mistake == "no residual" and i == 1 else y + x
            if self.mistake == "norm after the sum" and i == 1:
                x = rms_norm(x)
        return x


def compared(mistake: str, precision: str) -> parity.Result:
    def model(linear: Any, *mistakes: str) -> nn.Module:
        return nn.Sequential(*(Layer(linear, mistake) for mistake in mistakes))

    def factory(te: Any) -> parity.Pair:
        reference = model(nn.Linear, *[""] * LAYERS)
        in_all = "tanh" in mistake or mistake == "sigmoid"
        candidate = model(te.Linear, mistake, *[mistake if in_all else ""] * (LAYERS - 1))
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, candidate, lambda rng: rng.normal(2, 24, WIDTH), names)

    (result,) = parity.compare(parity.Case("gated", factory, sizes=({},)), [precision])
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("mistake", "title", "message"),
    [
        ("no tanh", "operation", "the 1st 'tanh' of 0 and of 3 more like it"),
        ("sigmoid", "operation", "it is sigmoid"),
        ("norm before the gate", "norm-missing", "a RMSNorm comes before in 0 (sum 1)"),
        ("norm after the sum", "norm-missing", "a RMSNorm comes after it in 0 (sum 2)"),
        ("no residual", "residual-placement", "return the branch alone"),
    ],
)
def test_mistakes_around_a_gated_branch_are_told(mistake, title, message, precision):
    first = compared(mistake, precision).findings[0]
    assert (first.title, message in first.message) == (title, True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_right_gates_pass(precision):
    assert compared("", precision).passed
