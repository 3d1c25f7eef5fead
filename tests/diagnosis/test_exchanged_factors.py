"""A factor of one term of a sum that multiplies the other term in the port."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity

WIDTH = 64


class Scaled(nn.Module):
    """CaiT's LayerScale: a gain on each branch."""

    def __init__(self, linear: Any, right: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(4))
        self.gains = nn.ParameterList(nn.Parameter(torch.rand(WIDTH) + 0.2) for _ in self.layers)
        self.right = right

    def forward(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = x + gain * layer(x) if self.right else x * gain + layer(x)
        return x


class Highway(nn.Module):
    """Srivastava's gate between what a layer returns and what it is given."""

    def __init__(self, linear: Any, right: bool) -> None:
        super().__init__()
        self.layer, self.gate, self.right = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), right

    def forward(self, x: Tensor) -> Tensor:
        gate, y = self.gate(x).sigmoid(), self.layer(x).tanh()
        return gate * y + (1 - gate) * x if self.right else gate * x + (1 - gate) * y


def compared(module: type[nn.Module], right: bool, precision: str) -> parity.Result:
    def factory(te: Any) -> parity.Pair:
        reference = module(nn.Linear, True)
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, module(te.Linear, right), lambda rng: rng.normal(2, 24, WIDTH), names)

    (result,) = parity.compare(parity.Case("scaled", factory, sizes=({},)), [precision])
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("module", [Scaled, Highway])
class TestFactors:
    def test_of_their_own_terms_pass(self, module, precision):
        assert compared(module, True, precision).passed

    def test_of_the_other_terms_are_told(self, module, precision):
        first = compared(module, False, precision).findings[0]
        assert (first.title, "each has the other's factor" in first.message) == ("operation", True)
