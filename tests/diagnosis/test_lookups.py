"""Embeddings and tables: wrong rows, ids that are off, positions that begin elsewhere, and padding rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

from parity.case.case import Rng
from parity.mistakes.lookups import buckets_of

# Sums of tokens, positions and types; a position table for class tokens and patches; a bias by T5's buckets.

HIDDEN, TOKENS, POSITIONS, SEQ, HEADS = 64, 100, 40, 24, 4


class Embedded(nn.Module):
    """Tokens, positions and types in front of a linear layer. As in RoBERTa, position 1 is the padding's."""

    def __init__(self, linear: Any, first: int = 2, over_padding: bool = False, types: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, HIDDEN), nn.Embedding(POSITIONS, HIDDEN, padding_idx=1)
        self.types = nn.Embedding(2, HIDDEN)
        self.linear = linear(HIDDEN, HIDDEN)
        self.first, self.over_padding, self.adds_types = first, over_padding, types

    def forward(self, ids: Tensor) -> Tensor:
        is_token = ids > 0
        counted = torch.ones_like(ids) if self.over_padding else is_token
        x = self.tokens(ids) + self.positions((counted.cumsum(1) - 1).clamp(min=0) + self.first)
        return self.linear(x + self.types(torch.zeros_like(ids)) if self.adds_types else x)


class Patches(nn.Module):
    """Class tokens in front of patches, with a table of positions that is added to both, as in ViT."""

    def __init__(
        self,
        linear: Any,
        tokens: int = 1,
        roll: int = 0,
        adds: bool = True,
        patch_rows: slice | None = None,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.norm = norm(HIDDEN) if norm else nn.Identity()
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
        return self.linear(self.norm(x + table if self.adds else x))


class Distances(nn.Module):
    """Attention with a bias of scores by T5's buckets."""

    def __init__(self, core: Any, both_directions: bool = True, buckets: int = 16, farthest: int = 128) -> None:
        super().__init__()
        self.bias = nn.Embedding(16, HEADS)
        self.core, self.both_directions, self.buckets, self.farthest = core, both_directions, buckets, farthest

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        distances = torch.arange(SEQ) - torch.arange(SEQ)[:, None]
        bias = self.bias(buckets_of(distances, self.buckets, self.farthest, self.both_directions)).permute(2, 0, 1)[
            None
        ]
        return self.core(query, key, value, bias)


def written_out(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + bias
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def ids_behind_padding(rng: Rng) -> Tensor:
    """Return two sequences, the first without padding and the second with one padding token in front."""
    tokens = rng.integers(2, SEQ, low=1, high=TOKENS)
    return tokens.masked_fill(torch.arange(SEQ) < torch.arange(2)[:, None], 0)


@pytest.mark.parametrize(
    ("port", "title", "phrase"),
    [
        ({}, "passed", ""),
        (dict(first=0), "embedding-position", "off by -2"),
        (dict(first=1), "embedding-position", "off by -1"),
        (dict(first=3), "embedding-position", "off by +1"),
        (dict(over_padding=True), "embedding-position", "from 2 on without a gap"),
        (dict(types=False), "no-gradient", 'if you use "types.weight"'),
    ],
)
def test_positions_that_begin_elsewhere_and_types_that_are_not_added_are_told(port, title, phrase):
    tells_only(twins(Embedded, port, ids_behind_padding), title, phrase)


@pytest.mark.parametrize(
    ("port", "title"),
    [
        ({}, "passed"),
        (dict(roll=1), "embedding-position"),
        (dict(roll=-1), "embedding-position"),
        (dict(adds=False), "no-gradient"),
    ],
)
def test_a_table_that_is_added_otherwise_is_told(port, title):
    tells(twins(Patches, port, normal((2, SEQ, HIDDEN))), title)


def test_a_table_that_is_left_out_before_a_norm_is_not_told_as_ones():
    norm = dict(norm=nn.LayerNorm)
    result = twins(Patches, norm | dict(adds=False), normal((2, SEQ, HIDDEN)), right=norm)
    tells_only(result, "no-gradient", "as if it were 0")


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("first", "phrase"), [(0, "the table begins after them"), (1, "add the table's rows to special tokens, too")]
)
def test_a_table_that_special_tokens_do_not_get_is_told(first, phrase, tokens):
    rows = slice(first * tokens, first * tokens + SEQ)
    result = twins(Patches, dict(patch_rows=rows), normal((2, SEQ, HIDDEN)), right=dict(tokens=tokens))
    tells_only(result, "embedding-position", phrase)


@pytest.mark.parametrize(
    ("right", "port", "phrase"),
    [
        (dict(), dict(both_directions=False), "in one direction"),
        (dict(both_directions=False), dict(both_directions=True), "in both directions"),
        (dict(), dict(buckets=8), "in both directions up to 128, 8 in number."),
        (dict(farthest=20), dict(both_directions=False), "in one direction up to 20"),
        (dict(farthest=20), dict(farthest=128), "in both directions up to 128"),
    ],
)
def test_other_buckets_are_told(right, port, phrase):
    def candidate(te: Any) -> nn.Module:
        options = dict(qkv_format="bshd", attention_dropout=0.0, attn_mask_type="no_mask")
        core = te.DotProductAttention(HEADS, 16, **options)

        def with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
            return core(query, key, value, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)

        return Distances(with_bias, **right | port)

    result = compared(lambda: Distances(written_out, **right), candidate, normal(*[(2, SEQ, HEADS, 16)] * 3))
    tells(result, "attention-bias", phrase)


# Ids that are off by one, or that belong to another position.

VOCABULARY, WIDTH, IDS = 64, 48, 15
Ids = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, linear: Any, ids: Ids = torch.clone) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(VOCABULARY, WIDTH), linear(WIDTH, WIDTH)
        self.head, self.ids = linear(WIDTH, VOCABULARY), ids

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(self.ids(ids))
        return self.head(F.silu(self.up(x + x.cumsum(1) / IDS)))


@in_turn(
    ("ids", "title", "phrase"),
    [
        (torch.clone, "passed", ""),
        (lambda ids: ids + 1, "embedding-position", "the port's are off by +1."),
        (lambda ids: ids - 1, "embedding-position", "the port's are off by -1."),
        (lambda ids: ids.roll(1, -1), "embedding-position", "the port takes that of the position before."),
        (lambda ids: ids.roll(-1, -1), "embedding-position", "the port takes that of the position after."),
        (
            lambda ids: F.pad(ids, (1, 0))[:, :-1],
            "embedding-position",
            "the port takes that of the position before, 0 for the first.",
        ),
    ],
)
def test_other_ids_are_told(ids, title, phrase, precision):
    inputs = lambda rng: 1 + rng.integers(2, IDS, high=VOCABULARY - 2)  # noqa: E731
    tells(twins(Model, dict(ids=ids), inputs, precision), title, phrase)


# Padding rows, which get no gradient, on only one side.

ROWS, PADDING = 32, 3


class Padded(nn.Module):
    """Looks tokens up, with or without a padding row; if ``tied``, the logits use the table as well."""

    def __init__(self, linear: Any, padding_idx: int | None, tied: bool) -> None:
        super().__init__()
        self.table, self.layer, self.tied = nn.Embedding(ROWS, HIDDEN, padding_idx), linear(HIDDEN, HIDDEN), tied

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.table(ids))
        return nn.functional.linear(x, self.table.weight) if self.tied else x


@in_turn(
    ("tied", "right", "port", "title", "phrase"),
    [
        (tied, *row)
        for tied in (False, True)
        for row in (
            (PADDING, PADDING, "passed", ""),
            (PADDING, None, "padding-row", f"give the embedding of table.weight padding_idx={PADDING}"),
            (None, PADDING, "padding-row", f"leave out padding_idx={PADDING} of the embedding of table.weight"),
        )
    ],
)
def test_a_padding_row_that_one_side_lacks_is_told(tied, right, port, title, phrase, precision):
    inputs = lambda rng: rng.integers(4, 32, high=ROWS)  # noqa: E731
    result = twins(Padded, dict(padding_idx=port), inputs, precision, right=dict(padding_idx=right, tied=tied))
    tells_only(result, title, phrase)
