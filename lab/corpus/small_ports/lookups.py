"""Embeddings and tables: wrong rows, ids that are off, positions that begin elsewhere, and padding rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small import Host, normal, twins
from parity.case.case import Rng
from parity.mistakes.lookups import buckets_of

HIDDEN, SEQ, HEADS = 64, 24, 4
VOCABULARY, PADDING = 32, 3

# Sums of tokens, positions and types; a position table for class tokens and patches; a bias by T5's buckets.


class Embedded(nn.Module):
    """Tokens, positions and types in front of a linear layer. As in RoBERTa, position 1 is the padding's."""

    def __init__(self, linear: Any, first: int = 2, over_padding: bool = False, types: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(40, HIDDEN, padding_idx=1)
        self.types = nn.Embedding(2, HIDDEN)
        self.linear = linear(HIDDEN, HIDDEN)
        self.first, self.over_padding, self.adds_types = first, over_padding, types

    def forward(self, ids: Tensor) -> Tensor:
        counted = torch.ones_like(ids) if self.over_padding else ids > 0
        x = self.tokens(ids) + self.positions((counted.cumsum(1) - 1).clamp(min=0) + self.first)
        return self.linear(x + self.types(torch.zeros_like(ids)) if self.adds_types else x)


class Patches(nn.Module):
    """Class tokens in front of patches, with a table of positions that is added to both, as in ViT."""

    def __init__(
        self,
        linear: Any,
        tokens: int = 1,
        normed: bool = False,
        roll: int = 0,
        adds: bool = True,
        patch_rows: slice | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN) if normed else nn.Identity()
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
        self.bias, self.core = nn.Embedding(16, HEADS), core
        self.both_directions, self.buckets, self.farthest = both_directions, buckets, farthest

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        distances = torch.arange(SEQ) - torch.arange(SEQ)[:, None]
        buckets = buckets_of(distances, self.buckets, self.farthest, self.both_directions)
        return self.core(query, key, value, self.bias(buckets).permute(2, 0, 1)[None])


def written_out(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + bias
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def tes_distances(te: Any, **settings: Any) -> nn.Module:
    core = te.DotProductAttention(HEADS, 16, qkv_format="bshd", attention_dropout=0.0, attn_mask_type="no_mask")

    def with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return core(query, key, value, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)

    return Distances(with_bias, **settings)


def ids_behind_padding(rng: Rng) -> Tensor:
    """Return two sequences, the first without padding and the second with one padding token in front."""
    tokens = rng.integers(2, SEQ, low=1, high=VOCABULARY)
    return tokens.masked_fill(torch.arange(SEQ) < torch.arange(2)[:, None], 0)


EMBEDDED = twins(Embedded, ids_behind_padding)
PATCHES = twins(Patches, normal((2, SEQ, HIDDEN)))
OF_FIVE_TOKENS = twins(Patches, normal((2, SEQ, HIDDEN)), "patches_behind_five_tokens", settings=dict(tokens=5))
NORMED = twins(Patches, normal((2, SEQ, HIDDEN)), "patches_before_norm", settings=dict(normed=True))


def distances(name: str, **settings: Any) -> Host:
    drawn = normal(*[(2, SEQ, HEADS, 16)] * 3)
    return Host(name, lambda **given: Distances(written_out, **given), tes_distances, drawn, settings)


FAR, ONE_WAY = distances("distances"), distances("distances_one_way", both_directions=False)
NEAR = distances("distances_up_to_20", farthest=20)

# Ids that are off by one, or that belong to another position; padding rows, which get no gradient, on only one side.


class Tokens(nn.Module):
    """Logits of tokens and those before; a port may have a padding row that the reference lacks, or other ids."""

    def __init__(
        self, linear: Any, tied: bool = False, padding: int | None = None, ids: Callable[[Tensor], Tensor] = torch.clone
    ) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(VOCABULARY, HIDDEN, padding), linear(HIDDEN, HIDDEN)
        self.head, self.ids = None if tied else linear(HIDDEN, VOCABULARY), ids

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(self.ids(ids))
        x = F.silu(self.up(x + x.cumsum(1) / SEQ))
        return self.head(x) if self.head else F.linear(x, self.tokens.weight)


def ids(rng: Rng) -> Tensor:
    return rng.integers(4, SEQ, low=1, high=VOCABULARY - 1)


TOKENS, TIED = twins(Tokens, ids), twins(Tokens, ids, "tied_tokens", settings=dict(tied=True))
WITH_ROW, TIED_WITH_ROW = (
    twins(Tokens, ids, name, settings=dict(tied="tied" in name, padding=PADDING))
    for name in ("padding_row", "tied_padding_row")
)

PORTS = (
    *(host.right() for host in (EMBEDDED, PATCHES, TOKENS, TIED, WITH_ROW, TIED_WITH_ROW)),
    EMBEDDED.wrong("embedding-position", "off by -2", first=0),
    EMBEDDED.wrong("embedding-position", "off by +1", first=3),
    EMBEDDED.wrong("embedding-position", "from 2 on without a gap", over_padding=True),
    EMBEDDED.wrong("no-gradient", 'if you use "types.weight"', types=False),
    PATCHES.wrong("embedding-position", roll=1),
    PATCHES.wrong("embedding-position", roll=-1),
    PATCHES.wrong("no-gradient", adds=False),
    NORMED.wrong("no-gradient", "as if it were 0", adds=False),
    *(
        host.wrong(
            "embedding-position",
            "the table begins after them",
            name="patches get the first rows",
            patch_rows=slice(SEQ),
        )
        for host in (PATCHES, OF_FIVE_TOKENS)
    ),
    OF_FIVE_TOKENS.wrong(
        "embedding-position",
        "add the table's rows to special tokens, too",
        name="patches alone get rows",
        patch_rows=slice(5, None),
    ),
    FAR.wrong("attention-bias", "in one direction", both_directions=False),
    FAR.wrong("attention-bias", "in both directions up to 128, 8 in number.", buckets=8),
    ONE_WAY.wrong("attention-bias", "in both directions", both_directions=True),
    NEAR.wrong("attention-bias", "in one direction up to 20", both_directions=False),
    NEAR.wrong("attention-bias", "in both directions up to 128", farthest=128),
    TOKENS.wrong("embedding-position", "the port's are off by +1.", name="ids + 1", ids=lambda ids: ids + 1),
    TOKENS.wrong(
        "embedding-position",
        "the port takes that of the position before.",
        name="ids of the position before",
        ids=lambda ids: ids.roll(1, -1),
    ),
    TOKENS.wrong(
        "embedding-position",
        "the port takes that of the position after.",
        name="ids of the position after",
        ids=lambda ids: ids.roll(-1, -1),
    ),
    TOKENS.wrong(
        "embedding-position",
        "the port takes that of the position before, 0 for the first.",
        name="ids shifted in",
        ids=lambda ids: F.pad(ids, (1, 0))[:, :-1],
    ),
    *(
        host.wrong("padding-row", "give the embedding of tokens.weight padding_idx=3", padding=None)
        for host in (WITH_ROW, TIED_WITH_ROW)
    ),
    *(
        host.wrong("padding-row", "leave out padding_idx=3 of the embedding of tokens.weight", padding=PADDING)
        for host in (TOKENS, TIED)
    ),
)
