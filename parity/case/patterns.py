"""Expand patterns of a weight map, such as ``"layers.{i}.norm.weight"``, which is one entry for all layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from parity.case.weight_map import SIDES, Constant, Copies, Experts, Side, Stack, WeightMap, describe, names, renamed

# A name in braces stands for a number: ``{i}``, and ``{i+1}`` for the next one, if the two sides count from different
# numbers or the first layers have entries of their own; ``i`` itself is never less than 0. An entry is expanded for
# each number that the names on its left have among the reference's parameters, whatever TE has. If the counts differ,
# the map's check names the layers that one side lacks.
# A name in braces that only one side has stands for all of its numbers at once, in the outermost term that has one
# part: ``experts("fc1.weight{e}")`` is ``experts("fc1.weight0", "fc1.weight1", ...)``. A pattern that matches nothing
# is kept unchanged, as a name that no module has.


Numbers = Mapping[str, int]
_INDEX = re.compile(r"\{([A-Za-z_]\w*)([+-]\d+)?\}")
_GATHERING = (Stack, Experts, Copies)
_Value = TypeVar("_Value")


def has_patterns(weights: object) -> bool:
    """Return whether a name of a weight map, or of a mapping from names, stands for those of several layers."""
    if not isinstance(weights, Mapping):
        return False
    sides = (side for entry in weights.items() for side in entry if isinstance(side, SIDES))
    return any(_INDEX.search(name) for side in sides for name in names(side))


def expanded(weights: WeightMap, reference: Iterable[str], candidate: Iterable[str]) -> dict[Side, Side]:
    """Return the map with an entry for each layer.

    Args:
        weights: a map, some of whose names have names in braces for numbers.
        reference: the names of the reference's parameters.
        candidate: the names of the candidate's.
    """
    ours, theirs = tuple(reference), tuple(candidate)
    found: dict[Side, Side] = {}
    for left, right in weights.items():
        if not (isinstance(left, SIDES) and isinstance(right, SIDES)) or not (
            _find_indices(left) or _find_indices(right)
        ):
            found[left] = right
            continue
        # A constant has no name, so TE's own parameters say how many layers there are.
        counted, among = (left, ours) if any(names(left)) else (right, theirs)
        shared = _find_indices(left) & _find_indices(right) if counted is left else _find_indices(right)
        layers = _find_numbers(counted, shared, among) if shared else [{}]
        for numbers in layers or [{}]:
            found[_fill_side(left, numbers, ours)] = _fill_side(right, numbers, theirs)
    return found


def expanded_names(by_name: Mapping[str, _Value], candidate: Iterable[str]) -> dict[str, _Value]:
    """Return a mapping with an entry for each name that a pattern matches; patterns that match none are dropped."""
    known = tuple(candidate)
    found: dict[str, _Value] = {}
    for pattern, value in by_name.items():
        indices = _find_indices(pattern)
        every = [_filled_name(pattern, numbers) for numbers in _find_numbers(pattern, indices, known)]
        found.update(dict.fromkeys(every if indices else [pattern], value))
    return found


def _find_indices(side: Side) -> set[str]:
    return {index for name in names(side) for index in _of_name(name)}


def _of_name(name: str) -> list[str]:
    return [index for index, _ in _INDEX.findall(name)]


def _find_numbers(side: Side, wanted: set[str], known: Sequence[str]) -> list[Numbers]:
    """Return the numbers that these indices stand for in known names, in ascending order."""
    order = [index for name in names(side) for index in _of_name(name) if index in wanted]
    order = list(dict.fromkeys(order))
    found: set[tuple[int, ...]] = set()
    for name in names(side):
        if set(order) <= set(_of_name(name)):
            found.update(tuple(numbers[index] for index in order) for numbers in _match_pattern(name, known))
    return [dict(zip(order, numbers, strict=True)) for numbers in sorted(found)]


def _match_pattern(name: str, known: Sequence[str]) -> Iterator[Numbers]:
    """Yield the numbers with which a pattern becomes a known name; an index that occurs twice has one number."""
    expression = re.compile(r"(0|[1-9]\d*)".join(map(re.escape, _INDEX.sub("\0", name).split("\0"))))
    indices = [(index, int(offset or 0)) for index, offset in _INDEX.findall(name)]
    for matched in filter(None, map(expression.fullmatch, known)):
        numbers: dict[str, int] = {}
        for (index, offset), number in zip(indices, matched.groups(), strict=True):
            if numbers.setdefault(index, int(number) - offset) != int(number) - offset or numbers[index] < 0:
                break
        else:
            yield numbers


def _fill_side(side: Side, numbers: Numbers, known: Sequence[str]) -> Side:
    """Return the side with these numbers in place of their indices; any other index gets all of its numbers."""
    return _expand_gathering_terms(renamed(side, lambda name: _filled_name(name, numbers)), known)


def _filled_name(name: str, numbers: Numbers) -> str:
    def filled(found: re.Match[str]) -> str:
        return str(numbers[found[1]] + int(found[2] or 0)) if found[1] in numbers else found[0]

    return _INDEX.sub(filled, name)


def _expand_gathering_terms(side: Side, known: Sequence[str]) -> Side:
    if isinstance(side, (str, Constant)) or not _find_indices(side):
        return side
    if isinstance(side, _GATHERING) and len(side.parts) == 1:
        parts = _repeat_part(side.parts[0], known)
        return dataclasses.replace(side, parts=tuple(parts)) if parts else side
    return dataclasses.replace(side, parts=tuple(_expand_gathering_terms(part, known) for part in side.parts))


def _repeat_part(part: Side, known: Sequence[str]) -> list[Side]:
    """Return the part once for each number that its index has."""
    return [
        renamed(part, partial(_filled_name, numbers=one)) for one in _find_numbers(part, _find_indices(part), known)
    ]


# The inverse: entries of several layers become one pattern, if it stands for exactly these.


_LETTERS = "ijk"
_LAYER = re.compile(r"(?:^|(?<=\.))(?:0|[1-9]\d*)(?=\.)")
_Entry = tuple[Side, Side]


def collapsed(weights: WeightMap, reference: Iterable[str], candidate: Iterable[str]) -> dict[Side, Side]:
    """Return a map that ``expanded`` turns into this one, with one entry for what several layers have in common.

    Args:
        weights: a map without patterns.
        reference: the names of the reference's parameters, including those that the map leaves out.
        candidate: the names of the candidate's.
    """
    ours, theirs = tuple(reference), tuple(candidate)
    entries: list[_Entry] = list(weights.items())
    for letter in _LETTERS:
        groups: dict[tuple[str, str], list[_Entry]] = {}
        patterns: dict[tuple[str, str], _Entry] = {}
        for entry in entries:
            pattern = _make_pattern(entry, letter)
            described = describe(pattern[0]), describe(pattern[1])
            patterns.setdefault(described, pattern)
            groups.setdefault(described, []).append(entry)
        entries = [
            one
            for described, members in groups.items()
            for one in _merge_entries(members, patterns[described], ours, theirs)
        ]
    return dict(entries)


def _merge_entries(members: list[_Entry], pattern: _Entry, ours: Sequence[str], theirs: Sequence[str]) -> list[_Entry]:
    """Return the pattern if it stands for these entries and no others, else the entries."""

    def described(entries: list[_Entry]) -> set[tuple[str, str]]:
        return {(describe(left), describe(right)) for left, right in expanded(dict(entries), ours, theirs).items()}

    return [pattern] if len(members) > 1 and described([pattern]) == described(members) else members


def _make_pattern(entry: _Entry, letter: str) -> _Entry:
    """Return the entry with a letter in place of its layer's number; unchanged if the names of a side differ in it.

    If the two sides count from different numbers, one gets an offset: ``{i+1}``.
    """
    layers = [{_find_layer_number(name) for name in names(side)} for side in entry]
    counted = [{int(layer[1]) for layer in side if layer is not None} for side in layers]
    if any(None in side for side in layers) or any(len(numbers) > 1 for numbers in counted) or not any(counted):
        return entry
    first = min(number for numbers in counted for number in numbers)

    def with_letter(name: str, numbers: set[int]) -> str:
        [offset] = (number - first for number in numbers)
        return _LAYER.sub(f"{{{letter}+{offset}}}" if offset else f"{{{letter}}}", name, count=1)

    left, right = (
        renamed(side, partial(with_letter, numbers=numbers)) for side, numbers in zip(entry, counted, strict=True)
    )
    return left, right


def _find_layer_number(name: str) -> tuple[str, str] | None:
    """Return the first number between dots, with what is before it; None if there is none."""
    found = _LAYER.search(name)
    return (name[: found.start()], found[0]) if found else None
