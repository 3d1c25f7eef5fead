"""Sequences packed one after the other (``thd``) are the sequences by themselves, in attention and in whole layers."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import plain
import pytest
import torch
from agreement import assert_agree, te_on_cpu
from torch import Tensor, nn
from weight_maps import mlp_weights, norm_weights, self_attention_weights

import parity
from parity import reference

HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM = 64, 96, 4, 2, 16
LENGTHS = (16, 5, 11)
BATCH, SEQ = len(LENGTHS), max(LENGTHS)
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
    """``[tokens, hidden]`` as ``[batch, seq, hidden]``, 0 for padding."""
    return tensor.new_zeros(BATCH, SEQ, tensor.shape[-1]).masked_scatter(IS_TOKEN[..., None], tensor)


def agree_on_packed_sequences(
    reference_module: nn.Module, build: Any, weights: Any, masked: Tensor | None, call: dict[str, Any]
) -> None:
    """TE's module sees the tokens of all sequences in a row, the reference the sequences with padding."""

    def call_te(module: nn.Module, x: Tensor) -> Tensor:
        return unpacked(module(x[IS_TOKEN], **PACKED | call))

    def call_reference(module: nn.Module, x: Tensor) -> Tensor:
        hidden = HIDDEN_KEYS if masked is None else HIDDEN_KEYS | masked
        # Padding may see everything, lest it see nothing: what comes of it is dropped.
        hidden = hidden & IS_TOKEN[:, None, :, None]
        return module(x, masked=hidden).masked_fill(~IS_TOKEN[..., None], 0.0)

    def pair(te: ModuleType) -> parity.Pair:
        return parity.Pair(
            reference_module,
            build(te),
            lambda rng: rng.normal(BATCH, SEQ, HIDDEN),
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
