"""Hold what ``suggest_map`` finds as plain data, and print it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parity.case.weight_map import Reorder, Side, WeightMap, describe
from parity.ranks.layout import Over
from parity.suggest.layouts import Entries
from parity.suggest.over_ranks import Divided
from parity.suggest.settle import CLEARLY

# The data.


Outcome = Literal["settled", "tied", "not run"]


@dataclass(frozen=True)
class Alternative:
    """One of the ways in which parameters could map.

    Attributes:
        entries: left and right sides of the weight map, without those that all alternatives share.
        error: relative L2 error of the outputs with it, all else as suggested; NaN if it was not run.
        chosen: whether the suggestion has it.
    """

    entries: Entries
    error: float
    chosen: bool


@dataclass(frozen=True)
class Decision:
    """A question that names and shapes left open.

    Attributes:
        about: TE's parameters, those of the first layer if layers repeat it.
        alternatives: the chosen one first, then by error.
        repeats: for how many layers at once it was decided.
    """

    about: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    repeats: int = 1

    @property
    def outcome(self) -> Outcome:
        """``settled`` where the chosen error is less than half that of any other, ``tied`` where it is not."""
        errors = [alternative.error for alternative in self.alternatives]
        if any(map(math.isnan, errors)):
            return "not run"
        return "settled" if errors[0] < CLEARLY * min(errors[1:]) else "tied"


@dataclass(frozen=True)
class Suggestion:
    """A weight map for a pair, and the reasons for it.

    Attributes:
        weights: the map; without an entry for what is in ``problems``.
        decisions: what names and shapes left open, and how it was settled.
        problems: what has no place in the map, or why the modules could not be run; a sentence each.
        hints: what is probably wrong with the modules, if the map does not fit; a sentence each.
        error: relative L2 error of the outputs in FP32 under the map; NaN if it could not be run.
        expected: what FP32 costs the reference itself (TE multiplies in TF32); NaN if it could not be run.
        limit: the map fits if the error is at most this.
        runs: how many maps were run.
        divided: how ranks divide the candidate's parameters, if that was asked for.
        written: the map as it is written into a file: with one entry, ``"layers.{i}.weight"``, for what all layers have
            alike.
    """

    weights: WeightMap
    decisions: tuple[Decision, ...] = ()
    problems: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    error: float = math.nan
    expected: float = math.nan
    limit: float = math.nan
    runs: int = 0
    divided: tuple[Divided, ...] = ()
    written: WeightMap = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Return whether the two modules agree under the map, as far as FP32 can tell."""
        return self.error <= self.limit

    @property
    def settled(self) -> bool:
        """Return whether the map is complete, fits, and no alternative fits as well."""
        return self.fits and not self.problems and all(decision.outcome == "settled" for decision in self.decisions)


# A suggestion for a terminal: the map as it goes into a user's file, then the reasons for it.


_SHOWN_ENTRIES = 3
_SHOWN_ALTERNATIVES = 6


def python(weight_map: WeightMap) -> str:
    """Return the argument ``weights=`` of ``parity.Pair``, one entry per line."""
    entries = "".join(f"    {_entry(left, right)},\n" for left, right in weight_map.items())
    return f"weights={{\n{entries}}},"


def python_over_ranks(divided: Sequence[Divided]) -> str:
    """Return the argument ``parallel=`` of ``parity.Pair``, one parameter per line."""
    entries = [(f'"{one.name}": [{", ".join(map(_over, one.split))}],', one.reason) for one in divided]
    width = max(len(entry) for entry, _ in entries)
    lines = "".join(f"        {entry:<{width}}  # {reason}\n" for entry, reason in entries)
    return f"parallel=parity.Parallel(\n    weights={{\n{lines}    }},\n),"


def _over(one: Over) -> str:
    blocks = f", blocks={one.blocks}" if one.blocks > 1 else ""
    return f'parity.over("{one.axis}", dim={one.dim}{blocks})'


def explain(suggestion: Suggestion) -> str:
    """Say what was open, how it was settled, and what to look at next."""
    lines = list(suggestion.problems)
    for outcome, heading in (
        ("settled", "decided by running both modules in FP32, by the relative L2 error of the outputs:"),
        ("tied", "NOT decided, since running both modules shows no clear winner; errors of the outputs:"),
        (
            "not run",
            "NOT decided; sorted by names and shapes, the likeliest first, with the errors of those that were run:",
        ),
    ):
        decisions = [decision for decision in suggestion.decisions if decision.outcome == outcome]
        if decisions:
            lines += [heading, *(line for decision in decisions for line in _decision(decision))]
    return "\n".join([*lines, *_verdict(suggestion)])


def _decision(decision: Decision) -> Iterator[str]:
    layers = f", in {decision.repeats} similar layers" if decision.repeats > 1 else ""
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
        yield f"{figures}: NO map fits; of {suggestion.runs} maps that were run, none is clearly better than this one."
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
