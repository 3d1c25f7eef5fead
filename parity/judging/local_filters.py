"""Matched filters after a failure: a subtle mistake that is made at one place of several, or that no output shows.

The filters that judge outputs (``directions``) assume a mistake at all of its places. Where a port failed and nothing
explains it, each place is tried alone, and gradients are looked at as well: of a loss, one number, they are all there
is. No law is measured of these filters, so they judge nothing. They name a mistake that every tensor contains which is
precise enough to tell, and without which every tensor would pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from parity.diagnosis.budget import Budget
from parity.diagnosis.catalogue import calls_of, subtle_hypotheses_anywhere
from parity.diagnosis.codes import CODES
from parity.diagnosis.failure import Failure
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.search import CHECKS_FOR_FILTERS
from parity.diagnosis.trial import tensors_under
from parity.diagnosis.verify import verified
from parity.judging.component import Component, has_component
from parity.judging.directions import PRESENT
from parity.passes import Tensors, golden_truths, model_tensors
from parity.result import Finding, TensorResult
from parity.truth import Deviations, in_fp32

# Standard deviations that a whole mistake must be worth in a tensor for that one to tell whether it was made.
_TELLS = 6.0
# Of the largest: mistakes that are worth as much cannot be told apart by that; which is whole decides.
_SAME = 0.9


class _Shown(NamedTuple):
    """What one tensor shows of a mistake.

    Attributes:
        mistake: the hypothesis.
        label: of the tensor.
        coefficient: how much of the mistake's change the error contains.
        worth: of the whole change, in standard deviations of rounding.
    """

    mistake: Hypothesis
    label: str
    coefficient: float
    worth: float

    @property
    def away(self) -> float:
        """From the mistake as a whole."""
        return abs(self.coefficient - 1.0)


def local_filter_findings(failure: Failure) -> tuple[Finding, ...]:
    """The subtle mistake that all tensors contain and that explains them; none if there is none.

    Raises:
        OutOfTime: if the search has reached its limit of real time.
    """
    failure.prepared.clock.check()
    shown = list(_of_whole_mistakes(failure, failure.budget(CHECKS_FOR_FILTERS)))
    most = max((one.worth for one in shown), default=0.0)
    for one in sorted((one for one in shown if one.worth >= _SAME * most), key=lambda one: one.away):
        explanation = verified(failure, (one.mistake,))
        if explanation is not None and explanation.complete:
            return (_finding(one),)
    return ()


def _finding(shown: _Shown) -> Finding:
    mistake = shown.mistake
    message = (
        f"the error of {shown.label} contains {shown.coefficient:.2g} times what {mistake.name} would change, which is "
        f"worth {shown.worth:.2g} standard deviations of rounding, and no tensor lacks it; {mistake.repair}"
    )
    return Finding(CODES[mistake.title], mistake.title, message)


def _of_whole_mistakes(failure: Failure, budget: Budget) -> Iterator[_Shown]:
    """Of each mistake that every tensor contains which can tell, what the one shows that tells best."""
    prepared = failure.prepared
    observed = _observed(failure)
    for mistake in subtle_hypotheses_anywhere(prepared, calls_of(prepared).trace):
        if budget.spent():
            return
        tensors = tensors_under(prepared, (mistake,))
        shown = [] if tensors is None else list(_shown(mistake, observed, failure.golden, tensors))
        if shown and all(one.away <= PRESENT for one in shown):
            yield max(shown, key=lambda one: one.worth)


def _observed(failure: Failure) -> list[tuple[TensorResult, Deviations]]:
    """Golden, and the errors of the candidate and of the models, of each tensor in which all are finite."""
    truths, rounding = golden_truths(failure.prepared), failure.precision.rounding
    ran = [failure.candidate, *(model_tensors(failure.prepared, rounding, one) for one in failure.freedoms)]
    keys = [(one.kind, one.name) for one in failure.results]
    found = [truths[key].deviations([tensors[key] for tensors in ran]) for key in keys]
    both = zip(failure.results, found, strict=True)
    return [(result, those) for result, those in both if all(error.is_finite for error in those.errors)]


def _shown(
    mistake: Hypothesis, observed: Sequence[tuple[TensorResult, Deviations]], golden: Tensors, tensors: Tensors
) -> Iterator[_Shown]:
    """What each tensor shows that tells."""
    for result, (truth, (error, *models)) in observed:
        key = result.kind, result.name
        if tensors[key].shape != golden[key].shape:
            continue
        change = in_fp32(tensors[key] - golden[key])
        if change.is_finite and has_component(change):
            found = Component(error, models, change, truth, max(model.norm for model in models))
            worth = change.total / found.deviation if found.deviation else math.inf
            if worth >= _TELLS:
                yield _Shown(mistake, result.label, found.coefficient, worth)
