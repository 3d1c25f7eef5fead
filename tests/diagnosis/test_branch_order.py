"""Residual branches that a port takes in the other order, or side by side: a decoder's attentions, a mixer's MLPs."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, SEQ = 64, 32

Order = Literal["right", "exchanged", "beside"]


class Block(nn.Module):
    """Two branches that mix tokens, and channels."""

    def __init__(self, linear: Any, order: Order) -> None:
        super().__init__()
        self.order = order
        self.of_tokens, self.of_channels = linear(SEQ, SEQ), linear(WIDTH, WIDTH)

    def tokens(self, x: Tensor) -> Tensor:
        return self.of_tokens(F.silu(x).mT).mT

    def channels(self, x: Tensor) -> Tensor:
        return self.of_channels(F.gelu(x, approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "beside":
            return x + self.tokens(x) + self.channels(x)
        if self.order == "exchanged":
            x = x + self.channels(x)
            return x + self.tokens(x)
        x = x + self.tokens(x)
        return x + self.channels(x)


def result(order: Order, precision: str, layers: int = 2) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        right, port = (
            nn.Sequential(*(Block(linear, given) for _ in range(layers)))
            for linear, given in ((nn.Linear, "right"), (te.Linear, order))
        )
        names = {name: name for name, _ in right.named_parameters()}
        return parity.Pair(right, port, lambda rng: rng.normal(2, SEQ, WIDTH), weights=names)

    (one,) = parity.compare(parity.Case("branches", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_branches_in_the_other_order_are_told_by_their_last_layers(precision):
    finding = result("exchanged", precision).findings[0]
    assert finding.title == "operation"
    told = "the 1st 'linear' of 0.of_tokens before the branch that ends with the 1st 'linear' of 0.of_channels"
    assert f"compute the branch that ends with {told}, as the reference does, and so for 1 more" in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_branches_side_by_side_are_told(precision):
    finding = result("beside", precision).findings[0]
    assert finding.title == "parallel-block"
    assert "both are computed from one input" in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_the_same_order_passes(precision):
    assert result("right", precision).passed
