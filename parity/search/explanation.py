"""Decide which findings of a failed comparison are told: of its inputs, of the probes, or of the matched filters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parity.case.case import Rng
from parity.judge.directions import PRESENT, Direction
from parity.judge.directions import findings as mistakes
from parity.judge.statistics import Component, has_component
from parity.mistakes.catalogue import calls_of, subtle_hypotheses_anywhere
from parity.mistakes.codes import UNEXPLAINED, finding
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.trial import tensors_under
from parity.numerics.errors import Deviations, in_fp32
from parity.numerics.golden import in_fp64
from parity.passes.all_passes import Tensors, golden_truths, model_tensors, tensors_of
from parity.passes.one_pass import outputs_of, run
from parity.passes.prepare import Prepared, cast
from parity.result import PROBED, Finding, TensorResult
from parity.search.failure import Budget, Failure, in_time, on_probes
from parity.search.findings import findings
from parity.search.reruns import with_argument_names
from parity.search.search import CHECKS_FOR_FILTERS, Screened
from parity.search.verify import is_loud, verified

# Matched filters after a failure: a subtle mistake that is made at one place of several, or that shows in no output.
#
# The filters that judge outputs (``parity.judge.directions``) assume that a mistake is made at all of its places. If a
# port failed and nothing explains it, each place is tried alone, and gradients count as well: beside a loss, which is
# one number, there is nothing else. No law is measured for these filters, so they judge nothing. They name a mistake if
# every tensor that is precise enough contains it, and every tensor would pass without it.


# A tensor tells whether a mistake was made if the whole mistake is worth so many standard deviations there.
_TELLS = 6.0
# Mistakes that are worth at least this share of the largest cannot be told apart by worth; the most complete one wins.
_SAME = 0.9


class _Shown(NamedTuple):
    """Hold what one tensor shows of a mistake.

    Attributes:
        mistake: the hypothesis.
        label: the tensor's label.
        coefficient: how much of the mistake's change the error contains.
        worth: the whole change, in standard deviations of rounding.
    """

    mistake: Hypothesis
    label: str
    coefficient: float
    worth: float

    @property
    def away(self) -> float:
        """Return how far the coefficient is from 1, the mistake as a whole."""
        return abs(self.coefficient - 1.0)


def local_filter_findings(failure: Failure) -> tuple[Finding, ...]:
    """Return the subtle mistake that all tensors contain and that explains them; none if there is no such mistake.

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
    return finding(mistake.title, message, repair=mistake.repair, code=mistake.code)


def _of_whole_mistakes(failure: Failure, budget: Budget) -> Iterator[_Shown]:
    """Yield, for each mistake that every tensor that can tell contains, what the most telling tensor shows."""
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
    """Return golden and the errors of candidate and models for each tensor in which all of them are finite."""
    truths, rounding = golden_truths(failure.prepared), failure.precision.rounding
    ran = [failure.candidate, *(model_tensors(failure.prepared, rounding, one) for one in failure.freedoms)]
    keys = [one.key for one in failure.results]
    found = [truths[key].deviations([tensors[key] for tensors in ran]) for key in keys]
    both = zip(failure.results, found, strict=True)
    return [(result, those) for result, those in both if all(error.is_finite for error in those.errors)]


def _shown(
    mistake: Hypothesis, observed: Sequence[tuple[TensorResult, Deviations]], golden: Tensors, tensors: Tensors
) -> Iterator[_Shown]:
    """Yield what each tensor that can tell shows of a mistake."""
    for result, (truth, (error, *models)) in observed:
        key = result.key
        if tensors[key].shape != golden[key].shape:
            continue
        change = in_fp32(tensors[key] - golden[key])
        if change.is_finite and has_component(change):
            found = Component(error, models, change, truth, max(model.norm for model in models))
            worth = change.total / found.deviation if found.deviation else math.inf
            if worth >= _TELLS:
                yield _Shown(mistake, result.label, found.coefficient, worth)


# Does rounding alone decide the numbers that differ? Then no port can be judged by them.


# A kernel that computes in FP32 rounds at each of its steps; the inputs are perturbed once, by this many unit
# roundoffs. Measured on LayerNorms of constant rows (width 32 to 1024, values 0.3 to 1e4, TE 2.20.2 on emulated
# kernels), whose mean is rounded several times: one perturbation by 4 unit roundoffs explains every error.
ROUNDINGS = 8.0


def ill_conditioned(failed: Sequence[TensorResult], prepared: Prepared) -> Finding | None:
    """Return a finding if changing the inputs by a few roundoffs of FP32 moves every failed tensor as far as its error.

    A row of equal numbers is an example: LayerNorm subtracts the mean and divides what rounding left by ``sqrt(eps)``.

    Args:
        failed: all tensors that failed.
        prepared: what was compared.
    """
    if not failed or not all(tensor.errors.finite for tensor in failed):
        return None
    changes = _changes(prepared)
    if any(tensor.errors.max_abs > changes[tensor.key] for tensor in failed):
        return None
    worst = max(failed, key=lambda tensor: tensor.margin)
    change = changes[worst.key]
    return Finding(
        "PAR005",
        "ill-conditioned",
        f"{worst.label} is off by up to {worst.errors.max_abs:.2g}; but already in FP64, changing the inputs by "
        f"{ROUNDINGS:g} roundoffs of FP32 changes the reference's by up to {change:.2g}: rounding decides these "
        "numbers, whoever computes them, so give other inputs, such as rows that are not constant",
    )


def _changes(prepared: Prepared) -> dict[tuple[str, str], float]:
    """Return the largest change of each golden tensor when every input moves by some roundoffs of FP32, up or down."""
    prepared.reference.double()
    with in_fp64():
        ran = run(
            prepared.reference,
            prepared.call,
            _perturbed(prepared.inputs),
            prepared.input_names,
            lambda outputs: {name: prepared.cotangents[name].to(output.dtype) for name, output in outputs.items()},
            differentiated=not prepared.evaluation,
        )
    golden, perturbed = tensors_of(prepared.golden), tensors_of(ran)
    if prepared.probed:
        with torch.no_grad(), in_fp64():
            probed = outputs_of(prepared.reference, prepared.probe_call, _perturbed(prepared.probe))
        golden |= {(PROBED, name): output for name, output in prepared.probed.items()}
        perturbed |= {(PROBED, name): output for name, output in probed.items()}
    changes = {key: (perturbed[key] - truth).abs() for key, truth in golden.items()}
    return {key: change.max().item() if change.numel() else 0.0 for key, change in changes.items()}


def _perturbed(inputs: Any) -> Any:
    """Return the inputs in FP64, with each element of a floating-point one a little larger or smaller."""
    rng = Rng(0, "conditioning")
    step = ROUNDINGS * torch.finfo(torch.float32).eps / 2

    def perturb(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        signs = rng.integers(*x.shape, high=2).to(x.device, x.dtype) * 2 - 1
        return x * (1 + step * signs)

    return tree_map_only(Tensor, perturb, cast(inputs, torch.float64))


# Why a comparison failed: the findings on its inputs, on the probing inputs, or of the matched filters.


_AGAIN = 0.3  # of a search's budget, for another that is told what the first has tried


def explain(
    failure: Failure, unreached: Sequence[str], known: Sequence[Direction], seconds: float
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return the findings on the inputs as they were drawn or, if these show nothing wrong, on the probing inputs.

    Args:
        failure: the comparison.
        unreached: names of TE parameters that the backward pass did not reach.
        known: directions of the mistakes that could be made.
        seconds: real time after which no further pass is begun, 0 for no limit.

    Returns:
        The findings, and a note if the limit ended the search.
    """
    clock = failure.prepared.clock
    with clock.limited_to(seconds):
        found = in_time(lambda: _explained(failure, unreached, known))
        notes = (ended_early(seconds),) if clock.ended else ()
    return with_argument_names(found, failure), notes


def ended_early(seconds: float) -> str:
    """Return the note that a limit of so many seconds ended the search."""
    return (
        f"the search for the cause ended after {seconds:g} s; --parity-diagnosis=SECONDS gives it longer, as "
        "do --diagnosis of parity run and diagnosis_seconds of parity.compare"
    )


def _explained(failure: Failure, unreached: Sequence[str], known: Sequence[Direction]) -> tuple[Finding, ...]:
    shaky = ill_conditioned([tensor for tensor in failure.results if not tensor.passed], failure.prepared)
    if shaky is not None:
        return (shaky,)
    drawn = [tensor for tensor in failure.results if not tensor.probed]
    probed = [tensor for tensor in failure.results if tensor.probed]
    on_probe = None if all(tensor.passed for tensor in probed) else on_probes(failure)
    if on_probe is not None and all(tensor.passed for tensor in drawn):
        return findings(on_probe)
    screened, of_drawn = Screened(), dataclasses.replace(failure, results=drawn, on_probe=on_probe)
    found = tuple(in_time(lambda: findings(of_drawn, unreached, screened)))
    by_filter = tuple(mistakes(drawn, known))
    if _is_known(found):
        # Among causes that fit equally well, the one that a filter has found is the likeliest.
        seen = {finding.title for finding in by_filter}
        return tuple(sorted(found, key=lambda finding: finding.title not in seen))
    # What a filter finds in a loud error, and the search has not confirmed, is a part of another mistake's.
    quiet = () if is_loud(of_drawn) else by_filter
    known_by_filter = quiet or tuple(in_time(lambda: local_filter_findings(of_drawn)))
    if known_by_filter or on_probe is None or of_drawn.prepared.clock.ended:
        return known_by_filter or found
    # If the error is far too large on the inputs as drawn, its cause explains at least a part of it there, where most
    # causes have been tried.
    among, effort = (screened.helping, _AGAIN) if is_loud(of_drawn) else (None, 1.0)
    also = dataclasses.replace(of_drawn, on_probe=None)
    probing = findings(dataclasses.replace(on_probe, on_drawn=also, among=among, effort=effort))
    return probing if _is_known(probing) else found


def _is_known(found: Sequence[Finding]) -> bool:
    """Return whether the findings are causes, which leave nothing unexplained."""
    return bool(found) and all(finding.code not in UNEXPLAINED for finding in found)
