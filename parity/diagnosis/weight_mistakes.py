"""Known mistakes in weight maps: what TE would hold, and the reference would have to hold to agree with it.

Each mistake changes what one entry of the map packs: rows in another order, halves exchanged, a constant for what was
never copied. The change is differentiable, so that gradients with respect to the true parameters come out as the
port's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations, takewhile

from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.weight_terms import (
    InterleavedQKV,
    MisfitError,
    Reorder,
    RopeHalves,
    SeparatedQKV,
    Shape,
    Shift,
    Side,
    Stack,
    Transpose,
    describe,
    names,
    pack,
    shape_of,
    unpack,
)
from parity.weights import WeightMap

_HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)


@dataclass(frozen=True)
class Heads:
    """How an attention's channels are shared out.

    Attributes:
        query: number of query heads.
        groups: number of key and value heads.
        head_dim: channels of one.
        rows: names of the parameters whose rows are a query's, key's or value's channels.
        columns: ditto of those whose columns are the context's.
    """

    query: int
    groups: int
    head_dim: int
    rows: frozenset[str] = frozenset()
    columns: frozenset[str] = frozenset()

    @property
    def all_rows(self) -> int:
        """Of query, key and value in one parameter."""
        return (self.query + 2 * self.groups) * self.head_dim


@dataclass(frozen=True)
class _Change:
    """Another reading of what one entry packs.

    Attributes:
        title, name, repair: as in ``Hypothesis``; the name without the entry's.
        change: from what the entry packs to what TE computes with, the same shape.
    """

    title: str
    name: str
    repair: str
    change: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Changed:
    """An entry of the map with another reading of what it packs."""

    change: _Change
    left: Side
    right: Side

    @property
    def parameter(self) -> str:
        """What TE's module calls its parameter, whichever layer it is of."""
        return next(iter(names(self.right)), "").rpartition(".")[2]


def weight_hypotheses(
    weights: WeightMap, shapes: Mapping[str, Shape], heads: Heads | None, module: nn.Module
) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with one entry of this weight map, or two that were exchanged.

    Args:
        weights: the pair's map.
        shapes: of the reference's parameters, by name.
        heads: of the reference's attention; None where it has none.
        module: the reference.
    """
    for entries in _changes(weights, shapes, heads):
        yield from (_hypothesis([entry], shapes, module) for entry in entries)
    yield from (_exchanged([exchange], shapes, module) for exchange in _exchanges(weights, shapes))


def repeated_weight_hypotheses(
    weights: WeightMap, shapes: Mapping[str, Shape], heads: Heads | None, module: nn.Module
) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with several entries alike; arguments as ``weight_hypotheses``.

    An argument of TE such as ``zero_centered_gamma`` is for all norms of a layer, and layers are ported by one map.
    """
    same: dict[tuple[str, str, int], list[_Changed]] = defaultdict(list)
    for entries in _changes(weights, shapes, heads):
        alike: Counter[tuple[str, str]] = Counter()
        for entry in entries:
            what = entry.change.title, entry.change.name
            key = (*what, alike[what])
            same[key].append(entry)
            alike[what] += 1
    for entries in same.values():
        yield from (_hypothesis(some, shapes, module) for some in _together(entries))
    exchanged: dict[tuple[str, str], list[_Exchange]] = defaultdict(list)
    for exchange in _exchanges(weights, shapes):
        exchanged[exchange.kind].append(exchange)
    for exchanges in exchanged.values():
        if len(exchanges) > 1:
            yield _exchanged(exchanges, shapes, module)


def _changes(weights: WeightMap, shapes: Mapping[str, Shape], heads: Heads | None) -> Iterator[list[_Changed]]:
    """By entry of the map, every other reading of it."""
    for left, right in weights.items():
        if any(names(left)):
            changes = (*_other_terms(left, right, shapes, heads), *_other_values(left, right, shapes, heads))
            yield [_Changed(change, left, right) for change in changes]


def _together(same: Sequence[_Changed]) -> Iterator[list[_Changed]]:
    """Entries that are likely to be misread alike: all, and in all layers those of one of TE's parameters.

    Of queries, keys and values two are rotated.
    """
    by_parameter: dict[str, list[_Changed]] = defaultdict(list)
    for entry in same:
        by_parameter[entry.parameter].append(entry)
    kinds = list(by_parameter.values())
    sizes = (1, 2) if same[0].change.title == "rope-layout" else (1,)
    some = chain.from_iterable(combinations(kinds, size) for size in sizes if size < len(kinds))
    for group in (kinds, *some):
        entries = [entry for kind in group for entry in kind]
        if len(entries) > 1:
            yield entries


def _hypothesis(entries: Sequence[_Changed], shapes: Mapping[str, Shape], module: nn.Module) -> Hypothesis:
    """That these entries are misread, all alike."""
    first, *others = entries
    one = first.change
    where = describe(first.right).strip('"')
    repair = one.repair
    if others:
        where += f" and {len(others)} more"
        repair += f"; likewise for {', '.join(describe(entry.right) for entry in others)}"

    def read(reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
        like = next(iter(reference.values()))
        found: dict[str, Tensor] = {}
        for entry in entries:
            packed = pack(entry.left, reference, like)
            found |= unpack(entry.left, entry.change.change(packed), shapes)
        return found

    return Hypothesis(one.title, f"{one.name} {where}", repair, module, read=read)


def _other_terms(left: Side, right: Side, shapes: Mapping[str, Shape], heads: Heads | None) -> Iterator[_Change]:
    """Other terms of the same packed shape that people take for this one."""
    for title, other in _confused_with(left, shapes, heads):
        try:
            if shape_of(other, shapes) != shape_of(left, shapes):
                continue
        except MisfitError:
            continue
        repair = f"map {describe(other)} to {describe(right)}, in place of {describe(left)}"
        yield _Change(title, title, repair, _from_one_to_other(left, other, shapes))


def _from_one_to_other(left: Side, other: Side, shapes: Mapping[str, Shape]) -> Callable[[Tensor], Tensor]:
    """What the entry packs, read as the other term has it, packed again."""

    def change(packed: Tensor) -> Tensor:
        return pack(left, unpack(other, packed, shapes), packed)

    return change


def _confused_with(left: Side, shapes: Mapping[str, Shape], heads: Heads | None) -> Iterator[tuple[str, Side]]:
    match left:
        case Stack(parts=parts, dim=dim):
            for order in permutations(parts) if len(parts) <= 3 else [parts[::-1]]:
                if order != parts:
                    yield _title_of_order(parts, order), Stack(order, dim)
            if len(parts) == 3:
                for groups, head_dim in _possible_heads(parts, shapes, heads):
                    yield "qkv-layout", InterleavedQKV(parts, groups, head_dim)
        case InterleavedQKV(parts=(query, key, value)):
            yield "qkv-layout", Stack((query, key, value))
            yield "key-value-swapped", InterleavedQKV((query, value, key), left.groups, left.head_dim)
        case SeparatedQKV(parts=(part,)):
            yield "qkv-layout", part
        case RopeHalves(parts=(part,)):
            yield "rope-layout", part
        case Shift(parts=(part,)):
            yield "gamma-shift", part
        case Transpose(parts=(part,)):
            yield "weight-transposed", part
        case Reorder(parts=(part,), order=order):
            yield _title_of_reorder(part, order, shape_of(left, shapes)), part
        case str() if len(shapes[left]) == 1:
            yield "gamma-shift", Shift((left,), -1.0)
            yield "gamma-shift", Shift((left,), 1.0)
        case str() if len(shapes[left]) == 2:
            yield "weight-transposed", Transpose((left,))
    if heads is not None and isinstance(left, str) and shapes[left][:1] == (heads.all_rows,):
        yield "qkv-layout", SeparatedQKV((left,), heads.groups, heads.head_dim)
    if heads is not None and not isinstance(left, RopeHalves) and set(names(left)) <= heads.rows:
        yield "rope-layout", RopeHalves((left,), heads.head_dim, heads.head_dim)


def _title_of_order(parts: tuple[Side, ...], order: tuple[Side, ...]) -> str:
    if len(parts) == 2:
        return "gate-up-swapped"
    return "key-value-swapped" if order == (parts[0], parts[2], parts[1]) else "stacked-in-another-order"


def _title_of_reorder(part: Side, order: tuple[int, ...], shape: Shape) -> str:
    if isinstance(part, Stack):
        return "gate-up-swapped" if len(order) == 2 else "gate-up-interleaved"
    return "heads-transposed" if len(order) in shape else "heads-permuted"


def _possible_heads(
    parts: tuple[Side, ...], shapes: Mapping[str, Shape], heads: Heads | None
) -> Iterator[tuple[int, int]]:
    """Groups and head dimension for query, key and value: those that are known, else each usual one that fits."""
    if heads is not None:
        yield heads.groups, heads.head_dim
        return
    query, key = shape_of(parts[0], shapes)[0], shape_of(parts[1], shapes)[0]
    for head_dim in _HEAD_DIMS:
        if query % head_dim == key % head_dim == 0 and query % key == 0:
            yield key // head_dim, head_dim


def _other_values(left: Side, right: Side, shapes: Mapping[str, Shape], heads: Heads | None) -> Iterator[_Change]:
    """Rows and columns in another order, and constants, which no term of a map says."""
    shape, where = shape_of(left, shapes), describe(right)
    if len(shape) == 1:
        for value in (1.0, 0.0):
            yield _Change(
                "weight-not-copied",
                f"not copied ({value:g})",
                f"copy the reference's parameter to {where}; it holds {value:g} throughout, as it was constructed",
                lambda packed, value=value: packed + (value - packed).detach(),  # type: ignore[misc]
            )
    is_of_attention = heads is not None and set(names(left)) <= heads.rows | heads.columns
    if len(shape) == 2 and shape[0] % 2 == 0 and shape[0] > 2 and not is_of_attention:
        if isinstance(left, str):
            repair = f"exchange the halves of {where}: the gate, which is activated, comes first"
            yield _Change("gate-up-swapped", "halves swapped", repair, lambda packed: packed.roll(len(packed) // 2, 0))
        repair = f"put the gate's rows of {where} before up's; they take turns"
        yield _Change("gate-up-interleaved", "halves interleaved", repair, lambda x: _transposed_rows(x, 2))
        yield _Change("gate-up-interleaved", "halves apart", repair, lambda x: _transposed_rows(x, len(x) // 2))
    if heads is not None:
        for dim, parameters in ((0, heads.rows), (1, heads.columns)):
            if set(names(left)) <= parameters and len(shape) > dim:
                count = shape[dim] // heads.head_dim
                if count > 1 and shape[dim] == count * heads.head_dim:
                    yield from _other_heads(where, dim, count, heads)


def _other_heads(where: str, dim: int, count: int, heads: Heads) -> Iterator[_Change]:
    """The rows (``dim`` 0) or columns of a weight, which belong to so many heads, in another order."""
    what = "rows" if dim == 0 else "columns"

    def moved(move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda packed: move(packed.movedim(dim, 0)).movedim(0, dim)

    for name, blocks in (("by channel", count), ("by channel, inverse", heads.head_dim)):
        repair = f"order the {what} of {where} head by head, [heads, head_dim]; they are ordered channel by channel"
        yield _Change("heads-transposed", f"{what} {name}", repair, moved(lambda x, n=blocks: _transposed_rows(x, n)))  # type: ignore[misc]
    orders: dict[str, Callable[[Tensor], Tensor]] = {
        "in reverse": lambda x: x.flip(0),
        "moved by one": lambda x: x.roll(1, 0),
        "moved back by one": lambda x: x.roll(-1, 0),
    }
    if count == heads.query and 1 < heads.groups < count:
        orders["by group"] = lambda x: _transposed_rows(x, heads.groups)
        orders["by place in the group"] = lambda x: _transposed_rows(x, count // heads.groups)
    for name, order in orders.items():
        repair = f"put the heads among the {what} of {where} in the reference's order; they are {name}"
        change = moved(lambda x, order=order: order(x.unflatten(0, (count, -1))).flatten(0, 1))  # type: ignore[misc]
        yield _Change("heads-permuted", f"{what}' heads {name}", repair, change)


def _transposed_rows(x: Tensor, blocks: int) -> Tensor:
    """Rows that are laid out as ``[blocks, n]``, as ``[n, blocks]``."""
    return x.unflatten(0, (blocks, -1)).transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True)
class _Exchange:
    """Two entries of one shape, each with the other's TE parameter."""

    left: Side
    right: Side
    other_left: Side
    other_right: Side

    @property
    def kind(self) -> tuple[str, str]:
        """In what the two parameters' names differ: key and value, or one layer's number and another's."""
        one, other = describe(self.right), describe(self.other_right)
        before = _common(one, other)
        one, other = one[before:], other[before:]
        after = _common(one[::-1], other[::-1])
        return one[: len(one) - after], other[: len(other) - after]


def _common(one: str, other: str) -> int:
    """With how many characters both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _exchanges(weights: WeightMap, shapes: Mapping[str, Shape]) -> Iterator[_Exchange]:
    entries = [(left, right) for left, right in weights.items() if any(names(left))]
    for entry, other in combinations(entries, 2):
        if shape_of(entry[0], shapes) == shape_of(other[0], shapes):
            yield _Exchange(*entry, *other)


def _exchanged(exchanges: Sequence[_Exchange], shapes: Mapping[str, Shape], module: nn.Module) -> Hypothesis:
    """That these were exchanged, all of them."""
    first, *others = exchanges
    where = f"{describe(first.right)} {describe(first.other_right)}".replace('"', "")
    repair = (
        f"map {describe(first.left)} to {describe(first.other_right)}, and {describe(first.other_left)} to "
        f"{describe(first.right)}"
    )
    if others:
        where += f" and {len(others)} more"
        repair += "".join(f"; likewise {describe(one.left)} and {describe(one.other_left)}" for one in others)

    def read(reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
        like = next(iter(reference.values()))
        found: dict[str, Tensor] = {}
        for one in exchanges:
            packed, other = pack(one.left, reference, like), pack(one.other_left, reference, like)
            found |= unpack(one.left, other, shapes) | unpack(one.other_left, packed, shapes)
        return found

    return Hypothesis("parameters-exchanged", f"exchanged {where}", repair, module, read=read)
