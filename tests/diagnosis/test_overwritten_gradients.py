"""A module that is called several times adds up its gradients: where one call overwrites the others, that is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parity

WIDTH = 64


class Microbatches(nn.Module):
    """One layer, called for each half of a batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(half).relu() for half in x.chunk(2)])


class Copied(Microbatches):
    """The second half's weight is a copy, whose gradient goes nowhere."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        copied = nn.functional.linear(second, self.layer.weight.detach(), self.layer.bias)
        return torch.cat([self.layer(first).relu(), copied.relu()])


def first_finding(port, precision="bf16", **arguments):
    def factory(te, **_):
        layer = te.Linear(WIDTH, WIDTH, **arguments)
        layer.weight.overwrite_main_grad = bool(arguments)
        return parity.Pair(
            Microbatches(nn.Linear(WIDTH, WIDTH)),
            port(layer),
            inputs=lambda rng: rng.normal(64, WIDTH),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    (result,) = parity.compare(parity.Case("microbatches", factory, sizes=({},)), [precision])
    return result.findings[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_a_main_grad_that_each_call_overwrites_is_told_as_one(precision):
    finding = first_finding(Microbatches, precision, fuse_wgrad_accumulation=True)
    assert finding.title == "gradient-accumulation"
    assert "overwrite_main_grad off" in finding.message


def test_a_copy_of_the_layer_is_told_as_a_copy():
    finding = first_finding(Copied)
    assert finding.title == "gradient-path-missing"
