"""TransformerEngine issue 407: which half of ``fc1_weight`` is the gate?

The same MLP is ported twice: with the gate first, as TE expects it, and with up first.

    pytest examples/issue_407.py --parity-precisions=fp32
"""

import parity
from parity import reference

SIZE = dict(batch=2, seq=1024, hidden=512, ffn=1536)


def mlp(te, hidden, ffn, fc1):
    plain = reference.SwiGLUMLP(hidden, ffn)
    for projection in (plain.gate_proj, plain.up_proj, plain.down_proj):
        projection.weight.data.normal_(std=0.023)
    return parity.Pair(
        reference=plain,
        candidate=te.LayerNormMLP(hidden, ffn, normalization="RMSNorm", activation="swiglu", bias=False),
        weights={"norm.weight": "layer_norm_weight", fc1: "fc1_weight", "down_proj.weight": "fc2_weight"},
        inputs=lambda rng, batch, seq: rng.uniform(batch, seq, hidden),
    )


@parity.pair("gate_over_up", sizes=[SIZE])
def gate_over_up(te, hidden, ffn, **_):
    return mlp(te, hidden, ffn, parity.stack("gate_proj.weight", "up_proj.weight"))


@parity.pair("up_over_gate", sizes=[SIZE])
def up_over_gate(te, hidden, ffn, **_):
    return mlp(te, hidden, ffn, parity.stack("up_proj.weight", "gate_proj.weight"))
