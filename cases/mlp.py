"""A norm followed by an MLP, for every activation of ``te.LayerNormMLP``."""

import dataclasses

import parity
from parity import reference

PLAIN_SIZES = [dict(batch=2, seq=128, hidden=256, ffn=1024)]
GATED_SIZES = [dict(batch=2, seq=128, hidden=256, ffn=768)]
LARGE_PLAIN = [dict(batch=1, seq=4096, hidden=4096, ffn=16384)]
LARGE_GATED = [dict(batch=1, seq=4096, hidden=4096, ffn=14336)]
ACCEPTED = {
    "gelu": ["activation"],  # by erf: rounding
    "geglu": ["activation"],
    "clamped_swiglu": ["operation"],  # a lower bound where the gate is 0: saturated
}


def gated_mlp(te, activation, hidden, ffn):
    return parity.Pair(
        reference=reference.GatedMLP(hidden, ffn, activation),
        candidate=te.LayerNormMLP(hidden, ffn, normalization="RMSNorm", activation=activation, bias=False),
        weights={
            "norm.weight": "layer_norm_weight",
            parity.stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
            "down_proj.weight": "fc2_weight",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@parity.pair("issue_407", sizes=[dict(batch=2, seq=1024, hidden=512, ffn=1536)], large_sizes=LARGE_GATED)
def issue_407(te, hidden, ffn, **_):
    """Return the pair of TransformerEngine issue 407, with the issue's sizes, scale of weights, and inputs."""
    pair = gated_mlp(te, "swiglu", hidden, ffn)
    for projection in (pair.reference.gate_proj, pair.reference.up_proj, pair.reference.down_proj):
        projection.weight.data.normal_(std=0.023)
    return dataclasses.replace(pair, inputs=lambda rng, batch, seq: rng.uniform(batch, seq, hidden))


def _gated_case(activation):
    @parity.pair(
        f"layernorm_mlp_{activation}", sizes=GATED_SIZES, large_sizes=LARGE_GATED, accepts=ACCEPTED.get(activation, [])
    )
    def case(te, hidden, ffn, **_):
        return gated_mlp(te, activation, hidden, ffn)

    return case


def _plain_case(activation):
    @parity.pair(
        f"layernorm_mlp_{activation}", sizes=PLAIN_SIZES, large_sizes=LARGE_PLAIN, accepts=ACCEPTED.get(activation, [])
    )
    def case(te, hidden, ffn, **_):
        return parity.Pair(
            reference=reference.MLP(hidden, ffn, activation),
            candidate=te.LayerNormMLP(hidden, ffn, activation=activation),
            weights={
                "norm.weight": "layer_norm_weight",
                "norm.bias": "layer_norm_bias",
                "up_proj.weight": "fc1_weight",
                "up_proj.bias": "fc1_bias",
                "down_proj.weight": "fc2_weight",
                "down_proj.bias": "fc2_bias",
            },
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
        )

    return case


gelu, qgelu, relu, srelu, silu = map(_plain_case, reference.POINTWISE)
glu, geglu, qgeglu, reglu, sreglu, swiglu, clamped_swiglu = map(_gated_case, reference.GATES)
