"""Norms in FP32 of rows whose mean outweighs what varies: how one number was rounded decides a whole row."""

from __future__ import annotations

from torch import nn

import parity


def compared(eps: float = 1e-5) -> list[parity.Result]:
    def factory(te):
        return parity.Pair(
            nn.LayerNorm(64, eps=1e-5),
            te.LayerNorm(64, eps=eps),
            weights={"weight": "weight", "bias": "bias"},
            inputs=lambda rng: rng.normal(96, 64).abs(),
        )

    return parity.compare(parity.Case("norm", factory, sizes=({},)), ["fp32"], seeds=range(80))


def test_right_ports_pass_on_every_seed():
    assert {result.status for result in compared()} == {"passed"}


def test_another_eps_is_told_all_the_same():
    assert {result.findings[0].title for result in compared(eps=1e-6)} == {"norm-eps"}
