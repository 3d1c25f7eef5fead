"""Whether a weight map uses each parameter of both modules once, in shapes that fit; what is wrong if not."""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from parity.weights.alike import Problem, lines
from parity.weights.notation import WeightMap
from parity.weights.other_names import OtherNames, Parameters
from parity.weights.sides import describe, holds, names, shape_of
from parity.weights.terms import SIDES, Constant, Copies, MisfitError, Shape, Side, WeightMapError
from parity.weights.ties import tied_in_entry
from parity.weights.unused import unused_of_reference, unused_of_te

_NO_OTHERS = OtherNames()


def check_map(
    weights: WeightMap,
    reference_shapes: Mapping[str, Shape],
    candidate_shapes: Mapping[str, Shape],
    reference_others: OtherNames = _NO_OTHERS,
    candidate_others: OtherNames = _NO_OTHERS,
) -> None:
    """Make sure that a map uses each parameter of both modules once, in shapes that fit.

    Args:
        weights: the map.
        reference_shapes: shapes of the reference's parameters by name.
        candidate_shapes: shapes of TE's parameters by name.
        reference_others, candidate_others: what further names of theirs mean, see ``other_names``.

    Raises:
        WeightMapError: with every problem there is, one a line; those of layers that are alike stand in one.
    """
    reference = Parameters("reference", reference_shapes, reference_others)
    candidate = Parameters("TE", candidate_shapes, candidate_others)
    problems = [
        *_map_problems(weights, reference, candidate),
        *unused_of_reference(weights, reference, candidate),
        *unused_of_te(weights, reference, candidate),
    ]
    if problems:
        raise WeightMapError("\n".join([*["weights has no entry"] * (not weights), *lines(problems)]))


def check_entries(
    weights: WeightMap,
    reference_shapes: Mapping[str, Shape],
    candidate_shapes: Mapping[str, Shape],
    reference_others: OtherNames = _NO_OTHERS,
    candidate_others: OtherNames = _NO_OTHERS,
) -> None:
    """As ``check_map``, but the map may leave parameters out.

    Raises:
        WeightMapError: ditto.
    """
    reference = Parameters("reference", reference_shapes, reference_others)
    problems = list(_map_problems(weights, reference, Parameters("TE", candidate_shapes, candidate_others)))
    if problems:
        raise WeightMapError("\n".join(lines(problems)))


def _map_problems(weights: WeightMap, reference: Parameters, candidate: Parameters) -> Iterator[Problem]:
    """What is wrong with the entries that there are."""
    if not isinstance(weights, Mapping):
        raise WeightMapError(f"weights must be a dict {{left: right}}, not {type(weights).__name__}")
    for left, right in weights.items():
        entry = _describe_entry(left, right)
        unknown = [*_unknown_names(left, reference), *_unknown_names(right, candidate)]
        if isinstance(left, SIDES) and isinstance(right, SIDES):
            unknown += tied_in_entry(left, right, weights, reference, candidate)
        yield from (Problem(f"{entry}: {told}") for told in unknown)
        yield from map(Problem, _entry_problems(left, right, reference.shapes, candidate.shapes, not unknown))
    for module, side in ((reference, 0), (candidate, 1)):
        for name, entries in _users(weights, side).items():
            if len(entries) > 1:
                described = " and in ".join(_describe_entry(*entry) for entry in entries)
                advice = "; copies(...) on the right fills several TE parameters with one" if side == 0 else ""
                yield Problem(f'{module.kind} parameter "{name}" is used {len(entries)} times: in {described}{advice}')


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


def _unknown_names(side: Side, module: Parameters) -> Iterator[str]:
    for name in names(side) if isinstance(side, SIDES) else ():
        if name in module.others.buffers:
            yield (
                f'"{name}" is no {module.kind} parameter of its own: it is a buffer, and buffers are not mapped; give '
                "both modules the same in the factory"
            )
        elif name not in module.shapes and name not in module.others.tied:
            close = _closest(name, module.shapes)
            advice = f'; did you mean "{close}" {tuple(module.shapes[close])}?' if close else ""
            yield f'there is no {module.kind} parameter "{name}"{advice}'


def _closest(name: str, known: Mapping[str, Shape]) -> str | None:
    """The only name with a prefix more or a prefix less, or else the one with the most letters in common."""
    within = sorted((other for other in known if name.endswith(f".{other}")), key=len)
    below = [other for other in known if other.endswith(f".{name}")]
    found = within[-1:] or (below if len(below) == 1 else difflib.get_close_matches(name, known, n=1))
    return found[0] if found else None


def _describe_entry(left: object, right: object) -> str:
    return f"{describe(left)}: {describe(right)}"


def _describe_shapes(side: Side, shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {tuple(shapes[name])}" for name in names(side)) or "no parameter"
