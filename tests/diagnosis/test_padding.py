"""Padding that is hidden by a large number, on the left, off by a key, attended to, or compared by mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, in_turn, tells, tells_only, twins
from torch import Tensor, nn

import parity
from parity.case.case import Rng

HEADS, SEQ, HEAD_DIM = 2, 24, 16

# Padding that is hidden by a large negative number, as in BERT, against TE's mask.

Mask = Callable[[Tensor], Tensor]  # maps the positions that hold tokens to the mask that TE is given


class Reference(nn.Module):
    """Attention whose padded queries return zeros."""

    def __init__(self, hides: float) -> None:
        super().__init__()
        self.hides = hides

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        bias = (1.0 - tokens[:, None, None].to(query.dtype)) * self.hides
        scores = query @ key.transpose(-2, -1) / math.sqrt(HEAD_DIM) + bias
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2) * tokens[..., None].to(value.dtype)


def hidden_by(
    mask: Mask, precision: str, left: bool = False, kind: str = "padding", hides: float = -1e4
) -> parity.Result:
    """Compare attention that adds ``hides`` to scores of padded keys with TE's, which is given a mask of the tokens."""

    def inputs(rng: Rng) -> tuple[Tensor, ...]:
        tokens = torch.arange(SEQ) < rng.integers(4, low=SEQ // 2, high=SEQ - 1)[:, None]
        tokens = tokens.flip(1) if left else tokens
        return (*(rng.normal(4, SEQ, HEADS, HEAD_DIM) for _ in range(3)), tokens)

    def called(core: nn.Module, query: Tensor, key: Tensor, value: Tensor, tokens: Tensor) -> Tensor:
        output = core(query, key, value, attention_mask=mask(tokens)[:, None, None], attn_mask_type=kind)
        return output * tokens[..., None].to(output.dtype)

    options = dict(qkv_format="bshd", attention_dropout=0.0)
    port = lambda te: te.DotProductAttention(HEADS, HEAD_DIM, **options)  # noqa: E731
    return compared(lambda: Reference(hides), port, inputs, precision, call_candidate=called)


def off_by(keys: int) -> Mask:
    """Return a mask whose padding begins this many keys too late."""
    return lambda tokens: torch.arange(SEQ) >= tokens.sum(1, keepdim=True) + keys


@in_turn(
    ("hides", "mask", "title"),
    [
        (-1e4, torch.logical_not, "passed"),
        (-1e9, torch.logical_not, "passed"),
        (-1e4, torch.clone, "mask-polarity"),
        (-1e9, torch.zeros_like, "padding-mask"),
    ],
)
def test_a_mask_of_large_numbers_is_a_mask(mask, title, hides, precision):
    tells(hidden_by(mask, precision, hides=hides), title)


def test_lengths_that_are_counted_where_padding_is_on_the_left_are_told():
    phrase = "padding is the first keys of a sequence; it is taken to be the last ones"
    # In FP32, TE uses a kernel that reads the mask itself.
    tells(hidden_by(torch.logical_not, "bf16", left=True), "padding-mask", phrase)


@pytest.mark.parametrize(("keys", "phrase"), [(1, "one padded key"), (-1, "lacks a token")])
def test_padding_that_begins_a_key_late_or_early_is_told(keys, phrase):
    tells(hidden_by(off_by(keys), "bf16"), "padding-mask", phrase)


# Padding that a port both attends to and fills: among pairs of mistakes, the one with a meaning comes first.


class Padded(nn.Module):
    """A layer of attention in which padded tokens are hidden and get no result."""

    def __init__(self, linear, core=None) -> None:
        super().__init__()
        self.qkv, self.out, self.core = linear(64, 3 * 64), linear(64, 64), core

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, -1)).unbind(2)
        if self.core is not None:
            return x + self.out(self.core(query, key, value))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=~padding[:, None, None])
        return x + self.out(y.transpose(1, 2).flatten(2).masked_fill(padding[..., None], 0.0))


def test_padding_that_is_attended_to_is_told_before_the_call_that_is_left_out_besides():
    def inputs(rng: Rng) -> tuple[Tensor, Tensor]:
        return rng.normal(4, 20, 64), torch.arange(20) >= rng.integers(4, low=9, high=21)[:, None]

    def port(te: Any) -> nn.Module:
        return Padded(te.Linear, te.DotProductAttention(4, 16, qkv_format="bshd", attn_mask_type="no_mask"))

    result = compared(lambda: Padded(nn.Linear), port, inputs)
    assert [finding.title for finding in result.findings] == ["padding-mask", "operation"]


# Padding in layers with and without windows, each of which has its own mask.


class Windowed(nn.Module):
    """One layer that sees all tokens and one with a window; a port may ignore padding, or exchange the masks."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.layers = mistake, nn.ModuleList(linear(64, 3 * 64) for _ in range(2))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        near = (place[:, None] - place).abs() <= 4
        masks = [torch.ones_like(near), near][:: -1 if self.mistake == "exchanged" else 1]
        for layer, mask in zip(self.layers, masks, strict=True):
            query, key, value = (t.transpose(1, 2) for t in layer(x).unflatten(-1, (3, 4, -1)).unbind(2))
            seen = mask if self.mistake == "ignored" else mask & ~padding[:, None, None]
            scores = (query @ key.mT / 4.0).masked_fill(~seen, torch.finfo(query.dtype).min)
            x = x + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return x.masked_fill(padding[..., None], 0.0)


@in_turn(
    ("mistake", "title", "phrase"),
    [
        ("", "passed", ""),
        ("ignored", "padding-mask", "the port attends to padded keys"),
        ("exchanged", "window", "the port has that of the other layers"),
    ],
)
def test_padding_beside_windows_is_told(mistake, title, phrase, precision):
    def inputs(rng: Rng) -> tuple[Tensor, Tensor]:
        return rng.normal(2, SEQ, 64), torch.arange(SEQ) >= rng.integers(2, low=12, high=20)[:, None]

    result = compared(lambda: Windowed(nn.Linear), lambda te: Windowed(te.Linear, mistake), inputs, precision)
    tells(result, title, phrase)


# Padded tokens that are compared though nothing reads them, with each kind of input that may mark them.


class Encoder(nn.Module):
    def __init__(self, linear: Any, attention: nn.Module) -> None:
        super().__init__()
        self.qkv, self.attention, self.out = linear(64, 3 * 64), attention, linear(64, 64)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).unbind(2)
        return x + self.out(self.attention(q, k, v, hidden))


class Plain(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        keep = ~hidden[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2)


class Ported(nn.Module):
    def __init__(self, te: Any, **options: Any) -> None:
        super().__init__()
        self.attention = te.DotProductAttention(
            4, 16, qkv_format="bshd", attn_mask_type="padding", attention_dropout=0.0, **options
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return self.attention(q, k, v, attention_mask=hidden[:, None, None, :])


def as_padding(hidden: Tensor) -> Tensor:
    return hidden


def as_kept_integers(hidden: Tensor) -> Tensor:
    return (~hidden).long()


def as_bias(hidden: Tensor) -> Tensor:
    return (hidden * -1e4)[:, None, None, :]


def as_lengths(hidden: Tensor) -> Tensor:
    return (~hidden).sum(1)


READ = {
    as_padding: lambda given: given,
    as_kept_integers: lambda given: given == 0,
    as_bias: lambda given: given[:, 0, 0] < -1.0,
    as_lengths: lambda given: torch.arange(32) >= given[:, None],
}


def with_hidden_rows(
    given_as: Any, precision: str, zeroed: bool = False, sequence_first: bool = False, **options: Any
) -> parity.Result:
    """Compare an encoder with a correct port; if ``zeroed``, both return zeros for hidden tokens."""

    def call(module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        hidden = READ[given_as](mask)
        output = module(x.transpose(0, 1) if sequence_first else x, hidden)
        if zeroed:
            output = output * ~hidden[..., None]
        return output.transpose(0, 1) if sequence_first else output

    def inputs(rng: Rng) -> tuple[Tensor, Tensor]:
        hidden = torch.arange(32) >= torch.tensor([32, 20, 25])[:, None]
        return rng.normal(*((32, 3) if sequence_first else (3, 32)), 64), given_as(hidden)

    return compared(
        lambda: Encoder(nn.Linear, Plain()),
        lambda te: Encoder(te.Linear, Ported(te, **options)),
        inputs,
        precision,
        call_reference=call,
        call_candidate=call,
    )


@pytest.mark.parametrize(
    ("given_as", "precision", "sequence_first"),
    [
        (as_padding, "bf16", True),
        (as_padding, "fp8_current", False),
        (as_kept_integers, "bf16", False),
        (as_bias, "bf16", False),
        (as_lengths, "fp32", False),
    ],
)
def test_a_right_port_is_told_to_leave_hidden_tokens_out(given_as, precision, sequence_first):
    result = with_hidden_rows(given_as, precision, sequence_first=sequence_first)
    tells_only(result, "hidden-rows", "the input mask masks")


def test_a_right_port_passes_that_leaves_them_out():
    assert with_hidden_rows(as_padding, "bf16", zeroed=True).passed


def test_a_wrong_port_is_told_that_most_of_its_error_is_where_tokens_are_hidden_until_they_are_left_out():
    result = with_hidden_rows(as_padding, "fp32", softmax_scale=0.2)
    tells(result, "hidden-rows")
    assert "unexplained" in [finding.title for finding in result.findings]
    tells(with_hidden_rows(as_padding, "fp32", zeroed=True, softmax_scale=0.2), "softmax-scale")


# An input that splits rows as a mask does: ids of packed documents.


class Packed(nn.Module):
    """A linear layer of tokens that also reads the id of each token's document; the port adds no known mistake."""

    def __init__(self, linear: Any, wave: float = 0.0) -> None:
        super().__init__()
        self.linear, self.wave = linear(64, 64), wave

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        y = self.linear(x) * (1.0 + 0.0 * documents[..., None])
        return y + self.wave * (7.0 * y.flip(-1)).sin() if self.wave else y


def test_the_ids_of_documents_are_no_mask():
    def inputs(rng: Any) -> tuple[Tensor, Tensor]:
        return rng.normal(2, 32, 64), (torch.arange(32) > 19).long().expand(2, -1).contiguous()

    result = twins(Packed, dict(wave=0.3), inputs)
    assert not result.passed
    assert "hidden-rows" not in [one.title for one in result.findings]
