"""Attention by itself and with its projections."""

import dataclasses

import torch

import parity
from parity import reference

HEADS = {"mha": dict(heads=8, groups=8), "gqa": dict(heads=8, groups=2), "mqa": dict(heads=8, groups=1)}
CORE_SIZE = dict(batch=2, seq=128, head_dim=64)
LARGE = dict(batch=1, seq=4096, head_dim=128)
LARGE_HEADS = {"mha": dict(heads=32, groups=32), "gqa": dict(heads=32, groups=8), "mqa": dict(heads=32, groups=1)}
WINDOW = 32
SIZES = [dict(batch=2, seq=128, hidden=512, heads=8, groups=2)]


def query_key_value(rng, batch, seq, heads, groups, head_dim):
    return (
        rng.normal(batch, seq, heads, head_dim),
        rng.normal(batch, seq, groups, head_dim),
        rng.normal(batch, seq, groups, head_dim),
    )


def core_attention(te, reference_module, heads, groups, head_dim, **te_arguments):
    return parity.Pair(
        reference=reference_module,
        candidate=te.DotProductAttention(
            heads, head_dim, num_gqa_groups=groups, qkv_format="bshd", attention_dropout=0.0, **te_arguments
        ),
        inputs=query_key_value,
    )


def _case(mask, heads_name, build):
    accepts = ["cache-step"] if mask == "full" else []  # keys have no order
    return parity.pair(
        f"attention_{mask}_{heads_name}",
        sizes=[CORE_SIZE | HEADS[heads_name]],
        large_sizes=[LARGE | LARGE_HEADS[heads_name]],
        accepts=accepts,
    )(build)


def _causal(te, heads, groups, head_dim, **_):
    return core_attention(te, reference.CoreAttention(causal=True), heads, groups, head_dim, attn_mask_type="causal")


def _full(te, heads, groups, head_dim, **_):
    return core_attention(te, reference.CoreAttention(), heads, groups, head_dim, attn_mask_type="no_mask")


def _window(te, heads, groups, head_dim, **_):
    return core_attention(
        te,
        reference.CoreAttention(causal=True, window=WINDOW),
        heads,
        groups,
        head_dim,
        attn_mask_type="causal",
        window_size=(WINDOW, 0),
    )


def _padding(te, heads, groups, head_dim, **_):
    """Return a pair for sequences of unequal lengths. Outputs of padded queries mean nothing, so both are set to 0."""

    def inputs(rng, batch, seq):
        lengths = rng.integers(batch, low=seq // 2, high=seq + 1)
        is_padding = torch.arange(seq) >= lengths[:, None]
        return (*query_key_value(rng, batch, seq, heads, groups, head_dim), is_padding)

    def call_reference(module, query, key, value, is_padding):
        return module(query, key, value, is_padding).masked_fill(is_padding[..., None], 0.0)

    def call_candidate(module, query, key, value, is_padding):
        context = module(query, key, value, attention_mask=is_padding[:, None, None, :])
        return context.masked_fill(is_padding[..., None], 0.0)

    pair = core_attention(te, reference.CoreAttention(), heads, groups, head_dim, attn_mask_type="padding")
    return dataclasses.replace(pair, inputs=inputs, call_reference=call_reference, call_candidate=call_candidate)


causal_mha, causal_gqa, causal_mqa = (_case("causal", name, _causal) for name in HEADS)
full_mha, full_gqa, full_mqa = (_case("full", name, _full) for name in HEADS)
window_mha, window_gqa, window_mqa = (_case("window", name, _window) for name in HEADS)
padding_mha, padding_gqa, padding_mqa = (_case("padding", name, _padding) for name in HEADS)


def _delayed_fp8():
    from transformer_engine.common.recipe import DelayedScaling

    return DelayedScaling(fp8_dpa=True)


# On a Hopper, attention trains in FP8 with heads of 128 and with delayed scaling alone.
FP8 = parity.recipe("fp8_delayed_dpa", _delayed_fp8)
FP8_SIZE = dict(batch=2, seq=128, head_dim=128, heads=4, groups=2)
FP8_OPTIONS = dict(sizes=[FP8_SIZE], large_sizes=[LARGE | LARGE_HEADS["gqa"]], precisions=[FP8])
causal_fp8 = parity.pair("attention_causal_fp8", **FP8_OPTIONS)(_causal)
full_fp8 = parity.pair("attention_full_fp8", **FP8_OPTIONS)(_full)


OPTIONS = dict(
    sizes=SIZES,
    large_sizes=[dict(batch=1, seq=4096, hidden=4096, heads=32, groups=8)],
    accepts=["rope-position", "rope-precision"],  # relative; rounding
)


def rope_attention(te, weights, hidden, heads, groups, **te_arguments):
    rope = te.RotaryPositionEmbedding(hidden // heads)
    return parity.Pair(
        reference=reference.Attention(hidden, heads, groups),
        candidate=te.MultiheadAttention(
            hidden,
            heads,
            num_gqa_groups=groups,
            attention_dropout=0.0,
            attn_mask_type="causal",
            qkv_format="bshd",
            bias=False,
            **te_arguments,
        ),
        weights=weights | {"o_proj.weight": "proj.weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
        call_candidate=lambda module, x: module(x, rotary_pos_emb=rope(x.shape[1])),
    )


@parity.pair("multihead_attention_separate_qkv", **OPTIONS)
def separate_qkv(te, hidden, heads, groups, **_):
    weights = {
        "q_proj.weight": "qkv.query_weight",
        "k_proj.weight": "qkv.key_weight",
        "v_proj.weight": "qkv.value_weight",
    }
    return rope_attention(te, weights, hidden, heads, groups)


@parity.pair("multihead_attention_interleaved_qkv", **OPTIONS)
def interleaved_qkv(te, hidden, heads, groups, **_):
    fused = parity.interleaved_qkv(
        "q_proj.weight", "k_proj.weight", "v_proj.weight", groups=groups, head_dim=hidden // heads
    )
    return rope_attention(te, {fused: "qkv.weight"}, hidden, heads, groups, fuse_qkv_params=True)


@parity.pair("multihead_attention_stacked_qkv", **OPTIONS)
def stacked_qkv(te, hidden, heads, groups, **_):
    fused = parity.stack("q_proj.weight", "k_proj.weight", "v_proj.weight")
    return rope_attention(
        te, {fused: "qkv.weight"}, hidden, heads, groups, fuse_qkv_params=True, qkv_weight_interleaved=False
    )
