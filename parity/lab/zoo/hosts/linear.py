"""Linear layers, with and without a norm in front."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from parity.case.case import Pair
from parity.lab.zoo.hosts.case import host
from parity.lab.zoo.planting import construct
from parity.reference import NormLinear

SMALL = dict(batch=2, seq=32, width=64, out=96)
LARGE = dict(batch=2, seq=128, width=256, out=384)
LOW_RANK = (SMALL | dict(rank=16), LARGE | dict(rank=16))
ALPHA = 32.0
SQUARE = (dict(batch=2, seq=32, width=64), dict(batch=2, seq=128, width=256))


class LowRankLinear(nn.Module):
    """A linear layer with a low-rank addition that is scaled by ``ALPHA`` over its rank, as LoRA's."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, out: int, rank: int) -> None:
        super().__init__()
        self.base = linear(width, out, bias=False)
        self.down = linear(width, rank, bias=False)
        self.up = linear(rank, out, bias=False)
        self.scale = ALPHA / rank

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, width]`` to ``[batch, seq, out]``."""
        return self.base(x) + self.scale * self.up(self.down(x))


@host("linear", SMALL, LARGE)
def linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.Linear(width, out),
        candidate=construct(te.Linear, width, out),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


@host("square_linear", *SQUARE)
def square_linear(te: ModuleType, width: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.Linear(width, width, bias=False),
        candidate=construct(te.Linear, width, width, bias=False),
        weights={"weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


@host("norm_linear", SMALL, LARGE)
def norm_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    return Pair(
        reference=NormLinear(nn.LayerNorm(width), width, out),
        candidate=construct(te.LayerNormLinear, width, out),
        weights={
            "norm.weight": "layer_norm_weight",
            "norm.bias": "layer_norm_bias",
            "linear.weight": "weight",
            "linear.bias": "bias",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


@host("low_rank_linear", *LOW_RANK)
def low_rank_linear(te: ModuleType, width: int, out: int, rank: int, **_: Any) -> Pair:
    return Pair(
        reference=LowRankLinear(nn.Linear, width, out, rank),
        candidate=LowRankLinear(te.Linear, width, out, rank),
        weights={f"{name}.weight": f"{name}.weight" for name in ("base", "down", "up")},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


HOSTS = (linear, square_linear, norm_linear, low_rank_linear)
