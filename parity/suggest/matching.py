"""Which units of the reference hold what which units of the candidate hold: by name first, then by shape and order."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from parity.suggest.names import GATE, QKV, UP, Parts
from parity.suggest.units import WEIGHT, Unit

# A part, an expert, and the how-manieth of its kind in the model: the third layer's query, say.
Key = tuple[str, int | None, int]

# RoPE's form is a question of query and key alike; which half is the gate, of both halves.
_TOGETHER = (QKV, tuple(f"cross {part}" for part in QKV), (GATE, UP))


@dataclass(frozen=True)
class Group:
    """Units of both modules that hold the same numbers, e.g. ``q_proj``, ``k_proj`` and ``v_proj`` and TE's ``qkv``.

    Attributes:
        reference: in the order of their parts.
        candidate: ditto.
        parts: what the candidate's units compute; empty where no name tells.
        named: whether names put them together; else their shapes did, and the order of the reference's is a guess.
    """

    reference: tuple[Unit, ...]
    candidate: tuple[Unit, ...]
    parts: Parts = ()
    named: bool = True


@dataclass(frozen=True)
class Matching:
    """How the units of two modules go together.

    Attributes:
        groups: units that belong together.
        exchangeable: groups, one unit each, that only their order matched: any of them may hold any other's numbers.
        reference_left: units that have no counterpart.
        candidate_left: ditto.
    """

    groups: tuple[Group, ...]
    exchangeable: tuple[tuple[Group, ...], ...]
    reference_left: tuple[Unit, ...]
    candidate_left: tuple[Unit, ...]


def match(
    reference: Sequence[Unit], candidate: Sequence[Unit], told: tuple[Mapping[Unit, Parts], Mapping[Unit, Parts]]
) -> Matching:
    """Put units together: those whose names tell the same part, those of the same name, then those of fitting shapes.

    The n-th query belongs to the n-th query, in the order in which the modules declare them, so that it does not matter
    how layers are numbered; if the two have different numbers of them, names decide nothing.

    Args:
        reference: units that are to be matched.
        candidate: ditto.
        told: what the names of both tell, see ``parts_by_unit``; may tell of further units.
    """
    left = {unit: told[0].get(unit, ()) for unit in reference}
    right = {unit: told[1].get(unit, ()) for unit in candidate}
    groups = [group for group in _by_part(left, right) if _numels(group.reference) == _numels(group.candidate)]
    rest = _Rest(reference, candidate, groups)
    groups += [rest.take(group) for group in list(_by_path(rest.reference, rest.candidate))]
    while (fused := _fused_by_shape(rest.reference, rest.candidate)) is not None:
        groups.append(rest.take(fused))
    exchangeable = []
    for same_shape in list(_by_shape(rest.reference, rest.candidate)):
        for group in same_shape:
            rest.take(group)
        if len(same_shape) == 1:
            groups += same_shape
        else:
            exchangeable.append(same_shape)
    return Matching(tuple(groups), tuple(exchangeable), tuple(rest.reference), tuple(rest.candidate))


class _Rest:
    """The units of both modules that are in no group yet."""

    def __init__(self, reference: Sequence[Unit], candidate: Sequence[Unit], groups: Iterable[Group]) -> None:
        self.reference, self.candidate = list(reference), list(candidate)
        for group in groups:
            self.take(group)

    def take(self, group: Group) -> Group:
        self.reference = [unit for unit in self.reference if unit not in group.reference]
        self.candidate = [unit for unit in self.candidate if unit not in group.candidate]
        return group


def _by_part(reference: Mapping[Unit, Parts], candidate: Mapping[Unit, Parts]) -> Iterator[Group]:
    """Units that are connected through the parts that they share."""
    experts = 1 + max((unit.expert for unit in (*reference, *candidate) if unit.expert is not None), default=-1)
    left, right = (_keys(parts, experts) for parts in (reference, candidate))
    counts = [Counter((part, expert) for part, expert, _ in keys) for keys in (left, right)]
    shared = {key for key in left.keys() & right.keys() if counts[0][key[:2]] == counts[1][key[:2]]}
    open_keys = [key for key in right if key in shared]
    done: set[Key] = set()
    for start in open_keys:
        if start in done:
            continue
        keys = _connected(start, left, right, shared)
        done |= keys
        members = [key for key in open_keys if key in keys]
        members.sort(key=lambda key: (_rank(key[0]), -1 if key[1] is None else key[1]))
        yield Group(
            tuple(dict.fromkeys(left[key] for key in members)),
            tuple(dict.fromkeys(right[key] for key in members)),
            tuple(dict.fromkeys(part for part, _, _ in members)),
        )


def _keys(parts: Mapping[Unit, Parts], experts: int) -> dict[Key, Unit]:
    """Each part of each expert of each unit; a fused weight ``[experts, out, in]`` has the parts of all of them."""
    keys: dict[Key, Unit] = {}
    seen: Counter[tuple[str, int | None]] = Counter()
    for unit, unit_parts in parts.items():
        fused = unit.expert is None and len(unit.shapes.get(WEIGHT, ())) == 3
        for part in unit_parts:
            for expert in range(experts or unit.shape[0]) if fused else (unit.expert,):
                keys[part, expert, seen[part, expert]] = unit
                seen[part, expert] += 1
    return keys


def _connected(start: Key, left: Mapping[Key, Unit], right: Mapping[Key, Unit], shared: set[Key]) -> set[Key]:
    """The keys whose units hold one of these keys too, and those whose layouts are one question."""
    found, front = {start}, [start]
    while front:
        key = front.pop()
        near = {other for other in shared if left[other] == left[key] or right[other] == right[key]}
        together = {(part, *key[1:]) for parts in _TOGETHER if key[0] in parts for part in parts}
        if together <= shared and all(
            len({side[other] for other in together}) == len(together) for side in (left, right)
        ):
            near |= together
        front += near - found
        found |= near
    return found


def _rank(part: str) -> int:
    """Query before key before value, gate before up."""
    order = (*QKV, GATE, UP)
    word = part.removeprefix("cross ")
    return order.index(word) if word in order else len(order)


def _by_path(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Iterator[Group]:
    """Units of the same name and of fitting shapes."""
    paths = {(unit.path, unit.expert): unit for unit in reference}
    for unit in candidate:
        other = paths.get((unit.path, unit.expert))
        if other is not None and _fit(other, unit):
            yield Group((other,), (unit,))


def _fused_by_shape(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Group | None:
    """A unit of TE that no single unit of the reference fits, and the two or three that fit together."""
    for unit in candidate:
        if len(unit.shape) != 2 or any(_fit(other, unit) for other in reference):
            continue
        rows, columns = unit.shape
        matrices = [other for other in reference if len(other.shape) == 2 and columns in other.shape]
        for count, parts in ((2, ("gate", "up")), (3, ("query", "key", "value"))):
            for first in range(len(matrices) - count + 1):
                run = matrices[first : first + count]
                if sum(math.prod(other.shape) for other in run) == rows * columns:
                    return Group(tuple(run), (unit,), parts, named=False)
    return None


def _by_shape(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Iterator[tuple[Group, ...]]:
    """As many units on both sides of one shape, each put to that in the same place of the order."""
    classes: dict[object, tuple[list[Unit], list[Unit]]] = defaultdict(lambda: ([], []))
    for side, units in enumerate((reference, candidate)):
        for unit in units:
            classes[WEIGHT in unit.shapes, tuple(sorted(unit.shape)), unit.expert][side].append(unit)
    for left, right in classes.values():
        if left and len(left) == len(right):
            yield tuple(Group((one,), (other,), named=False) for one, other in zip(left, right, strict=True))


def _fit(one: Unit, other: Unit) -> bool:
    return sorted(one.shape) == sorted(other.shape)


def _numels(units: Sequence[Unit]) -> int:
    return sum(math.prod(unit.shape) for unit in units)
