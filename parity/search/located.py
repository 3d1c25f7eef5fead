"""Ask the stages: where does a failed candidate depart from its reference, and which known mistakes make that?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from parity.mistakes.catalogue import hypotheses
from parity.mistakes.codes import CODES, describe_rivals, finding, repairable
from parity.mistakes.hypothesis import Hypothesis, Scope
from parity.passes.prepare import Prepared
from parity.result import Finding, StageResult
from parity.search.failure import Failure
from parity.shown import few_of
from parity.stages.judge import Judged, Stage, is_flagged
from parity.stages.locate import Stages, judge_stages
from parity.stages.suspects import Suspect, Suspicion
from parity.trace.calls import Misfit
from parity.trace.trace import LINEAR, Call, Site, grouped

_SCOPES: tuple[Scope, ...] = ("all", "kind", "one", "call")
_NEAREST = 2  # known mistakes that a message names if none explains a stage
_NAMED = 3  # values at which a stage begins that a message names
_ROWS = 0.25  # a dimension tells where the error is if at most this share of its indices has most of it
_MOST_OF_IT = 0.9
_LAYERS = 3  # of a gated MLP, which TE computes in one call; a stage of more is not a mistake's place
_WHOLE = "the module"


@dataclass(frozen=True)
class Located:
    """Where a candidate departs from its reference.

    Attributes:
        stages: the stages of its pass.
        suspicion: tries mistakes in them.
        prepared: what was compared.
    """

    stages: Stages
    suspicion: Suspicion
    prepared: Prepared

    @cached_property
    def likely(self) -> list[Hypothesis]:
        """The known mistakes that may change where it departs."""
        if not self.is_in_values:
            return []
        known = hypotheses(self.prepared, self.stages.graph.trace, frozenset(), [])
        return [one for one in known if self.suspicion.concerns(one)]

    @property
    def is_in_values(self) -> bool:
        """Whether a stage of the forward pass is off."""
        return bool(self.suspicion.flagged)


def locate(failure: Failure) -> Iterator[Located]:
    """Yield where a candidate departs from its reference; nothing if its pass cannot be judged stage by stage.

    A candidate that ran elsewhere, as a step of a training, is not run again; it may have been recorded. Probing inputs
    that scale the rows of embedding tables are left out, since the scaling is not a part of the candidate.
    """
    prepared = failure.prepared
    made = failure.request.candidate_run
    if (made is not None and made.values is None) or prepared.scales_lookups:
        return
    prepared.clock.check()
    try:
        stages = judge_stages(failure.request, prepared, failure.freedoms)
    except Misfit:
        return
    yield _make_located(prepared, stages)


def _make_located(prepared: Prepared, stages: Stages) -> Located:
    return Located(stages, Suspicion(prepared, stages, prepared.clock.is_over), prepared)


def findings_of_stages(prepared: Prepared, stages: Stages) -> tuple[Finding, ...]:
    """Return the findings on a port that is right at its end and wrong at some stage: mistakes, then the place."""
    located = _make_located(prepared, stages)
    suspects = located.suspicion.explanations(located.likely)
    every = [one for one in suspects if one.explained == located.suspicion.flagged]
    # A mistake that is made everywhere comes before the same at one place, and a single call comes last.
    kinds = grouped(sorted(every, key=lambda one: _SCOPES.index(one.mistake.scope)), lambda one: one.mistake.title)
    told = [_tell_suspect(some[0], kinds) for some in list(kinds.values())[:_NEAREST]]
    places = list(place_findings(located))
    return tuple([*(replace(one, place=describe_place(stages)) for one in told), *places] or [_tell_stages(stages)])


def results_of_stages(stages: Stages) -> tuple[StageResult, ...]:
    """Return the stages as plain data, forward ones first."""
    return tuple(
        StageResult(
            describe_end(one.stage),
            one.stage.backward,
            math.nan if one.stage.backward else _measure_whole_error(stages, one),
            math.inf if one.is_missing else one.error,
            one.expected,
            one.gain,
            is_flagged(one),
        )
        for one in stages.all
    )


def _measure_whole_error(stages: Stages, one: Judged) -> float:
    """Return the error of a value against golden, which has what earlier stages added; NaN if this is not known."""
    match = stages.found[one.stage.number]
    golden = stages.graph.trace.tensor(match.value).double()
    size = torch.linalg.vector_norm(golden).item()
    if not size or match.end.shape != golden.shape:  # an expert may have other tokens
        return math.nan
    rows = stages.graph.rows_read(match.value, golden)
    apart = match.end - golden
    return torch.linalg.vector_norm(apart if rows is None else torch.where(rows, apart, 0.0)).item() / size


def _tell_suspect(one: Suspect, kinds: Mapping[str, Sequence[Suspect]]) -> Finding:
    mistake = one.mistake
    others = [f"{CODES[title]} {title}" for title in kinds if title != mistake.title]
    message = (
        f"each stage is within {one.misfit:.2g} times the expected error, computed from the candidate's own values, if "
        f"you {mistake.repair}{describe_rivals(others)}"
    )
    return finding(mistake.title, message, sure=not others, repair=mistake.repair, code=mistake.code)


def _tell_stages(stages: Stages) -> Finding:
    """Return a finding on stages that are too long to be a place."""
    first = stages.flagged[0]
    message = (
        f"{len(stages.flagged)} stages are off; the first ends at the {describe_end(first.stage)}, and its result "
    )
    return repairable("first-divergence", message + _describe_size(first), "compare the layers before it as pairs")


def describe_contradiction(find_place: Callable[[], Located | None], mistakes: Sequence[Hypothesis]) -> str:
    """Say what the stages show against mistakes that are made at once; return an empty text if they show nothing."""
    located = find_place()
    found = None if located is None else located.suspicion.contradiction(mistakes)
    if found is None:
        return ""
    left = f"is {found.ratio:.2g} times the expected error off" if math.isfinite(found.ratio) else "fits nothing"
    where = describe_stage(found.stage)
    return f"; but with it, what the reference computes {where}, from the candidate's own values, {left}"


# Words for a place.


def describe_place(stages: Stages) -> str:
    """Return the words for the first stage that is off, a forward one if any is; empty if it holds many layers."""
    flagged = stages.flagged
    if not flagged or _count_layers(stages, flagged[0].stage) > _LAYERS:
        return ""
    stage = flagged[0].stage
    return f"after the {_describe_site(stage.end)}" if stage.changed_later else describe_stage(stage)


def place_findings(located: Located) -> Iterator[Finding]:
    """Yield a finding on the first stage that is off, if its place can be told."""
    place = describe_place(located.stages)
    if not place:
        return
    first = located.stages.flagged[0]
    stages = [one for one in located.stages.all if one.stage.backward == first.stage.backward]
    right = sum(not is_flagged(one) for one in stages)
    others = len(stages) - right - 1
    more = f", {others} later {'one does' if others == 1 else 'ones do'} not" if others else ""
    counted = f"{right} of {len(stages)} stages of the {'backward' if first.stage.backward else 'forward'} pass agree"
    if first.stage.changed_later:
        measured = "it computes what the reference does there, and then goes on with another value, which"
        advice = f"look at what the candidate does with the result of the {_describe_site(first.stage.end)}"
    else:
        what = "the gradient there" if first.stage.backward else "its result"
        measured = f"computed again from the candidate's own values before it, {what}"
        advice = "look at what the candidate computes there" + _advise_to_compare(located.stages, first.stage)
    message = f"the candidate departs from the reference {place}: {measured} {_describe_size(first)}"
    around = f"{counted}{more}{_describe_nearest(located)}{_list_casts(located)}"
    yield repairable("first-divergence", f"{message}{_describe_part(located, first)}. {around}", advice)


def _describe_nearest(located: Located) -> str:
    """Say which known mistakes come nearest to what the candidate computes there."""
    near = [
        f"{one.name} (leaves {left:.0%} of the error there)"
        for left, one in located.suspicion.nearest(located.likely, _NEAREST)
    ]
    return f". Perhaps it is like {' or '.join(near)}: no known mistake comes nearer" if near else ""


def _list_casts(located: Located) -> str:
    """Say which values the candidate casts to 16 bits, if it is compared in FP32."""
    if located.prepared.dtype is not torch.float32:
        return ""
    matches = located.stages.found.values()
    cast = [f"the {_describe_site(one.value.site)}" for one in matches if one.begin is not one.end]
    return f". The candidate casts to 16 bits: {few_of(cast, _NAMED)}" if cast else ""


def _count_layers(stages: Stages, stage: Stage) -> int:
    """Return how many linear layers with weights are in a stage, several of which one module of TE may compute."""
    parameters = stages.graph.trace.parameters
    linear = (call for call in stage.calls if call.name in LINEAR)
    return sum(any(value.number in parameters for value in call.inputs) for call in linear if not stage.backward)


def _advise_to_compare(stages: Stages, stage: Stage) -> str:
    """Return the advice to compare the stage's module alone; nothing if that would be about the whole again."""
    where, calls = _describe_module(stage), stages.graph.trace.calls
    inside = sum(f"{call.site[0]}.".startswith(f"{where}.") for call in calls)
    is_part = where != _WHOLE and inside <= _MOST_OF_IT * len(calls)
    return f", or compare {where} alone, with the values that it begins with" if is_part else ""


def describe_stage(stage: Stage) -> str:
    """Return the words for a stage: ``in layers.2, between 1st 'linear' of ... and 1st 'matmul' of ...``."""
    if stage.parameter:
        return f"in the gradient of {stage.parameter}"
    where = _describe_module(stage)
    if len(stage.calls) == 1:
        # What only moves elements is seldom what is wrong, but its result is known by what follows from it.
        when = "at" if stage.computes or stage.backward else "at or after"
        return f"{when} the {_describe_site(stage.calls[0].site)}"
    if stage.backward:
        return f"in {where}, in the gradient at the {_describe_site(stage.end)}"
    begins = few_of([f"the {_describe_site(site)}" for site in stage.begins], _NAMED) or "the inputs"
    return f"in {where}, between {begins} and the {_describe_site(stage.end)}"


def describe_end(stage: Stage) -> str:
    """Return the words for the value that a stage ends with, or for a gradient, its parameter or where it begins."""
    return f"d {stage.parameter}" if stage.parameter else f"{'d ' * stage.backward}{_describe_site(stage.end)}"


def _describe_module(stage: Stage) -> str:
    """Return the path that the modules of a stage's calls have in common."""
    paths = [call.site[0].split(".") for call in stage.calls] or [stage.end[0].split(".")]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) or _WHOLE


def _describe_site(site: Site) -> str:
    """Return ``1st 'linear' of layers.0.fc``, with the number of the submodule's call after its first."""
    again = f" (call {site[1] + 1})" if site[1] else ""
    return f"{Call(site, site[2], None, (), {}, None).described}{again}"


def _describe_size(one: Judged) -> str:
    if one.is_missing:
        return "is missing"
    if one.ratio > 1.0 or not math.isfinite(one.ratio):
        return f"differs by {one.error:.2g} where {one.expected:.2g} is expected"
    return f"leans by {abs(one.gain):.2g} standard deviations of rounding"


def _describe_part(located: Located, one: Judged) -> str:
    """Say in which indices of its dimensions a value is off, if these are few."""
    if one.stage.backward or one.exact is None:
        return ""
    apart = (located.stages.found[one.stage.number].end - one.exact).square()
    whole = apart.sum()
    told = []
    for dim in range(apart.dim()):
        rest = [other for other in range(apart.dim()) if other != dim]
        share = (apart.sum(rest) if rest else apart) / whole
        order = share.argsort(descending=True)
        count = int((share[order].cumsum(0) < _MOST_OF_IT).sum()) + 1
        if len(share) > 1 and count <= max(1, int(_ROWS * len(share))):
            indices = torch.sort(order[:count]).values.tolist()
            told.append(f"{few_of([str(i) for i in indices], 6)} of the {len(share)} in dimension {dim}")
    return f", nearly all of it at index {' and '.join(told)}" if told else ""
