"""Python's own numbers that a module returns beside tensors, as what ``.item()`` gives: no gradient is theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from parity.diagnosis.codes import finding
from parity.judging.judge import judge
from parity.limits.table import Table
from parity.passes import Tensors, model_numbers
from parity.precision import Precision
from parity.prepare import Prepared
from parity.result import Finding
from parity.truth import Truth

# A single number's error hangs on chance more than a tensor's, and freedoms of a port's own lines are not asked for it:
# within this many times the limit it is noted, beyond no rounding makes it so.
_GROSS = 10.0


def judged_numbers(
    prepared: Prepared, returned: Mapping[str, float], precision: Precision, table: Table
) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """Judge a candidate's Python numbers against the reference's: floats as outputs of one element, others exactly.

    Integers and booleans may hang on rounding, as a count of tokens does: where they differ, it is said.

    Args:
        prepared: with golden, and what the rounding model's passes returned.
        returned: by the candidate.
        precision: at which it ran.
        table: what faithful ports show.

    Returns:
        What to note, a sentence each; and a finding for each number that no rounding explains.
    """
    notes: list[str] = []
    found: list[Finding] = []
    exact = prepared.golden.numbers
    for place, one in exact.items():
        if place not in returned:
            notes.append(f"the reference returns a number at {place}, which the candidate does not")
            continue
        other = returned[place]
        if one == other or (one != one and other != other):
            continue
        told = f"the candidate returns {_shown(other)} at {place} where the reference returns {_shown(one)}"
        if not (_is_float(one) and _is_float(other)):
            notes.append(f"{told}; whole numbers and booleans are not judged")
            continue
        runs = model_numbers(prepared, precision.rounding).values()
        modelled = [float(run[place]) for run in runs if place in run]
        margin = _margin(one, other, modelled, precision, table)
        if margin > _GROSS:
            found.append(finding("number", f"{told}, which no rounding at {precision.name} explains"))
        elif margin > 1.0:
            notes.append(f"{told}, {margin:.2g} times as far from it as {precision.name} explains")
    return tuple(notes), tuple(found)


def _is_float(number: float) -> bool:
    return isinstance(number, float)


def _shown(number: float) -> str:
    return f"{number:.6g}" if _is_float(number) else str(number)


def _margin(one: float, other: float, modelled: list[float], precision: Precision, table: Table) -> float:
    """The margin of one number as of an output that has no other; infinite where one alone is not finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    models = [_as_output(x) for x in modelled or [one]]
    truths = {key: Truth(x) for key, x in _as_output(one).items()}
    (result,) = judge(truths, models, _as_output(other), precision, table, ())
    return result.margin


def _as_output(number: float) -> Tensors:
    return {("output", "number"): torch.tensor(number, dtype=torch.float64)}
