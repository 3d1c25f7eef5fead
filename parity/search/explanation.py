"""Find the causes of a failed comparison: on its inputs, on the probing inputs, or by matched filters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parity.case.case import Rng
from parity.judge.directions import Direction, subtle_hypotheses_anywhere
from parity.judge.directions import findings as mistakes
from parity.mistakes.alternatives import unusual
from parity.mistakes.attention_mistakes import softmax_scale_hypotheses
from parity.mistakes.catalogue import hypotheses
from parity.mistakes.codes import CODES, NEEDS, UNEXPLAINED, describe_rivals, finding
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.layers import unused_parameters
from parity.mistakes.replay import outputs_with
from parity.numerics.golden import in_fp64
from parity.passes.all_passes import tensors_of
from parity.passes.nominal_clock import OutOfTime, work_of
from parity.passes.one_pass import outputs_of, run
from parity.passes.prepare import Prepared, cast
from parity.result import PROBED, Finding
from parity.search.borders import border_explanations, decoding_explanations, restart_explanations
from parity.search.factors import scale_findings, shared_factor, whole_scale_findings
from parity.search.failure import Budget, Failure, Tried, few_outputs, on_probes, outputs_tell_little
from parity.search.gradients import detached_path_findings, gradient_findings, loss_explanations, partly_scaled_findings
from parity.search.in_full import Explanation, exceeds_norm_limit, is_far_off, verified
from parity.search.located import (
    Located,
    describe_contradiction,
    describe_place,
    locate,
    place_findings,
)
from parity.search.misplaced import exchange_findings, order_findings
from parity.search.operands import other_operand_hypotheses
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
    with_argument_names,
)
from parity.search.screen import FAITHFUL, FirstOrder, Ranked
from parity.search.search import (
    AS_WELL,
    CHECKS_FOR_BORDERS,
    CHECKS_FOR_DECODING,
    CHECKS_FOR_OPERANDS,
    CHECKS_FOR_SEARCH,
    CHECKS_FOR_THE_REST,
    CHECKS_FOR_UNLIKELY,
    Screened,
    explanations,
    is_unusual,
    partly_explained,
)
from parity.search.subject import has
from parity.search.unexplained import ended_early, where_the_error_is
from parity.shown import raised
from parity.te.devices import classify
from parity.trace.trace import Trace
from parity.trace.whose import users_line

# Does rounding alone decide the numbers that differ? Then no port can be judged by them.


# A kernel that computes in FP32 rounds at each of its steps; the inputs are perturbed once, by this many unit
# roundoffs. Measured on LayerNorms of constant rows (width 32 to 1024, values 0.3 to 1e4, TE 2.20.2 on emulated
# kernels), whose mean is rounded several times: one perturbation by 4 unit roundoffs explains every error.
ROUNDINGS = 8.0


def ill_conditioned(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if changing the inputs by a few roundoffs of FP32 moves every failed tensor as far as its error.

    A row of equal numbers is an example: LayerNorm subtracts the mean and divides what rounding left by ``sqrt(eps)``.
    """
    failed = [tensor for tensor in failure.results if not tensor.passed]
    if not failed or not all(tensor.errors.finite for tensor in failed):
        return
    changes = _changes(failure.prepared)
    if any(tensor.errors.max_abs > changes[tensor.key] for tensor in failed):
        return
    worst = max(failed, key=lambda tensor: tensor.margin)
    change = changes[worst.key]
    yield Finding(
        "PAR005",
        "ill-conditioned",
        f"{worst.label} is off by up to {worst.errors.max_abs:.2g}; but even in FP64, changing the inputs by "
        f"{ROUNDINGS:g} roundoffs of FP32 changes the reference's by up to {change:.2g}. Rounding decides these "
        "numbers in any implementation, so compare on other inputs, such as rows that are not constant",
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


# Why a comparison failed: the findings on its inputs, on the probing inputs, or by the matched filters.


_AGAIN = 0.3  # of a search's budget, for a second search that knows what the first has tried


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
        The findings, and notes if the limit ended the search, or if a part of it raised.
    """
    clock = failure.prepared.clock
    with clock.limited_to(seconds):
        found = _explained(failure, unreached, known)
        notes = [f"the search for the cause {ended_early(seconds)}"] if clock.ended else []
    named = _part(lambda: [with_argument_names(found, failure)], failure) or [tuple(found)]
    if failure.broken and not _is_known(found):
        told = "; at ".join(filter(None, (raised(failure.broken[0]), users_line(failure.broken[0]))))
        notes.append(f"a part of the search for the cause raised {told}; the causes there were not tried")
    return named[0], tuple(notes)


def _part(tried: Callable[[], Iterable[Tried]], failure: Failure) -> list[Tried]:
    """Return what a part of the search finds before the limit of real time, without findings that do not fit the model.

    A part may raise, on a tensor of a rare dtype or in the pair's code, which may not expect a changed reference. The
    others still follow.

    Raises:
        Exception: one of a broken device, on which nothing can be computed any more.
    """
    found: list[Tried] = []
    try:
        with suppress(OutOfTime):
            for one in tried():
                if not isinstance(one, Finding) or has(failure, NEEDS[one.title]):
                    found.append(one)
    except Exception as error:
        if classify(error):
            raise
        failure.broken.append(error)
    return found


def _explained(failure: Failure, unreached: Sequence[str], known: Sequence[Direction]) -> Sequence[Finding]:
    if shaky := _part(lambda: ill_conditioned(failure), failure):
        return shaky
    drawn = [tensor for tensor in failure.results if not tensor.probed]
    probed = [tensor for tensor in failure.results if tensor.probed]
    on_probe = None if all(tensor.passed for tensor in probed) else on_probes(failure)
    of_drawn = dataclasses.replace(failure, results=drawn, on_probe=on_probe)
    as_drawn = dataclasses.replace(of_drawn, on_probe=None, by_average=True)
    if on_probe is not None and all(tensor.passed for tensor in drawn):
        return findings(dataclasses.replace(on_probe, on_drawn=as_drawn))
    screened = Screened()
    found = findings(of_drawn, unreached, screened)
    by_filter = _part(lambda: mistakes(drawn, known), of_drawn)
    if _is_known(found):
        # Among causes that fit equally well, the one that a filter has found is the likeliest.
        seen = {finding.title for finding in by_filter}
        return sorted(found, key=lambda finding: finding.title not in seen)
    # If the search has not confirmed what a filter finds in a loud error, that is a part of another mistake's error.
    # The cause of a loud error, in outputs or in gradients, has helped when the search tried it.
    quiet = [] if exceeds_norm_limit(of_drawn) else by_filter
    by_gradients = outputs_tell_little(of_drawn) and exceeds_norm_limit(of_drawn, of_drawn.results)
    among = screened.helping if exceeds_norm_limit(of_drawn) or by_gradients else None
    if quiet or on_probe is None or of_drawn.prepared.clock.ended:
        return quiet or found
    # If the error is far too large on the inputs as drawn, its cause explains at least a part of it there, where most
    # causes have been tried.
    effort = _AGAIN if among is not None else 1.0
    probing = findings(dataclasses.replace(on_probe, on_drawn=as_drawn, among=among, effort=effort))
    return probing if _is_known(probing) else found


def _is_known(found: Sequence[Finding]) -> bool:
    """Return whether the findings are causes, which leave nothing unexplained."""
    return bool(found) and all(finding.code not in UNEXPLAINED for finding in found)


# The causes that are tried on one kind of inputs, in order, until one explains the failure.


_HARDLY = 0.9
"""An error that is still above this share of what it was has hardly become smaller."""

_CHECKS_FOR_DIRECTIONS = 0.5  # times the check's cost, out of the search's budget

_CLOSE = 1.5
"""An explanation that fits up to this many times worse than the best is reported, too: they cannot be told apart."""

_PART = 0.25
"""Of the square of an error beyond rounding: a right number leaves less than this share, since the rest is rounding."""

_TELLING = 64  # if a tensor of this many numbers is far off, not just any two mistakes explain it


def findings(
    failure: Failure,
    unreached: Sequence[str] = (),
    screened: Screened | None = None,
) -> tuple[Finding, ...]:
    """Return every known cause that explains a failure, the best first; none for a comparison that passed.

    If the clock's limit of real time ends the search, these are the causes that were verified by then.

    Args:
        failure: the comparison.
        unreached: names of TE parameters that the backward pass did not reach.
        screened: gets the partial results of a search that explains nothing.

    Raises:
        OutOfTime: if the limit of real time is reached before anything is tried.
    """
    failed = [result for result in failure.results if not result.passed]
    if not failed:
        return ()
    part = partial(_part, failure=failure)
    spoiled = list(non_finite(failed, failure.precision))
    finite = all(result.finite for result in failure.outputs)
    for work in part(lambda: [work_of(lambda: outputs_with(failure.prepared, (), torch.float64))]):
        failure.prepared.clock.forward = work
    trace = next(iter(part(lambda: [failure.trace])), Trace())
    # Gradients that are not finite, or missing, need no further cause if all else is right.
    never_came = unused_parameters(failure.prepared.weights, unreached)
    lacking = [result for result in failed if not result.finite or result.name in never_came]
    is_told = (spoiled or unreached) and len(lacking) == len(failed)
    screened = Screened() if screened is None else screened
    located = cache(lambda: next(iter(part(lambda: locate(of_stages))), None))
    of_stages, failure = failure, dataclasses.replace(failure, against=partial(describe_contradiction, located))
    part = partial(_part, failure=failure)
    causes = _find_causes(failure, trace, unreached, screened, located) if finite and not is_told else []
    if is_told and not spoiled and len(failed) > 1 and failure.outputs_passed:
        budget = failure.budget(CHECKS_FOR_THE_REST)
        causes = part(lambda: detached_path_findings(failure, failed, trace, budget))
    told = " ".join(cause.message for cause in causes if cause.code == CODES["no-gradient"])
    untold = unreached_parameters([name for name in unreached if f'"{name}"' not in told])
    departs = located() if located.cache_info().currsize else None
    if causes and departs is not None:
        causes = [dataclasses.replace(causes[0], place=describe_place(departs.stages)), *causes[1:]]
    found = [*spoiled, *causes, *untold] or ([] if failure.draws else part(lambda: random_findings(failure)))
    if found:
        return tuple(found)
    unread = unread_inputs(failed, failure.candidate)
    most = part(lambda: _most_of_it(failure, screened.best))
    hidden = part(lambda: hidden_row_hints(failure)) if finite else []
    where = part(lambda: where_the_error_is(failure, screened.untried))
    departs = located() if finite else None
    places = [] if departs is None else part(partial(place_findings, departs))
    return (*unread, *most, *hidden, *where, *places)


def _most_of_it(failure: Failure, best: Ranked | None) -> Iterator[Finding]:
    """Yield a mistake that explains nearly all of the error but leaves more than rounding, so there is a second one."""
    # A part of a single number's error says nothing: some mistake or other explains any part of it.
    tells = best is not None and not few_outputs(failure)
    explained = partly_explained(failure, best[1]) if best is not None and tells else None
    if best is not None and explained is not None:
        label, before, after = explained
        yield finding(
            best[1][0].title,
            f"the relative error of {label} falls from {before:.2g} to {after:.2g} if you {best[1][0].repair}. "
            f"The normal error of {failure.precision.name} is smaller, so something else is wrong as well; repair this "
            "first",
            sure=False,  # another mistake may be the whole cause
            repair=best[1][0].repair,
            code=best[1][0].code,
        )


_Told = Callable[[Sequence[Explanation]], Iterator[Finding]]


def _find_causes(
    failure: Failure,
    trace: Trace,
    unreached: Sequence[str],
    screened: Screened,
    located: Callable[[], Located | None],
) -> list[Finding]:
    """Return the first causes that explain finite outputs and their gradients; arguments as for ``findings``.

    If a candidate is right once it is called differently, that is better evidence than a reference that is made wrong.
    So most of these causes are tried first.
    """
    search = failure.budget(CHECKS_FOR_SEARCH)
    first_order = cache(lambda: FirstOrder(failure, trace, failure.budget(_CHECKS_FOR_DIRECTIONS)))
    tells = not outputs_tell_little(failure)

    def known() -> Iterator[Hypothesis]:
        return _select_fitting(failure, hypotheses(failure.prepared, trace, frozenset(unreached), failure.broken))

    @cache
    def by_place() -> tuple[list[Hypothesis], list[Hypothesis]]:
        """Return the known mistakes that may change a place where the candidate departs, and the others.

        A port may also compute what is right and go on with something else, and a place may be misjudged.
        """
        where, every = located(), list(known())
        if where is None or not where.is_in_values:
            return every, []
        likely = [one for one in every if where.suspicion.concerns(one)]
        numbers = set(map(id, likely))
        return likely, [one for one in every if id(one) not in numbers]

    def told(explained: Sequence[Explanation]) -> Iterator[Finding]:
        """Yield the findings of explanations that no stage contradicts, and keep the others."""
        doubted.extend(one for one in explained if one.against)
        yield from _told([one for one in explained if not one.against], failure)

    doubted: list[Explanation] = []

    causes: list[Callable[[], Iterable[Finding]]] = [
        lambda: _by_chance(failure),
        lambda: own_recipe_findings(failure),
        lambda: shared_cache_findings(failure),
        lambda: hidden_row_findings(failure),
    ]
    if few_outputs(failure) and all(result.kind == "output" for result in failure.results):
        causes = [causes[0], lambda: _told(_of_one_number(failure, trace, search), failure)]
        return _first_found(causes, failure)
    if all(result.passed for result in failure.outputs):
        causes.append(lambda: _by_scale_of_scores(failure, trace, told))
        if failure.outputs_passed:
            causes.append(lambda: gradient_findings(failure, trace, failure.budget(CHECKS_FOR_THE_REST)))
    else:
        causes += [lambda: exchange_findings(failure), lambda: buffer_findings(failure)]
    causes += [
        # A cached weight whose scale is inverted is also a cached weight; the inverted scale says more than the cache.
        lambda: _by_scale(failure, search, told),
        lambda: microbatch_findings(failure),
        lambda: told(loss_explanations(failure, trace, search)),
        lambda: whole_scale_findings(failure),
        lambda: log_prob_findings(failure, trace),
        lambda: told(decoding_explanations(failure, trace, failure.budget(CHECKS_FOR_DECODING))),
        lambda: told(explanations(failure, by_place()[0], search, screened, first_order if tells else None)),
        # A mistake that moves rows or columns, such as one of a weight map, says more than that they are moved.
        lambda: order_findings(failure),
        lambda: _of_other_operands(failure, trace, located, told),
        lambda: told(border_explanations(failure, trace, failure.budget(CHECKS_FOR_BORDERS))),
        lambda: told(restart_explanations(failure, trace, failure.budget(CHECKS_FOR_BORDERS))),
        lambda: _against_the_stages(failure, by_place()[1], doubted, screened, first_order if tells else None),
        lambda: scale_findings(failure),
        lambda: precision_findings(failure, failure.budget(CHECKS_FOR_THE_REST)),
        lambda: partly_scaled_findings(failure) if failure.outputs_passed else (),
    ]
    return _first_found(causes, failure)


def _select_fitting(failure: Failure, known: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield the mistakes that may be a failure's cause and fit the model."""
    for one in known:
        failure.prepared.clock.check()
        if has(failure, NEEDS[one.title]) and (failure.among is None or (one.title, one.name) in failure.among):
            yield one


def _against_the_stages(
    failure: Failure,
    unlikely: Sequence[Hypothesis],
    doubted: Sequence[Explanation],
    screened: Screened,
    first_order: Callable[[], FirstOrder] | None,
) -> Iterator[Finding]:
    """Yield the findings of what explains everything, though the stages speak against it."""
    budget = failure.budget(CHECKS_FOR_UNLIKELY)
    found = [*explanations(failure, unlikely, budget, screened, first_order), *doubted]
    yield from _told([one for one in found if one.complete], failure)


def _first_found(causes: Iterable[Callable[[], Iterable[Finding]]], failure: Failure) -> list[Finding]:
    """Return the findings of the first cause that has any."""
    return next((found for cause in causes if (found := _part(cause, failure))), [])


def _of_other_operands(
    failure: Failure, trace: Trace, located: Callable[[], Located | None], told: _Told
) -> Iterator[Finding]:
    """Yield findings on calls that read another value than the reference's.

    So many calls could do so that one must explain every tensor, gradients included. An input that is no longer read is
    reported first.
    """
    where = located()
    if failure.among is not None or where is None or not where.is_in_values:
        return
    budget = failure.budget(CHECKS_FOR_OPERANDS)
    listed = list(other_operand_hypotheses(where, trace, budget.share(0.5)))
    found = [one for one in explanations(failure, listed, budget) if one.complete]
    if found:
        failed = [result for result in failure.results if not result.passed]
        yield from unread_inputs(failed, failure.candidate)
    yield from told(found)


def _by_chance(failure: Failure) -> list[Finding]:
    """Return findings about random numbers; with these, any other cause would explain this pass and not the next."""
    found = list(dropout_findings(failure))
    return found or (list(random_findings(failure)) if failure.draws else [])


def _of_one_number(failure: Failure, trace: Trace, budget: Budget) -> list[Explanation]:
    """Return the subtle mistakes that explain a few numbers, if all that do are of one kind.

    Only subtle mistakes, such as a wrong eps, show on probing inputs and hardly on others.
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


def _by_scale(failure: Failure, budget: Budget, told: _Told) -> Iterator[Finding]:
    """Yield the mistakes that multiply weights by the scales of their quantization."""
    known = list(scale_hypotheses(failure.prepared, failure.precision))
    if known:
        yield from told(explanations(failure, known, budget))


def _by_scale_of_scores(failure: Failure, trace: Trace, told: _Told) -> Iterator[Finding]:
    """Yield a finding on the scale of attention's scores if outputs passed and some gradients are off by one factor.

    Attention that is nearly uniform shows its scale in the gradients of queries and keys, and hardly in its output.
    """
    failed = [result for result in failure.results if not result.passed]
    some = len(failed) < sum(result.kind != "output" for result in failure.results)
    if some and shared_factor(failure, failed, everywhere=False):
        budget = failure.budget(CHECKS_FOR_THE_REST)
        found = explanations(failure, softmax_scale_hypotheses(trace), budget)
        yield from told([one for one in found if one.complete])


def _told(explained: Sequence[Explanation], failure: Failure) -> Iterator[Finding]:
    """Yield a finding for each hypothesis of the explanations that fit about as well as the best, one of each kind.

    A finding is sure if every tensor passes once it is repaired, if no explanation of another kind does as well, and if
    its fitted number, if it has one, is one that people write.
    """
    kinds: dict[tuple[str, ...], Explanation] = {}
    for explanation in explained:
        if explanation.after <= _CLOSE * explained[0].after:
            kinds.setdefault(tuple(one.title for one in explanation.hypotheses), explanation)
    complete = [explanation for explanation in kinds.values() if explanation.complete]
    for explanation in (*complete, *(one for one in kinds.values() if not one.complete)):
        rivals = [other.hypotheses for other in complete if other is not explanation]
        of_its_own = (
            _not_all(explanation)
            or _too_much(explanation, failure)
            or _fitted_to_a_part(explanation, failure)
            or _as_any_two(explanation, failure)
            or _hardly_seen(explanation)
        )
        doubts = explanation.against or of_its_own or _or_else(rivals) or _or_alike(explanation, explained)
        doubt = doubts + "".join(map(_as_if, explanation.hypotheses))
        # Mistakes with a meaning come first.
        for one in sorted(explanation.hypotheses, key=lambda one: one.scope == "call"):
            gains = _gains(explanation, failure.precision.name)
            told = f"{_together(one, explanation)}{gains} if you {one.repair}{_in_code_instead(one)}{doubt}"
            yield finding(one.title, told, sure=not doubt, repair=one.repair, code=one.code)


def _in_code_instead(one: Hypothesis) -> str:
    """Say that another entry of the map has the same effect as code that exchanges what the entry gives."""
    is_of_the_map = one.read is not None and bool(one.code.now)
    return "; if the map says what you mean, the port's code uses these parameters otherwise" if is_of_the_map else ""


def _gains(explanation: Explanation, precision: str) -> str:
    """Say what improves, which is hardly the norm of an error if a mistake is far below its noise."""
    if _is_hardly_seen(explanation):
        return f"every tensor, including {explanation.worst}, is within the normal error of {precision}"
    falls = f"the relative error of {explanation.worst} falls from {explanation.before:.2g} to {explanation.after:.2g}"
    return f"{falls}, the normal error of {precision}," if explanation.complete else falls


def _not_all(explanation: Explanation) -> str:
    """Say which tensor a repair leaves wrong; return an empty text if it leaves none."""
    left = explanation.left
    if left is None:
        return ""
    far = f"{left.margin:.2g} times its limit" if math.isfinite(left.margin) else "not finite"
    return f"; {left.label} is still {far} then, so something else is wrong as well, or this is not quite the mistake"


def _too_much(explanation: Explanation, failure: Failure) -> str:
    """Say if more error is left in all tensors together than rounding leaves, though each passes; else an empty text.

    Among the zoo's bugs that are diagnosed correctly (327 at one seed; FP32, BF16 and FP8), none leaves more than 1.12
    times what the precision costs. A few numbers may be off by any factor by chance.
    """
    if explanation.misfit <= FAITHFUL or few_outputs(failure):
        return ""
    left = f"the error of all tensors together is still {explanation.misfit:.3g} times the normal one"
    return f"; {left}, so this may not be quite the mistake"


def _fitted_to_a_part(explanation: Explanation, failure: Failure) -> str:
    """Say if a fitted number takes only a part of an error from a tensor, though it passes then; else an empty text.

    Some number of any kind takes a part of an error of its direction, and FP8's limits may let the rest pass. The right
    one leaves rounding, whose norm hardly scatters in a tensor of many numbers.
    """
    if all(one.tuned is None or one.value is None for one in explanation.hypotheses):
        return ""
    before = {one.key: one.errors.relative_l2 for one in failure.results if not one.passed and one.numel >= _TELLING}
    for now in explanation.results:
        after, costs = now.errors.relative_l2, now.expected.relative_l2
        beyond = before.get(now.key, 0.0) ** 2 - costs**2
        if beyond > 0.0 and after > costs * (FAITHFUL if after**2 < costs**2 + _PART * beyond else 1.0):
            left = f"{now.label} is still {after / costs:.3g} times as far off as rounding puts it, where it was"
            return f"; {left} {before[now.key] / costs:.3g} times, so another mistake may look like this one"
    return ""


def _as_any_two(explanation: Explanation, failure: Failure) -> str:
    """Say that two mistakes may pass by chance if no tensor of many numbers is far off; else return an empty text."""
    if len(explanation.hypotheses) < 2 or any(one.numel >= _TELLING and is_far_off(one) for one in failure.results):
        return ""
    return "; with so many known mistakes, some two may explain so small an error by chance, so it may not be these"


def _hardly_seen(explanation: Explanation) -> str:
    """Say that others may look like a mistake that has a large effect elsewhere and hardly any here.

    A second norm after the first one, whose gains are 1, does what an eps of 0 does. Against a number that is close to
    the right one, or a rounding, nothing speaks, since it never does more.
    """
    is_small = all(one.subtle or one.value is not None for one in explanation.hypotheses)
    if is_small or not _is_hardly_seen(explanation):
        return ""
    return "; it changes hardly anything here, so other mistakes may look the same"


def _is_hardly_seen(explanation: Explanation) -> bool:
    return explanation.complete and explanation.after > _HARDLY * explanation.before


def _or_alike(explanation: Explanation, explained: Sequence[Explanation]) -> str:
    """Say which others of a list, such as other activations, explain as much; return an empty text if none does."""
    (one, *more) = explanation.hypotheses
    kind = f"{one.name.partition(' ')[0]} "
    if more or one.value is not None or not explanation.complete:
        return ""
    alike = [
        other.hypotheses[0].name.removeprefix("activation ")
        for other in explained
        if len(other.hypotheses) == 1 and other.complete and other.misfit <= AS_WELL * explanation.misfit
        if other.hypotheses[0].value is None and other.hypotheses[0].name.startswith(kind)
        if other.hypotheses[0].name != one.name and other.hypotheses[0].place == one.place
        if not math.isclose(other.misfit, explanation.misfit)  # what computes the same is the same mistake
    ]
    return describe_rivals(alike)


def _or_else(rivals: Sequence[tuple[Hypothesis, ...]]) -> str:
    """Say which other mistakes explain as much; return an empty text if none does."""
    titles = [" with ".join(f"{CODES[one.title]} {one.title}" for one in rival) for rival in rivals]
    return describe_rivals(titles)


def _as_if(one: Hypothesis) -> str:
    """Say that a fitted number is unusual, so another mistake may look like this one; else return an empty text."""
    if one.value is None or not is_unusual(one):
        return ""
    return unusual(one.value)


def _together(one: Hypothesis, explanation: Explanation) -> str:
    others = [
        f"{'another ' * (other.title == one.title)}{CODES[other.title]} {other.title}"
        for other in explanation.hypotheses
        if other is not one
    ]
    return f"with {' and '.join(others)} repaired as well, " if others else ""
