"""te.MultiheadAttention, with each of its options, equals attention written out, for batches and packed sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import plain
import pytest
import torch
from agreement import CAN_CHECKPOINT_CORE_ATTENTION, FP32_AND_BF16, assert_agree, sequence_first, te_on_cpu
from packaging.version import Version
from torch import Tensor, nn
from weight_maps import Projections, cross_attention_weights, mlp_weights, norm_weights, self_attention_weights

import parity
from parity import reference
from parity.case.weight_map import WeightMap
from te_on_cpu import versions

# te.MultiheadAttention, with each of its options, equals attention written out.


HIDDEN, HEADS, HEAD_DIM = 64, 4, 16
BATCH, QUERIES, KEYS = 2, 16, 24
FUSED: dict[Projections, dict[str, bool]] = {
    "separate": {},
    "interleaved": {"fuse_qkv_params": True},
    "concatenated": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
}
NO_MASK = {"attn_mask_type": "no_mask"}


def agree_with_attention(
    te_options: dict[str, Any],
    plain_options: dict[str, Any] | None = None,
    groups: int = HEADS,
    projections: Projections = "separate",
    masked: Tensor | None = None,
    normalization: str | None = None,
    extra_weights: WeightMap | None = None,
    format_: str = "bshd",
    call: dict[str, Any] | None = None,
    precisions: tuple[str, ...] = FP32_AND_BF16,
) -> None:
    """Assert that self-attention agrees; ``call`` holds the arguments of TE's module besides its input."""
    bias = te_options.get("bias", True)
    head_dim = te_options.get("kv_channels", HEAD_DIM)
    normed = normalization is not None
    weights = dict(
        self_attention_weights(groups, head_dim, projections, "body." if normed else "", bias=bias, normed=normed)
    ) | dict(extra_weights or {})
    if normalization is not None:
        zero_centered = te_options.get("zero_centered_gamma", False)
        weights |= dict(norm_weights(normalization, "norm.", "layernorm_qkv.layer_norm_", zero_centered))
        te_options = te_options | {"input_layernorm": True, "normalization": normalization}

    def build(te: ModuleType) -> parity.Pair:
        attention: nn.Module = plain.Attention(HIDDEN, HEADS, groups, **{"bias": bias} | (plain_options or {}))
        if normalization is not None:
            returns_norm = te_options.get("return_layernorm_output", False)
            attention = plain.Normed(plain.norm(normalization, HIDDEN), attention, returns_norm)
        candidate = te.MultiheadAttention(
            HIDDEN,
            HEADS,
            attention_dropout=0.0,
            num_gqa_groups=groups,
            qkv_format=format_,
            **FUSED[projections] | te_options,
        )
        return parity.Pair(
            attention,
            candidate,
            lambda rng: rng.normal(BATCH, QUERIES, HIDDEN),
            weights,
            call_reference=lambda module, x: module(x, masked=masked),
            call_candidate=in_format(format_, lambda module, x: module(x, **call or {})),
        )

    assert_agree(build, precisions)


def in_format(format_: str, call: Callable[..., Any]) -> Callable[..., Any]:
    return sequence_first(call) if format_ == "sbhd" else call


@pytest.mark.parametrize(("groups", "format_"), [(HEADS, "bshd"), (HEADS, "sbhd"), (2, "sbhd"), (1, "bshd")])
@pytest.mark.parametrize("projections", FUSED)
def test_attention_reads_q_k_and_v_as_they_lie_in_its_parameters(
    projections: Projections, groups: int, format_: str
) -> None:
    agree_with_attention(
        {}, groups=groups, projections=projections, masked=plain.causal(QUERIES, QUERIES), format_=format_
    )


@pytest.mark.parametrize("projections", FUSED)
def test_projections_may_lack_biases(projections: Projections) -> None:
    agree_with_attention({"bias": False} | NO_MASK, projections=projections)


def test_return_bias_leaves_the_output_projections_bias_to_the_caller() -> None:
    agree_with_attention({"return_bias": True} | NO_MASK, {"bias_apart": True})


@pytest.mark.parametrize("kv_channels", [8, 32])
def test_kv_channels_is_the_width_of_a_head(kv_channels: int) -> None:
    agree_with_attention({"kv_channels": kv_channels} | NO_MASK, {"head_dim": kv_channels})


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(("zero_centered", "returns_norm"), [(False, False), (True, True)])
def test_an_input_norm_comes_before_the_projections(
    normalization: str, zero_centered: bool, returns_norm: bool
) -> None:
    options = {"zero_centered_gamma": zero_centered, "return_layernorm_output": returns_norm}
    agree_with_attention(options | NO_MASK, normalization=normalization)


def test_all_that_can_be_returned_is_returned_in_order() -> None:
    options = {"return_bias": True, "return_layernorm_output": True}
    agree_with_attention(options | NO_MASK, {"bias_apart": True}, normalization="LayerNorm")


@pytest.mark.parametrize("groups", [HEADS, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("rotate", [reference.rotate_halves, reference.rotate_interleaved])
def test_rope_rotates_halves_or_neighbours(rotate: plain.Rotate, groups: int) -> None:
    interleaved = rotate is reference.rotate_interleaved
    agree_with_attention(
        {"rotary_pos_interleaved": interleaved} | NO_MASK,
        {"rotate": rotate},
        groups,
        call={"rotary_pos_emb": rotary_positions(interleaved)},
    )


def rotary_positions(interleaved: bool) -> Tensor:
    """Return angles ``[seq, 1, 1, head_dim]``, as te.RotaryPositionEmbedding does."""
    angles = plain.rotary_angles(QUERIES, HEAD_DIM)
    full = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return full[:, None, None, :]


@pytest.mark.parametrize("before_rope", [True, False])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "L2Normalization"])
def test_qk_norm_norms_each_head_before_or_after_rope(kind: str, before_rope: bool) -> None:
    def head_norm(width: int) -> nn.Module:
        return plain.L2Norm(1e-3) if kind == "L2Normalization" else plain.norm(kind, width, eps=1e-3)

    parameters = {"LayerNorm": ("weight", "bias"), "RMSNorm": ("weight",), "L2Normalization": ()}[kind]
    agree_with_attention(
        {"qk_norm_type": kind, "qk_norm_eps": 1e-3, "qk_norm_before_rope": before_rope} | NO_MASK,
        {"head_norm": head_norm, "norm_before_rotation": before_rope, "rotate": reference.rotate_halves},
        groups=2,
        extra_weights={
            f"{side}_norm.{name}": f"{side[0]}_norm.{name}" for side in ("query", "key") for name in parameters
        },
        call={"rotary_pos_emb": rotary_positions(interleaved=False)},
    )


def padding() -> Tensor:
    """Return ``[batch, 1, 1, seq]``, True where the token is padding: at the end of the second sequence."""
    is_padding = torch.zeros(BATCH, 1, 1, QUERIES, dtype=torch.bool)
    is_padding[1, ..., -5:] = True
    return is_padding


def arbitrary() -> Tensor:
    """Return a mask ``[batch, 1, seq, seq]`` under which every query sees some keys."""
    mask = torch.rand(BATCH, 1, QUERIES, QUERIES, generator=torch.Generator().manual_seed(0)) < 0.5
    return mask & ~torch.eye(QUERIES, dtype=torch.bool)


SEEN = QUERIES, QUERIES
MASKS: dict[str, tuple[dict[str, Any], Tensor | None]] = {
    "no_mask": ({}, None),
    "causal": ({}, plain.causal(*SEEN)),
    "causal_bottom_right": ({}, plain.causal(*SEEN)),
    "arbitrary": ({"attention_mask": arbitrary()}, arbitrary()),
}
WINDOWS: dict[str, tuple[str, tuple[int, int], Tensor]] = {
    "causal": ("causal", (4, 0), plain.causal(*SEEN, before=4)),
    "bottom right": ("causal_bottom_right", (4, 0), plain.causal(*SEEN, before=4)),
    "two-sided": ("no_mask", (4, 3), plain.causal(*SEEN, before=4, after=3)),
}


@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.parametrize("when", ["built", "called"])
def test_the_mask_type_tells_what_a_query_sees(mask_type: str, when: str) -> None:
    arguments, masked = MASKS[mask_type]
    name = {"attn_mask_type": mask_type}
    if when == "built":
        agree_with_attention(name, masked=masked, call=arguments)
    else:
        agree_with_attention({}, masked=masked, call=name | arguments)


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("format_", ["bshd", "sbhd"])
def test_padded_keys_are_not_seen(mask_type: str, format_: str) -> None:
    masked = padding() if mask_type == "padding" else padding() | plain.causal(*SEEN)
    is_padded = padding()[:, 0, 0, :, None]

    def build(te: ModuleType) -> parity.Pair:
        candidate = te.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, attn_mask_type=mask_type, qkv_format=format_
        )
        call = in_format(format_, lambda module, x: module(x, attention_mask=padding()))
        return parity.Pair(
            plain.Attention(HIDDEN, HEADS),
            candidate,
            lambda rng: rng.normal(BATCH, QUERIES, HIDDEN),
            self_attention_weights(HEADS, HEAD_DIM),
            call_reference=lambda module, x: module(x, masked=masked).masked_fill(is_padded, 0.0),
            call_candidate=lambda module, x: call(module, x).masked_fill(is_padded, 0.0),
        )

    assert_agree(build)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_bounds_how_far_a_query_sees(window: str) -> None:
    mask_type, window_size, masked = WINDOWS[window]
    agree_with_attention({"attn_mask_type": mask_type, "window_size": window_size}, masked=masked)


@pytest.mark.skipif(
    versions.installed_version() < Version("2.20"), reason="TE's MultiheadAttention takes softcap from 2.20 on"
)
@pytest.mark.parametrize("when", ["built", "called"])
def test_softcap_bounds_the_scores(when: str) -> None:
    options: dict[str, Any] = {"softcap": 0.3}
    built, called = (options, None) if when == "built" else ({}, options)
    agree_with_attention(built, {"softcap": 0.3}, masked=plain.causal(*SEEN), call=called)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_a_softmax_sink_takes_part_of_the_attention(kind: str) -> None:
    learnt = kind == "learnable"
    agree_with_attention(
        {"softmax_type": kind},
        {"sink": "learnt" if learnt else "zero"},
        masked=plain.causal(*SEEN),
        extra_weights={"sink": "core_attention.softmax_offset"} if learnt else None,
    )


def test_alibi_takes_a_slope_of_each_head_times_the_distance_from_scores() -> None:
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).view(HEADS, 1, 1)
    distance = torch.arange(QUERIES)[:, None] - torch.arange(QUERIES)
    agree_with_attention(
        {},
        {"score_bias": -slopes * distance},
        masked=plain.causal(*SEEN),
        call={"core_attention_bias_type": "alibi"},
    )


@pytest.mark.parametrize("shape", [(BATCH, HEADS), (1, HEADS), (1, 1)], ids=str)
def test_a_bias_is_added_to_the_scores(shape: tuple[int, int]) -> None:
    # BF16 holds multiples of 1/64 up to 2 exactly.
    drawn = torch.randint(-128, 129, (*shape, QUERIES, QUERIES), generator=torch.Generator().manual_seed(0))
    bias = drawn.float() / 64
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        call = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias.to(dtype)}
        agree_with_attention({}, {"score_bias": bias}, masked=plain.causal(*SEEN), call=call, precisions=(precision,))


@CAN_CHECKPOINT_CORE_ATTENTION
def test_checkpoint_core_attention_recomputes_the_same() -> None:
    agree_with_attention({}, masked=plain.causal(*SEEN), call={"checkpoint_core_attention": True})


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize("projections", FUSED)
def test_attention_agrees_in_fp8(projections: Projections, precision: str) -> None:
    agree_with_attention(NO_MASK, projections=projections, normalization="LayerNorm", precisions=(precision,))


def agree_with_cross_attention(
    projections: Projections, groups: int, bias: bool, normed: bool, format_: str, mask_type: str = "no_mask"
) -> None:
    bottom_right = mask_type == "causal_bottom_right"
    masked = None if mask_type == "no_mask" else plain.causal(QUERIES, KEYS, bottom_right=bottom_right)
    weights = dict(cross_attention_weights(groups, projections, "body." if normed else "", bias=bias, normed=normed))
    if normed:
        weights |= dict(norm_weights("LayerNorm", "norm.", "layernorm_query.layer_norm_"))

    def build(te: ModuleType) -> parity.Pair:
        attention: nn.Module = plain.Attention(HIDDEN, HEADS, groups, bias=bias)
        candidate = te.MultiheadAttention(
            HIDDEN,
            HEADS,
            attention_dropout=0.0,
            num_gqa_groups=groups,
            attention_type="cross",
            attn_mask_type=mask_type,
            input_layernorm=normed,
            bias=bias,
            qkv_format=format_,
            **FUSED[projections],
        )
        return parity.Pair(
            plain.Normed(plain.norm("LayerNorm", HIDDEN), attention) if normed else attention,
            candidate,
            lambda rng: (rng.normal(BATCH, QUERIES, HIDDEN), rng.normal(BATCH, KEYS, HIDDEN)),
            weights,
            call_reference=lambda module, x, memory: module(x, memory, masked),
            call_candidate=in_format(format_, lambda module, x, memory: module(x, encoder_output=memory)),
        )

    assert_agree(build)


@pytest.mark.parametrize(("groups", "format_"), [(HEADS, "bshd"), (2, "sbhd")])
@pytest.mark.parametrize("projections", FUSED)
def test_cross_attention_takes_keys_and_values_from_the_memory(
    projections: Projections, groups: int, format_: str
) -> None:
    agree_with_cross_attention(projections, groups, bias=True, normed=False, format_=format_)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("projections", FUSED)
def test_cross_attentions_norm_is_of_the_queries_alone(projections: Projections, bias: bool) -> None:
    agree_with_cross_attention(projections, HEADS, bias=bias, normed=True, format_="bshd")


@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right"])
def test_a_causal_mask_starts_at_the_first_or_ends_at_the_last_key(mask_type: str) -> None:
    agree_with_cross_attention("separate", HEADS, bias=True, normed=False, format_="bshd", mask_type=mask_type)


@pytest.mark.parametrize("scaled_by_layer", [True, False])
def test_qk_layer_scaling_keeps_scores_within_fp16(scaled_by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect the values' mean from equal scores of 90000, which exceed FP16 unless divided by the layer's number."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_APPLY_QK_LAYER_SCALING", str(int(scaled_by_layer)))
    core = te_on_cpu().DotProductAttention(
        HEADS, HEAD_DIM, attention_dropout=0.0, attn_mask_type="no_mask", qkv_format="bshd", layer_number=8
    )
    query = torch.full((1, 4, HEADS, HEAD_DIM), 150.0, dtype=torch.float16)
    value = torch.randn(1, 4, HEADS, HEAD_DIM, dtype=torch.float16)
    context = core(query, query, value)
    expected = value.float().mean(dim=1).flatten().expand(1, 4, -1)
    if scaled_by_layer:
        torch.testing.assert_close(context.float(), expected, rtol=2.0**-9, atol=2.0**-9)
    else:
        assert context.isnan().all()


# Sequences packed one after the other (``thd``) give the same as each by itself, in attention and in whole layers.


FFN, GROUPS = 96, 2
LENGTHS = (16, 5, 11)
PACKED_BATCH, SEQ = len(LENGTHS), max(LENGTHS)
IS_TOKEN = torch.arange(SEQ) < torch.tensor(LENGTHS)[:, None]
CUMULATIVE = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
PACKED: dict[str, Any] = {
    "cu_seqlens_q": CUMULATIVE,
    "cu_seqlens_kv": CUMULATIVE,
    "max_seqlen_q": SEQ,
    "max_seqlen_kv": SEQ,
}
CAUSAL = plain.causal(SEQ, SEQ)
HIDDEN_KEYS = ~IS_TOKEN[:, None, None, :]


def unpacked(tensor: Tensor) -> Tensor:
    """Return ``[tokens, hidden]`` as ``[batch, seq, hidden]``, with 0 for padding."""
    return tensor.new_zeros(PACKED_BATCH, SEQ, tensor.shape[-1]).masked_scatter(IS_TOKEN[..., None], tensor)


def agree_on_packed_sequences(
    reference_module: nn.Module, build: Any, weights: Any, masked: Tensor | None, call: dict[str, Any]
) -> None:
    """Assert that TE's module on tokens of all sequences in a row agrees with the reference on padded sequences."""

    def call_te(module: nn.Module, x: Tensor) -> Tensor:
        return unpacked(module(x[IS_TOKEN], **PACKED | call))

    def call_reference(module: nn.Module, x: Tensor) -> Tensor:
        hidden = HIDDEN_KEYS if masked is None else HIDDEN_KEYS | masked
        # Let padding see everything, because a query must see something; its output is dropped.
        hidden = hidden & IS_TOKEN[:, None, :, None]
        return module(x, masked=hidden).masked_fill(~IS_TOKEN[..., None], 0.0)

    def pair(te: ModuleType) -> parity.Pair:
        return parity.Pair(
            reference_module,
            build(te),
            lambda rng: rng.normal(PACKED_BATCH, SEQ, HIDDEN),
            weights,
            call_reference=call_reference,
            call_candidate=call_te,
        )

    assert_agree(pair)


@pytest.mark.parametrize(("mask_type", "masked"), [("padding", None), ("padding_causal", CAUSAL)])
@pytest.mark.parametrize("fused", [False, True], ids=["separate QKV", "fused QKV"])
def test_attention_of_packed_sequences_is_attention_of_each(mask_type: str, masked: Tensor | None, fused: bool) -> None:
    agree_on_packed_sequences(
        plain.Attention(HIDDEN, HEADS, GROUPS),
        lambda te: te.MultiheadAttention(
            HIDDEN,
            HEADS,
            num_gqa_groups=GROUPS,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type=mask_type,
            fuse_qkv_params=fused,
        ),
        self_attention_weights(GROUPS, HEAD_DIM, "interleaved" if fused else "separate"),
        masked,
        {},
    )


def test_rope_starts_anew_with_each_packed_sequence() -> None:
    angles = plain.rotary_angles(SEQ, HEAD_DIM)
    agree_on_packed_sequences(
        plain.Attention(HIDDEN, HEADS, rotate=reference.rotate_halves),
        lambda te: te.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal"
        ),
        self_attention_weights(HEADS, HEAD_DIM),
        CAUSAL,
        {"rotary_pos_emb": torch.cat((angles, angles), -1)[:, None, None]},
    )


@pytest.mark.parametrize("window", [None, (4, 0)])
def test_a_layer_of_packed_sequences_is_a_layer_of_each(window: tuple[int, int] | None) -> None:
    weights = self_attention_weights(GROUPS, HEAD_DIM, "separate", "attention.", "self_attention.", normed=True)
    layer = plain.Layer(
        plain.Attention(HIDDEN, HEADS, GROUPS),
        plain.MLP(HIDDEN, FFN, "gelu"),
        (plain.norm("LayerNorm", HIDDEN), None, plain.norm("LayerNorm", HIDDEN)),
    )
    agree_on_packed_sequences(
        layer,
        lambda te: te.TransformerLayer(
            HIDDEN,
            FFN,
            HEADS,
            num_gqa_groups=GROUPS,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attn_input_format="thd",
            self_attn_mask_type="padding_causal",
            window_size=window,
        ),
        dict(weights)
        | dict(mlp_weights("mlp.", "layernorm_mlp."))
        | dict(norm_weights("LayerNorm", "attention_norm.", "self_attention.layernorm_qkv.layer_norm_"))
        | dict(norm_weights("LayerNorm", "mlp_norm.", "layernorm_mlp.layer_norm_")),
        plain.causal(SEQ, SEQ, before=window[0] if window else None),
        {},
    )


@pytest.mark.parametrize("dispatch", ["auto", "grouped"])
def test_each_packed_sequence_may_have_a_mask_of_its_own(dispatch: str) -> None:
    attention_class = te_on_cpu().DotProductAttention
    if "thd_attention_policies" not in inspect.signature(attention_class.forward).parameters:
        pytest.skip("this TransformerEngine has one mask type for all packed sequences")
    attention = attention_class(HEADS, HEAD_DIM, attention_dropout=0.0, qkv_format="thd")
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randn(sum(LENGTHS), HEADS, HEAD_DIM, generator=rng).bfloat16() for _ in range(4)]
    policies = [
        {"sequence_ids": torch.tensor([0, 2]), "mask_type": "padding_causal", "window_size": (-1, 0)},
        {"sequence_ids": torch.tensor([1]), "mask_type": "padding", "window_size": (-1, -1)},
    ]
    masks = [("padding_causal", (0, 2)), ("padding", (1,))]
    inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    output = attention(
        *inputs, **PACKED, thd_attention_policies=policies, thd_attention_policy_dispatch=dispatch
    ).view_as(tensors[3])
    actual = [output, *torch.autograd.grad(output, inputs, tensors[3])]
    for mask_type, entries in masks:
        inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        output = attention(*inputs, **PACKED, attn_mask_type=mask_type).view_as(tensors[3])
        expected = [output, *torch.autograd.grad(output, inputs, tensors[3])]
        for entry in entries:
            tokens = slice(int(CUMULATIVE[entry]), int(CUMULATIVE[entry + 1]))
            for got, wanted in zip(actual, expected, strict=True):
                assert torch.equal(got[tokens], wanted[tokens])
