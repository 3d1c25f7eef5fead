"""Slopes of ALiBi: TE has the paper's by default, which are others than a reference's of its own formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.mistakes.masks import papers_slopes
from parity.te import state

HEADS, HEAD_DIM, SEQ = 6, 16, 24  # of heads no power of 2: the paper's slopes are not one geometric sequence
SLOPES = 2.0 ** (-8.0 * torch.arange(1.0, HEADS + 1.0) / HEADS)


class Attention(nn.Module):
    """Causal; scores rise by each head's slope from one key to the next."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        positions = torch.arange(SEQ)
        distance = positions - positions[:, None]
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(HEAD_DIM)
        scores = scores + (SLOPES[:, None, None] * distance).to(query.dtype)
        weights = scores.masked_fill(distance > 0, -math.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)


def compared(precision: str, **alibi: Any) -> parity.Result:
    def call(module: nn.Module, *heads: Tensor) -> Tensor:
        return module(*heads, core_attention_bias_type="alibi", **alibi)

    def factory(te: Any) -> parity.Pair:
        port = te.DotProductAttention(HEADS, HEAD_DIM, qkv_format="bshd", attn_mask_type="causal")
        inputs = lambda rng: [rng.normal(2, SEQ, HEADS, HEAD_DIM) for _ in range(3)]  # noqa: E731
        return parity.Pair(Attention(), port, inputs, call_candidate=call)

    (result,) = parity.compare(parity.Case("alibi", factory, sizes=({},)), [precision])
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_tes_own_slopes_in_the_place_of_the_references_are_told(precision):
    (finding,) = compared(precision).findings
    assert finding.title == "attention-bias"
    assert "alibi_slopes; it has the paper's, which are its default" in finding.message


@pytest.mark.parametrize("heads", [2, 6, 8, 12])
def test_the_papers_slopes_are_tes(heads):
    port = parity.te.kernels("cpu").te.DotProductAttention(heads, HEAD_DIM, qkv_format="bshd", attn_mask_type="causal")
    query, key, value = (torch.randn(1, SEQ, heads, HEAD_DIM) for _ in range(3))
    contexts = []
    for slopes in (None, papers_slopes(heads).float()):
        with state.fresh_caches():  # TE keeps slopes for the whole process
            contexts.append(port(query, key, value, core_attention_bias_type="alibi", alibi_slopes=slopes))
    torch.testing.assert_close(*contexts)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_references_slopes_pass(precision):
    assert compared(precision, alibi_slopes=SLOPES).passed
