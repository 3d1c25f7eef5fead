"""Whole transformer layers."""

import parity
from parity import reference

ROUNDED = ["norm-statistics", "norm-rounding"]  # rounding
LARGE = dict(batch=1, seq=4096, hidden=4096, ffn=14336, heads=32, groups=8)


@parity.pair(
    "transformer_layer_gpt",
    sizes=[dict(batch=2, seq=128, hidden=256, ffn=1024, heads=4)],
    large_sizes=[dict(batch=1, seq=4096, hidden=4096, ffn=16384, heads=32)],
    accepts=[*ROUNDED, "activation"],  # GELU by erf: rounding
)
def gpt(te, hidden, ffn, heads, **_):
    weights = {
        "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
        "attention_norm.bias": "self_attention.layernorm_qkv.layer_norm_bias",
        "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
        "mlp.norm.bias": "layernorm_mlp.layer_norm_bias",
    }
    for kind in ("weight", "bias"):
        weights |= {
            f"attention.q_proj.{kind}": f"self_attention.layernorm_qkv.query_{kind}",
            f"attention.k_proj.{kind}": f"self_attention.layernorm_qkv.key_{kind}",
            f"attention.v_proj.{kind}": f"self_attention.layernorm_qkv.value_{kind}",
            f"attention.o_proj.{kind}": f"self_attention.proj.{kind}",
            f"mlp.up_proj.{kind}": f"layernorm_mlp.fc1_{kind}",
            f"mlp.down_proj.{kind}": f"layernorm_mlp.fc2_{kind}",
        }
    return parity.Pair(
        reference=reference.GPTLayer(hidden, ffn, heads),
        candidate=te.TransformerLayer(
            hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd"
        ),
        weights=weights,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@parity.pair(
    "transformer_layer_llama",
    sizes=[dict(batch=2, seq=128, hidden=256, ffn=768, heads=8, groups=2)],
    large_sizes=[LARGE],
    accepts=[*ROUNDED, "rope-position", "rope-precision"],  # relative; rounding
)
def llama(te, hidden, ffn, heads, groups, **_):
    rope = te.RotaryPositionEmbedding(hidden // heads)
    return parity.Pair(
        reference=reference.LlamaLayer(hidden, ffn, heads, groups),
        candidate=te.TransformerLayer(
            hidden,
            ffn,
            heads,
            num_gqa_groups=groups,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attn_input_format="bshd",
        ),
        weights={
            "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
            "attention.q_proj.weight": "self_attention.layernorm_qkv.query_weight",
            "attention.k_proj.weight": "self_attention.layernorm_qkv.key_weight",
            "attention.v_proj.weight": "self_attention.layernorm_qkv.value_weight",
            "attention.o_proj.weight": "self_attention.proj.weight",
            "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
            parity.stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
            "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
        call_candidate=lambda module, x: module(x, rotary_pos_emb=rope(x.shape[1])),
    )


def _delayed_with_fp8_attention():
    from transformer_engine.common.recipe import DelayedScaling

    return DelayedScaling(fp8_dpa=True, fp8_mha=True)


# Attention's output and the gradients of its inputs stay in FP8 between it and its projections.
llama_fp8_attention = parity.pair(
    "transformer_layer_llama_fp8_attention",
    sizes=[dict(batch=2, seq=128, hidden=512, ffn=768, heads=4, groups=2)],
    large_sizes=[LARGE],
    precisions=[parity.recipe("fp8_delayed_mha", _delayed_with_fp8_attention)],
)(llama.factory)
