"""Rotary tables as Meta's Llama has them: a complex buffer of a fixed length, which multiplies pairs of channels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity

HIDDEN, HEADS, HEAD_DIM, BATCH, SEQ = 64, 4, 16, 3, 20
NAMES = ("query", "key", "value", "out")
OPTIONS: dict[str, Any] = dict(attention_dropout=0.0, bias=False, attn_mask_type="causal", rotary_pos_interleaved=True)
IN_TE = {"query.weight": "qkv.query_weight", "key.weight": "qkv.key_weight", "value.weight": "qkv.value_weight"}


class Attention(nn.Module):
    """Causal attention behind a mask of a fixed length."""

    phases: Tensor
    mask: Tensor

    def __init__(self, linear: Any, base: float = 10_000.0) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        angles = torch.arange(SEQ)[:, None] * base ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("phases", torch.polar(torch.ones_like(angles), angles)[:, None])
        self.register_buffer("mask", torch.full((SEQ, SEQ), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (HEADS, HEAD_DIM)) for layer in (self.query, self.key, self.value))
        query, key = self.rotated(query), self.rotated(key)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(HEAD_DIM) + self.mask.to(x)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).flatten(2))

    def rotated(self, x: Tensor) -> Tensor:
        wide = x.double() if x.dtype is torch.float64 else x.float()
        turned = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * self.phases
        return torch.view_as_real(turned).flatten(-2).to(x)


def compared(precision: str, base: float = 10_000.0, qkv_format: str = "bshd") -> parity.Result:
    def factory(te: Any) -> parity.Pair:
        angles = te.RotaryPositionEmbedding(HEAD_DIM, interleaved=True)(SEQ)
        return parity.Pair(
            Attention(nn.Linear, base),
            te.MultiheadAttention(HIDDEN, HEADS, qkv_format=qkv_format, **OPTIONS),
            lambda rng: rng.normal(BATCH, SEQ, HIDDEN),
            IN_TE | {"out.weight": "proj.weight"},
            call_candidate=lambda module, x: module(x, rotary_pos_emb=angles),
        )

    (result,) = parity.compare(parity.Case("llama", factory, sizes=({},)), [precision])
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tes_rotation_of_pairs_passes(precision):
    assert compared(precision).passed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_another_base_is_told(precision):
    (finding,) = compared(precision, base=500_000.0).findings
    assert finding.title == "rope-base"
    assert "rotary_base=500000; it rotates with base 1e+04" in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_batch_that_is_taken_for_the_sequence_is_told_though_tables_have_the_sequences_length(precision):
    (finding,) = compared(precision, qkv_format="sbhd").findings
    assert finding.title == "sequence-first"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_port_keeps_a_complex_table_in_every_precision(precision):
    def factory(te: Any) -> parity.Pair:
        weights = {f"{name}.weight": f"{name}.weight" for name in NAMES}
        return parity.Pair(
            Attention(nn.Linear), Attention(te.Linear), lambda rng: rng.normal(BATCH, SEQ, HIDDEN), weights
        )

    (result,) = parity.compare(parity.Case("llama", factory, sizes=({},)), [precision])
    assert result.passed
