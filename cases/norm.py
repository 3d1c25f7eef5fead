"""Norms by themselves."""

from torch import nn

import parity

SIZES = [dict(batch=2, seq=256, hidden=1024)]
LARGE = [dict(batch=1, seq=4096, hidden=4096)]


@parity.pair("layernorm", sizes=SIZES, large_sizes=LARGE)
def layernorm(te, hidden, **_):
    return parity.Pair(
        reference=nn.LayerNorm(hidden),
        candidate=te.LayerNorm(hidden),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden, mean=0.5),
    )


@parity.pair("rmsnorm", sizes=SIZES, large_sizes=LARGE)
def rmsnorm(te, hidden, **_):
    return parity.Pair(
        reference=nn.RMSNorm(hidden, eps=1e-6),
        candidate=te.RMSNorm(hidden, eps=1e-6),
        weights={"weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@parity.pair("rmsnorm_zero_centered", sizes=SIZES, large_sizes=LARGE)
def rmsnorm_zero_centered(te, hidden, **_):
    return parity.Pair(
        reference=nn.RMSNorm(hidden, eps=1e-5),
        candidate=te.RMSNorm(hidden, zero_centered_gamma=True),
        weights={parity.shift("weight", -1.0): "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )
