"""Norms of few rows in FP32: a row's rounded root moves all of it, and few rows have no scatter to tell that by."""

from __future__ import annotations

import pytest
from torch import nn

import parity


def compared(rows: int, channels: int, eps: float = 1e-5) -> list[parity.Result]:
    def factory(te):
        return parity.Pair(
            nn.LayerNorm(channels, eps=1e-5),
            te.LayerNorm(channels, eps=eps),
            weights={"weight": "weight", "bias": "bias"},
            inputs=lambda rng: rng.normal(rows, channels),
        )

    return parity.compare(parity.Case("norm", factory, sizes=({},)), ["fp32"], seeds=range(60))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("channels", [80, 256])
def test_right_ports_pass_on_every_seed(rows, channels):
    assert {result.status for result in compared(rows, channels)} == {"passed"}


@pytest.mark.parametrize("rows", [1, 3])
def test_another_eps_is_told_all_the_same(rows):
    assert {result.findings[0].title for result in compared(rows, 80, eps=1e-6)} == {"norm-eps"}
