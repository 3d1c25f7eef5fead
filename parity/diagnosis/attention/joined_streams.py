"""Attention to keys of several streams that are joined, and ports in which a stream does not see all of them.

Text and image in MMDiT and Flux, tokens of a prompt before those of a sequence, a class token before patches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from parity.diagnosis.attention.attention import Attention, attentions, heads_of
from parity.diagnosis.attention.masks import HIDDEN
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.walk import ancestors
from parity.watching.trace import Edit, Trace, Value

_JOINS = frozenset({"cat", "concat", "concatenate"})
_NEAR = 32  # of a key's ancestors, among which streams are joined
_MOST = 3  # streams

_Blocks = frozenset[tuple[int, int]]  # which stream's queries do not see which stream's keys


@dataclass(frozen=True, eq=False)
class _Joined:
    """Attention to several streams.

    Attributes:
        attention: to all of them.
        keys: how many there are of each stream, in order.
        queries: ditto; a single number where they are not joined.
    """

    attention: Attention
    keys: tuple[int, ...]
    queries: tuple[int, ...]

    def edits(self, blocks: _Blocks) -> tuple[Edit, ...]:
        """Queries of some streams are not to see keys of some."""

        def hiding(bias: Tensor) -> Tensor:
            hidden = torch.zeros_like(bias, dtype=torch.bool)
            for query, key in blocks:
                rows, columns = _slice(self.queries, query), _slice(self.keys, key)
                hidden[..., rows, columns] = True
            return bias.masked_fill(hidden, HIDDEN)

        return self.attention.edits(mask=hiding)


def joined_stream_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """That a stream's queries see their own keys alone, that all do, or that no query sees a stream's keys."""
    alike: dict[tuple[int, int], list[_Joined]] = defaultdict(list)
    for attention in attentions(trace):
        joined = _joined(trace, attention)
        if joined is not None:
            alike[len(joined.queries), len(joined.keys)].append(joined)
    for (queries, keys), some in alike.items():
        yield from everywhere_and_somewhere(
            _mistakes(queries, keys), some, module, lambda one: one.attention.call.module
        )


def _mistakes(queries: int, keys: int) -> Iterator[Mistake[_Joined]]:
    """Of so many streams of queries, as many as of keys or one, and so many of keys."""
    others = {i: frozenset((i, j) for j in range(keys) if j != i) for i in range(queries if queries == keys else 0)}
    if others:
        yield _hiding(
            "those of each stream see its own keys alone", frozenset[tuple[int, int]]().union(*others.values())
        )
    for number, blocks in others.items():
        yield _hiding(f"those of stream {number + 1} see its own keys alone", blocks)
    for number in range(keys):
        yield _hiding(f"none sees the keys of stream {number + 1}", frozenset((i, number) for i in range(queries)))


def _hiding(described: str, blocks: _Blocks) -> Mistake[_Joined]:
    return Mistake(
        "mask",
        described,
        f"let queries see the keys of all streams that the reference joins, in its order; {described}",
        lambda one: one.edits(blocks),
    )


def _joined(trace: Trace, attention: Attention) -> _Joined | None:
    query, key, _ = heads_of(trace, attention)
    keys = _lengths(trace, attention.key, key.shape[-2])
    if keys is None or len(keys) > _MOST:
        return None
    queries = _lengths(trace, attention.query, query.shape[-2])
    return _Joined(
        attention, keys, queries if queries is not None and len(queries) == len(keys) else query.shape[-2:-1]
    )


def _lengths(trace: Trace, value: Value, seq: int) -> tuple[int, ...] | None:
    """Of the streams that are joined to so many positions, the nearest to a value; None where none are."""
    for made in (value, *ancestors(trace, value, _NEAR)):
        call = trace.producer(made)
        if call is not None and call.name in _JOINS and len(call.inputs) > 1:
            shapes = [trace.tensor(part).shape for part in call.inputs]
            axes = [i for i, size in enumerate(trace.tensor(made).shape[:-1]) if size == seq]
            for axis in axes:
                lengths = tuple(shape[axis] for shape in shapes if len(shape) > axis)
                if len(lengths) == len(shapes) and sum(lengths) == seq:
                    return lengths
    return None


def _slice(lengths: tuple[int, ...], number: int) -> slice:
    ends = list(accumulate(lengths))
    return slice(ends[number] - lengths[number], ends[number])
