"""Mistakes in weight maps: weights that are misread, exchanged, not copied or not used."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, combinations, islice, permutations, product, takewhile

import torch
from torch import Tensor

from parity.case.patterns import collapsed
from parity.case.weight_map import (
    Experts,
    InterleavedQKV,
    MisfitError,
    Rearrange,
    Reorder,
    RopeHalves,
    SeparatedQKV,
    Shape,
    Shift,
    Side,
    Stack,
    Transpose,
    WeightMap,
    describe,
    names,
    pack,
    shape_of,
    unpack,
)
from parity.mistakes.hypothesis import Hypothesis, ReadWeights, Scope
from parity.mistakes.usual_numbers import USUAL
from parity.result import NO_CODE, Code
from parity.trace.trace import grouped, unnumbered

# Other readings of one entry of a weight map: the weights that TE would hold if the map were wrong.
#
# For example rows in another order, exchanged halves, or a constant for a weight that was never copied. Each reading is
# differentiable, so that gradients with respect to the true parameters come out as the port's.


Shapes = Mapping[str, Shape]

_MATRICES = (2, 3)  # dimensions of a weight, or of the stacked weights of experts
_FEW_EXPERTS = 8  # with no more experts than this, every exchange of two is tried
_OTHER_ORDERS = tuple(permutations(range(3)))[1:]  # other orders of Q, K and V
_INTERLEAVED, _APART = "qkv-layout interleaved", "qkv-layout apart"
_KEY_VALUE = re.compile(r"(^|\.)key_value\.(weight|bias)$")


@dataclass(frozen=True)
class Heads:
    """The division of an attention's channels into heads.

    Attributes:
        query: number of query heads.
        groups: number of key and value heads.
        head_dim: channels of one head.
        rows: names of the parameters whose rows are a query's, key's or value's channels.
        columns: names of the parameters whose columns are the context's channels.
    """

    query: int
    groups: int
    head_dim: int
    rows: frozenset[str] = frozenset()
    columns: frozenset[str] = frozenset()

    @property
    def all_rows(self) -> int:
        """The number of rows of a parameter that holds query, key and value."""
        return (self.query + 2 * self.groups) * self.head_dim


@dataclass(frozen=True)
class Mapped:
    """A weight map, and facts about its weights.

    Attributes:
        weights: the map, or some entries of it.
        shapes: the shapes of the reference's parameters, by name.
        candidate_shapes: the shapes of TE's parameters, by name.
        heads: the heads of the reference's attention; None if it has none.
        unused: names of TE's parameters that get no gradient though the reference's do.
        gated: names of the reference's parameters from which its gated units are computed.
    """

    weights: WeightMap
    shapes: Shapes
    candidate_shapes: Shapes
    heads: Heads | None = None
    unused: Container[str] = ()
    gated: Collection[str] = ()


_BLOCK = 32  # gate and up alternate in blocks of this many rows, for the kernels of TE's grouped MLP
GATE_FIRST = ": the gate, which goes through the activation, comes first"
"""The end of the repair for a gated unit's weight whose halves were exchanged."""
_GATES_ROWS, _UPS_ROWS = "the gate's rows", "up's"


_MapEntry = tuple[Side, Side]


@dataclass(frozen=True)
class Reading:
    """Another reading of the tensor that one entry packs.

    Attributes:
        title, name, repair: as in ``Hypothesis``, but the name does not include the entry's.
        change: maps the packed tensor to the one that TE computes with, of the same shape.
        code: the map's entry as it is and as it should be, if the repair is another entry.
    """

    title: str
    name: str
    repair: str
    change: Callable[[Tensor], Tensor]
    code: Code = NO_CODE


def _mapped(title: str, name: str, right: _MapEntry, wrong: _MapEntry, change: Callable[[Tensor], Tensor]) -> Reading:
    """Return a reading for a map that should have another entry, which differs in one of its sides."""
    instead = next(mine for mine, due in zip(wrong, right, strict=True) if mine != due)
    repair = f"map {describe(right[0])} to {describe(right[1])}, in place of {describe(instead)}"
    now, then = (f"{describe(left, 'parity.')}: {describe(te, 'parity.')}," for left, te in (wrong, right))
    return Reading(title, name, repair, change, Code((now,), (then,)))


def unchanged(packed: Tensor) -> Tensor:
    """Return the packed tensor as it is."""
    return packed


def readings(left: Side, right: Side, of: Mapped) -> Iterator[Reading]:
    """Yield every other reading of an entry."""
    yield from _other_terms(left, right, of.shapes, of.heads)
    yield from _other_terms_of_te(left, right, of.candidate_shapes, of.heads)
    is_unused = all(name in of.unused for name in names(right))
    yield from _unused(left, right, of.shapes) if is_unused else _not_copied(left, right, of.shapes)
    yield from _other_values(left, right, of.shapes, of.heads)


def _other_terms(left: Side, right: Side, shapes: Shapes, heads: Heads | None) -> Iterator[Reading]:
    """Yield readings of other terms that people confuse with the left side of an entry."""
    others = _confused_with(left, shapes, heads)
    if heads is not None and isinstance(left, str) and isinstance(right, str) and left in heads.rows:
        rest = islice(_fused_otherwise(left, shapes, heads), 1, None)
        others = chain(others, rest, _rearranged(left, shapes, heads))
    for title, other in others:
        if _are_alike(left, other, shapes):
            change = _read_as(other, left, shapes)
            yield _mapped(title, _named(title, left, other), (other, right), (left, right), change)


def _other_terms_of_te(left: Side, right: Side, shapes: Shapes, heads: Heads | None) -> Iterator[Reading]:
    """Yield readings of other terms for TE's side: of several parameters, or of Q, K and V fused in another way."""
    unnamed = None if heads is None else replace(heads, rows=frozenset(), columns=frozenset())
    if isinstance(right, str):
        is_fused = heads is not None and set(names(left)) <= heads.rows
        others: Iterable[tuple[str, Side]] = _fused_otherwise(right, shapes, heads) if heads and is_fused else ()
    else:
        others = _confused_with(right, shapes, unnamed)
    if heads is not None:
        yield from _keys_and_values(left, right, shapes, heads)
    for title, other in others:
        if _are_alike(right, other, shapes):
            name = _INTERLEAVED if isinstance(other, SeparatedQKV) else _named(title, right, other)
            yield _mapped(title, name, (left, other), (left, right), _read_as(right, other, shapes))


def _keys_and_values(left: Side, right: Side, shapes: Shapes, heads: Heads) -> Iterator[Reading]:
    """Yield the other orders of cross-attention's keys and values, fused as ``key_value``: by group, or one first."""
    blocks = tuple(range(2 * heads.groups))
    orders = {
        _INTERLEAVED: blocks[::2] + blocks[1::2],
        _APART: tuple(sorted(blocks, key=lambda block: block % heads.groups)),
    }
    parts = right.parts if isinstance(right, Stack) else (right,)
    for place, part in enumerate(parts):
        if isinstance(part, str) and _KEY_VALUE.search(part) and shapes[part][0] == len(blocks) * heads.head_dim:
            for name, order in orders.items() if heads.groups > 1 else ():
                other: Side = Reorder((part,), order)
                if isinstance(right, Stack):
                    other = Stack((*parts[:place], other, *parts[place + 1 :]))
                change = _read_as(right, other, shapes)
                yield _mapped("qkv-layout", name, (left, other), (left, right), change)


def _are_alike(one: Side, other: Side, shapes: Shapes) -> bool:
    """Return whether both terms pack to the same shape."""
    try:
        return shape_of(one, shapes) == shape_of(other, shapes)
    except MisfitError:
        return False


def _named(title: str, one: Side, other: Side) -> str:
    """Return the title, plus whatever else two layers must share to have the same mistake.

    For experts, that is the order. For queries, keys and values, it is whether TE has them head by head, which is its
    default, or one after the other while the reference has them head by head.
    """
    if isinstance(other, InterleavedQKV) and title == "qkv-layout":
        return _INTERLEAVED
    if isinstance(other, SeparatedQKV):
        return _APART
    if not isinstance(one, Experts) or not isinstance(other, Experts):
        return title
    places = ", ".join(str(one.parts.index(part)) for part in other.parts)
    return f"{title} {places}"


def _read_as(one: Side, other: Side, shapes: Shapes) -> Callable[[Tensor], Tensor]:
    """Return a function that unpacks a tensor by one term and packs it by the other."""

    def change(packed: Tensor) -> Tensor:
        return pack(other, unpack(one, packed, shapes), packed)

    return change


def _confused_with(left: Side, shapes: Shapes, heads: Heads | None) -> Iterator[tuple[str, Side]]:
    match left:
        case Experts(parts=parts):
            yield from (("experts-permuted", Experts(order)) for order in _other_orders(parts))
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
        case Rearrange(parts=(part,)):
            is_fused = heads is not None and shape_of(left, shapes)[:1] == (heads.all_rows,)
            yield "qkv-layout" if is_fused else "heads-transposed", part
            for other in _flattened_otherwise(part, shape_of(part, shapes)):
                yield "weight-transposed", other
        case Reorder(parts=(part,), order=order):
            yield _title_of_reorder(part, order, shape_of(left, shapes)), part
        case str() if len(shapes[left]) == 1:
            yield "gamma-shift", Shift((left,), -1.0)
            yield "gamma-shift", Shift((left,), 1.0)
        case str() if len(shapes[left]) in _MATRICES:
            yield "weight-transposed", Transpose((left,))
    if heads is not None and isinstance(left, str):
        yield from islice(_fused_otherwise(left, shapes, heads), 1)
    if heads is not None and not isinstance(left, RopeHalves) and set(names(left)) <= heads.rows:
        yield "rope-layout", RopeHalves((left,), heads.head_dim, heads.head_dim)


def _fused_otherwise(one: str, shapes: Shapes, heads: Heads) -> Iterator[tuple[str, Side]]:
    """Yield terms that separate a parameter with Q, K and V by group into Q, K and V, in any order."""
    if shapes[one][:1] == (heads.all_rows,):
        separated = SeparatedQKV((one,), heads.groups, heads.head_dim)
        yield "qkv-layout", separated
        if heads.query == heads.groups:
            yield from (("qkv-layout", Reorder((separated,), order)) for order in _OTHER_ORDERS)


def _rearranged(one: str, shapes: Shapes, heads: Heads) -> Iterator[tuple[str, Side]]:
    """Yield terms that bring a fused parameter with Q, K and V in another order to one of TE's layouts."""
    if shapes[one][:1] != (heads.all_rows,) or heads.query != heads.groups:
        return
    yield from (("qkv-layout", Reorder((one,), order)) for order in _OTHER_ORDERS)
    more = " ..." if len(shapes[one]) > 1 else ""
    for before in ("heads channels qkv", "channels heads qkv", "channels qkv heads", "qkv channels heads"):
        for after in ("qkv heads channels", "heads qkv channels"):
            sizes = (("qkv", 3), ("heads", heads.query))
            yield "qkv-layout", Rearrange((one,), f"({before}){more} -> ({after}){more}", sizes)


def _flattened_otherwise(part: Side, shape: Shape) -> Iterator[Side]:
    """Yield a convolution's weight as a linear layer's, with channels and pixels in every order: ``out (c h w)``."""
    inner = "bcde"[: len(shape) - 1] if len(shape) in (3, 4, 5) else ""
    for order in permutations(inner) if inner else ():
        yield Rearrange((part,), f"a {' '.join(inner)} -> a ({' '.join(order)})")


def _other_orders(parts: tuple[Side, ...]) -> Iterator[tuple[Side, ...]]:
    """Yield every exchange of two parts, if there are few, all parts in reverse, and all moved by one."""
    for one, other in combinations(range(len(parts)), 2) if len(parts) <= _FEW_EXPERTS else ():
        order = list(parts)
        order[one], order[other] = order[other], order[one]
        yield tuple(order)
    if len(parts) > 2:
        yield from (parts[::-1], (*parts[1:], parts[0]), (parts[-1], *parts[:-1]))


def _title_of_order(parts: tuple[Side, ...], order: tuple[Side, ...]) -> str:
    if len(parts) == 2:
        return "gate-up-swapped"
    return "key-value-swapped" if order == (parts[0], parts[2], parts[1]) else "stacked-in-another-order"


def _title_of_reorder(part: Side, order: tuple[int, ...], shape: Shape) -> str:
    if isinstance(part, Stack):
        return "gate-up-swapped" if len(order) == 2 else "gate-up-interleaved"
    return "heads-transposed" if len(order) in shape else "heads-permuted"


def _possible_heads(parts: tuple[Side, ...], shapes: Shapes, heads: Heads | None) -> Iterator[tuple[int, int]]:
    """Yield groups and head dimension of query, key and value: the known ones, else all common ones that fit."""
    if heads is not None:
        yield heads.groups, heads.head_dim
        return
    query, key = shape_of(parts[0], shapes)[0], shape_of(parts[1], shapes)[0]
    for head_dim in sorted(USUAL.head_dims):
        if query % head_dim == key % head_dim == 0 and query % key == 0:
            yield key // head_dim, head_dim


def _not_copied(left: Side, right: Side, shapes: Shapes) -> Iterator[Reading]:
    """Yield a constant, as after the parameter's construction, which still gets its gradient."""
    if len(shape_of(left, shapes)) == 1:
        where = f"copy the reference's parameter to {describe(right)}"
        for value in (1.0, 0.0):
            repair = f"{where}; it holds {value:g} throughout, as when it was constructed"
            held = lambda packed, value=value: packed + (value - packed).detach()  # noqa: E731
            yield Reading("weight-not-copied", f"not copied ({value:g})", repair, held)


def _unused(left: Side, right: Side, shapes: Shapes) -> Iterator[Reading]:
    """Yield a constant without a gradient, because nothing uses the parameter.

    A constant 1 leaves out a factor, which is a vector, and a constant 0 leaves out a table that is added.
    """
    where = describe(right)
    if _is_bias(left):
        yield Reading("bias-dropped", "unused (0)", f"add {where}, which the candidate does not use", torch.zeros_like)
        return
    shape = shape_of(left, shapes)
    is_vector = math.prod(shape) == max(shape, default=1)
    for value in (1.0, 0.0) if is_vector else (0.0, 1.0):
        repair = f"use {where}: the candidate computes as if it were {value:g}, and no gradient reaches it"
        constant = partial(torch.full_like, fill_value=value)
        yield Reading("no-gradient", f"unused ({value:g})", repair, constant)


def _other_values(left: Side, right: Side, shapes: Shapes, heads: Heads | None) -> Iterator[Reading]:
    """Yield rows and columns in an order that no term of a map expresses."""
    shape, where = shape_of(left, shapes), describe(right)
    is_of_attention = heads is not None and set(names(left)) <= heads.rows | heads.columns
    rows = shape[-2] if len(shape) in _MATRICES else shape[0] if shape and _is_bias(left) else 0
    if rows % 2 == 0 and rows > 2 and not is_of_attention:
        dim = -2 if len(shape) in _MATRICES else 0
        if isinstance(left, str):
            repair = f"exchange the halves of {where}{GATE_FIRST}"
            yield Reading("gate-up-swapped", "halves swapped", repair, _moved(dim, lambda x: x.roll(len(x) // 2, 0)))
        repair = f"put {_GATES_ROWS} of {where} before {_UPS_ROWS}; they take turns"
        for name, blocks in (("halves interleaved", 2), ("halves apart", rows // 2)):
            change = _moved(dim, partial(_transposed_rows, blocks=blocks))
            yield Reading("gate-up-interleaved", name, repair, change)
        yield from _in_blocks(where, rows, dim)
    if heads is not None:
        for dim, parameters in ((0, heads.rows), (1, heads.columns)):
            if set(names(left)) <= parameters and len(shape) > dim:
                count = shape[dim] // heads.head_dim
                if count > 1 and shape[dim] == count * heads.head_dim:
                    yield from _other_heads(where, dim, count, heads)


def _is_bias(left: Side) -> bool:
    return all(name.endswith("bias") for name in names(left))


def _in_blocks(where: str, rows: int, dim: int) -> Iterator[Reading]:
    """Yield gate and up that alternate in blocks, as with TE's ``glu_interleave_size``, on one side only."""
    if rows % (2 * _BLOCK) or rows == 2 * _BLOCK:
        return
    shapes = {
        f"lay out {where} with te.interleave_glu_tensor, as glu_interleave_size={_BLOCK} reads it": (-1, 2, _BLOCK),
        f"give TE glu_interleave_size={_BLOCK}, or {where} without blocks of that size": (2, -1, _BLOCK),
    }
    for repair, shape in shapes.items():
        name = f"blocks of {_BLOCK} {'apart' if shape[1] == 2 else 'in turns'}"
        blocks = lambda x, shape=shape: x.unflatten(0, shape).transpose(0, 1).flatten(0, 2)  # noqa: E731
        yield Reading("gate-up-interleaved", name, repair, _moved(dim, blocks))


def _other_heads(where: str, dim: int, count: int, heads: Heads) -> Iterator[Reading]:
    """Yield other orders of the rows (``dim`` 0) or columns of a weight, which belong to ``count`` heads."""
    what = "rows" if dim == 0 else "columns"
    for name, blocks in (("by channel", count), ("by channel, inverse", heads.head_dim)):
        repair = f"order the {what} of {where} head by head, [heads, head_dim]; they are ordered channel by channel"
        change = _moved(dim, partial(_transposed_rows, blocks=blocks))
        yield Reading("heads-transposed", f"{what} {name}", repair, change)
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
        change = _moved(dim, lambda x, order=order: order(x.unflatten(0, (count, -1))).flatten(0, 1))  # type: ignore[misc]
        yield Reading("heads-permuted", f"{what}' heads {name}", repair, change)


def _moved(dim: int, move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return ``move``, which moves rows, applied to another dimension."""
    return lambda packed: move(packed.movedim(dim, 0)).movedim(0, dim)


def _transposed_rows(x: Tensor, blocks: int) -> Tensor:
    """Return rows that are laid out as ``[blocks, n]`` transposed to ``[n, blocks]``."""
    return x.unflatten(0, (blocks, -1)).transpose(0, 1).flatten(0, 1)


# Mistakes in weight maps, as the weights that the reference would have to hold to agree with TE.
#
# One entry is misread, several are misread alike, or two entries have each other's TE parameter.


_INDEX = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")
_WEIGHT_OR_BIAS = re.compile(r"[._]?(weight|bias)$")


@dataclass(frozen=True)
class _Misread:
    """An entry of the map with another reading."""

    reading: Reading
    left: Side
    right: Side

    @property
    def parameter(self) -> str:
        """The parameter's name in TE's module, without the layer's path."""
        return next(iter(names(self.right)), "").rpartition(".")[2]

    @property
    def layer(self) -> str:
        """The path of the module that has the parameter, or the common prefix of its weight and bias."""
        return _WEIGHT_OR_BIAS.sub("", next(iter(names(self.right)), ""))

    @property
    def owner(self) -> str:
        """The path of the module that has that layer."""
        return self.layer.rpartition(".")[0]

    @property
    def stack(self) -> str:
        """The path of the list of layers that the layer is in; empty outside of one."""
        numbered = re.match(r"(.*?)\.?\d+\.", self.layer)
        return numbered[1] or "." if numbered else ""

    @property
    def block(self) -> str:
        """The path of the block, such as a ``TransformerLayer``, whose attention or MLP has that layer."""
        return ".".join(self.layer.split(".")[:-2])


def weight_hypotheses(of: Mapped) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with one entry or by exchanging two."""
    for entries in _misread(of):
        yield from (_make_hypothesis([entry], of) for entry in entries)
    yield from (_exchanged([exchange], of.shapes) for exchange in _exchanges(of))
    yield from (_used_twice([exchange], of.shapes) for exchange in _with_unused(of))


def repeated_weight_hypotheses(of: Mapped) -> Iterator[Hypothesis]:
    """Yield every known mistake made alike with several entries.

    An argument of TE such as ``zero_centered_gamma`` applies to all norms of a layer, and one map ports all layers.
    """
    same: dict[tuple[str, str, int], list[_Misread]] = defaultdict(list)
    for entries in _misread(of):
        alike: Counter[tuple[str, str]] = Counter()
        for entry in entries:
            what = entry.reading.title, entry.reading.name
            key = (*what, alike[what])
            same[key].append(entry)
            alike[what] += 1

    @cache  # many readings are of the same entries
    def name_once(entries: tuple[_MapEntry, ...]) -> list[str]:
        """Return TE's sides in words, with one pattern for what several layers have in common."""
        return [describe(right) for right in collapsed(dict(entries), of.shapes, of.candidate_shapes).values()]

    for entries in same.values():
        for some in _together(entries):
            yield _make_hypothesis(some, of, name_once(tuple((entry.left, entry.right) for entry in some)))
    for exchanges in grouped(_exchanges(of), lambda one: one.kind).values():
        if len(exchanges) > 1:
            yield _exchanged(exchanges, of.shapes)
    for exchanges in grouped(_with_unused(of), lambda one: one.kind).values():
        if len(exchanges) > 1:
            yield _used_twice(exchanges, of.shapes)


def _misread(of: Mapped) -> Iterator[list[_Misread]]:
    """Yield, for each entry of the map, all its other readings."""
    for left, right in of.weights.items():
        if any(names(left)):
            others = readings(left, right, of)
            yield [_Misread(_of_its_subject(one, left, of), left, right) for one in others]


def _of_its_subject(reading: Reading, left: Side, of: Mapped) -> Reading:
    """Return the reading, worded without gates or heads if the entry belongs to no gated unit or attention."""
    parameters = set(names(left))
    is_gated = not parameters.isdisjoint(of.gated)
    is_attentions = of.heads is not None and parameters <= of.heads.rows | of.heads.columns
    known = {
        "gate-up-swapped": is_gated,
        "gate-up-interleaved": is_gated or _GATES_ROWS not in reading.repair,
        "heads-transposed": is_attentions,
        "heads-permuted": is_attentions,
    }
    if known.get(reading.title, True):
        return reading
    repair = reading.repair.removesuffix(GATE_FIRST)
    repair = repair.replace(_GATES_ROWS, "every second row").replace(_UPS_ROWS, "the others")
    return replace(reading, title="stacked-in-another-order", repair=repair)


def _together(same: Sequence[_Misread]) -> Iterator[list[_Misread]]:
    """Yield groups of entries that are likely to be misread alike.

    These are all entries, those of one parameter of TE in all layers, or those of one layer, of a block, such as a
    decoder's self-attention and cross-attention, of one owner, such as the norms of queries and keys, or of a list of
    layers, which does not contain the last norm.

    For rotary layouts, any two of queries, keys and values also make a group, in all layers or in one. A layer's norms
    are told apart by the modules that have them.
    """
    by_path = grouped(same, lambda entry: unnumbered(next(iter(names(entry.right)), "")))
    by_layer = grouped(same, lambda entry: entry.layer)
    by_block = grouped(same, lambda entry: unnumbered(entry.block))
    by_owner = grouped(same, lambda entry: unnumbered(entry.owner))
    by_stack = grouped(same, lambda entry: entry.stack)
    kinds = list(grouped(same, lambda entry: entry.parameter).values())
    sizes = (1, 2) if same[0].reading.title == "rope-layout" else (1,)
    some = chain.from_iterable(combinations(kinds, size) for size in sizes if size < len(kinds))
    rotated = list(_pairs_of_a_module(by_layer)) if 2 in sizes else []
    told: list[list[_Misread]] = []
    alone = chain.from_iterable(by.values() for by in (by_path, by_layer, by_block, by_owner, by_stack))
    for group in (kinds, *some, *rotated, *([one] for one in alone)):
        entries = [entry for kind in group for entry in kind]
        if len(entries) > 1 and entries not in told:
            told.append(entries)
            yield entries


def _pairs_of_a_module(by_layer: Mapping[str, list[_Misread]]) -> Iterator[tuple[list[_Misread], ...]]:
    """Yield the entries of every two layers of one module, such as attention's queries and keys."""
    for layers in grouped(by_layer, lambda layer: re.sub(r"\.?[^.]*$", "", layer)).values():
        yield from combinations([by_layer[layer] for layer in layers], 2)


def filled_from(fills: Sequence[tuple[Side, Side, Callable[[Tensor], Tensor]]], shapes: Shapes) -> ReadWeights:
    """Return a reading that fills some sides of a map from others.

    Args:
        fills: each side, the side that it is filled from, and a change to the tensor that the latter packs.
        shapes: the shapes of the parameters, by name.
    """

    def read(reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
        like = next(iter(reference.values()))
        found: dict[str, Tensor] = {}
        for filled, source, change in fills:
            found |= unpack(filled, change(pack(source, reference, like)), shapes)
        return found

    return read


def _make_hypothesis(entries: Sequence[_Misread], of: Mapped, alike: Sequence[str] = ()) -> Hypothesis:
    """Return the mistake of misreading all these entries alike.

    Args:
        entries: the entries, each with its other reading.
        of: the map.
        alike: TE's sides of several entries, in words.
    """
    first, *others = entries
    one = first.reading
    where = describe(first.right).strip('"')
    repair = one.repair
    if others:
        where += f" and {len(others)} more"
        repair += f"; likewise for {', '.join(right for right in alike if right != describe(first.right))}"
    read = filled_from([(entry.left, entry.left, entry.reading.change) for entry in entries], of.shapes)
    codes = [entry.reading.code for entry in entries]
    now, then = (
        tuple(chain.from_iterable(lines)) for lines in zip(*((one.now, one.then) for one in codes), strict=True)
    )
    return Hypothesis(one.title, f"{one.name} {where}", repair, read=read, code=Code(now, then))


@dataclass(frozen=True)
class _Exchange:
    """Two entries of one shape, each with the other's TE parameter."""

    left: Side
    right: Side
    other_left: Side
    other_right: Side

    @property
    def kind(self) -> tuple[str, str]:
        """The parts in which the two parameters' names differ, such as key and value, or two layers' numbers."""
        one, other = describe(self.right), describe(self.other_right)
        before = _common(one, other)
        one, other = one[before:], other[before:]
        after = _common(one[::-1], other[::-1])
        return one[: len(one) - after], other[: len(other) - after]

    @property
    def is_likely(self) -> bool:
        """Whether both are of one layer or one parameter of two: nobody maps a query to another layer's output."""
        one, other = describe(self.right), describe(self.other_right)
        return _INDEX.findall(one) == _INDEX.findall(other) or _INDEX.sub("", one) == _INDEX.sub("", other)


def _common(one: str, other: str) -> int:
    """Return how many leading characters the two share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _exchanges(of: Mapped) -> Iterator[_Exchange]:
    for entry, other in combinations(_entries(of), 2):
        if shape_of(entry[0], of.shapes) == shape_of(other[0], of.shapes):
            yield _Exchange(*entry, *other)


def _with_unused(of: Mapped) -> Iterator[_Exchange]:
    """Yield pairs of entries of one shape, of whose parameters the candidate uses only the second."""
    entries = _entries(of)
    unused = [entry for entry in entries if all(name in of.unused for name in names(entry[1]))]
    for entry, other in product(unused, [one for one in entries if one not in unused]):
        if shape_of(entry[0], of.shapes) == shape_of(other[0], of.shapes):
            yield _Exchange(*entry, *other)


def _entries(of: Mapped) -> list[_MapEntry]:
    return [(left, right) for left, right in of.weights.items() if any(names(left))]


def _used_twice(exchanges: Sequence[_Exchange], shapes: Shapes) -> Hypothesis:
    """Return the mistake of using the second parameter also where the first one is due."""
    uses = [f"{describe(one.right)} where the candidate uses {describe(one.other_right)} again" for one in exchanges]
    where = ", ".join(describe(one.right) for one in exchanges).replace('"', "")
    other = describe(exchanges[0].other_right).replace('"', "")
    read = filled_from([(one.left, one.other_left, unchanged) for one in exchanges], shapes)
    scope: Scope = "all" if exchanges[0].is_likely else "call"
    return Hypothesis(
        "no-gradient", f"{where} unused for {other}", f"use {', and '.join(uses)}", read=read, scope=scope
    )


def _exchanged(exchanges: Sequence[_Exchange], shapes: Shapes) -> Hypothesis:
    """Return the mistake of making all these exchanges."""
    first, *others = exchanges
    where = f"{describe(first.right)} {describe(first.other_right)}".replace('"', "")
    repair = (
        f"map {describe(first.left)} to {describe(first.other_right)}, and {describe(first.other_left)} to "
        f"{describe(first.right)}"
    )
    if others:
        where += f" and {len(others)} more"
        repair += "".join(f"; likewise {describe(one.left)} and {describe(one.other_left)}" for one in others)
    both = (pair for one in exchanges for pair in ((one.left, one.other_left), (one.other_left, one.left)))
    read = filled_from([(filled, source, unchanged) for filled, source in both], shapes)
    pairs = [
        ((left, te), (left, due))
        for one in exchanges
        for left, te, due in ((one.left, one.right, one.other_right), (one.other_left, one.other_right, one.right))
    ]
    now, then = (
        tuple(f"{describe(left, 'parity.')}: {describe(te, 'parity.')}," for left, te in side)
        for side in zip(*pairs, strict=True)
    )
    scope: Scope = "all" if first.is_likely else "call"
    return Hypothesis(
        "parameters-exchanged", f"exchanged {where}", repair, read=read, scope=scope, code=Code(now, then)
    )
