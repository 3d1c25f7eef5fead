"""Mistakes in tables whose rows a reference looks up, or adds by position: ports take other rows.

Learned positions begin at 2 in OPT and RoBERTa; positions may leave out padding; a table may begin with the class
token's row; T5 looks up buckets of distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.mistakes.hypothesis import Hypothesis, Mistake, everywhere_and_somewhere
from parity.trace.trace import RESHAPES, Call, Edit, Trace, Value, back, binary, edit

Reindex = Callable[[Tensor], Tensor]

_SHIFTS = (-2, -1, 1, 2)
_FEW_ROWS = 32  # a table with no more rows is of token types or segments, not of words
_SPECIAL_TOKENS = (1, 2, 5)  # of ViT's: the class token, DeiT's two, the class token and four registers
_FARTHEST = (16, 32, 64, 128, 256, 512, 1024)  # T5 puts all distances from this one on into one bucket; its own is 128


@dataclass(frozen=True, eq=False)
class Lookup:
    """``call`` returns the rows of ``table`` that ``index`` names.

    Attributes:
        call: of ``embedding``, or an indexing.
        table: a parameter, ``[rows, ...]``.
        index: integers of any shape.
        rows: of the table.
        traced: the index of the traced pass.
        padding: the row that gets no gradient; None where each has one.
    """

    call: Call
    table: Value
    index: Value
    rows: int
    traced: Tensor
    padding: int | None = None

    def edits(self, change: Reindex) -> tuple[Edit, ...]:
        """Return the edits that look up a changed index; empty if it is the same or leaves the table."""
        changed = change(self.traced)
        if torch.equal(changed, self.traced) or bool(((changed < 0) | (changed >= self.rows)).any()):
            return ()
        return (
            edit(
                self.call,
                (self.table, self.index),
                lambda was, table, index: _rows(table, change(index), self.padding).to(was.dtype),
            ),
        )


@dataclass(frozen=True, eq=False)
class Addition:
    """``call`` adds ``table`` ``[..., positions, width]``, a parameter or part of one."""

    call: Call
    table: Value
    positions: int

    def edits(self, change: Callable[[Tensor], Tensor]) -> tuple[Edit, ...]:
        """Return the edits that add a changed table."""
        return (edit(self.call, (self.table,), lambda was, table: was + (change(table) - table).to(was.dtype)),)


def lookups(trace: Trace) -> list[Lookup]:
    """Return every lookup in a parameter's rows, in order."""
    return [lookup for call in trace.calls if (lookup := _lookup(trace, call)) is not None]


def additions(trace: Trace) -> list[Addition]:
    """Return every addition of a table, in order."""
    found = []
    for call in trace.calls:
        match binary(call):
            case ("add", left, right):
                tables = [x for x in (left, right) if isinstance(x, Value) and _is_of_parameter(trace, x)]
                shapes = [(table, shape) for table in tables if len(shape := trace.tensor(table).shape) > 1]
                found += [Addition(call, table, shape[-2]) for table, shape in shapes if min(shape[-2:]) > 1]
    return found


def lookup_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's lookups."""
    found = lookups(trace)
    by_position = [one for one in found if _are_positions(one.traced)]
    mistakes = [*map(_shifted, _SHIFTS), *map(_counted_from, range(3))]
    yield from everywhere_and_somewhere(mistakes, by_position, lambda one: one.call.module)
    ids = [one for one in found if one not in by_position]
    others = [*map(_other_ids, (-1, 1)), *_ids_of_other_positions()]
    yield from everywhere_and_somewhere(others, ids, lambda one: one.call.module)
    few = [one for one in found if one.rows < _FEW_ROWS]
    yield from everywhere_and_somewhere([_first_row()], few, lambda one: one.call.module)
    for one in found:
        yield from everywhere_and_somewhere(_other_buckets(one.traced, one.rows), [one])
    yield from everywhere_and_somewhere(_of_two_axes(), found, lambda one: one.call.module)
    added = [
        *map(_rolled, (-1, 1)),
        *map(_grid_turned, range(2)),
        *map(_without_first, _SPECIAL_TOKENS),
        *map(_from_position, _SPECIAL_TOKENS),
    ]
    yield from everywhere_and_somewhere(added, additions(trace), lambda one: one.call.module)


def buckets_of(distances: Tensor, buckets: int, farthest: int, both_directions: bool) -> Tensor:
    """Return T5's buckets of distances: near ones have a bucket each, far ones share them by logarithm
    (arXiv 1910.10683).

    Args:
        distances: the key's position less the query's, integers.
        buckets: how many there are.
        farthest: the distance from which on all are in the last bucket.
        both_directions: whether keys after their query have half of the buckets; else they are in the first.
    """
    first = torch.zeros_like(distances)
    if both_directions:
        buckets //= 2
        first = buckets * (distances > 0)
    away = distances.abs() if both_directions else (-distances).clamp(min=0)
    near = buckets // 2
    logarithm = (away.clamp(min=1).float() / near).log() / math.log(farthest / near)
    far = (near + (logarithm * (buckets - near)).long()).clamp(max=buckets - 1)
    return first + torch.where(away < near, away, far)


def _is_of_parameter(trace: Trace, value: Value) -> bool:
    return trace.parameter(back(trace, value, RESHAPES | {"getitem", "expand"})) is not None


def _rows(table: Tensor, index: Tensor, padding: int | None) -> Tensor:
    return F.embedding(index, table, padding) if table.dim() == 2 else table[index]


def _lookup(trace: Trace, call: Call) -> Lookup | None:
    if len(call.args) < 2 or call.name not in ("embedding", "getitem"):
        return None
    table, index = call.args[:2] if call.name == "getitem" else call.args[1::-1]
    if trace.parameter(table) is None or not isinstance(index, Value):
        return None
    traced, rows = trace.tensor(index), trace.tensor(table).shape[0]
    padding = call.args[2] if len(call.args) > 2 else call.kwargs.get("padding_idx")
    return Lookup(call, table, index, rows, traced, padding) if traced.dtype in (torch.int64, torch.int32) else None


def _are_positions(index: Tensor) -> bool:
    """Return whether most ids go up by one along a sequence."""
    return index.dim() in (1, 2) and index.shape[-1] > 2 and (index.diff() == 1).double().mean().item() > 0.5


def _shifted(by: int) -> Mistake[Lookup]:
    return Mistake(
        "embedding-position",
        f"positions off by {by:+d}",
        f"look up the positions that the reference does; the port's are off by {by:+d}",
        lambda one: one.edits(lambda index: index + by),
    )


def _other_ids(by: int) -> Mistake[Lookup]:
    """Return the mistake that ids are off by a number, as if one side alone counted a vocabulary's special tokens."""
    return Mistake(
        "embedding-position",
        f"ids off by {by:+d}",
        f"look up the rows whose ids the reference is given; the port's are off by {by:+d}",
        lambda one: one.edits(lambda index: (index + by).clamp(0, one.rows - 1)),
    )


def _ids_of_other_positions() -> Iterator[Mistake[Lookup]]:
    """Yield ids of other positions, as if inputs had been shifted for labels once too often or not at all."""
    moves: dict[str, Reindex] = {
        "the position before": lambda index: index.roll(1, -1),
        "the position after": lambda index: index.roll(-1, -1),
        "the position before, 0 for the first": lambda index: F.pad(index, (1, 0))[..., :-1],
    }
    for described, move in moves.items():
        yield Mistake(
            "embedding-position",
            f"ids of {described}",
            f"look up the row of each position's own id, as the reference does; the port takes that of {described}",
            lambda one, move=move: one.edits(move) if one.traced.dim() > 0 else (),  # type: ignore[misc]
        )


def _first_row() -> Mistake[Lookup]:
    """Return the mistake that the first row is taken for all, as if token types had not been passed on."""
    return Mistake(
        "embedding-position",
        "first row for all",
        "look up the rows that the reference does (pass token types, segments); the port takes the first one for all",
        lambda one: one.edits(torch.zeros_like),
    )


def _counted_from(first: int) -> Mistake[Lookup]:
    """Return the mistake that positions are counted without regard to padding, which the reference's leave out."""
    return Mistake(
        "embedding-position",
        f"positions from {first} on",
        f"count positions as the reference does, where it leaves some out; they count from {first} on without a gap",
        lambda one: one.edits(lambda index: (first + torch.arange(index.shape[-1]).to(index)).expand_as(index)),
    )


def _rolled(by: int) -> Mistake[Addition]:
    return Mistake(
        "embedding-position",
        f"table rolled by {by:+d}",
        f"add the row of each position that the reference does; the port's are off by {-by:+d}",
        lambda one: one.edits(lambda table: table.roll(by, -2)),
    )


def _without_first(count: int) -> Mistake[Addition]:
    """Return the mistake that the first positions get none, as if special tokens came in front after the sum."""
    return Mistake(
        "embedding-position",
        f"table without its first {count}",
        f"add the table's rows to special tokens, too, as the reference does; the first {count} positions get none",
        lambda one: one.edits(lambda table: _after(count, table[..., count:, :], table)),
    )


def _from_position(count: int) -> Mistake[Addition]:
    """Return the mistake that the table begins after the first positions, as if it were of the patches alone."""
    return Mistake(
        "embedding-position",
        f"table from position {count} on",
        f"add the row of each position that the reference does; the first {count} get none, the table begins after "
        "them",
        lambda one: one.edits(lambda table: _after(count, table[..., :-count, :], table)),
    )


def _after(count: int, rows: Tensor, table: Tensor) -> Tensor:
    """Put zeros for so many positions before the rows."""
    return torch.cat((torch.zeros_like(table[..., :count, :]), rows), -2)


def _of_two_axes() -> Iterator[Mistake[Lookup]]:
    """Yield a table of relative positions read with query and key, or with rows and columns, exchanged."""
    yield Mistake(
        "attention-bias",
        "relative positions of the other sign",
        "look up the relative position of query and key as the reference does; the port exchanges the two",
        lambda one: one.edits(_turned) if _side(one.traced.numel()) > 1 else (),
    )
    yield Mistake(
        "attention-bias",
        "row and column of a table exchanged",
        "number a table's rows as the reference does; that of a position in two dimensions is (column, row)",
        lambda one: one.edits(lambda index: index % side * side + index // side) if (side := _side(one.rows)) else (),
    )


def _turned(index: Tensor) -> Tensor:
    """Return the transpose of a square index, which may be flattened."""
    side = _side(index.numel())
    return index.reshape(side, side).T.reshape(index.shape) if side else index


def _side(count: int) -> int:
    """Return the side of a square of so many places; 0 if they make no square."""
    side = math.isqrt(count)
    return side if side * side == count else 0


def _grid_turned(before: int) -> Mistake[Addition]:
    """Return the mistake that patches come column by column: a square table of positions, behind ``before`` others, is
    transposed.
    """

    def turned(table: Tensor) -> Tensor:
        first, grid = table.split((before, table.shape[-2] - before), -2)
        side = _side(grid.shape[-2])
        return torch.cat((first, grid.unflatten(-2, (side, side)).transpose(-3, -2).flatten(-3, -2)), -2)

    return Mistake(
        "embedding-position",
        f"rows and columns of positions exchanged{f', but for the first {before}' if before else ''}",
        "add the position of each patch as the reference does; the port exchanges their rows and columns",
        lambda one: one.edits(turned) if _side(one.positions - before) > 1 else (),
    )


def _other_buckets(index: Tensor, rows: int) -> Iterator[Mistake[Lookup]]:
    """Yield T5's buckets with other settings, where the index is T5's bucket of each distance."""
    if index.dim() < 2 or rows < 8:
        return
    queries, keys = index.shape[-2:]
    distances = torch.arange(keys) - torch.arange(queries)[:, None]

    def buckets(settings: tuple[bool, int, int]) -> Tensor:
        both_directions, farthest, count = settings
        return buckets_of(distances, count, farthest, both_directions).expand(index.shape).to(index)

    counts = (rows, rows // 2) if rows >= 16 else (rows,)
    known = [setting for setting in product((True, False), _FARTHEST, counts) if setting[1] > setting[2] // 2]
    right = next((settings for settings in known if torch.equal(buckets(settings), index)), None)
    if right is None:
        return
    for settings in known:
        both_directions, farthest, count = settings
        described = f"of distances in {'both directions' if both_directions else 'one direction'} up to {farthest}"
        described += f", {count} in number" if count != right[2] else ""
        yield Mistake(
            "attention-bias",
            f"buckets {described}",
            f"make the buckets of relative positions as the reference does; the port's are those {described}",
            lambda one, settings=settings: one.edits(lambda index: buckets(settings)),  # type: ignore[misc]
        )
