"""Of two mistakes that hold at once the one that has a meaning is told before a call that is left out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, HEADS, SEQ = 64, 4, 20


class Padded(nn.Module):
    """A layer of attention in which padded tokens neither are seen nor get anything."""

    def __init__(self, linear, core=None) -> None:
        super().__init__()
        self.qkv, self.out, self.core = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH), core

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if self.core is not None:
            return x + self.out(self.core(query, key, value))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=~padding[:, None, None])
        return x + self.out(y.transpose(1, 2).flatten(2).masked_fill(padding[..., None], 0.0))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_padding_that_is_attended_to_is_told_before_the_call_that_is_left_out_besides(precision):
    def factory(te, **_):
        core = te.DotProductAttention(HEADS, WIDTH // HEADS, qkv_format="bshd", attn_mask_type="no_mask")
        plain = Padded(nn.Linear)
        names = {name: name for name, _ in plain.named_parameters()}

        def inputs(rng):
            return rng.normal(4, SEQ, WIDTH), torch.arange(SEQ) >= rng.integers(4, low=9, high=SEQ + 1)[:, None]

        return parity.Pair(plain, Padded(te.Linear, core), inputs, names)

    (result,) = parity.compare(parity.Case("padded", factory, sizes=({},)), [precision])
    assert [finding.title for finding in result.findings] == ["padding-mask", "operation"]
