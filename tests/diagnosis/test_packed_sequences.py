"""Packed sequences: a port whose ``cu_seqlens`` are others than the reference's sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HEADS, HEAD_DIM = 4, 16
BORDERS = [0, 7, 19, 24, 40]


class OneByOne(nn.Module):
    """Causal attention in each sequence, in a loop."""

    def __init__(self, borders: list[int]) -> None:
        super().__init__()
        self.borders = borders

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = []
        for start, end in zip(self.borders, self.borders[1:], strict=False):
            query, key, value = (x[start:end].transpose(0, 1) for x in (q, k, v))
            context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            contexts.append(context.transpose(0, 1).flatten(1))
        return torch.cat(contexts)


class InBatchesOfOne(OneByOne):
    """The same, by attention that takes batches, and each result out of its batch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = []
        for start, end in zip(self.borders, self.borders[1:], strict=False):
            query, key, value = (x[None, start:end].transpose(1, 2) for x in (q, k, v))
            context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            contexts.append(context.transpose(1, 2).flatten(2)[0])
        return torch.cat(contexts)


class Masked(OneByOne):
    """The same at once, behind a mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number = torch.bucketize(torch.arange(self.borders[-1]), torch.tensor(self.borders[1:-1]), right=True)
        mask = (number[:, None] == number).tril()
        query, key, value = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(0, 1).flatten(1)


REFERENCES = [OneByOne(BORDERS), InBatchesOfOne(BORDERS), Masked(BORDERS)]


def found(reference: nn.Module, borders: list[int], precision: str, mask: str = "padding_causal") -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Any:
            given = torch.tensor(borders, dtype=torch.int32)
            longest = int(given.diff().max())
            lengths = dict(cu_seqlens_q=given, cu_seqlens_kv=given, max_seqlen_q=longest, max_seqlen_kv=longest)
            return module(q, k, v, attn_mask_type=mask, **lengths)

        attention = te.DotProductAttention(HEADS, HEAD_DIM, qkv_format="thd", attention_dropout=0.0)
        shape = BORDERS[-1], HEADS, HEAD_DIM
        inputs = lambda rng: tuple(rng.normal(*shape) for _ in range(3))  # noqa: E731
        return parity.Pair(reference, attention, inputs, call_candidate=call)

    (result,) = parity.compare(parity.Case("packed", factory, sizes=({},)), [precision])
    return result


@pytest.mark.parametrize("reference", REFERENCES, ids=["one by one", "in batches of one", "masked"])
def test_the_same_sequences_pass(reference):
    assert found(reference, BORDERS, "bf16").passed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("reference", REFERENCES, ids=["one by one", "in batches of one", "masked"])
@pytest.mark.parametrize(
    "borders",
    [
        [0, 7, 24, 40],  # merged with the neighbour
        [0, 8, 19, 24, 40],
        [0, 8, 20, 25, 40],  # every border but the ends one further on
        [0, 10, 20, 30, 40],
        [0, 3, 11, 12, 33, 40],
    ],
)
def test_other_borders_are_told_beside_the_references(borders, reference, precision):
    result = found(reference, borders, precision)
    assert [finding.title for finding in result.findings] == ["mask"]
    assert f"cu_seqlens={BORDERS}" in result.findings[0].message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_borders_that_the_reference_does_not_have_are_found_from_the_outputs(precision):
    result = found(OneByOne([0, 40]), BORDERS, precision)
    assert [finding.title for finding in result.findings] == ["mask"]
    assert f"it has sequences with the borders {BORDERS}" in result.findings[0].message


@pytest.mark.parametrize("reference", REFERENCES, ids=["one by one", "in batches of one", "masked"])
def test_one_sequence_across_all_borders_is_told(reference):
    result = found(reference, [0, BORDERS[-1]], "bf16")
    assert [finding.title for finding in result.findings] == ["mask"]


@pytest.mark.parametrize("reference", REFERENCES, ids=["one by one", "in batches of one", "masked"])
def test_sequences_that_are_not_causal_are_told(reference):
    result = found(reference, BORDERS, "bf16", mask="padding")
    assert [finding.title for finding in result.findings] == ["mask"]
    assert "causal" in result.findings[0].message
