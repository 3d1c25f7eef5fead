"""Masks that are no causal ones: windows on both sides, packed sequences, prefixes, and masks written in other ways."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HEADS, SEQ, HEAD_DIM = 2, 32, 16
LENGTHS = (7, 12, 3, 10)
CAUSAL = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
DISTANCE = torch.arange(SEQ) - torch.arange(SEQ)[:, None]
SEGMENT = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
PACKED = (SEGMENT[:, None] == SEGMENT) & CAUSAL
PREFIX = CAUSAL | (torch.arange(SEQ) < 9)


class Reference(nn.Module):
    """Attention that hides what ``visible`` leaves out, before its scores are scaled or after it."""

    def __init__(self, visible: Tensor, masks_first: bool = False) -> None:
        super().__init__()
        self.visible, self.masks_first = visible, masks_first

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        scores = query @ key.transpose(-2, -1)
        least = torch.finfo(scores.dtype).min
        if self.masks_first:
            scores = torch.where(self.visible, scores, least) / math.sqrt(HEAD_DIM)
        else:
            scores = (scores / math.sqrt(HEAD_DIM)).masked_fill(~self.visible, least)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def found(module: nn.Module, call=None, **te_arguments):
    """The titles of the findings, and the first message, where TE's attention is called with these arguments."""

    def factory(te, **_):
        options = dict(qkv_format="bshd", attention_dropout=0.0, attn_mask_type="causal") | te_arguments
        core = te.DotProductAttention(HEADS, HEAD_DIM, **options)
        return parity.Pair(
            reference=module,
            candidate=core,
            inputs=lambda rng, batch: tuple(rng.normal(batch, SEQ, HEADS, HEAD_DIM) for _ in range(3)),
            weights={},
            call_candidate=call or (lambda core, *heads: core(*heads)),
        )

    (result,) = parity.compare(parity.Case("mask", factory, sizes=(dict(batch=2),)), ["bf16"])
    titles = [finding.title for finding in result.findings] or [result.status]
    return titles, result.findings[0].message if result.findings else ""


@pytest.mark.parametrize(("size", "seen"), [((5, 5), "it sees 5 and 5"), ((4, 0), "it sees none after it")])
def test_a_window_on_both_sides_that_is_another_is_found(size, seen):
    both = Reference(DISTANCE.abs() <= 4)
    assert found(both, attn_mask_type="no_mask", window_size=(4, 4))[0] == ["passed"]
    titles, message = found(both, attn_mask_type="no_mask", window_size=size)
    assert titles == ["window"]
    assert seen in message


@pytest.mark.parametrize("size", [3, 9, 21, 27])
def test_a_window_that_the_reference_has_not_is_found(size):
    titles, message = found(Reference(CAUSAL), window_size=(size, 0))
    assert titles == ["window"]
    assert message.endswith(f"it sees {size}")


class MaskOfEachRow(nn.Module):
    """As transformers' models write it: what one row computes is the same, the calls that make its mask are not."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        visible = (CAUSAL & (DISTANCE > -5))[None, None]
        if len(query) > 1:
            visible = visible.expand(len(query), 1, SEQ, SEQ)
        return F.scaled_dot_product_attention(query, key, value, visible).transpose(1, 2).flatten(2)


def test_a_window_is_found_whose_mask_a_single_row_makes_with_other_calls():
    assert found(MaskOfEachRow(), window_size=(4, 0))[0] == ["passed"]
    assert found(MaskOfEachRow())[0] == ["window"]


@pytest.mark.parametrize("masks_first", [False, True])
def test_a_mask_is_understood_before_the_scale_and_after_it(masks_first):
    reference = Reference(CAUSAL, masks_first)
    assert found(reference)[0] == ["passed"]
    assert found(reference, attn_mask_type="no_mask")[0] == ["mask"]


@pytest.mark.parametrize("visible", [PACKED, PREFIX], ids=["packed", "prefix"])
def test_a_causal_mask_alone_is_found(visible):
    titles, message = found(Reference(visible))
    assert titles == ["mask"]
    assert "it has the causal one alone" in message


def packed(lengths, mask="padding_causal"):
    """TE's attention over the batch's rows, each of them sequences of these lengths."""

    def call(core, *heads):
        borders = torch.tensor([0, *lengths]).cumsum(0).int()
        rows = [
            core(
                *(x[i].clone() for x in heads),
                qkv_format="thd",
                attn_mask_type=mask,
                cu_seqlens_q=borders,
                cu_seqlens_kv=borders,
                max_seqlen_q=max(lengths),
                max_seqlen_kv=max(lengths),
            )
            for i in range(len(heads[0]))
        ]
        return torch.stack(rows).flatten(2)

    return call


def test_packed_sequences_of_the_right_lengths_pass():
    assert found(Reference(PACKED), packed(LENGTHS))[0] == ["passed"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (packed(LENGTHS, "padding"), "sequences that are not causal"),
        (packed((8, 11, 3, 10)), "sequence 1 beginning at 8"),
        (packed((19, 3, 10)), "no border before sequence 1"),
        (packed((12, 10, 7, 3)), "the sequences' lengths longest first"),
    ],
    ids=["not causal", "border", "merged", "order"],
)
def test_packed_sequences_of_other_lengths_are_found(call, told):
    titles, message = found(Reference(PACKED), call)
    assert titles == ["mask"]
    assert "cu_seqlens=[0, 7, 19, 22, 32]" in message
    assert message.endswith(told)


class Biased(nn.Module):
    """Scores without a scale, to which a bias is added in place, as T5 does."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        scores = query @ key.transpose(-2, -1)
        scores += -0.1 * DISTANCE.abs()
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def test_a_bias_that_is_added_in_place_stays_where_the_scale_is_another():
    bias = -0.1 * DISTANCE.abs()[None, None].expand(1, HEADS, -1, -1)

    def call(core, *heads):
        options = dict(core_attention_bias_type="post_scale_bias", core_attention_bias=bias.to(heads[0].dtype))
        return core(*heads, **options)

    unmasked = dict(attn_mask_type="no_mask")
    assert found(Biased(), call, softmax_scale=1.0, **unmasked)[0] == ["passed"]
    assert found(Biased(), call, **unmasked)[0] == ["softmax-scale"]


def test_batch_and_sequence_that_are_viewed_as_each_other_are_found():
    def call(core, *heads):
        return core(*(x.reshape(SEQ, 2, HEADS, HEAD_DIM) for x in heads)).reshape(2, SEQ, -1)

    assert found(Reference(CAUSAL), call, qkv_format="sbhd")[0] == ["sequence-first"]


class TwoAttentions(nn.Module):
    """A causal attention, and one that sees all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Reference(CAUSAL), Reference(torch.ones_like(CAUSAL))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.second(self.first(query, key, value).unflatten(-1, (HEADS, -1)), key, value)


def test_a_mask_is_compared_with_that_of_its_own_attention():
    def calls(second: str):
        return lambda core, query, key, value: core(
            core(query, key, value).unflatten(-1, (HEADS, -1)), key, value, attn_mask_type=second
        )

    assert found(TwoAttentions(), calls("no_mask"))[0] == ["passed"]
    titles, message = found(TwoAttentions(), calls("causal"))
    assert titles == ["mask"]
    assert message.endswith("by default in second")


@pytest.mark.parametrize(
    ("call", "title"),
    [
        (lambda core, query, key, value: core(query, value, key), "key-value-swapped"),
        (lambda core, *heads: core(*heads).unflatten(-1, (HEAD_DIM, HEADS)).mT.flatten(-2), "heads-permuted"),
    ],
    ids=["key and value", "heads and channels"],
)
def test_arguments_and_heads_that_changed_places_are_found(call, title):
    assert found(Reference(CAUSAL), call)[0] == [title]
