"""Match units of both modules that hold the same numbers: by name first, then by shape and order."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from parity.case.weight_map import Shape
from parity.suggest.units import GATE, QKV, UP, WEIGHT, Parts, Unit, flat, is_stack

# A part, an expert, and its number among its kind in the model, such as the third layer's query.
Key = tuple[str, int | None, int]

# RoPE's form is one question for query and key, and which half is the gate is one for both halves.
_TOGETHER = (QKV, tuple(f"cross {part}" for part in QKV), (GATE, UP))


@dataclass(frozen=True)
class Group:
    """Units of both modules that hold the same numbers, e.g. ``q_proj``, ``k_proj`` and ``v_proj`` and TE's ``qkv``.

    Attributes:
        reference, candidate: in the order of their parts.
        parts: what the candidate's units compute; empty if no name tells.
        named: whether names matched them; else their shapes did, and the order of the reference's is a guess.
    """

    reference: tuple[Unit, ...]
    candidate: tuple[Unit, ...]
    parts: Parts = ()
    named: bool = True


@dataclass(frozen=True)
class Matching:
    """Say how the units of two modules go together.

    Attributes:
        groups: units that belong together.
        exchangeable: groups of one unit each that only their order matched: any of them may hold any other's numbers.
        reference_left: units of the reference that have no counterpart.
        candidate_left: the candidate's units that have no counterpart.
        misfits: groups among those left that names matched, but that hold different numbers of elements.
    """

    groups: tuple[Group, ...]
    exchangeable: tuple[tuple[Group, ...], ...]
    reference_left: tuple[Unit, ...]
    candidate_left: tuple[Unit, ...]
    misfits: tuple[Group, ...] = ()


def match(
    reference: Sequence[Unit], candidate: Sequence[Unit], told: tuple[Mapping[Unit, Parts], Mapping[Unit, Parts]]
) -> Matching:
    """Match units whose names tell the same part, then those with the same name, then those with fitting shapes.

    The n-th query belongs to the n-th query, in the order in which the modules declare them, so that it does not matter
    how layers are numbered; if the two have different numbers of them, names decide nothing.

    Args:
        reference, candidate: units that are to be matched.
        told: what the names of both tell, see ``parts_by_unit``; may include further units.
    """
    left = {unit: told[0].get(unit, ()) for unit in reference}
    right = {unit: told[1].get(unit, ()) for unit in candidate}
    named = list(_by_part(left, right))
    groups = [group for group in named if _numels(group.reference) == _numels(group.candidate)]
    rest = _Rest(reference, candidate, groups)
    groups += [rest.take(group) for group in list(_by_path(rest.reference, rest.candidate, right))]
    exchangeable: list[tuple[Group, ...]] = []

    def take(classes: Iterable[tuple[Group, ...]]) -> None:
        for alike in list(classes):
            for group in alike:
                rest.take(group)
            if len(alike) == 1:
                groups.extend(alike)
            else:
                exchangeable.append(alike)

    take(_stacks_by_shape(rest.reference, rest.candidate, right))
    while (fused := _fused_by_shape(rest.reference, rest.candidate)) is not None:
        groups.append(rest.take(fused))
    for shape_of in (tuple, flat):
        take(_by_shape(rest.reference, rest.candidate, right, shape_of))
    misfits = tuple(group for group in named if rest.has(group))
    return Matching(tuple(groups), tuple(exchangeable), tuple(rest.reference), tuple(rest.candidate), misfits)


class _Rest:
    """The units of both modules that are in no group yet."""

    def __init__(self, reference: Sequence[Unit], candidate: Sequence[Unit], groups: Iterable[Group]) -> None:
        self.reference, self.candidate = list(reference), list(candidate)
        for group in groups:
            self.take(group)

    def has(self, group: Group) -> bool:
        return set(group.reference) <= set(self.reference) and set(group.candidate) <= set(self.candidate)

    def take(self, group: Group) -> Group:
        self.reference = [unit for unit in self.reference if unit not in group.reference]
        self.candidate = [unit for unit in self.candidate if unit not in group.candidate]
        return group


def _by_part(reference: Mapping[Unit, Parts], candidate: Mapping[Unit, Parts]) -> Iterator[Group]:
    """Yield units that are connected through the parts that they share."""
    experts = _numbers_of_experts(reference, candidate)
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


def _numbers_of_experts(reference: Iterable[Unit], candidate: Iterable[Unit]) -> set[int]:
    """Return how many experts a weight ``[experts, out, in]`` may have: as many as have numbers, or as
    such weights on both sides.
    """
    numbered = 1 + max((unit.expert for unit in (*reference, *candidate) if unit.expert is not None), default=-1)
    if numbered:
        return {numbered}
    return set.intersection(*({unit.shape[0] for unit in side if is_stack(unit)} for side in (reference, candidate)))


def _keys(parts: Mapping[Unit, Parts], experts: Container[int]) -> dict[Key, Unit]:
    """Return each part of each expert of each unit; a fused weight ``[experts, out, in]`` has the parts
    of all experts.
    """
    keys: dict[Key, Unit] = {}
    seen: Counter[tuple[str, int | None]] = Counter()
    for unit, unit_parts in parts.items():
        fused = is_stack(unit) and unit.shape[0] in experts
        for part in unit_parts:
            for expert in range(unit.shape[0]) if fused else (unit.expert,):
                keys[part, expert, seen[part, expert]] = unit
                seen[part, expert] += 1
    return keys


def _connected(start: Key, left: Mapping[Key, Unit], right: Mapping[Key, Unit], shared: set[Key]) -> set[Key]:
    """Return the keys whose units also hold one of these keys, and those whose layouts are the same question."""
    found, front = {start}, [start]
    while front:
        key = front.pop()
        near = {other for other in shared if left[other] == left[key] or right[other] == right[key]}
        together = {(part, *key[1:]) for parts in _TOGETHER if key[0] in parts for part in parts}
        if together <= shared and (
            all(len({side[other] for other in together}) == len(together) for side in (left, right))
            or any(left[other].has_bias_of_all for other in together)
        ):
            near |= together
        front += near - found
        found |= near
    return found


def _rank(part: str) -> int:
    """Rank query before key before value, and gate before up."""
    order = (*QKV, GATE, UP)
    word = part.removeprefix("cross ")
    return order.index(word) if word in order else len(order)


def _by_path(reference: Sequence[Unit], candidate: Sequence[Unit], told: Mapping[Unit, Parts]) -> Iterator[Group]:
    """Yield units with the same name and fitting shapes."""
    paths = {(unit.path, unit.expert): unit for unit in reference}
    for unit in candidate:
        other = paths.get((unit.path, unit.expert))
        if other is not None and _fit(other, unit):
            yield Group((other,), (unit,), told.get(unit, ()))


def _stacks_by_shape(
    reference: Sequence[Unit], candidate: Sequence[Unit], told: Mapping[Unit, Parts]
) -> Iterator[tuple[Group, ...]]:
    """Yield weights ``[experts, out, in]`` with the layers that TE has for each expert, if there are as
    many on both sides.

    Otherwise yield two such weights that follow each other, for layers that hold the elements of both.
    """
    layers: dict[str, tuple[Unit, ...]] = defaultdict(tuple)
    for unit in candidate:
        if unit.expert is not None and len(unit.shape) == 2:
            layers[unit.path] += (unit,)
    stacks = [unit for unit in reference if is_stack(unit)]
    told = {own[0]: told.get(own[0]) or _halves_of(own, layers.values()) for own in layers.values()}
    for read in (_in_any_order, tuple, _transposed):
        alike: dict[Shape, list[tuple[Unit, ...]]] = defaultdict(list)
        for own in layers.values():
            alike[read((len(own), *own[0].shape))].append(own)
        for shape, of_shape in alike.items():
            groups = tuple(_stacked(stacks, of_shape, shape, read, told))
            yield from [groups] if groups else []
            stacks = [unit for unit in stacks if all(unit not in group.reference for group in groups)]
            for group in groups:
                del layers[group.candidate[0].path]


def _stacked(
    stacks: Sequence[Unit],
    layers: Sequence[tuple[Unit, ...]],
    shape: Shape,
    read: Callable[[Shape], Shape],
    told: Mapping[Unit, Parts],
) -> Iterator[Group]:
    """Yield groups of layers that have one shape and are to be stacked; none if their numbers differ."""
    same = [unit for unit in stacks if read(unit.shape) == shape]
    if len(same) == len(layers):
        for one, own in zip(same, layers, strict=True):
            yield Group((one,), own, told.get(own[0], ()))
        return
    experts, rows, columns = len(layers[0]), *layers[0][0].shape
    halves = tuple(unit for unit in stacks if read(unit.shape) == read((experts, rows // 2, columns)))
    if len(layers) == 1 and not same and len(halves) == 2:
        yield Group(halves, layers[0], (GATE, UP))


def _halves_of(layers: Sequence[Unit], others: Iterable[Sequence[Unit]]) -> Parts:
    """Return gate and up if other layers lead from half as many channels back to as many as these read."""
    rows, columns = layers[0].shape
    return (GATE, UP) if any(2 * other[0].shape[1] == rows and other[0].shape[0] == columns for other in others) else ()


def _in_any_order(shape: Shape) -> Shape:
    """Return the shape of a stack such that rows and columns make no difference."""
    return (shape[0], *sorted(shape[1:]))


def _transposed(shape: Shape) -> Shape:
    return (shape[0], shape[2], shape[1])


def _fused_by_shape(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Group | None:
    """Yield a unit of TE that no single unit of the reference fits, with the two or three that fit together."""
    for unit in candidate:
        if len(unit.shape) != 2 or any(_fit(other, unit) for other in reference):
            continue
        rows, columns = unit.shape
        matrices = [
            other
            for other in reference
            if len(other.shape) == 2 and columns in other.shape and other.expert == unit.expert
        ]
        for count, parts in ((2, ("gate", "up")), (3, ("query", "key", "value"))):
            for first in range(len(matrices) - count + 1):
                run = matrices[first : first + count]
                if sum(math.prod(other.shape) for other in run) == rows * columns:
                    return Group(tuple(run), (unit,), parts, named=False)
    return None


def _by_shape(
    reference: Sequence[Unit],
    candidate: Sequence[Unit],
    told: Mapping[Unit, Parts],
    shape_of: Callable[[Shape], Shape],
) -> Iterator[tuple[Group, ...]]:
    """Match units by their order if both sides have as many of one shape."""
    classes: dict[object, tuple[list[Unit], list[Unit]]] = defaultdict(lambda: ([], []))
    for side, units in enumerate((reference, candidate)):
        for unit in units:
            classes[WEIGHT in unit.shapes, tuple(sorted(shape_of(unit.shape))), unit.expert][side].append(unit)
    for left, right in classes.values():
        if left and len(left) == len(right):
            yield tuple(
                Group((one,), (other,), told.get(other, ()), named=False)
                for one, other in zip(left, right, strict=True)
            )


def _fit(one: Unit, other: Unit) -> bool:
    return sorted(one.shape) == sorted(other.shape) or sorted(flat(one.shape)) == sorted(flat(other.shape))


def _numels(units: Sequence[Unit]) -> int:
    return sum(math.prod(unit.shape) for unit in units)
