"""Whether a weight map uses each parameter of both modules once, in shapes that fit; what is wrong if not."""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType

from parity.weights import WeightMap
from parity.weights.sides import describe, holds, names, shape_of
from parity.weights.terms import SIDES, Constant, Copies, MisfitError, Shape, Side, WeightMapError

_NONE: Mapping[str, str] = MappingProxyType({})


def check_map(
    weights: WeightMap,
    reference_shapes: Mapping[str, Shape],
    candidate_shapes: Mapping[str, Shape],
    reference_others: Mapping[str, str] = _NONE,
    candidate_others: Mapping[str, str] = _NONE,
) -> None:
    """Make sure that a map uses each parameter of both modules once, in shapes that fit.

    Args:
        weights: the map.
        reference_shapes: shapes of the reference's parameters by name.
        candidate_shapes: shapes of TE's parameters by name.
        reference_others, candidate_others: what names of theirs mean that are no parameter's, see ``other_names``.

    Raises:
        WeightMapError: with every problem there is, one a line.
    """
    problems = [
        *_map_problems(weights, reference_shapes, candidate_shapes, reference_others, candidate_others),
        *_unused("reference", reference_shapes, _users(weights, 0)),
        *_unused("TE", candidate_shapes, _users(weights, 1)),
    ]
    if problems:
        raise WeightMapError("\n".join(problems))


def check_entries(
    weights: WeightMap, reference_shapes: Mapping[str, Shape], candidate_shapes: Mapping[str, Shape]
) -> None:
    """As ``check``, but the map may leave parameters out.

    Raises:
        WeightMapError: ditto.
    """
    problems = list(_map_problems(weights, reference_shapes, candidate_shapes))
    if problems:
        raise WeightMapError("\n".join(problems))


def _map_problems(
    weights: WeightMap,
    reference_shapes: Mapping[str, Shape],
    candidate_shapes: Mapping[str, Shape],
    reference_others: Mapping[str, str] = _NONE,
    candidate_others: Mapping[str, str] = _NONE,
) -> Iterator[str]:
    """What is wrong with the entries that there are."""
    if not isinstance(weights, Mapping):
        raise WeightMapError(f"weights must be a dict {{left: right}}, not {type(weights).__name__}")
    for left, right in weights.items():
        unknown = [
            *_unknown_names("reference", left, reference_shapes, reference_others, _describe_entry(left, right)),
            *_unknown_names("TE", right, candidate_shapes, candidate_others, _describe_entry(left, right)),
        ]
        yield from unknown
        yield from _entry_problems(left, right, reference_shapes, candidate_shapes, not unknown)
    for kind, side in (("reference", 0), ("TE", 1)):
        for name, entries in _users(weights, side).items():
            if len(entries) > 1:
                described = " and in ".join(_describe_entry(*entry) for entry in entries)
                advice = "; copies(...) on the right fills several TE parameters with one" if side == 0 else ""
                yield f'{kind} parameter "{name}" is used {len(entries)} times: in {described}{advice}'


def _users(weights: WeightMap, side: int) -> dict[str, list[tuple[Side, Side]]]:
    """The entries that mention each parameter on their left (0) or right (1) side."""
    users: dict[str, list[tuple[Side, Side]]] = defaultdict(list)
    for entry in weights.items():
        if isinstance(entry[0], SIDES) and isinstance(entry[1], SIDES):
            for name in names(entry[side]):
                users[name].append(entry)
    return users


def _entry_problems(
    left: Side,
    right: Side,
    reference_shapes: Mapping[str, Shape],
    candidate_shapes: Mapping[str, Shape],
    known: bool,
) -> Iterator[str]:
    """What is wrong with an entry but for its names; ``known`` says whether these are parameters' names."""
    entry = _describe_entry(left, right)
    strangers = [side for side in (left, right) if not isinstance(side, SIDES)]
    for side in strangers:
        yield f"{entry}: {describe(side)} is no parameter's name and no term; several make one with stack(...)"
    if strangers:
        return
    if holds(right, Constant):
        yield f"{entry}: a constant stands for what the reference lacks, so it belongs on the left"
    if holds(left, Copies):
        yield f"{entry}: copies are TE parameters that hold the same of the reference's, so they belong on the right"
    if not known:
        return
    shapes = f"({_describe_shapes(left, reference_shapes)}; {_describe_shapes(right, candidate_shapes)})"
    try:
        left_shape, right_shape = shape_of(left, reference_shapes), shape_of(right, candidate_shapes)
    except MisfitError as misfit:
        yield f"{entry}: {misfit} {shapes}"
        return
    if left_shape != right_shape:
        advice = ""
        if len(left_shape) == 2 and left_shape == right_shape[::-1]:
            advice = "; is one the transpose() of the other?"
        elif math.prod(left_shape) == math.prod(right_shape):
            advice = "; rearrange() gives as many elements another shape"
        yield f"{entry}: the left side is {left_shape}, the right side {right_shape} {shapes}{advice}"


def _unknown_names(
    kind: str, side: Side, shapes: Mapping[str, Shape], others: Mapping[str, str], entry: str
) -> Iterator[str]:
    for name in names(side) if isinstance(side, SIDES) else ():
        if name in others:
            yield f'{entry}: "{name}" is no {kind} parameter of its own: {others[name]}'
        elif name not in shapes:
            close = difflib.get_close_matches(name, shapes, n=1)
            advice = f'; did you mean "{close[0]}" {tuple(shapes[close[0]])}?' if close else ""
            yield f'{entry}: there is no {kind} parameter "{name}"{advice}'


def _unused(kind: str, shapes: Mapping[str, Shape], users: Container[str]) -> Iterator[str]:
    """Parameters that no entry mentions."""
    for name, shape in shapes.items():
        if name in users:
            continue
        if kind == "reference":
            yield f'reference parameter "{name}" {tuple(shape)} is used by no entry'
        else:
            yield (
                f'TE parameter "{name}" {tuple(shape)} is filled by no entry; where the reference has none, build the '
                f"TE module without it or map {describe(Constant(0.0, tuple(shape)))} to it; where another parameter "
                f"of TE holds the same, map to copies(...) of both"
            )


def _describe_entry(left: object, right: object) -> str:
    return f"{describe(left)}: {describe(right)}"


def _describe_shapes(side: Side, shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {tuple(shapes[name])}" for name in names(side)) or "no parameter"
