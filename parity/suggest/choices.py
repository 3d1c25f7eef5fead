"""The questions that names and shapes leave open, each with the answers to be tried."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, permutations

from parity.suggest.geometry import Geometry
from parity.suggest.layouts import Entries, Layout, Shapes, constant_layouts, copied_entries, layouts
from parity.suggest.matching import Group, Matching
from parity.suggest.names import EMBEDDING, HEAD, is_norm, parts_by_unit
from parity.suggest.stored import Stored, with_doubts
from parity.suggest.units import Unit
from parity.weights.sides import describe, names

# Up to this many units that only their order matched, every order is tried; of more, each pair exchanged.
_ALL_ORDERS_UP_TO = 4


@dataclass(frozen=True)
class Choice:
    """Alternatives of which one holds.

    Attributes:
        layouts: the alternatives, the likeliest first.
        repeats: how many layers of a model have this choice; each alternative has the entries of all, layer by layer.
    """

    layouts: tuple[Layout, ...]
    repeats: int = 1

    @property
    def about(self) -> tuple[str, ...]:
        """TE's parameters of the first layer."""
        return tuple(name for _, right in self.first(self.layouts[0]) for name in names(right))

    def first(self, layout: Layout) -> Entries:
        """An alternative's entries for the first layer."""
        return layout.entries[: len(layout.entries) // self.repeats]

    def usual(self) -> Choice:
        """The choice without unusual alternatives."""
        return replace(self, layouts=tuple(layout for layout in self.layouts if layout.usual))


def choices(
    matching: Matching, shapes: Shapes, geometry: Geometry, stored: tuple[Stored, Stored]
) -> tuple[list[Choice], list[Group]]:
    """What there is to choose, and the groups that no layout fits.

    Layers that repeat a group repeat its layout: they are one choice. Layouts that contradict what the reference and
    the candidate say of how they store their weights are unusual.
    """
    alternatives = [(group, with_doubts(layouts(group, shapes, geometry), *stored)) for group in matching.groups]
    misfits = [group for group, found in alternatives if not found]
    twins = _twins(matching, {name: i for i, name in enumerate(shapes.candidate)})
    found = [_with_twins(own, group, twins.get(group, [])) for group, own in alternatives if own]
    single = set(matching.candidate_left).difference(*twins.values())
    found += [own for unit in matching.candidate_left if unit in single and (own := constant_layouts(unit))]
    found += [
        own
        for groups in matching.exchangeable
        if (own := with_doubts(list(_orders(groups, shapes, geometry)), *stored))
    ]
    return [_joint(members) for members in _families(found)], misfits


def _twins(matching: Matching, declared: Mapping[str, int]) -> dict[Group, list[Unit]]:
    """Units of TE that the reference lacks, by the group that may hold the same numbers.

    A layer of TE whose blocks are parallel has two norms, where the reference may have one: the norm before. A
    reference may tie its head to its embedding, where TE's module has both.
    """

    def place(unit: Unit) -> int:
        return min(declared[name] for name in unit.parameters.values())

    twins: dict[Group, list[Unit]] = {}
    for unit in matching.candidate_left:
        alike = [
            group
            for group in matching.groups
            if len(group.reference) == len(group.candidate) == 1 and group.candidate[0].shape == unit.shape
        ]
        tied = [group for group in alike if _may_be_tied(group.candidate[0], unit)]
        norms = [group for group in alike if is_norm(group.candidate[0]) and place(group.candidate[0]) < place(unit)]
        if is_norm(unit) and norms:
            twins.setdefault(max(norms, key=lambda group: place(group.candidate[0])), []).append(unit)
        elif len(tied) == 1:
            twins.setdefault(tied[0], []).append(unit)
    return twins


def _may_be_tied(one: Unit, other: Unit) -> bool:
    """Whether both may be an embedding and the head that is tied to it, of which one at least has a telling name."""
    told = {part for unit in (one, other) for part in parts_by_unit([unit]).get(unit, ("untold",))}
    return len(one.shape) == 2 and told in ({EMBEDDING, HEAD}, {EMBEDDING, "untold"}, {HEAD, "untold"})


def _with_twins(own: list[Layout], group: Group, twins: Sequence[Unit]) -> list[Layout]:
    """A norm's layouts, each with the same numbers in its twins, or with constants in them."""
    for twin in twins:
        copied = [replace(layout, entries=copied_entries(layout.entries, group.candidate[0], twin)) for layout in own]
        apart = [
            replace(layout, entries=layout.entries + constants.entries)
            for layout in own
            for constants in constant_layouts(twin)
        ]
        own = copied + apart
    return own


def _orders(groups: Sequence[Group], shapes: Shapes, geometry: Geometry) -> Iterator[Layout]:
    """Layouts of groups of one shape, whose units of the reference may belong to any of them."""
    found = list(_all_orders(groups, shapes, geometry))
    named = [sum(1 for left, _ in layout.entries for _ in names(left)) for layout in found]
    # An order that leaves a bias of the reference without a place is none.
    yield from (layout for layout, count in zip(found, named, strict=True) if count == max(named))


def _all_orders(groups: Sequence[Group], shapes: Shapes, geometry: Geometry) -> Iterator[Layout]:
    if len(groups) <= _ALL_ORDERS_UP_TO:
        orders = list(permutations(range(len(groups))))
    else:
        orders = [tuple(range(len(groups))), *_exchanges(len(groups))]
    for order in orders:
        own = [
            layouts(Group(groups[i].reference, group.candidate, group.parts, named=False), shapes, geometry)
            for i, group in zip(order, groups, strict=True)
        ]
        for same in zip(*own, strict=False):
            yield Layout(tuple(chain.from_iterable(layout.entries for layout in same)))


def _exchanges(count: int) -> Iterator[tuple[int, ...]]:
    for one, other in combinations(range(count), 2):
        order = list(range(count))
        order[one], order[other] = order[other], order[one]
        yield tuple(order)


def _families(found: Iterable[Sequence[Layout]]) -> Iterator[list[Sequence[Layout]]]:
    families: dict[tuple[str, ...], list[Sequence[Layout]]] = {}
    for own in found:
        families.setdefault(tuple(_without_numbers(layout.entries) for layout in own), []).append(own)
    yield from families.values()


def _without_numbers(entries: Entries) -> str:
    """The entries with each number in a name left open, as it counts layers or experts."""
    written = "; ".join(f"{describe(left)}: {describe(right)}" for left, right in entries)
    return re.sub(r'"[^"]*"', lambda name: re.sub(r"\d+", "#", name[0]), written)


def _joint(members: Sequence[Sequence[Layout]]) -> Choice:
    joint = tuple(
        Layout(tuple(chain.from_iterable(layout.entries for layout in same)), same[0].usual)
        for same in zip(*members, strict=True)
    )
    return Choice(joint, len(members))
