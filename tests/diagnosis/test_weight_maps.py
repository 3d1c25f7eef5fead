"""What findings on weight maps say beside the mistake, which the corpus shows."""

from __future__ import annotations

import pytest
import torch
from ports import compared, tells, tells_only
from torch import Tensor, nn

import parity
from lab.corpus.small import normal
from lab.corpus.small_ports.weight_maps import CROSS, KEYS, QUERIES, SCALE_AND_SHIFT, of_cross_attention
from parity.case.weight_map import Reorder, describe, reorder
from parity.mistakes import weight_maps

WIDTH, HEADS, INNER = 64, 4, 80


def test_a_decoder_layer_whose_attentions_are_both_misread_is_told_as_one_mistake():
    def call(layer: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
        return layer(x, memory, tgt_mask=torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1))

    itself, cross, mlp = "self_attention.", "inter_attention.", "layernorm_mlp."
    names = {
        "self_attn.in_proj_": f"{itself}layernorm_qkv.",
        "self_attn.out_proj.": f"{itself}proj.",
        "norm1.": f"{itself}layernorm_qkv.layer_norm_",
        "norm2.": f"{cross}layernorm_query.layer_norm_",
        "norm3.": f"{mlp}layer_norm_",
        "linear1.": f"{mlp}fc1_",
        "linear2.": f"{mlp}fc2_",
    }
    weights = of_cross_attention("multihead_attn.", cross, "layernorm_query")
    weights |= {left + kind: right + kind for left, right in names.items() for kind in ("weight", "bias")}
    options = dict(
        hidden_dropout=0.0,
        layer_type="decoder",
        activation="relu",
        attn_input_format="bshd",
        attention_dropout=0.0,
        fuse_qkv_params=True,
    )
    result = compared(
        lambda: nn.TransformerDecoderLayer(CROSS, 3, INNER, dropout=0.0, batch_first=True, norm_first=True),
        lambda te: te.TransformerLayer(CROSS, INNER, 3, **options),
        normal((2, QUERIES, CROSS), (2, KEYS, CROSS)),
        "fp32",
        weights,
        call_reference=call,
        call_candidate=lambda module, x, memory: module(x, encoder_output=memory),
    )
    tells_only(result, "qkv-layout", "self_attention.layernorm_qkv.weight")
    assert "inter_attention.key_value.weight" in result.findings[0].message


@pytest.mark.parametrize("order", [(1, 0), (*range(WIDTH, 2 * WIDTH), *range(WIDTH))], ids=["halves", "rows"])
def test_a_scale_and_a_shift_are_told_as_parts_in_another_order_and_not_as_gate_and_up(order):
    wrong = SCALE_AND_SHIFT.case(weights=lambda name: reorder(name, order) if "halves" in name else name)
    (result,) = parity.compare(wrong, ["bf16"])
    tells(result, "stacked-in-another-order")
    assert "gate" not in result.findings[0].message
    assert len(result.findings[0].message) < 500


def test_an_order_of_many_rows_is_shortened_but_where_it_is_to_be_pasted():
    term = Reorder(("w",), tuple(range(100)))
    assert describe(term) == 'reorder("w", order=(0, 1, 2, ..., 97, 98, 99))'
    assert "50, 51, 52" in describe(term, "parity.")


def test_what_all_layers_have_in_common_is_told_once():
    entries = {f"layers.{i}.fused.{kind}": f"layers.{i}.qkv.{kind}" for i in range(4) for kind in ("weight", "bias")}
    ours, theirs = (
        {name: (3 * WIDTH, WIDTH) if name.endswith("weight") else (3 * WIDTH,) for name in side}
        for side in (entries, entries.values())
    )
    rows = frozenset(ours)
    mapped = weight_maps.Mapped(entries, ours, theirs, weight_maps.Heads(4, 4, WIDTH // 4, rows))
    repairs = [one.repair for one in weight_maps.repeated_weight_hypotheses(mapped)]
    of_all = [repair for repair in repairs if "likewise" in repair and "layers.3" not in repair]
    assert any(repair.endswith('likewise for "layers.{i}.qkv.weight", "layers.{i}.qkv.bias"') for repair in of_all)
