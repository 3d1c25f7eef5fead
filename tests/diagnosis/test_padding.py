"""Padding that is hidden by a large negative number, as BERT hides it, and what ports make of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity

HEADS, SEQ, HEAD_DIM = 2, 24, 16


class Reference(nn.Module):
    """Attention whose padded queries return nothing."""

    def __init__(self, hides: float) -> None:
        super().__init__()
        self.hides = hides

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        bias = (1.0 - tokens[:, None, None].to(query.dtype)) * self.hides
        scores = query @ key.transpose(-2, -1) / math.sqrt(HEAD_DIM) + bias
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2) * tokens[..., None].to(value.dtype)


def found(mask: Any, precision: str, left: bool = False, kind: str = "padding", hides: float = -1e4) -> tuple[str, str]:
    """Title and message of the first finding on TE's attention with the mask that is made of the tokens."""

    def inputs(rng: parity.case.case.Rng, batch: int) -> tuple[Tensor, ...]:
        tokens = torch.arange(SEQ) < rng.integers(batch, low=SEQ // 2, high=SEQ - 1)[:, None]
        tokens = tokens.flip(1) if left else tokens
        return (*(rng.normal(batch, SEQ, HEADS, HEAD_DIM) for _ in range(3)), tokens)

    def called(core: nn.Module, query: Tensor, key: Tensor, value: Tensor, tokens: Tensor) -> Tensor:
        output = core(query, key, value, attention_mask=mask(tokens)[:, None, None], attn_mask_type=kind)
        return output * tokens[..., None].to(output.dtype)

    def factory(te: Any, **_: Any) -> parity.Pair:
        core = te.DotProductAttention(HEADS, HEAD_DIM, qkv_format="bshd", attention_dropout=0.0)
        return parity.Pair(Reference(hides), core, inputs, {}, call_candidate=called)

    (one,) = parity.compare(parity.Case("padding", factory, sizes=(dict(batch=4),)), [precision])
    return (one.findings[0].title, one.findings[0].message) if one.status == "failed" else (one.status, one.reason)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("hides", [-1e4, -1e9])
def test_a_mask_of_large_numbers_is_a_mask(hides, precision):
    assert found(torch.logical_not, precision, hides=hides)[0] == "passed"
    assert found(lambda tokens: tokens, precision, hides=hides)[0] == "mask-polarity"
    assert found(lambda tokens: torch.zeros_like(tokens), precision, hides=hides)[0] == "padding-mask"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])  # in FP32 TE takes a kernel that reads the mask itself
def test_lengths_that_are_counted_where_padding_is_on_the_left_are_told(precision):
    title, message = found(torch.logical_not, precision, left=True)
    assert title == "padding-mask"
    assert "padding is the first keys of a sequence; it is taken to be the last ones" in message


@pytest.mark.parametrize(("by", "told"), [(1, "one padded key"), (-1, "lacks a token")])
def test_padding_that_begins_a_key_late_or_early_is_told(by, told):
    title, message = found(lambda tokens: torch.arange(SEQ) >= tokens.sum(1, keepdim=True) + by, "bf16")
    assert title == "padding-mask"
    assert told in message
