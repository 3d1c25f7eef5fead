"""Tables whose rows a port takes for other positions, or not at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.mistakes.lookups import buckets_of

HIDDEN, TOKENS, POSITIONS, SEQ, HEADS = 64, 100, 40, 24, 4


class Embedded(nn.Module):
    """Tokens, their positions and their types, in front of a linear layer."""

    def __init__(self, linear, first: int = 2, over_padding: bool = False, types: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)
        self.types = nn.Embedding(2, HIDDEN)
        self.linear = linear(HIDDEN, HIDDEN)
        self.first, self.over_padding, self.adds_types = first, over_padding, types

    def forward(self, ids: Tensor) -> Tensor:
        is_token = ids > 0
        counted = torch.ones_like(ids) if self.over_padding else is_token
        x = self.tokens(ids) + self.positions((counted.cumsum(1) - 1).clamp(min=0) + self.first)
        return self.linear(x + self.types(torch.zeros_like(ids)) if self.adds_types else x)


class Patches(nn.Module):
    """Class tokens in front of patches, and a table of positions that is added, as in ViT."""

    def __init__(
        self, linear, tokens: int = 1, roll: int = 0, adds: bool = True, patch_rows: slice | None = None
    ) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, tokens, HIDDEN))
        self.table = nn.Parameter(torch.randn(1, SEQ + tokens, HIDDEN))
        self.linear = linear(HIDDEN, HIDDEN)
        self.roll, self.adds, self.patch_rows = roll, adds, patch_rows

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1, -1)
        if self.patch_rows is not None:
            return self.linear(torch.cat((token, x + self.table[:, self.patch_rows]), 1))
        x = torch.cat((token, x), 1)
        table = self.table.roll(self.roll, 1) if self.roll else self.table
        return self.linear(x + table if self.adds else x)


class Distances(nn.Module):
    """Attention whose scores have a bias by T5's buckets."""

    def __init__(self, core, both_directions: bool = True) -> None:
        super().__init__()
        self.bias = nn.Embedding(16, HEADS)
        self.core, self.both_directions = core, both_directions

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        distances = torch.arange(SEQ) - torch.arange(SEQ)[:, None]
        bias = self.bias(buckets_of(distances, 16, 128, self.both_directions)).permute(2, 0, 1)[None]
        return self.core(query, key, value, bias)


def written_out(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + bias
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def found(reference, port, inputs):
    def factory(te, **_):
        right = reference()
        return parity.Pair(
            reference=right,
            candidate=port(te),
            inputs=inputs,
            weights={name: name for name, _ in right.named_parameters()},
        )

    (result,) = parity.compare(parity.Case("lookups", factory, sizes=(dict(batch=2),)), ["bf16"])
    return [(finding.title, finding.message) for finding in result.findings] or [(result.status, "")]


def ids(rng, batch):
    """Sequences that begin with as much padding as their number."""
    tokens = rng.integers(batch, SEQ, low=1, high=TOKENS)
    return tokens.masked_fill(torch.arange(SEQ) < torch.arange(batch)[:, None], 0)


def patches(rng, batch):
    return rng.normal(batch, SEQ, HIDDEN)


def heads(rng, batch):
    return tuple(rng.normal(batch, SEQ, HEADS, 16) for _ in range(3))


def of_embedded(**port):
    return found(lambda: Embedded(nn.Linear), lambda te: Embedded(te.Linear, **port), ids)


@pytest.mark.parametrize(("first", "by"), [(0, -2), (1, -1), (3, 1)])
def test_positions_that_begin_elsewhere_are_found(first, by):
    ((title, message),) = of_embedded(first=first)
    assert title == "embedding-position"
    assert f"off by {by:+d}" in message


def test_positions_that_count_padding_are_found():
    ((title, message),) = of_embedded(over_padding=True)
    assert title == "embedding-position"
    assert "from 2 on without a gap" in message


def test_an_embedding_that_is_not_added_is_found():
    ((title, message),) = of_embedded(types=False)
    assert title == "no-gradient"
    assert 'if you use "types.weight"' in message


@pytest.mark.parametrize(
    ("port", "title"),
    [
        ({}, "passed"),
        (dict(roll=1), "embedding-position"),
        (dict(roll=-1), "embedding-position"),
        (dict(adds=False), "no-gradient"),
    ],
)
def test_a_table_that_is_added_otherwise_is_found(port, title):
    assert found(lambda: Patches(nn.Linear), lambda te: Patches(te.Linear, **port), patches)[0][0] == title


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize(
    ("first", "message"), [(0, "the table begins after them"), (1, "add the table's rows to special tokens, too")]
)
def test_a_table_that_special_tokens_do_not_get_is_found(first, message, tokens):
    rows = slice(first * tokens, first * tokens + SEQ)
    reference = lambda: Patches(nn.Linear, tokens)  # noqa: E731
    ((title, told),) = found(reference, lambda te: Patches(te.Linear, tokens, patch_rows=rows), patches)
    assert (title, message in told) == ("embedding-position", True)


@pytest.mark.parametrize(("reference", "port"), [(True, False), (False, True)])
def test_buckets_of_the_other_kind_are_found(reference, port):
    def candidate(te):
        core = te.DotProductAttention(HEADS, 16, qkv_format="bshd", attention_dropout=0.0, attn_mask_type="no_mask")

        def with_bias(query, key, value, bias):
            return core(query, key, value, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)

        return Distances(with_bias, port)

    title, message = found(lambda: Distances(written_out, reference), candidate, heads)[0]
    assert title == "attention-bias"
    assert f"in {'both directions' if port else 'one direction'}" in message


def test_right_lookups_are_none_to_tell():
    assert of_embedded() == [("passed", "")]
