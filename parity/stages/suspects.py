"""Which known mistakes make the stages that are off, and spoil none that is right?

A mistake is tried in one stage at a time, from the candidate's own values at its beginning. So it is compared with what
the candidate made of these, at the noise of one stage, and costs the calls of one stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from parity.mistakes.hypothesis import Hypothesis, together
from parity.numerics.errors import TINY
from parity.numerics.golden import in_fp64
from parity.passes.nominal_clock import Clock
from parity.passes.prepare import Prepared
from parity.stages.graph import Values, laid_out_as
from parity.stages.judge import RATIO, Judged, Stage, is_flagged
from parity.stages.locate import Stages
from parity.trace.calls import Misfit
from parity.trace.trace import Edit, Site, Value, grouped

_AGAINST = 2.0 * RATIO  # under a mistake that the candidate makes, rounding may cost more, and a constant is not exact
_HELPS = 0.9  # a mistake whose number is worth fitting leaves less than this share of a stage's error
NEAR = 0.5
"""A mistake that leaves at most this share of a region's error comes near to what the candidate does."""

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


@dataclass(frozen=True)
class Contradiction:
    """Where mistakes leave, or make, an error that rounding does not explain.

    Attributes:
        stage: the stage.
        ratio: of its error to the expected one.
    """

    stage: Stage
    ratio: float


@dataclass(frozen=True)
class _Region:
    """What lies between some linear layers and the next one, or an output.

    A mistake may be made in several ways that differ in between, such as by turning queries instead of keys. So it is
    compared at the end, and what was matched in between is computed as well.

    Attributes:
        end: the value that it ends with.
        inner: the numbers of the matched values in between.
        flagged: those of its stages that are off.
    """

    end: Value
    inner: frozenset[int]
    flagged: frozenset[Site]


class Suspicion:
    """Tries mistakes in the forward stages of one pass.

    Args:
        prepared: what was compared.
        stages: its stages.
        is_over: whether no time is left.
    """

    def __init__(self, prepared: Prepared, stages: Stages, is_over: Callable[[], bool]) -> None:
        self._prepared = prepared
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
        self._stages_by_number = {one.stage.number: one for one in self._forward}
        self._anchors = [match.value for match in stages.found.values() if match.evidence in ("weights", "output")]
        self._regions: dict[int, list[_Region]] = {}
        self._up_to: dict[int, _Region] = {}
        self._unchanged: dict[_Region, float] = {}
        self.flagged = frozenset(one.stage.end for one in self._forward if is_flagged(one))

    def explanations(self, known: Iterable[Hypothesis]) -> list[Suspect]:
        """Return the mistakes that explain some flagged stages and spoil no other, those that explain most first."""
        found: list[Suspect] = []
        partly: list[tuple[float, Hypothesis]] = []
        for mistake in known:
            if self._is_over():
                break
            suspect, left = self._try_mistake(mistake)
            if suspect is not None:
                found.append(suspect)
                continue
            if mistake.tuned is not None and left < _HELPS:
                partly.append((left, mistake))
        found += self._fit_numbers(partly)
        return sorted(found, key=lambda one: (-len(one.explained), one.misfit))

    def ratio_of(self, one: Judged, mistake: Hypothesis) -> float:
        """Return the error that a mistake leaves where a stage is, or makes where none is, over the expected one."""
        right = [region for region in self._find_touched(mistake) if not region.flagged]
        return max(self._ratio_under(region, mistake) for region in (*self._regions_of(one), *right))

    def nearest(self, known: Iterable[Hypothesis], count: int) -> list[tuple[float, Hypothesis]]:
        """Return mistakes of different kinds that explain most of a region's error, with the share that they leave."""
        tried = ((self._try_mistake(one)[1], one) for one in takewhile(lambda one: not self._is_over(), known))
        near = sorted((entry for entry in tried if entry[0] <= NEAR), key=lambda entry: entry[0])
        kinds = grouped(near, lambda entry: entry[1].title)
        return [some[0] for some in kinds.values()][:count]

    def concerns(self, mistake: Hypothesis) -> bool:
        """Return whether a mistake changes a region that is off, a weight read just before it, or what no stage shows.

        What a layer returns is matched by its weight, so that other weights may show only in what follows.
        """
        only_detaches = bool(mistake.edits) and all(one.detached is not None for one in mistake.edits)
        if only_detaches or mistake.around is not None or mistake.returned is not None:
            return True
        if any(region.flagged for region in self._find_touched(mistake)) or any(map(self._goes_around, mistake.edits)):
            return True
        return any(region.flagged for region in self._find_read(mistake))

    @cached_property
    def _regions_after(self) -> Mapping[int, list[_Region]]:
        """The regions that begin with each linear layer's result, by its number."""
        regions = {region.end.number: region for one in self._forward for region in self._regions_of(one)}
        found: dict[int, list[_Region]] = {}
        for region in regions.values():
            above = [one for one in self._anchors if self._graph.is_above(one, region.end)]
            for anchor in above:
                if not any(self._graph.is_above(anchor, other) for other in above):
                    found.setdefault(anchor.number, []).append(region)
        return found

    def contradiction(self, mistakes: Sequence[Hypothesis]) -> Contradiction | None:
        """Return what speaks against these mistakes, made at once; None if nothing does, or if it cannot be told.

        Such mistakes change no place that is off, or leave one wrong that they change, or spoil one that is right.
        """
        if self.flagged and not all(map(self.concerns, mistakes)):
            first = next(one for one in self._forward if is_flagged(one))
            return Contradiction(first.stage, first.ratio)
        # Values were matched by the weights as mapped, so other weights are told only by what follows from them.
        readers = [one for one in mistakes if one.read is not None]
        of_calls = [one for one in mistakes if one.read is None and one.returned is None]
        joined = _join_mistakes(of_calls)
        if joined is None or any(map(self._goes_around, joined.edits)):
            return None
        theirs = {region.end.number for one in readers for region in self._find_read(one)}
        regions = [region for region in self._find_touched(joined) if region.end.number not in theirs]
        if not regions:
            return None
        ratios = [(self._ratio_under(region, joined), region.end.number) for region in regions]
        worst, end = max(ratios)
        return None if worst <= _AGAINST else Contradiction(self._stages_by_number[end].stage, worst)

    def _find_read(self, mistake: Hypothesis) -> list[_Region]:
        """Return the regions of the layers whose weights a mistake changes, and those that follow from them."""
        layers = [one for name in self._changed_parameters(mistake) for one in self._by_parameter.get(name, ())]
        after = [region for one in layers for region in self._regions_after.get(one.stage.number, ())]
        return [*after, *(region for one in layers for region in self._regions_of(one))]

    def _goes_around(self, one: Edit) -> bool:
        """Return whether a later call is changed to compute, from earlier values, what a stage that is off does."""
        try:
            needed = [self._graph.same_value(value) for value in one.needs]
        except Misfit:
            return False
        made = self._graph.trace.calls[self._graph.order[one.site]].outputs if one.site in self._graph.order else ()
        return any(
            any(self._graph.is_above(value, end) for value in needed)
            and any(self._graph.is_above(end, value) for value in made)
            for end in self._flagged_ends
        )

    @cached_property
    def _flagged_ends(self) -> list[Value]:
        return [self._values[one.stage.number] for one in self._forward if is_flagged(one)]

    def _try_mistake(self, mistake: Hypothesis) -> tuple[Suspect | None, float]:
        """Return a mistake if it explains all that it touches, and the least share of an error that it leaves."""
        regions = sorted(self._find_touched(mistake), key=lambda region: not region.flagged)
        least, worst = math.inf, 0.0
        for region in regions if regions and regions[0].flagged else ():
            ratio = self._ratio_under(region, mistake)
            if region.flagged:
                unchanged = self._ratio_under(region, None)
                least = min(least, ratio / max(unchanged, RATIO))
                if unchanged <= RATIO:  # the error leans, and is no larger than rounding leaves: nothing can be told
                    return None, least
            elif ratio <= RATIO:  # where all is right, each stage of it must stay right as well
                ratio = max([ratio, *(self._ratio_under(alone, mistake) for alone in self._list_stages_of(region))])
            worst = max(worst, ratio)
            if not worst <= RATIO:
                return None, least
        if not worst:
            return None, least
        return Suspect(mistake, frozenset[Site]().union(*(region.flagged for region in regions)), worst), least

    def _regions_of(self, one: Judged) -> list[_Region]:
        """Return the regions that a stage is in, each up to one of the linear layers or outputs that depend on it."""
        number = one.stage.number
        if number not in self._regions:
            value = self._values[number]
            below = [end for end in self._anchors if end == value or self._graph.is_above(value, end)]
            ends = [end for end in below if not any(self._graph.is_above(other, end) for other in below)]
            regions = [self._region_up_to(end) for end in ends or [value]]
            if is_flagged(one) and all(self._ratio_under(region, None) <= RATIO for region in regions):
                # What is off here is hidden by the noise of what follows.
                regions = [_Region(value, frozenset(), frozenset({one.stage.end}))]
            self._regions[number] = regions
        return self._regions[number]

    def _region_up_to(self, end: Value) -> _Region:
        if end.number not in self._up_to:
            before = [one for one in self._anchors if self._graph.is_above(one, end)]
            inner = {
                one.number
                for one in self._values.values()
                if one not in self._anchors
                and self._graph.is_above(one, end)
                and not any(self._graph.is_above(one, anchor) for anchor in before)
            }
            ends = (one.stage.end for one in self._stages_at((*inner, end.number)))
            self._up_to[end.number] = _Region(end, frozenset(inner), self.flagged.intersection(ends))
        return self._up_to[end.number]

    def _list_stages_of(self, region: _Region) -> Iterator[_Region]:
        """Yield the stages within a region, each as a region of its own."""
        for one in self._stages_at(region.inner):
            yield _Region(self._values[one.stage.number], frozenset(), frozenset())

    def _stages_at(self, numbers: Iterable[int]) -> list[Judged]:
        """Return the stages that end with these values."""
        return [self._stages_by_number[number] for number in numbers if number in self._stages_by_number]

    def _fit_numbers(self, partly: Sequence[tuple[float, Hypothesis]]) -> Iterator[Suspect]:
        """Yield mistakes whose number had to be fitted, each at its place."""
        families = grouped(sorted(partly, key=lambda entry: entry[0]), lambda entry: (entry[1].title, entry[1].place))
        for (_, best), *_ in list(families.values())[:_MOST_FITTED]:
            first = next((region for region in self._find_touched(best) if region.flagged), None)
            if first is None or best.value is None or best.tuned is None or best.value <= 0.0 or self._is_over():
                continue
            left = partial(_log_of_ratio, self._ratio_under, first, best.tuned)
            bounds = (math.log(best.value / _FITTED_WITHIN), math.log(best.value * _FITTED_WITHIN))
            near = minimize_scalar(left, bounds=bounds, method="bounded", options={"maxiter": _EVALUATIONS})
            suspect, _ = self._try_mistake(best.tuned(math.exp(float(near.x))))
            if suspect is not None:
                yield suspect

    def _find_touched(self, mistake: Hypothesis) -> list[_Region]:
        """Return the regions that a mistake changes; none if it changes more than calls and weights.

        If a layer's result is right, a change of it is made to what follows from it.
        """
        if mistake.around is not None or mistake.returned is not None:
            return []
        sites = [one.site for one in mistake.edits if one.detached is None]
        touched = {one.stage.number: one for site in sites for one in self._by_site.get(site, ())}
        for name in self._changed_parameters(mistake):
            touched.update((one.stage.number, one) for one in self._by_parameter.get(name, ()))
        followed = {self._right_anchors[site] for site in sites if site in self._right_anchors}
        own = [region for number, one in touched.items() if number not in followed for region in self._regions_of(one)]
        after = [region for number in followed for region in self._regions_after.get(number, ())]
        return list({region.end.number: region for region in (*own, *after)}.values())

    @cached_property
    def _right_values(self) -> Mapping[Site, int]:
        """The numbers of all values that are right, by the calls that return them."""
        return self._find_right(self._values.values())

    @cached_property
    def _right_anchors(self) -> Mapping[Site, int]:
        """The numbers of the linear layers' results that are right, by the calls that return them."""
        return self._find_right(self._anchors)

    def _find_right(self, values: Iterable[Value]) -> Mapping[Site, int]:
        judged = (one for one in values if one.number in self._stages_by_number)
        return {one.site: one.number for one in judged if not is_flagged(self._stages_by_number[one.number])}

    def _changed_parameters(self, mistake: Hypothesis) -> dict[str, Tensor]:
        if mistake.read is None:
            return {}
        try:
            with torch.no_grad(), in_fp64():
                return {name: x for name, x in mistake.read(self._all_parameters).items() if name in self._parameters}
        except Exception:  # a mistake's function may raise anything on tensors that do not suit it
            return {}

    @cached_property
    def _all_parameters(self) -> Mapping[str, Tensor]:
        """All of the reference's parameters in FP64, also those that no call reads."""
        read = {name: self._graph.trace.tensors[number] for name, number in self._parameters.items()}
        every = self._prepared.reference.named_parameters(remove_duplicate=False)
        return {name: x.detach().double() for name, x in every} | read

    def _ratio_under(self, region: _Region, mistake: Hypothesis | None) -> float:
        """Return the error that a mistake leaves at the end of a region, over the expected one; infinite for none."""
        end = region.end.number
        if mistake is None and region in self._unchanged:
            return self._unchanged[region]
        given = {other: x for other, x in self._begins.items() if other != end and other not in region.inner}
        parameters = {} if mistake is None else self._changed_parameters(mistake)
        given |= {self._parameters[name]: x for name, x in parameters.items()}
        stages = self._stages_at((end, *region.inner))
        expected = math.hypot(*(one.expected for one in stages))
        calls = sum(len(one.stage.calls) for one in stages)
        self._clock.advance(calls / max(len(self._graph.trace.calls), 1))
        ratio = self._measure_misfit(region.end, given, () if mistake is None else mistake.edits) / max(expected, TINY)
        if mistake is None:
            self._unchanged[region] = ratio
        return ratio

    def _edit_given(self, given: dict[int, Tensor], edits: Sequence[Edit], end: Value) -> dict[int, Tensor]:
        """Return what values that are given, and right, become by edits.

        Raises:
            Misfit: if an edit cannot be made.
        """
        values, changed = Values(self._graph, given), dict[int, Tensor]()
        for one in edits:
            number = self._right_values.get(one.site, end.number)
            if one.detached is None and number != end.number and number in given:
                was = changed.get(number, given[number])
                needed = (values.get(self._graph.same_value(value)) for value in one.needs)
                try:
                    changed[number] = laid_out_as(one.compute(was, *needed), was)
                except Exception as error:  # an edit may raise anything on values that it does not expect
                    raise Misfit("a layer's result cannot be changed so") from error
        return changed

    def _measure_misfit(self, end: Value, given: dict[int, Tensor], edits: Sequence[Edit]) -> float:
        """Return the relative error of the candidate's value if it is computed with edits; infinite if it cannot be."""
        match = self._stages.found[end.number]
        try:
            x = Values(self._graph, given | self._edit_given(given, edits, end), edits).get(end).double()
        except Misfit:
            return math.inf
        norm = torch.linalg.vector_norm(x).item()
        if x.shape != match.end.shape or not math.isfinite(norm) or norm == 0.0:
            return math.inf
        apart = match.end - x
        read = (known.get(end.number) for known in (self._graph.read, self._stages.rows_read))
        masked = (torch.where(rows, apart, 0.0) for rows in read if rows is not None and len(rows) == len(apart))
        return min(torch.linalg.vector_norm(one).item() for one in (apart, *masked)) / norm


def _join_mistakes(mistakes: Sequence[Hypothesis]) -> Hypothesis | None:
    """Return mistakes in calls, made at once, as one; None if there are none, or if they change the same thing."""
    if not mistakes:
        return None
    joined = mistakes[0]
    for one in mistakes[1:]:
        edits = together(joined.edits, one.edits)
        if edits is None:
            return None
        joined = replace(joined, edits=edits)
    return joined


def _log_of_ratio(
    ratio_under: Callable[[_Region, Hypothesis], float], one: _Region, tuned: Callable[[float], Hypothesis], x: float
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
