"""Counts over trials: what each rule detects, and how often it rejects a right port."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parity.zoo.catalogue import BUGS
from parity.zoo.rivals import RULES
from parity.zoo.signal import filter_ratio
from parity.zoo.trial import CLEAN, Trial, Verdict

PARITY = "parity"
METHODS = (PARITY, *RULES)
Verdicts = Mapping[Trial, Verdict]


@dataclass(frozen=True)
class Count:
    """How many of how many."""

    hits: int
    total: int

    @property
    def share(self) -> float:
        """From 0 to 1; NaN of none."""
        return self.hits / self.total if self.total else math.nan


@dataclass(frozen=True)
class Place:
    """A bug in a host at a size and precision; its trials differ in the seed."""

    bug: str
    host: str
    size: str
    precision: str


@dataclass(frozen=True)
class Strength:
    """A bug's signal to noise at a place, each the largest over tensors.

    Attributes:
        norm_ratio: of norms, the root mean square over seeds.
        filter_ratio: of a matched filter; NaN with too few seeds.
    """

    norm_ratio: float
    filter_ratio: float


def rejects(verdict: Verdict, method: str) -> bool:
    """Whether a rule rejects the port."""
    return verdict.detected if method == PARITY else verdict.rejected[method] > 0


def judged(verdicts: Verdicts, clean: bool, precision: str) -> list[tuple[Trial, Verdict]]:
    """The trials at a precision that ended with a verdict."""
    return [
        (trial, verdict)
        for trial, verdict in verdicts.items()
        if (trial.bug == CLEAN) == clean and trial.precision == precision and verdict.status != "error"
    ]


def told_apart(verdicts: Verdicts, trials: Iterable[Trial], method: str) -> Count:
    """Bugs that a rule rejects where it accepts the right port, among those whose right port was judged."""
    pairs = [(verdicts[trial], verdicts.get(dataclasses.replace(trial, bug=CLEAN))) for trial in trials]
    judged_pairs = [(bug, clean) for bug, clean in pairs if clean is not None and clean.status != "error"]
    hits = sum(rejects(bug, method) and not rejects(clean, method) for bug, clean in judged_pairs)
    return Count(hits, len(judged_pairs))


def rejections(verdicts: Iterable[tuple[Trial, Verdict]], method: str) -> Count:
    """Rejected ports."""
    listed = list(verdicts)
    return Count(sum(rejects(verdict, method) for _, verdict in listed), len(listed))


def rejected_tensors(verdicts: Iterable[tuple[Trial, Verdict]], method: str) -> Count:
    """Rejected tensors: each is a check of its own."""
    listed = [verdict for _, verdict in verdicts]
    hits = sum(verdict.failed_tensors if method == PARITY else verdict.rejected[method] for verdict in listed)
    return Count(hits, sum(verdict.tensors for verdict in listed))


def named_first(verdicts: Iterable[tuple[Trial, Verdict]]) -> Count:
    """Detected bugs whose first finding is the planted one."""
    detected = [(trial, verdict) for trial, verdict in verdicts if verdict.detected]
    hits = sum(verdict.findings[:1] == (BUGS[trial.bug].finding,) for trial, verdict in detected)
    return Count(hits, len(detected))


def by_place(verdicts: Verdicts) -> dict[Place, list[tuple[Trial, Verdict]]]:
    """Trials with a bug and a verdict, in the order of the catalogue."""
    places: dict[Place, list[tuple[Trial, Verdict]]] = defaultdict(list)
    for trial, verdict in verdicts.items():
        if trial.bug != CLEAN and verdict.status != "error":
            places[Place(trial.bug, trial.host, trial.size, trial.precision)].append((trial, verdict))
    return dict(places)


def strength(verdicts: Iterable[tuple[Trial, Verdict]]) -> Strength:
    """Of the trials of one place."""
    signals = defaultdict(list)
    for _, verdict in verdicts:
        for name, signal in verdict.signals.items():
            signals[name].append(signal)
    ratios = [math.sqrt(sum(s.norm_ratio**2 for s in found) / len(found)) for found in signals.values()]
    filters = [filter_ratio([s.coefficient for s in found]) for found in signals.values()]
    return Strength(max(ratios, default=math.nan), max((f for f in filters if not math.isnan(f)), default=math.nan))


def errors(verdicts: Verdicts) -> list[tuple[Trial, Verdict]]:
    """Trials in which a port raised."""
    return [(trial, verdict) for trial, verdict in verdicts.items() if verdict.status == "error"]
