"""A port with another number of heads is told the reference's number and its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH = 128


class Attention(nn.Module):
    def __init__(self, linear: Any, heads: int, groups: int, te: Any = None) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = heads, groups, WIDTH // heads
        keys = groups * self.head_dim
        self.q, self.k, self.v, self.out = (linear(WIDTH, n, bias=False) for n in (WIDTH, keys, keys, WIDTH))
        options = dict(num_gqa_groups=groups, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0)
        self.attention = None if te is None else te.DotProductAttention(heads, self.head_dim, **options)

    def forward(self, x: Tensor) -> Tensor:
        split = zip((self.q, self.k, self.v), (self.heads, self.groups, self.groups), strict=True)
        q, k, v = (layer(x).unflatten(-1, (count, self.head_dim)) for layer, count in split)
        if self.attention is not None:
            return self.out(self.attention(q, k, v))
        k, v = (y.repeat_interleave(self.heads // self.groups, 2) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layers(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def result(precision: str, right: tuple[int, int], wrong: tuple[int, int]) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        reference = Layers(*(Attention(nn.Linear, *right) for _ in range(2)))
        candidate = Layers(*(Attention(te.Linear, *wrong, te) for _ in range(2)))
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, candidate, lambda rng: rng.normal(2, 32, WIDTH), names)

    (one,) = parity.compare(parity.Case("heads", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [((4, 4), (8, 8)), ((8, 8), (2, 2)), ((8, 2), (4, 1)), ((4, 2), (16, 8)), ((8, 8), (1, 1))],
)
def test_another_number_of_heads_is_told_with_both(right, wrong, precision):
    one = result(precision, right, wrong)
    assert not one.passed
    (finding,) = one.findings
    assert finding.title == "head-count"
    assert f"num_attention_heads={right[0]}, as the reference has; it has {wrong[0]}" in finding.message


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_the_same_number_passes(heads):
    assert result("bf16", heads, heads).passed
