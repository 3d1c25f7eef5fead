"""Keys that a port does not rotate: then their bias, which all keys share, gets no gradient but rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, HEADS, SEQ = 64, 2, 32
HEAD = WIDTH // HEADS


class Attention(nn.Module):
    """Queries, keys and values with biases."""

    def __init__(self, linear: Any, of_keys: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.of_keys = *(linear(WIDTH, WIDTH) for _ in range(3)), of_keys
        frequencies = 10_000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        self.angles = torch.outer(torch.arange(SEQ), frequencies).repeat(1, 2)

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * self.angles.sin().to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k = self.rotated(k) if self.of_keys else k
        return F.scaled_dot_product_attention(self.rotated(q), k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_that_queries_alone_are_rotated_is_told_though_it_leaves_a_bias_no_gradient(precision):
    def factory(te: Any, **_: Any) -> parity.Pair:
        right = Attention(nn.Linear)
        names = {name: name for name, _ in right.named_parameters()}
        port = Attention(te.Linear, of_keys=False)
        return parity.Pair(right, port, lambda rng: rng.normal(2, SEQ, WIDTH), weights=names)

    (one,) = parity.compare(parity.Case("rotated", factory, sizes=({},)), [precision])
    assert [finding.title for finding in one.findings] == ["rope-one-side"]
