"""Activations that a reference clamps, in place or not, and a port clamps otherwise."""

from __future__ import annotations

import math

import pytest
from torch import Tensor, nn

import parity


class Layers(nn.Module):
    """Two linear layers, whose results are clamped as OLMo clamps queries, keys and values."""

    def __init__(self, linear, limit: float, in_place: bool = False) -> None:
        super().__init__()
        self.first, self.second = linear(64, 128), linear(128, 64)
        self.limit, self.in_place = limit, in_place

    def forward(self, x: Tensor) -> Tensor:
        return self.clamped(self.second(self.clamped(self.first(x))))

    def clamped(self, x: Tensor) -> Tensor:
        if self.in_place:
            x.clamp_(min=-self.limit, max=self.limit)
            return x
        return x if math.isinf(self.limit) else x.clamp(-self.limit, self.limit)


def findings(limit: float, in_place: bool):
    def factory(te, **_):
        reference = Layers(nn.Linear, 0.5, in_place)
        return parity.Pair(
            reference,
            Layers(te.Linear, limit),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, tokens: rng.normal(tokens, 64),
        )

    (result,) = parity.compare(parity.Case("clamped", factory, sizes=(dict(tokens=64),)), ["bf16"])
    return [(finding.title, finding.message) for finding in result.findings] or result.status


@pytest.mark.parametrize("in_place", [False, True])
def test_a_right_port_passes(in_place):
    assert findings(0.5, in_place) == "passed"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("limit", "told"), [(math.inf, "none are clamped"), (0.75, "they are clamped to 0.75")])
def test_another_range_and_none_are_told(limit, told, in_place):
    ((title, message),) = findings(limit, in_place)
    assert title == "operation"
    assert f"clamp activations between -0.5 and 0.5, as the reference does; {told}" in message
