"""Parameters that one module ties and the other does not: what to say of them, and what to write."""

from __future__ import annotations

from collections.abc import Iterator

from parity.weights.notation import WeightMap
from parity.weights.other_names import Parameters
from parity.weights.sides import describe, names
from parity.weights.terms import SIDES, Copies, Shape, Side

# Said of TE's, where the reference has two parameters.
UNTIED = "and the reference has two parameters: tie these, or build the TE module so that it has two"


def tied_in_entry(
    left: Side, right: Side, weights: WeightMap, reference: Parameters, candidate: Parameters
) -> Iterator[str]:
    """What is wrong with the names in an entry that are further names of tied parameters."""
    firsts = [_first(side, module) for side, module in ((left, reference), (right, candidate))]
    if None not in firsts and weights.get(str(firsts[0])) == firsts[1]:
        yield f'both modules tie this to "{firsts[0]}", which has an entry: leave this one out'
        return
    for name in names(left):
        if (first := reference.others.tied.get(name)) is not None:
            text = f'"{name}" is no reference parameter of its own: it is tied to "{first}"'
            if isinstance(right, str) and right in candidate.shapes and isinstance(weights.get(first), str):
                yield f"{text}, and TE has both apart: {fill_both(weights, first, right)} in place of both entries"
            else:
                yield f"{text}; map that"
    for name in names(right):
        if (first := candidate.others.tied.get(name)) is not None:
            mapped = any(first in names(other) for other in weights.values() if isinstance(other, SIDES))
            advice = UNTIED if mapped else "map that"
            yield f'"{name}" is no TE parameter of its own: it is tied to "{first}"{", " if mapped else "; "}{advice}'


def tied_elsewhere(name: str, shape: Shape, there: Parameters, here: Parameters) -> str | None:
    """The name under which the other module ties what is an unused parameter here: the same, or one of its shape."""
    tied = [other for other, first in there.others.tied.items() if there.shapes[first] == shape]
    if name in tied:
        return name
    alike = [other for other in tied if other not in here.shapes]
    return alike[0] if len(alike) == 1 and len(shape) > 1 else None


def fill_both(weights: WeightMap, first: str, name: str) -> str:
    """What to do where the reference ties a parameter to ``first``, and TE has its own, ``name``."""
    filled = weights.get(first)
    both = describe(Copies((filled, name))) if isinstance(filled, str) else f'copies(..., "{name}")'
    return f'tie TE\'s, or write "{first}": {both}'


def _first(side: Side, module: Parameters) -> str | None:
    return module.others.tied.get(side) if isinstance(side, str) else None
