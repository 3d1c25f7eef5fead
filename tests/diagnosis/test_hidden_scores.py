"""TE's unfused attention gives hidden keys the score -10000, which is no hiding where all other scores are below it."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HEADS, HEAD_DIM = 2, 32


class Core(nn.Module):
    """Causal attention, each of whose queries is as far from its own key as its scale makes it."""

    def __init__(self, core, scale: float) -> None:
        super().__init__()
        self.core, self.scale = core, scale

    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        return self.core(-self.scale * x, x, value)


def causal(*heads: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in heads)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def compared(scale: float) -> parity.Result:
    def factory(te):
        core = te.DotProductAttention(HEADS, HEAD_DIM, qkv_format="bshd", attention_dropout=0.0)
        return parity.Pair(
            Core(causal, scale), Core(core, scale), lambda rng: [rng.normal(2, 4, HEADS, HEAD_DIM) for _ in range(2)]
        )

    (result,) = parity.compare(parity.Case("attention", factory, sizes=({},), probe=None), ["fp32"])
    return result


def test_scores_above_it_pass():
    assert compared(10.0).passed


@pytest.mark.parametrize("scale", [1e4, 1e5])
def test_scores_below_it_are_told(scale):
    first = compared(scale).findings[0]
    assert (first.title, "keep scores far above -10000" in first.message) == ("mask", True)
