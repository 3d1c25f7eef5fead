"""Attention that computes in FP8, by itself and in a layer.

Delayed scaling alone trains it on a Hopper, with heads of 128; TE's recipes with ``fp8_dpa`` and ``fp8_mha`` are no
built-in precisions, so they are declared here.
"""

import dataclasses

import parity
from parity import reference


def _delayed(**arguments):
    from transformer_engine.common.recipe import DelayedScaling

    return DelayedScaling(**arguments)


DPA = parity.recipe("fp8_delayed_dpa", lambda: _delayed(fp8_dpa=True))
MHA = parity.recipe("fp8_delayed_mha", lambda: _delayed(fp8_dpa=True, fp8_mha=True))
HEADS = dict(batch=2, seq=128, head_dim=128, heads=4, groups=2)
LAYER = dict(batch=2, seq=128, hidden=512, ffn=768, heads=4, groups=2)


@parity.pair("fp8_attention_causal", sizes=[HEADS], precisions=[DPA])
def causal(te, heads, groups, head_dim, **_):
    return parity.Pair(
        reference=reference.CoreAttention(causal=True),
        candidate=te.DotProductAttention(
            heads,
            head_dim,
            num_gqa_groups=groups,
            qkv_format="bshd",
            attention_dropout=0.0,
            attn_mask_type="causal",
        ),
        inputs=lambda rng, batch, seq: tuple(
            rng.normal(batch, seq, each, head_dim) for each in (heads, groups, groups)
        ),
    )


@parity.pair("fp8_attention_full", sizes=[HEADS], precisions=[DPA])
def full(te, heads, groups, head_dim, **_):
    pair = causal.factory(te, heads, groups, head_dim)
    candidate = te.DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=groups,
        qkv_format="bshd",
        attention_dropout=0.0,
        attn_mask_type="no_mask",
    )
    return dataclasses.replace(pair, reference=reference.CoreAttention(), candidate=candidate)


@parity.pair("fp8_attention_in_a_layer", sizes=[LAYER], precisions=[DPA, MHA])
def in_a_layer(te, hidden, ffn, heads, groups, **_):
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
