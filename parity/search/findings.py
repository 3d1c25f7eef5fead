"""Lead from a failed comparison to its findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import torch

from parity.mistakes.attention_mistakes import softmax_scale_hypotheses
from parity.mistakes.catalogue import calls_of, hypotheses, subtle_hypotheses_anywhere
from parity.mistakes.codes import CODES, finding
from parity.mistakes.constants import is_written
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.layers import unused_parameters
from parity.mistakes.trial import outputs_under
from parity.passes.nominal_clock import work_of
from parity.result import Finding
from parity.search.borders import border_explanations, restart_explanations
from parity.search.decoding import decoding_explanations
from parity.search.divergence import first_divergence
from parity.search.failure import Budget, Failure, few_outputs, in_time
from parity.search.gradient_screen import outputs_tell_little
from parity.search.gradients import detached_path_findings, gradient_findings, loss_explanations, partly_scaled_findings
from parity.search.localise import (
    output_scale_findings,
    shared_factor,
    where_the_error_is,
    whole_scale_findings,
)
from parity.search.orders import exchange_findings, order_findings
from parity.search.other_operands import other_operand_hypotheses
from parity.search.precision_mistakes import log_prob_findings, precision_findings, scale_hypotheses
from parity.search.reruns import (
    buffer_findings,
    dropout_findings,
    hidden_row_findings,
    hidden_row_hints,
    microbatch_findings,
    non_finite,
    own_recipe_findings,
    random_findings,
    shared_cache_findings,
    unreached_parameters,
    unread_inputs,
)
from parity.search.screen import FirstOrder, Ranked
from parity.search.search import (
    AS_WELL,
    CHECKS_FOR_BORDERS,
    CHECKS_FOR_DECODING,
    CHECKS_FOR_OPERANDS,
    CHECKS_FOR_SEARCH,
    CHECKS_FOR_THE_REST,
    Screened,
    explanations,
    partly_explained,
)
from parity.search.verify import Explanation, is_loud, verified
from parity.te.devices import classify
from parity.trace.trace import Trace
from parity.trace.whose import users_line

_HARDLY = 0.9
"""An error that is still above this share of what it was has hardly become smaller."""

_CHECKS_FOR_DIRECTIONS = 0.5  # times the check's cost, out of the search's budget

_CLOSE = 1.5
"""An explanation that fits up to this many times worse than the best is reported, too: they cannot be told apart."""


def findings(failure: Failure, unreached: Sequence[str] = (), screened: Screened | None = None) -> tuple[Finding, ...]:
    """Return every known cause that explains a failure, the best first; none for a comparison that passed.

    Where the clock's limit of real time ends the search, these are the causes that are verified by then.

    Args:
        failure: the comparison.
        unreached: names of TE parameters that the backward pass did not reach.
        screened: gets what a search in vain leaves.

    Raises:
        OutOfTime: if the limit of real time is reached before anything is tried.
    """
    failed = [result for result in failure.results if not result.passed]
    if not failed:
        return ()
    spoiled = list(non_finite(failed, failure.precision))
    finite = all(result.finite for result in failure.outputs)
    failure.prepared.clock.forward = work_of(lambda: outputs_under(failure.prepared, (), torch.float64))
    trace = calls_of(failure.prepared).trace
    # Gradients that are not finite, or missing, need no further cause if all else is right.
    never_came = unused_parameters(failure.prepared.weights, unreached)
    lacking = [result for result in failed if not result.finite or result.name in never_came]
    is_told = (spoiled or unreached) and len(lacking) == len(failed)
    screened = Screened() if screened is None else screened
    causes = _causes(failure, trace, unreached, screened) if finite and not is_told else []
    if is_told and not spoiled and len(failed) > 1 and all(result.passed for result in failure.outputs):
        budget = failure.budget(CHECKS_FOR_THE_REST)
        causes = in_time(lambda: detached_path_findings(failure, failed, trace, budget))
    told = " ".join(cause.message for cause in causes if cause.code == CODES["no-gradient"])
    untold = unreached_parameters([name for name in unreached if f'"{name}"' not in told])
    found = [*spoiled, *causes, *untold] or ([] if failure.draws else in_time(lambda: random_findings(failure)))
    if found:
        return tuple(found)
    unread = unread_inputs(failed, failure.candidate)
    most = in_time(lambda: _most_of_it(failure, screened.best))
    hidden = hidden_row_hints(failure) if finite else ()
    diverged = in_time(lambda: first_divergence(failure, trace))
    return (*unread, *most, *hidden, *where_the_error_is(failure), *diverged)


def _most_of_it(failure: Failure, best: Ranked | None) -> Iterator[Finding]:
    """Yield a mistake that explains nearly all of the error but leaves more than rounding: there is a second one."""
    # A part of a single number's error says nothing: some mistake or other explains any part of it.
    tells = best is not None and not few_outputs(failure)
    explained = partly_explained(failure, best[1]) if best is not None and tells else None
    if best is not None and explained is not None:
        label, before, after = explained
        yield finding(
            best[1][0].title,
            f"the relative error of {label} falls from {before:.2g} to {after:.2g} if you {best[1][0].repair}. "
            f"{failure.precision.name} costs less, so something else is wrong, too; repair this one first",
            repair=best[1][0].repair,
            code=best[1][0].code,
        )


def _causes(failure: Failure, trace: Trace, unreached: Sequence[str], screened: Screened) -> list[Finding]:
    """Return what explains finite outputs and their gradients; arguments as for ``findings``.

    ``screened`` gets what the search leaves where none explains.

    A candidate that is right as soon as it is called otherwise is better evidence than a reference made wrong.
    """
    search = failure.budget(CHECKS_FOR_SEARCH)
    first_order = cache(lambda: FirstOrder(failure, trace, failure.budget(_CHECKS_FOR_DIRECTIONS)))
    tells = not outputs_tell_little(failure)

    def known() -> Iterator[Hypothesis]:
        for one in hypotheses(failure.prepared, trace, frozenset(unreached)):
            failure.prepared.clock.check()
            if failure.among is None or (one.title, one.name) in failure.among:
                yield one

    causes: list[Callable[[], Iterable[Finding]]] = [
        lambda: _by_chance(failure),
        lambda: own_recipe_findings(failure),
        lambda: shared_cache_findings(failure),
        lambda: hidden_row_findings(failure),
    ]
    if few_outputs(failure) and all(result.kind == "output" for result in failure.results):
        return in_time(lambda: _by_chance(failure) or _told(_of_one_number(failure, trace, search), failure))
    outputs_passed = all(result.passed for result in failure.outputs)
    if outputs_passed:
        causes += [
            lambda: _by_scale_of_scores(failure, trace),
            lambda: gradient_findings(failure, trace, failure.budget(CHECKS_FOR_THE_REST)),
        ]
    else:
        causes += [lambda: exchange_findings(failure), lambda: buffer_findings(failure)]
    causes += [
        # A cached weight whose scale is inverted is also a cached weight; the inverted scale says more than the cache.
        lambda: _by_scale(failure, search),
        lambda: microbatch_findings(failure),
        lambda: _told(loss_explanations(failure, trace, search), failure),
        lambda: whole_scale_findings(failure),
        lambda: log_prob_findings(failure, trace),
        lambda: _told(decoding_explanations(failure, trace, failure.budget(CHECKS_FOR_DECODING)), failure),
        lambda: _told(explanations(failure, known(), search, screened, first_order if tells else None), failure),
        # A mistake that moves rows or columns, such as one of a weight map, says more than that they are moved.
        lambda: order_findings(failure),
        lambda: _of_other_operands(failure, trace, first_order) if tells else (),
        lambda: _told(border_explanations(failure, trace, failure.budget(CHECKS_FOR_BORDERS)), failure),
        lambda: _told(restart_explanations(failure, trace, failure.budget(CHECKS_FOR_BORDERS)), failure),
        lambda: output_scale_findings(failure),
        lambda: precision_findings(failure, failure.budget(CHECKS_FOR_THE_REST)),
        lambda: partly_scaled_findings(failure) if outputs_passed else (),
    ]
    return _first_found(causes)


def _first_found(causes: Iterable[Callable[[], Iterable[Finding]]]) -> list[Finding]:
    """Return what the first cause that holds finds; one on which parity itself fails, as by a tensor of a rare dtype,
    hides no other.

    Raises:
        Exception: what the pair's code raised, or a broken device; parity's own if no cause holds.
    """
    broken: list[Exception] = []
    for cause in causes:
        try:
            found = in_time(cause)
        except Exception as error:
            if classify(error) or users_line(error):
                raise
            broken.append(error)
            continue
        if found:
            return found
    if broken:
        raise broken[0]
    return []


def _of_other_operands(failure: Failure, trace: Trace, first_order: Callable[[], FirstOrder]) -> Iterator[Finding]:
    """Yield calls that read something else. So many could that one must explain every tensor, gradients included.

    An input that is not read any more is reported before it.
    """
    if failure.among is not None or not is_loud(failure):
        return
    budget = failure.budget(CHECKS_FOR_OPERANDS)
    listed = other_operand_hypotheses(trace, first_order(), budget.share(0.5))
    found = [one for one in explanations(failure, listed, budget) if one.complete]
    if found:
        failed = [result for result in failure.results if not result.passed]
        yield from unread_inputs(failed, failure.candidate)
    yield from _told(found, failure)


def _by_chance(failure: Failure) -> list[Finding]:
    """Return findings about random numbers: any other cause would explain this pass and not the next."""
    found = list(dropout_findings(failure))
    return found or (list(random_findings(failure)) if failure.draws else [])


def _of_one_number(failure: Failure, trace: Trace, budget: Budget) -> list[Explanation]:
    """Return the subtle mistakes that explain a few numbers, if all that do are of one kind.

    Subtle ones alone show on probing inputs and hardly on others, as a wrong eps does.
    """
    found = []
    for one in subtle_hypotheses_anywhere(failure.prepared, trace):
        if budget.spent():
            break
        explanation = verified(failure, (one,))
        if explanation is not None and explanation.complete:
            found.append(explanation)
    kinds = {explanation.hypotheses[0].title for explanation in found}
    return sorted(found, key=lambda explanation: explanation.misfit) if len(kinds) == 1 else []


def _by_scale(failure: Failure, budget: Budget) -> Iterator[Finding]:
    """Yield the mistakes that multiply weights by the scales of their quantization."""
    known = list(scale_hypotheses(failure.prepared, failure.precision))
    if known:
        yield from _told(explanations(failure, known, budget), failure)


def _by_scale_of_scores(failure: Failure, trace: Trace) -> Iterator[Finding]:
    """Yield another scale of attention's scores if some gradients are right but for one factor, though outputs passed.

    Attention that is nearly uniform shows its scale in the gradients of queries and keys, and hardly in its output.
    """
    failed = [result for result in failure.results if not result.passed]
    some = len(failed) < sum(result.kind != "output" for result in failure.results)
    if some and shared_factor(failure, failed):
        budget = failure.budget(CHECKS_FOR_THE_REST)
        found = explanations(failure, softmax_scale_hypotheses(trace), budget)
        yield from _told([one for one in found if one.complete], failure)


def _told(explained: Sequence[Explanation], failure: Failure) -> Iterator[Finding]:
    """Yield a finding for each hypothesis of each explanation; one explanation of a kind, and only
    those that fit about as well.

    A finding is sure if every tensor passes once it is repaired, if no explanation of another kind does as well, and if
    its number, where one was fitted, is one that people write.
    """
    kinds: dict[tuple[str, ...], Explanation] = {}
    for explanation in explained:
        if explanation.after <= _CLOSE * explained[0].after:
            kinds.setdefault(tuple(one.title for one in explanation.hypotheses), explanation)
    complete = [explanation for explanation in kinds.values() if explanation.complete]
    for explanation in (*complete, *(one for one in kinds.values() if not one.complete)):
        rivals = [other.hypotheses for other in complete if other is not explanation]
        doubts = _not_all(explanation) or _or_else(rivals) or _or_alike(explanation, explained)
        # Mistakes with a meaning come first.
        for one in sorted(explanation.hypotheses, key=lambda one: one.scope == "call"):
            doubt = doubts + _as_if(one)
            gains = _gains(explanation, failure.precision.name)
            told = f"{_together(one, explanation)}{gains} if you {one.repair}{doubt}"
            yield finding(one.title, told, sure=not doubt, repair=one.repair, code=one.code)


def _gains(explanation: Explanation, precision: str) -> str:
    """Say what becomes better: the norm of an error hardly does, if a mistake is far below its noise."""
    if explanation.complete and explanation.after > _HARDLY * explanation.before:
        return f"every tensor, {explanation.worst} among them, is within what {precision} costs,"
    falls = f"the relative error of {explanation.worst} falls from {explanation.before:.2g} to {explanation.after:.2g}"
    return f"{falls}, what {precision} costs," if explanation.complete else falls


def _not_all(explanation: Explanation) -> str:
    """Say which tensor a repair leaves wrong; return an empty text if it leaves none."""
    left = explanation.left
    if left is None:
        return ""
    far = f"{left.margin:.2g} times its limit" if math.isfinite(left.margin) else "not finite"
    return f"; {left.label} is still {far} then, so something else is wrong as well, or this is not quite the mistake"


def _or_alike(explanation: Explanation, explained: Sequence[Explanation]) -> str:
    """Say which others of a list, such as other activations, explain as much; return an empty text if none does."""
    (one, *more) = explanation.hypotheses
    kind = f"{one.name.partition(' ')[0]} "
    if more or one.value is not None or not explanation.complete:
        return ""
    alike = [
        other.hypotheses[0].name.removeprefix(kind)
        for other in explained
        if len(other.hypotheses) == 1 and other.complete and other.misfit <= AS_WELL * explanation.misfit
        if other.hypotheses[0].value is None and other.hypotheses[0].name.startswith(kind)
        if other.hypotheses[0].name != one.name and other.hypotheses[0].place == one.place
        if not math.isclose(other.misfit, explanation.misfit)  # what computes the same is the same mistake
    ]
    return f"; {' or '.join(alike)} explains it equally well, so it is one of these" if alike else ""


def _or_else(rivals: Sequence[tuple[Hypothesis, ...]]) -> str:
    """Say which other mistakes explain as much; return an empty text if none does."""
    titles = [" with ".join(f"{CODES[one.title]} {one.title}" for one in rival) for rival in rivals]
    return f"; {' or '.join(titles)} explains it equally well, so it is one of these" if titles else ""


def _as_if(one: Hypothesis) -> str:
    """Say that the number which fits best is one that people hardly write, so that another mistake may look like this
    one; return an empty text otherwise.
    """
    if one.tuned is None or one.value is None or is_written(one.value):
        return ""
    return f"; {one.value:.4g} is an unusual value, so something else may have this effect"


def _together(one: Hypothesis, explanation: Explanation) -> str:
    others = [f"{CODES[other.title]} {other.title}" for other in explanation.hypotheses if other is not one]
    return f"together with {' and '.join(others)}, " if others else ""
