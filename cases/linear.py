"""Linear layers, with and without a norm before them."""

from torch import nn

import parity
from parity import reference

SIZES = [dict(batch=2, seq=256, in_features=512, out_features=768)]
LARGE = [dict(batch=1, seq=4096, in_features=4096, out_features=4096)]


@parity.pair("linear", sizes=SIZES, large_sizes=LARGE)
def linear(te, in_features, out_features, **_):
    return parity.Pair(
        reference=nn.Linear(in_features, out_features),
        candidate=te.Linear(in_features, out_features),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, in_features),
    )


@parity.pair("linear_no_bias", sizes=SIZES, large_sizes=LARGE)
def linear_no_bias(te, in_features, out_features, **_):
    return parity.Pair(
        reference=nn.Linear(in_features, out_features, bias=False),
        candidate=te.Linear(in_features, out_features, bias=False),
        weights={"weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, in_features),
    )


@parity.pair("layernorm_linear", sizes=SIZES, large_sizes=LARGE)
def layernorm_linear(te, in_features, out_features, **_):
    return parity.Pair(
        reference=reference.NormLinear(nn.LayerNorm(in_features), in_features, out_features),
        candidate=te.LayerNormLinear(in_features, out_features),
        weights={
            "norm.weight": "layer_norm_weight",
            "norm.bias": "layer_norm_bias",
            "linear.weight": "weight",
            "linear.bias": "bias",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, in_features),
    )


@parity.pair("rmsnorm_linear_zero_centered", sizes=SIZES, large_sizes=LARGE)
def rmsnorm_linear_zero_centered(te, in_features, out_features, **_):
    return parity.Pair(
        reference=reference.NormLinear(nn.RMSNorm(in_features, eps=1e-5), in_features, out_features, bias=False),
        candidate=te.LayerNormLinear(
            in_features, out_features, normalization="RMSNorm", zero_centered_gamma=True, bias=False
        ),
        weights={parity.shift("norm.weight", -1.0): "layer_norm_weight", "linear.weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, in_features),
    )
