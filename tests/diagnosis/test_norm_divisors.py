"""LayerNorms that divide by n - 1 or add eps to the root, as ``x.std(-1) + eps`` does, against ports that do not."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity

WIDTH = 64
EPS = 1e-3
INPUTS = 0.1  # standard deviation: eps is a tenth of the variance


class LayerNorm(nn.Module):
    """LayerNorm as people write it out."""

    def __init__(self, unbiased: bool, eps_outside: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.unbiased, self.eps_outside = unbiased, eps_outside

    def forward(self, x: Tensor) -> Tensor:
        difference = x - x.mean(-1, keepdim=True)
        if self.eps_outside:
            y = difference / (x.std(-1, keepdim=True, unbiased=self.unbiased) + EPS)
        else:
            y = difference * torch.rsqrt(x.var(-1, keepdim=True, unbiased=self.unbiased) + EPS)
        return y * self.weight + self.bias


def compared(reference: nn.Module, candidate: Any, precision: str = "fp32") -> parity.Result:
    def factory(te: Any) -> parity.Pair:
        return parity.Pair(
            reference,
            candidate(te),
            lambda rng: rng.normal(2, 32, WIDTH) * INPUTS,
            {"weight": "weight", "bias": "bias"},
            fill=True,
        )

    return parity.compare(parity.Case("norm", factory, sizes=({},)), [precision])[0]


WAYS = tuple(product((False, True), repeat=2))  # unbiased, eps outside


@pytest.mark.parametrize("way", WAYS)
def test_the_same_norm_passes(way: tuple[bool, bool]) -> None:
    assert compared(LayerNorm(*way), lambda te: LayerNorm(*way)).passed


@pytest.mark.parametrize(("reference", "port"), [pair for pair in product(WAYS, WAYS) if pair[0] != pair[1]])
def test_another_divisor_and_another_place_of_eps_are_named(
    reference: tuple[bool, bool], port: tuple[bool, bool]
) -> None:
    result = compared(LayerNorm(*reference), lambda te: LayerNorm(*port))
    told = result.findings[0].message
    titles = {finding.title for finding in result.findings}
    if reference[0] != port[0]:
        assert "norm-statistics" in titles
        assert ("by n - 1" if reference[0] else "unbiased=False") in told or "write the norm" in told
    if reference[1] != port[1]:
        assert "norm-eps" in titles or "together with PAR201" in told or "inside the root, not outside" in told


@pytest.mark.parametrize(
    ("reference", "told"),
    [((True, False), "multiply the weight of TE's LayerNorm by sqrt((n - 1) / n)"), ((True, True), "in plain PyTorch")],
)
def test_tes_layer_norm_in_the_place_of_one_that_divides_by_n_minus_1(reference: tuple[bool, bool], told: str) -> None:
    result = compared(LayerNorm(*reference), lambda te: te.LayerNorm(WIDTH, eps=EPS))
    assert told in result.findings[0].message
