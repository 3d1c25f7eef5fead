"""Mistakes in tables whose rows a reference looks up or adds by position: ports take other rows.

Learned positions begin at 2 in OPT and RoBERTa; positions may leave out padding; a table may begin with the class
token's row; T5 looks up buckets of distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.mistakes.hypothesis import Hypothesis, Mistake, at_each_scope
from parity.mistakes.usual_numbers import USUAL
from parity.trace.trace import RESHAPES, Call, Edit, Trace, Value, argument, back, binary, edit, instead, once_a_trace

Reindex = Callable[[Tensor], Tensor]

_SHIFTS = (-2, -1, 1, 2)
_FEW_ROWS = 32  # a table with fewer rows is one of token types or segments, not of words
_SAME_ROWS = RESHAPES | {"getitem", "expand"}


@dataclass(frozen=True, eq=False)
class Lookup:
    """``call`` returns the rows of ``table`` that ``index`` names.

    Attributes:
        call: a call of ``embedding``, or an indexing.
        table: a parameter, ``[rows, ...]``.
        index: integers of any shape.
        rows: how many the table has.
        traced: the index in the traced pass.
        padding: the row that gets no gradient; None if every row gets one.
    """

    call: Call
    table: Value
    index: Value
    rows: int
    traced: Tensor
    padding: int | None = None

    def edits(self, change: Reindex) -> tuple[Edit, ...]:
        """Return the edits that look up a changed index; empty if it is the same or outside the table."""
        changed = change(self.traced)
        if torch.equal(changed, self.traced) or bool(((changed < 0) | (changed >= self.rows)).any()):
            return ()

        def rows(table: Tensor, index: Tensor) -> Tensor:
            return F.embedding(change(index), table, self.padding) if table.dim() == 2 else table[change(index)]

        return (instead(self.call, (self.table, self.index), rows),)


@dataclass(frozen=True, eq=False)
class Addition:
    """``call`` adds ``table`` ``[..., positions, width]``, a parameter or part of one."""

    call: Call
    table: Value
    positions: int

    def edits(self, change: Callable[[Tensor], Tensor]) -> tuple[Edit, ...]:
        """Return the edits that add a changed table."""
        return (edit(self.call, (self.table,), lambda was, table: was + (change(table) - table).to(was.dtype)),)


@once_a_trace
def lookups(trace: Trace) -> list[Lookup]:
    """Return every lookup of a parameter's rows, in order."""
    return [lookup for call in trace.calls if (lookup := _lookup(trace, call)) is not None]


def additions(trace: Trace) -> list[Addition]:
    """Return every addition of a table, in order."""
    found = []
    for call in trace.calls:
        match binary(call):
            case ("add", left, right):
                tables = [x for x in (left, right) if trace.parameter(back(trace, x, _SAME_ROWS))]
                shapes = [(table, shape) for table in tables if len(shape := trace.tensor(table).shape) > 1]
                found += [Addition(call, table, shape[-2]) for table, shape in shapes if min(shape[-2:]) > 1]
    return found


def lookup_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's lookups."""
    found = lookups(trace)
    by_position = [one for one in found if _are_positions(one.traced)]
    yield from at_each_scope(_of_positions(), by_position, lambda one: one.call.module)
    ids = [one for one in found if one not in by_position]
    yield from at_each_scope(_of_ids(), ids, lambda one: one.call.module)
    few = [one for one in found if one.rows < _FEW_ROWS]
    first_row = _looked_up(
        "first row for all",
        "look up the rows that the reference does (pass token types, segments); the port takes the first one for all",
        torch.zeros_like,
    )
    yield from at_each_scope([first_row], few, lambda one: one.call.module)
    for one in found:
        yield from at_each_scope(_other_buckets(one.traced, one.rows), [one])
    yield from at_each_scope(_of_two_axes(), found, lambda one: one.call.module)
    yield from at_each_scope(_of_tables(), additions(trace), lambda one: one.call.module)


def buckets_of(distances: Tensor, buckets: int, farthest: int, both_directions: bool) -> Tensor:
    """Return T5's buckets: one for each small distance, and logarithmic ones for large distances (arXiv 1910.10683).

    Args:
        distances: the key's position minus the query's, integers.
        buckets: how many there are.
        farthest: all distances from this one on are in the last bucket.
        both_directions: whether keys after their query get half of the buckets; otherwise they are in the first one.
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


def _lookup(trace: Trace, call: Call) -> Lookup | None:
    if len(call.args) < 2 or call.name not in ("embedding", "getitem"):
        return None
    table, index = call.args[:2] if call.name == "getitem" else call.args[1::-1]
    if trace.parameter(table) is None or not isinstance(index, Value):
        return None
    traced, rows = trace.tensor(index), trace.tensor(table).shape[0]
    padding = argument(call, 2, "padding_idx")
    return Lookup(call, table, index, rows, traced, padding) if traced.dtype in (torch.int64, torch.int32) else None


def _are_positions(index: Tensor) -> bool:
    """Return whether more than half of the ids are one larger than their predecessor in the sequence."""
    return index.dim() in (1, 2) and index.shape[-1] > 2 and (index.diff() == 1).double().mean().item() > 0.5


def _looked_up(name: str, repair: str, change: Reindex) -> Mistake[Lookup]:
    """Return the mistake of looking up rows of other positions or ids."""
    return Mistake("embedding-position", name, repair, lambda one: one.edits(change))


def _of_positions() -> Iterator[Mistake[Lookup]]:
    """Yield positions that are shifted, or that count padding which the reference leaves out."""
    for by in _SHIFTS:
        repair = f"look up the positions that the reference does; the port's are off by {by:+d}"
        yield _looked_up(f"positions off by {by:+d}", repair, lambda index, by=by: index + by)  # type: ignore[misc]
    right = "count positions as the reference does, where it leaves some out"
    for first in range(3):
        yield _looked_up(
            f"positions from {first} on",
            f"{right}; they count from {first} on without a gap",
            lambda index, first=first: (first + torch.arange(index.shape[-1]).to(index)).expand_as(index),  # type: ignore[misc]
        )


def _of_ids() -> Iterator[Mistake[Lookup]]:
    """Yield ids that are off by one, as with special tokens, and ids of other positions, as with shifted labels."""
    for by in (-1, 1):
        yield Mistake(
            "embedding-position",
            f"ids off by {by:+d}",
            f"look up the rows whose ids the reference is given; the port's are off by {by:+d}",
            lambda one, by=by: one.edits(lambda index: (index + by).clamp(0, one.rows - 1)),  # type: ignore[misc]
        )
    moves: dict[str, Reindex] = {
        "the position before": lambda index: index.roll(1, -1),
        "the position after": lambda index: index.roll(-1, -1),
        "the position before, 0 for the first": lambda index: F.pad(index, (1, 0))[..., :-1],
    }
    for described, move in moves.items():
        repair = f"look up the row of each position's own id, as the reference does; the port takes that of {described}"
        yield _looked_up(f"ids of {described}", repair, lambda index, move=move: move(index) if index.dim() else index)  # type: ignore[misc]


def _of_tables() -> Iterator[Mistake[Addition]]:
    """Yield tables of positions that are rolled, transposed, or added to all but the first positions."""
    right = "add the row of each position that the reference does"

    def added(name: str, repair: str, change: Reindex) -> Mistake[Addition]:
        return Mistake("embedding-position", name, repair, lambda one: one.edits(change))

    for by in (-1, 1):
        told = f"{right}; the port's are off by {-by:+d}"
        yield added(f"table rolled by {by:+d}", told, lambda table, by=by: table.roll(by, -2))  # type: ignore[misc]
    yield from map(_grid_turned, range(2))
    for count in USUAL.special_tokens:  # these were put in front after the sum
        told = "add the table's rows to special tokens, too, as the reference does"
        yield added(
            f"table without its first {count}",
            f"{told}; the first {count} positions get none",
            lambda table, count=count: _after(count, table[..., count:, :], table),  # type: ignore[misc]
        )
    for count in USUAL.special_tokens:  # the port's table has rows only for the patches
        yield added(
            f"table from position {count} on",
            f"{right}; in the port, the first {count} get none, and the table begins after them",
            lambda table, count=count: _after(count, table[..., :-count, :], table),  # type: ignore[misc]
        )


def _after(count: int, rows: Tensor, table: Tensor) -> Tensor:
    """Return the rows with ``count`` rows of zeros before them."""
    return torch.cat((torch.zeros_like(table[..., :count, :]), rows), -2)


def _of_two_axes() -> Iterator[Mistake[Lookup]]:
    """Yield tables of relative positions read with query and key, or rows and columns, exchanged."""

    def turned(index: Tensor) -> Tensor:
        side = _side(index.numel())  # the index may be flattened
        return index.reshape(side, side).T.reshape(index.shape) if side else index

    yield Mistake(
        "attention-bias",
        "relative positions of the other sign",
        "look up the relative position of query and key as the reference does; the port exchanges the two",
        lambda one: one.edits(turned) if _side(one.traced.numel()) > 1 else (),
    )
    yield Mistake(
        "attention-bias",
        "row and column of a table exchanged",
        "number a table's rows as the reference does; the port looks up (column, row) for a position (row, column)",
        lambda one: one.edits(lambda index: index % side * side + index // side) if (side := _side(one.rows)) else (),
    )


def _side(count: int) -> int:
    """Return the square root of ``count``; 0 if it is not a whole number."""
    side = math.isqrt(count)
    return side if side * side == count else 0


def _grid_turned(before: int) -> Mistake[Addition]:
    """Return the mistake of numbering patches by columns: rows after the first ``before`` are a transposed square."""

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
    """Yield T5's buckets with other settings, if the index holds T5's buckets."""
    if index.dim() < 2 or rows < 8 or not torch.equal(index[..., 1:, 1:], index[..., :-1, :-1]):
        return
    queries, keys = index.shape[-2:]
    distances = torch.arange(keys) - torch.arange(queries)[:, None]
    # The first column upwards and then the first row hold the bucket of each distance once.
    each = torch.arange(1 - queries, keys)
    there = torch.cat((index[..., :, 0].flip(-1), index[..., 0, 1:]), -1)

    def buckets(settings: tuple[bool, int, int], distances: Tensor = distances) -> Tensor:
        both_directions, farthest, count = settings
        return buckets_of(distances, count, farthest, both_directions).to(index)

    def known(farthest: Iterable[int]) -> Iterator[tuple[bool, int, int]]:
        counts = (rows, rows // 2) if rows >= 16 else (rows,)
        return (setting for setting in product((True, False), farthest, counts) if setting[1] > setting[2] // 2)

    tried = chain(known(USUAL.bucket_distances), known(range(max(USUAL.bucket_distances))))
    right = next((settings for settings in tried if bool((buckets(settings, each) == there).all())), None)
    if right is None:
        return
    for settings in known((right[1], *(one for one in USUAL.bucket_distances if one != right[1]))):
        both_directions, farthest, count = settings
        described = f"of distances in {'both directions' if both_directions else 'one direction'} up to {farthest}"
        described += f", {count} in number" if count != right[2] else ""
        yield Mistake(
            "attention-bias",
            f"buckets {described}",
            f"make the buckets of relative positions as the reference does; the port's are those {described}",
            lambda one, settings=settings: one.edits(lambda index: buckets(settings).expand(index.shape)),  # type: ignore[misc]
        )
