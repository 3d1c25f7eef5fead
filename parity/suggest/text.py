"""A suggestion for a terminal: the map as it goes into a user's file, then what it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parity.suggest.suggestion import Alternative, Decision, Suggestion
from parity.weights.notation import WeightMap
from parity.weights.sides import describe
from parity.weights.terms import Reorder, Side

_SHOWN_ENTRIES = 3
_SHOWN_ALTERNATIVES = 6


def python(weight_map: WeightMap) -> str:
    """The argument ``weights=`` of ``parity.Pair``, an entry a line."""
    entries = "".join(f"    {_entry(left, right)},\n" for left, right in weight_map.items())
    return f"weights={{\n{entries}}},"


def explain(suggestion: Suggestion) -> str:
    """What was open, how it was settled, and what to look at next."""
    lines = list(suggestion.problems)
    for outcome, heading in (
        ("settled", "settled by running both modules in FP32, by the relative L2 error of the outputs:"),
        ("tied", "NOT settled by running both modules, as the first is no clear best:"),
        ("not run", "NOT settled, the likeliest by name and shape first; errors of those that were run:"),
    ):
        decisions = [decision for decision in suggestion.decisions if decision.outcome == outcome]
        if decisions:
            lines += [heading, *(line for decision in decisions for line in _decision(decision))]
    return "\n".join([*lines, *_verdict(suggestion)])


def _decision(decision: Decision) -> Iterator[str]:
    layers = f", in {decision.repeats} layers alike" if decision.repeats > 1 else ""
    yield f"  {', '.join(decision.about[:_SHOWN_ENTRIES])}{layers}"
    for alternative in decision.alternatives[:_SHOWN_ALTERNATIVES]:
        error = "not run" if math.isnan(alternative.error) else f"{alternative.error:.2g}"
        yield f"    {error:>8}  {_entries(alternative)}"
    hidden = len(decision.alternatives) - _SHOWN_ALTERNATIVES
    if hidden > 0:
        yield f"              and {hidden} more"


def _entries(alternative: Alternative) -> str:
    shown = [_entry(left, right) for left, right in alternative.entries[:_SHOWN_ENTRIES]]
    return ", ".join(shown) + (", ..." if len(alternative.entries) > _SHOWN_ENTRIES else "")


def _verdict(suggestion: Suggestion) -> Iterator[str]:
    if math.isnan(suggestion.error):
        yield "The map was not run: check it, and complete it by hand."
        return
    figures = f"With this map the error is {suggestion.error:.2g}; FP32 itself costs {suggestion.expected:.2g}"
    if suggestion.fits:
        yield f"{figures}: the map fits ({suggestion.runs} maps run)."
    else:
        yield f"{figures}: NO map fits; of {suggestion.runs} that were run none is clearly better than this one."
        yield "Look at what a weight map cannot express: the activation, the norm and its eps, the mask, RoPE, the"
        yield "scale of the softmax, the order of inputs. With this map in the pair, `parity run` tries the known"
        yield "mistakes and names the one that explains the rest."


def _entry(left: Side, right: Side) -> str:
    return f"{_side(left)}: {_side(right)}"


def _side(side: Side) -> str:
    written = describe(side, "parity.")
    if isinstance(side, Reorder):
        count = len(side.order)
        if side.order == (*range(0, count, 2), *range(1, count, 2)):
            written = written.replace(repr(side.order), f"(*range(0, {count}, 2), *range(1, {count}, 2))")
    return written
