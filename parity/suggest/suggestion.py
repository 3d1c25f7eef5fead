"""What ``suggest_map`` finds, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from parity.suggest.layouts import Entries
from parity.suggest.settle import CLEARLY
from parity.weights.notation import WeightMap

Outcome = Literal["settled", "tied", "not run"]


@dataclass(frozen=True)
class Alternative:
    """One of the ways in which parameters could map.

    Attributes:
        entries: left and right sides of the weight map, without those that all alternatives share.
        error: relative L2 error of the outputs with it, all else as suggested; NaN where it was not run.
        chosen: whether the suggestion has it.
    """

    entries: Entries
    error: float
    chosen: bool


@dataclass(frozen=True)
class Decision:
    """A question that names and shapes left open.

    Attributes:
        about: TE's parameters, of the first layer where layers repeat it.
        alternatives: the chosen one first, then by error.
        repeats: how many layers it was decided for at once.
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
    """A weight map for a pair, and why it is this one.

    Attributes:
        weights: the map; without an entry for what is in ``problems``.
        decisions: what names and shapes left open, and how it was settled.
        problems: what has no place in the map, or why the modules could not be run; a sentence each.
        hints: what is probably wrong with the modules, where the map does not fit; a sentence each.
        error: relative L2 error of the outputs in FP32 under the map; NaN where it could not be run.
        expected: what FP32 costs the reference itself (TE multiplies in TF32); NaN where it could not be run.
        limit: up to which error the map fits.
        runs: how many maps were run.
    """

    weights: WeightMap
    decisions: tuple[Decision, ...] = ()
    problems: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    error: float = math.nan
    expected: float = math.nan
    limit: float = math.nan
    runs: int = 0

    @property
    def fits(self) -> bool:
        """Whether the two modules agree under the map, as far as FP32 can tell."""
        return self.error <= self.limit

    @property
    def settled(self) -> bool:
        """Whether the map is complete, fits, and no alternative fits as well."""
        return self.fits and not self.problems and all(decision.outcome == "settled" for decision in self.decisions)
