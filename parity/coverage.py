"""Which mistakes would a comparison have passed? A pass says nothing about these.

A port with exactly one known mistake is modelled by the reference with that mistake, computed as the precision's
kernels round. It is judged as a candidate is. If it passes, this comparison could not have shown the mistake: with
these weights, inputs and sizes a cap may never bind, or a window may be longer than the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from parity.case.case import Case, mixed
from parity.comparison import catching, in_fp32, judge_outputs, list_parts
from parity.judge.request import CandidateRun, Request, run_again
from parity.judge.second_look import HOPELESS_MARGIN, is_hopeless
from parity.judge.statistics import SMALLEST_SLICE
from parity.judge.unshown import but_for_its_number, list_idle_conditions
from parity.mistakes.catalogue import hypotheses
from parity.mistakes.hypothesis import Hypothesis, more_like_it
from parity.mistakes.replay import Outputs, call_with
from parity.numerics.errors import TINY, norm_of
from parity.numerics.freedom import FUSED_POINTWISE
from parity.passes.all_passes import Tensors, as_returned, model_numbers, run_model
from parity.passes.modes import usual_modes
from parity.passes.prepare import Cache, Prepared, calls_of, prepare, reweighed
from parity.result import Result, TensorResult
from parity.shown import raised
from parity.te import why_refused
from parity.trace.effects import undisturbed
from parity.trace.trace import ordinal
from parity.trace.whose import users_line
from parity.user_error import UserError

_FP64 = 1e-12  # in FP64, sums in another order change outputs by less than this share
# The wrong ports' kernels. Those of both models that they are judged by round otherwise.
_KERNELS = replace(FUSED_POINTWISE, splits_of_k=2, jitter=0)


@dataclass(frozen=True)
class Tried:
    """A known mistake, and what the comparison would have said of a port that makes it and no other.

    Attributes:
        mistake: the mistake.
        effect: the largest change of an output in FP64, in units of its limit; 0 if it is less than sums in another
            order change.
        margin: the largest margin of a tensor, at least; infinite if something is not finite.
        is_shown: whether the comparison would have failed.
        is_idle: whether the port returns the same bits as without the mistake.
    """

    mistake: Hypothesis
    effect: float
    margin: float
    is_shown: bool
    is_idle: bool = False

    @property
    def place(self) -> str:
        """The first call that it changes, in words, and how many others there are."""
        sites = dict.fromkeys(one.site for one in self.mistake.edits)
        module, _, name, index = next(iter(sites))
        return f"{ordinal(index + 1)} {name!r} of {module or 'the module'}{more_like_it(len(sites))}"

    def joined(self, other: Tried) -> Tried:
        """Return what two parts of the outputs, which are judged apart, say together."""
        effect, margin = max(self.effect, other.effect), max(self.margin, other.margin)
        is_shown, is_idle = self.is_shown or other.is_shown, self.is_idle and other.is_idle
        return Tried(self.mistake, effect, margin, is_shown, is_idle)


def try_mistakes(request: Request) -> list[Tried]:
    """Return what a comparison would have said of each mistake that is known of its reference's operations.

    Mistakes count that are made everywhere, or in all operations that one argument of TE sets. Of those that differ
    only in a number, the likeliest number counts. A mistake that the reference cannot be computed with is left out.

    Raises:
        UserError: if the pair cannot be compared.
    """
    reason = why_refused(request.precision, request.kernels)
    if reason is not None:
        raise UserError(f"{request.case} does not run at {request.precision.name}: {reason}")

    def explain(error: BaseException) -> list[Tried]:
        if isinstance(error, UserError):
            raise error
        told = "; at ".join(filter(None, (raised(error), users_line(error))))
        raise UserError(f"{request.case} cannot be compared, so nothing is known of what it shows: {told}") from error

    with usual_modes(), undisturbed(mixed(request.seed, "coverage")):
        return catching(partial(_try_in_parts, request), explain)


def missed(tried: Sequence[Tried]) -> list[Tried]:
    """Return the mistakes that would have passed, without those of a kind of operation that pass everywhere as well."""
    passed = [one for one in tried if not one.is_shown]
    everywhere = [one.mistake for one in passed if one.mistake.scope == "all"]

    def repeats(kind: Hypothesis) -> bool:
        return any(one.title == kind.title and kind.name.startswith(f"{one.name} in ") for one in everywhere)

    return [one for one in passed if one.mistake.scope == "all" or not repeats(one.mistake)]


def _try_in_parts(request: Request) -> list[Tried]:
    found: dict[tuple[object, ...], Tried] = {}

    def add_all(case: Case, request: Request) -> None:
        shown = {key for key, one in found.items() if one.is_shown}
        for one in _try_all(replace(request, case=case), shown):
            key = but_for_its_number(one.mistake)
            found[key] = found[key].joined(one) if key in found else one

    for case in list_parts(request):
        add_all(case, request)
    probing = reweighed(request.case, request.checked, request.kernels) if request.probe_weights else None
    if probing:
        with suppress(UserError):  # the comparison notes it as well
            add_all(probing, in_fp32(request))
    return list(found.values())


def _try_all(request: Request, shown: Container[object]) -> Iterator[Tried]:
    """Yield each mistake but those shown already with what the comparison of these outputs would have said of it."""
    prepared = prepare(request.case, request.checked, request.precision.dtype, request.seed, request.kernels)
    candidate = run_again(request, prepared)
    prepared = as_returned(prepared, candidate)
    right = _run_with(request, prepared, ())
    verdict = _judge_run(request, right)
    if verdict.status in ("error", "skipped"):
        raise UserError(f"{request.case} proves nothing at {request.precision.name}: {verdict.reason}")
    effects = _Effects(prepared, verdict.tensors)
    for mistake in _list_mistakes(prepared):
        if but_for_its_number(mistake) in shown:
            continue
        effect = effects.of(mistake)
        if not effect <= HOPELESS_MARGIN:
            yield Tried(mistake, effect, effect, is_shown=True)
            continue
        try:
            wrong = _run_with(request, prepared, (mistake,))
        except Exception:  # the user's code may raise anything if it gets values that it does not expect
            continue
        if any(x.shape != right.tensors[key].shape for key, x in wrong.tensors.items()):
            yield Tried(mistake, effect, math.inf, is_shown=True)
            continue
        is_same = all(torch.equal(x, right.tensors[key]) for key, x in wrong.tensors.items())
        if is_same and wrong.numbers == right.numbers:
            yield Tried(mistake, effect, verdict.margin, is_shown=False, is_idle=True)
            continue
        result = _judge_run(request, wrong)
        yield Tried(mistake, effect, result.margin, is_shown=not result.passed)


def _list_mistakes(prepared: Prepared) -> list[Hypothesis]:
    """Return whole mistakes in operations, the likeliest first, each with one number."""
    trace = calls_of(prepared).trace
    known = hypotheses(prepared, trace, broken=[])
    whole = (one for one in known if one.scope in ("all", "kind") and one.edits and not one.adds)
    found: dict[tuple[object, ...], Hypothesis] = {}
    for one in chain(list_idle_conditions(trace), whole):
        found.setdefault(but_for_its_number(one), one)
    return list(found.values())


class _Effects:
    """How far mistakes move outputs in FP64, which takes little time and shows most of them."""

    def __init__(self, prepared: Prepared, right: Sequence[TensorResult]) -> None:
        outputs = [one for one in right if one.kind == "output" and one.numel >= SMALLEST_SLICE]
        self._golden = prepared.golden.outputs
        self._tolerances = {one.name: one.tolerance_relative_l2 for one in outputs if one.tolerance_relative_l2}
        self._outputs = Outputs(prepared, torch.float64)

    def of(self, mistake: Hypothesis) -> float:
        """Return how many times its tolerance a mistake moves an output; 0 if it cannot be computed."""
        outputs = self._outputs.under((mistake,)) or {}
        effects = [0.0]
        for name, tolerance in self._tolerances.items():
            golden, other = self._golden[name], outputs.get(name)
            if other is not None and other.shape == golden.shape:
                change = norm_of(other - golden) / max(norm_of(golden), TINY)
                effects.append(0.0 if change < _FP64 else change / tolerance)
        return math.inf if any(map(math.isnan, effects)) else max(effects)


def _run_with(request: Request, prepared: Prepared, mistakes: Sequence[Hypothesis]) -> CandidateRun:
    """Return what a port with these mistakes computes, in the dtypes in which the pair's own port returns it."""
    wrong = replace(prepared, call=call_with(prepared, mistakes), cache=Cache())
    computed = run_model(wrong, request.precision.rounding, _KERNELS)
    tensors: Tensors = {
        key: x if key in prepared.wide or key[0].endswith("gradient") else x.to(prepared.dtype)
        for key, x in computed.items()
    }
    return CandidateRun(tensors, numbers=model_numbers(wrong, request.precision.rounding)[_KERNELS])


class _Hopeless(Exception):
    """Raised at the first look at a port that no second one clears."""


def _judge_run(request: Request, run: CandidateRun) -> Result:
    """Return the verdict on a run, without a second look that could not change it."""
    at_first: list[Result] = []

    def end_if_hopeless(result: Result | None, decided: bool) -> None:
        if result is not None and is_hopeless(result.tensors, 0, False, request.precision.rounding):
            at_first.append(result)
            raise _Hopeless

    try:
        return judge_outputs(replace(request, candidate_run=run, on_progress=end_if_hopeless)).result
    except _Hopeless:
        return at_first[0]
