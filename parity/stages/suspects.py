"""Which known mistakes make the stages that are off, and spoil none that is right?

A mistake is tried in one stage at a time, from the candidate's own values at its beginning. So it is compared with what
the candidate made of these, at the noise of one stage, and costs the calls of one stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from parity.mistakes.hypothesis import Hypothesis
from parity.numerics.golden import in_fp64
from parity.passes.nominal_clock import Clock
from parity.passes.prepare import Prepared
from parity.stages.graph import Values
from parity.stages.judge import Judged
from parity.stages.locate import RATIO, Stages, is_flagged
from parity.trace.calls import Misfit
from parity.trace.trace import Site, Value, grouped

_HELPS = 0.9  # a mistake whose number is worth fitting leaves less than this share of a stage's error
_MOST_FITTED = 6  # mistakes whose number is fitted
_FITTED_WITHIN = 4.0  # times the best known number, in both directions
_EVALUATIONS = 24


@dataclass(frozen=True)
class Suspect:
    """A mistake that makes stages that are off.

    Attributes:
        mistake: the mistake.
        explained: the flagged stages that are right under it, by their ends.
        misfit: the largest ratio of error to expected error that it leaves in these.
    """

    mistake: Hypothesis
    explained: frozenset[Site]
    misfit: float


class Suspicion:
    """Tries mistakes in the forward stages of one pass.

    Args:
        prepared: what was compared.
        stages: its stages.
        is_over: whether no time is left.
    """

    def __init__(self, prepared: Prepared, stages: Stages, is_over: Callable[[], bool]) -> None:
        self._stages = stages
        self._graph = stages.graph
        self._clock: Clock = prepared.clock
        self._is_over = is_over
        self._forward = [one for one in stages.all if not one.stage.backward]
        self._by_site = _stages_of_calls(self._forward)
        self._by_parameter = _stages_of_parameters(stages, self._forward)
        self._parameters = {name: number for number, name in self._graph.trace.parameters.items()}
        self._begins = {number: match.begin for number, match in stages.found.items()}
        self._values = {match.value.number: match.value for match in stages.found.values()}
        self._ends = {one.stage.number: one.stage.end for one in self._forward}
        self._by_end = {end: self._values[number] for number, end in self._ends.items()}
        self._expected = {one.stage.number: one.expected for one in self._forward}
        self._insides: dict[Hypothesis, set[int]] = {}
        self.flagged = frozenset(one.stage.end for one in self._forward if is_flagged(one))

    def explanations(self, known: Iterable[Hypothesis]) -> list[Suspect]:
        """Return the mistakes that explain some flagged stages and spoil no other, those that explain most first."""
        found: list[Suspect] = []
        partly: list[tuple[float, Hypothesis]] = []
        for mistake in known:
            if self._is_over():
                break
            suspect, left = self._try(mistake)
            if suspect is not None:
                found.append(suspect)
            elif mistake.tuned is not None and left < _HELPS:
                partly.append((left, mistake))
        found += self._fitted(partly)
        return sorted(found, key=lambda one: (-len(one.explained), one.misfit))

    def concerns(self, mistake: Hypothesis) -> bool:
        """Return whether a mistake changes a flagged stage, or anything that no stage shows, such as the inputs."""
        is_elsewhere = mistake.around is not None or mistake.returned is not None
        return is_elsewhere or any(self._flagged_by(one, mistake) for one in self._touched(mistake))

    def _try(self, mistake: Hypothesis) -> tuple[Suspect | None, float]:
        """Return a mistake if it explains what it touches, and the least share of a flagged stage's error it leaves."""
        touched = self._touched(mistake)
        flagged = {one.stage.end: ends for one in touched if (ends := self._flagged_by(one, mistake))}
        if not flagged:
            return None, math.inf
        least, worst = math.inf, 0.0
        for one in sorted(touched, key=lambda one: one.stage.end not in flagged):
            ratio = self._ratio_under(one, mistake)
            if one.stage.end in flagged:
                least = min(least, ratio / max(one.ratio, RATIO))
            worst = max(worst, ratio)
            if not worst <= RATIO:
                return None, least
        return Suspect(mistake, frozenset[Site]().union(*flagged.values()), worst), least

    def _flagged_by(self, one: Judged, mistake: Hypothesis) -> frozenset[Site]:
        """Return the flagged ones among a stage and those before it that a mistake's operation spans."""
        ends = {self._ends[number] for number in self._inside(mistake) if number in self._ends}
        reach = {end for end in ends if self._graph.is_above(self._by_end[end], self._values[one.stage.number])}
        return frozenset(({one.stage.end} | reach) & self.flagged)

    def _inside(self, mistake: Hypothesis) -> set[int]:
        """Return the matched values inside of the operations that a mistake changes: they do not begin its stages."""
        if mistake not in self._insides:
            self._insides[mistake] = set(self._find_inside(mistake))
        return self._insides[mistake]

    def _find_inside(self, mistake: Hypothesis) -> Iterator[int]:
        for edit in mistake.edits:
            if edit.site not in self._graph.order:
                continue
            results = self._graph.trace.calls[self._graph.order[edit.site]].outputs
            with suppress(Misfit):
                needed = [self._graph.same_value(value) for value in edit.needs]
                for value in self._values.values():
                    is_made_of = any(self._graph.is_above(one, value) for one in needed)
                    if is_made_of and any(self._graph.is_above(value, result) for result in results):
                        yield value.number

    def _fitted(self, partly: Sequence[tuple[float, Hypothesis]]) -> Iterator[Suspect]:
        """Yield mistakes whose number had to be fitted, each at its place."""
        families = grouped(sorted(partly, key=lambda entry: entry[0]), lambda entry: (entry[1].title, entry[1].place))
        for (_, best), *_ in list(families.values())[:_MOST_FITTED]:
            first = next((one for one in self._touched(best) if self._flagged_by(one, best)), None)
            if first is None or best.value is None or best.tuned is None or best.value <= 0.0 or self._is_over():
                continue
            left = partial(_log_of_ratio, self._ratio_under, first, best.tuned)
            bounds = (math.log(best.value / _FITTED_WITHIN), math.log(best.value * _FITTED_WITHIN))
            near = minimize_scalar(left, bounds=bounds, method="bounded", options={"maxiter": _EVALUATIONS})
            suspect, _ = self._try(best.tuned(math.exp(float(near.x))))
            if suspect is not None:
                yield suspect

    def _touched(self, mistake: Hypothesis) -> list[Judged]:
        """Return the stages that a mistake changes; none if it changes more than calls and weights."""
        if mistake.around is not None or mistake.returned is not None:
            return []
        sites = [one.site for one in mistake.edits if one.detached is None]
        touched = {one.stage.end: one for site in sites for one in self._by_site.get(site, ())}
        for name in self._changed_parameters(mistake):
            touched.update((one.stage.end, one) for one in self._by_parameter.get(name, ()))
        return [one for one in self._forward if one.stage.end in touched]

    def _changed_parameters(self, mistake: Hypothesis) -> dict[str, Tensor]:
        if mistake.read is None:
            return {}
        trace = self._graph.trace
        now = {name: trace.tensors[number] for name, number in self._parameters.items()}
        with torch.no_grad(), in_fp64():
            return {name: x for name, x in mistake.read(now).items() if name in self._parameters}

    def _ratio_under(self, one: Judged, mistake: Hypothesis) -> float:
        """Return the error that a mistake leaves in a stage, over the expected one; infinite if it does not fit."""
        number = one.stage.number
        match = self._stages.found[number]
        inside = self._inside(mistake)
        given = {other: x for other, x in self._begins.items() if other != number and other not in inside}
        expected = math.hypot(one.expected, *(self._expected.get(other, 0.0) for other in inside))
        given |= {self._parameters[name]: x for name, x in self._changed_parameters(mistake).items()}
        self._clock.advance(len(one.stage.calls) / max(len(self._graph.trace.calls), 1))
        try:
            x = Values(self._graph, given, mistake.edits).get(self._values[number]).double()
        except Misfit:
            return math.inf
        norm = torch.linalg.vector_norm(x).item()
        if x.shape != match.end.shape or not math.isfinite(norm) or norm == 0.0:
            return math.inf
        rows = self._graph.read.get(number, torch.tensor(True))
        apart = torch.linalg.vector_norm(torch.where(rows, match.end - x, 0.0)).item()
        return apart / norm / expected


def _log_of_ratio(
    ratio_under: Callable[[Judged, Hypothesis], float], one: Judged, tuned: Callable[[float], Hypothesis], x: float
) -> float:
    return math.log(max(ratio_under(one, tuned(math.exp(x))), 1e-12))


def _stages_of_calls(stages: Sequence[Judged]) -> Mapping[Site, list[Judged]]:
    found: dict[Site, list[Judged]] = {}
    for one in stages:
        for call in one.stage.calls:
            found.setdefault(call.site, []).append(one)
    return found


def _stages_of_parameters(stages: Stages, forward: Sequence[Judged]) -> Mapping[str, list[Judged]]:
    found: dict[str, list[Judged]] = {}
    for one in forward:
        values: set[Value] = {value for call in one.stage.calls for value in call.inputs}
        for name in {stages.graph.trace.parameters.get(value.number, "") for value in values}:
            found.setdefault(name, []).append(one)
    return found
