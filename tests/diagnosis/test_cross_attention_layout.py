"""TE takes fused weights for head by head unless it is told otherwise, also keys and values of cross-attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.case.weight_map import WeightMap

HIDDEN, FFN, HEADS, QUERIES, KEYS = 48, 80, 3, 20, 12
FUSED: dict[str, Any] = dict(attention_dropout=0.0, fuse_qkv_params=True)
KINDS = ("weight", "bias")


def of_cross_attention(plain: str, te: str, query: str) -> WeightMap:
    return {
        parity_side: te_side
        for kind in KINDS
        for parity_side, te_side in {
            f"{plain}in_proj_{kind}": parity.stack(f"{te}{query}.{kind}", f"{te}key_value.{kind}"),
            f"{plain}out_proj.{kind}": f"{te}proj.{kind}",
        }.items()
    }


def compared(reference: nn.Module, build: Any, weights: WeightMap, precision: str, call: Any = None) -> parity.Result:
    def factory(te: Any) -> parity.Pair:
        return parity.Pair(
            reference,
            build(te),
            lambda rng: (rng.normal(2, QUERIES, HIDDEN), rng.normal(2, KEYS, HIDDEN)),
            weights,
            call_reference=call or (lambda module, x, memory: module(x, memory, memory)[0]),
            call_candidate=lambda module, x, memory: module(x, encoder_output=memory),
        )

    (result,) = parity.compare(parity.Case("cross", factory, sizes=({},)), [precision])
    return result


def cross_attention(interleaved: bool, precision: str) -> parity.Result:
    options = dict(attention_type="cross", attn_mask_type="no_mask", qkv_format="bshd")
    return compared(
        nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True),
        lambda te: te.MultiheadAttention(HIDDEN, HEADS, **FUSED, **options, qkv_weight_interleaved=interleaved),
        of_cross_attention("", "", "query_layer"),
        precision,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_keys_and_values_one_after_the_other_pass_where_te_takes_them_so(precision):
    assert cross_attention(False, precision).passed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_keys_and_values_that_te_takes_for_head_by_head_are_told(precision):
    finding = cross_attention(True, precision).findings[0]
    assert finding.title == "qkv-layout"
    assert 'reorder("key_value.weight", order=(0, 2, 4, 1, 3, 5))' in finding.message


def test_a_decoder_layer_whose_attentions_are_both_misread_is_told_as_one_mistake():
    def call(layer: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
        return layer(x, memory, tgt_mask=torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1))

    itself, cross, mlp = "self_attention.", "inter_attention.", "layernorm_mlp."
    weights = dict(of_cross_attention("multihead_attn.", cross, "layernorm_query"))
    for kind in KINDS:
        weights |= {
            f"self_attn.in_proj_{kind}": f"{itself}layernorm_qkv.{kind}",
            f"self_attn.out_proj.{kind}": f"{itself}proj.{kind}",
            f"norm1.{kind}": f"{itself}layernorm_qkv.layer_norm_{kind}",
            f"norm2.{kind}": f"{cross}layernorm_query.layer_norm_{kind}",
            f"norm3.{kind}": f"{mlp}layer_norm_{kind}",
            f"linear1.{kind}": f"{mlp}fc1_{kind}",
            f"linear2.{kind}": f"{mlp}fc2_{kind}",
        }
    options = dict(hidden_dropout=0.0, layer_type="decoder", activation="relu", attn_input_format="bshd")
    (finding,) = compared(
        nn.TransformerDecoderLayer(HIDDEN, HEADS, FFN, dropout=0.0, batch_first=True, norm_first=True),
        lambda te: te.TransformerLayer(HIDDEN, FFN, HEADS, **FUSED, **options),
        weights,
        "fp32",
        call,
    ).findings
    assert finding.title == "qkv-layout"
    assert "self_attention.layernorm_qkv.weight" in finding.message
    assert "inter_attention.key_value.weight" in finding.message
