"""Known mistakes in weight maps: what TE would hold, and the reference would have to hold to agree with it.

One entry is misread, several are misread alike, or two have each other's TE parameter.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, takewhile

from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis, Scope
from parity.diagnosis.weight_maps.weight_readings import GATE_FIRST, Heads, Reading, Shapes, readings
from parity.weights.notation import WeightMap
from parity.weights.sides import describe, names, pack, shape_of, unpack
from parity.weights.terms import Side

_NUMBER = re.compile(r"\d+")
_INDEX = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")
_WEIGHT_OR_BIAS = re.compile(r"[._]?(weight|bias)$")


@dataclass(frozen=True)
class _Misread:
    """An entry of the map with another reading of what it packs."""

    reading: Reading
    left: Side
    right: Side

    @property
    def parameter(self) -> str:
        """What TE's module calls its parameter, whichever layer it is of."""
        return next(iter(names(self.right)), "").rpartition(".")[2]

    @property
    def layer(self) -> str:
        """The path of what has the parameter's weight and bias."""
        return _WEIGHT_OR_BIAS.sub("", next(iter(names(self.right)), ""))

    @property
    def owner(self) -> str:
        """The path of what has that layer."""
        return self.layer.rpartition(".")[0]

    @property
    def stack(self) -> str:
        """The path of the list of layers that it is in; empty outside of one."""
        numbered = re.match(r"(.*?)\.?\d+\.", self.layer)
        return numbered[1] or "." if numbered else ""

    @property
    def block(self) -> str:
        """The path of what has that layer's module: of a ``TransformerLayer``, whose attention and MLP have layers."""
        return ".".join(self.layer.split(".")[:-2])


def weight_hypotheses(
    weights: WeightMap,
    shapes: Shapes,
    candidate_shapes: Shapes,
    heads: Heads | None,
    module: nn.Module,
    unused: Container[str] = (),
    gated: Collection[str] = (),
) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with one entry of this weight map, or two that were exchanged.

    Args:
        weights: the pair's map.
        shapes: of the reference's parameters, by name.
        candidate_shapes: ditto of TE's.
        heads: of the reference's attention; None where it has none.
        module: the reference.
        unused: TE's parameters without a gradient, which the reference gives one.
        gated: names of the reference's parameters from which its gated units are computed.
    """
    for entries in _misread(weights, shapes, candidate_shapes, heads, unused, gated):
        yield from (_hypothesis([entry], shapes, module) for entry in entries)
    yield from (_exchanged([exchange], shapes, module) for exchange in _exchanges(weights, shapes))


def repeated_weight_hypotheses(
    weights: WeightMap,
    shapes: Shapes,
    candidate_shapes: Shapes,
    heads: Heads | None,
    module: nn.Module,
    unused: Container[str] = (),
    gated: Collection[str] = (),
) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with several entries alike; arguments as ``weight_hypotheses``.

    An argument of TE such as ``zero_centered_gamma`` is for all norms of a layer, and layers are ported by one map.
    """
    same: dict[tuple[str, str, int], list[_Misread]] = defaultdict(list)
    for entries in _misread(weights, shapes, candidate_shapes, heads, unused, gated):
        alike: Counter[tuple[str, str]] = Counter()
        for entry in entries:
            what = entry.reading.title, entry.reading.name
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


def _misread(
    weights: WeightMap,
    shapes: Shapes,
    candidate_shapes: Shapes,
    heads: Heads | None,
    unused: Container[str],
    gated: Collection[str],
) -> Iterator[list[_Misread]]:
    """By entry of the map, every other reading of it."""
    for left, right in weights.items():
        if any(names(left)):
            others = readings(left, right, shapes, candidate_shapes, heads, unused)
            yield [_Misread(_of_its_subject(one, left, heads, gated), left, right) for one in others]


def _of_its_subject(reading: Reading, left: Side, heads: Heads | None, gated: Collection[str]) -> Reading:
    """The reading, which speaks of gates and heads only where the entry is of a gated unit, or of attention."""
    parameters = set(names(left))
    is_gated = not parameters.isdisjoint(gated)
    is_attentions = heads is not None and parameters <= heads.rows | heads.columns
    known = {"gate-up-swapped": is_gated, "heads-transposed": is_attentions, "heads-permuted": is_attentions}
    if known.get(reading.title, True):
        return reading
    return replace(reading, title="stacked-in-another-order", repair=reading.repair.removesuffix(GATE_FIRST))


def _together(same: Sequence[_Misread]) -> Iterator[list[_Misread]]:
    """Entries that are likely to be misread alike: all, in all layers those of one of TE's parameters, a layer's.

    So are those of a whole block, such as a decoder's attention to itself and to its encoder, those of one owner, such
    as the norms of queries and keys, and those of all layers, whatever the last norm is.

    Of queries, keys and values two are rotated, in all layers or in one. A layer's norms are told apart by the modules
    that have them.
    """
    by_parameter: dict[str, list[_Misread]] = defaultdict(list)
    by_path: dict[str, list[_Misread]] = defaultdict(list)
    by_layer: dict[str, list[_Misread]] = defaultdict(list)
    by_block: dict[str, list[_Misread]] = defaultdict(list)
    by_owner: dict[str, list[_Misread]] = defaultdict(list)
    by_stack: dict[str, list[_Misread]] = defaultdict(list)
    for entry in same:
        by_parameter[entry.parameter].append(entry)
        by_path[_NUMBER.sub("#", next(iter(names(entry.right)), ""))].append(entry)
        by_layer[entry.layer].append(entry)
        by_block[_NUMBER.sub("#", entry.block)].append(entry)
        by_owner[_NUMBER.sub("#", entry.owner)].append(entry)
        by_stack[entry.stack].append(entry)
    kinds = list(by_parameter.values())
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
    """Every two layers that one module has, as an attention has queries and keys, with the entries of each."""
    modules: dict[str, list[list[_Misread]]] = defaultdict(list)
    for layer, entries in by_layer.items():
        modules[re.sub(r"\.?[^.]*$", "", layer)].append(entries)
    for layers in modules.values():
        yield from combinations(layers, 2)


def _hypothesis(entries: Sequence[_Misread], shapes: Shapes, module: nn.Module) -> Hypothesis:
    """That these entries are misread, all alike."""
    first, *others = entries
    one = first.reading
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
            found |= unpack(entry.left, entry.reading.change(packed), shapes)
        return found

    return Hypothesis(one.title, f"{one.name} {where}", repair, module, read=read)


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

    @property
    def is_likely(self) -> bool:
        """Whether both are of one layer, or one parameter in two; who maps one layer's query to another's output?"""
        one, other = describe(self.right), describe(self.other_right)
        return _INDEX.findall(one) == _INDEX.findall(other) or _INDEX.sub("", one) == _INDEX.sub("", other)


def _common(one: str, other: str) -> int:
    """With how many characters both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _exchanges(weights: WeightMap, shapes: Shapes) -> Iterator[_Exchange]:
    entries = [(left, right) for left, right in weights.items() if any(names(left))]
    for entry, other in combinations(entries, 2):
        if shape_of(entry[0], shapes) == shape_of(other[0], shapes):
            yield _Exchange(*entry, *other)


def _exchanged(exchanges: Sequence[_Exchange], shapes: Shapes, module: nn.Module) -> Hypothesis:
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

    scope: Scope = "all" if first.is_likely else "call"
    return Hypothesis("parameters-exchanged", f"exchanged {where}", repair, module, read=read, scope=scope)
