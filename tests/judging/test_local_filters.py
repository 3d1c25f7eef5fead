"""Subtle mistakes of modules that return a loss: gradients, and the loss of probing inputs, name them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HIDDEN, FFN = 64, 256


class Loss(nn.Module):
    """Blocks, one after the other with a residual, and the cosine of what comes out with a target."""

    def __init__(self, *blocks: nn.Module, kind: str = "cosine", beside: float = 0.0) -> None:
        super().__init__()
        self.blocks, self.kind, self.beside = nn.ModuleList(blocks), kind, beside

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        x = x + self.beside * torch.sin(7.0 * x) if self.beside else x
        if self.kind == "cosine":
            return F.cosine_similarity(x.float(), target.float(), dim=-1).mean().view(1)
        return F.cross_entropy(x.float().flatten(0, 1), target.argmax(-1).flatten()).view(1)


class MLP(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, eps=eps)
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x)), approximate=self.approximate))

    approximate = "tanh"


class ErfMLP(MLP):
    approximate = "none"


MAP = {
    "norm.weight": "layer_norm_weight",
    "norm.bias": "layer_norm_bias",
    "up.weight": "fc1_weight",
    "up.bias": "fc1_bias",
    "down.weight": "fc2_weight",
    "down.bias": "fc2_bias",
}


def result(
    blocks: list[type[MLP]], kind: str = "cosine", eps: float = 1e-5, beside: float = 0.0, seq: int = 64
) -> parity.Result:
    """Of TE's MLPs with GELU by tanh in the place of these, in FP32."""

    def factory(te: Any, **_: Any) -> parity.Pair:
        ported = [te.LayerNormMLP(HIDDEN, FFN, activation="gelu", eps=eps) for _ in blocks]
        places = range(len(blocks))
        return parity.Pair(
            Loss(*(block() for block in blocks), kind=kind),
            Loss(*ported, kind=kind, beside=beside),
            lambda rng, batch, seq: (rng.normal(batch, seq, HIDDEN), rng.normal(batch, seq, HIDDEN)),
            weights={f"blocks.{i}.{mine}": f"blocks.{i}.{tes}" for i in places for mine, tes in MAP.items()},
        )

    (one,) = parity.compare(parity.Case("loss", factory, sizes=(dict(batch=2, seq=seq),)), ["fp32"])
    return one


@pytest.mark.parametrize("blocks", [[ErfMLP, ErfMLP], [MLP, ErfMLP]])
def test_another_gelu_is_told(blocks):
    assert [finding.title for finding in result(blocks).findings] == ["activation"]


@pytest.mark.parametrize("kind", ["cosine", "cross-entropy"])
@pytest.mark.parametrize("eps", [1e-6, 1e-4, 1e-3])
def test_another_eps_is_told(eps, kind):
    (finding,) = result([MLP], kind, eps).findings
    assert finding.title == "norm-eps"
    assert f"eps={eps:g}" in finding.message


def test_an_eps_that_no_norm_of_an_error_shows_is_told_by_how_much_of_it_gradients_contain():
    assert "no tensor lacks it" in result([MLP], eps=1e-4).findings[0].message


@pytest.mark.parametrize("kind", ["cosine", "cross-entropy"])
def test_a_mistake_that_is_not_known_is_told_as_none(kind):
    one = result([MLP, MLP], kind, beside=2e-3)
    assert one.status == "failed"
    assert {finding.code for finding in one.findings} <= {"PAR501", "PAR502"}
