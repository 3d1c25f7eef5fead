"""Run one case at one precision. This is the one place that shows the whole way from a case to its result."""

from __future__ import annotations

import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from torch import nn

from parity.case.case import Case, mixed
from parity.case.formats import asked_format
from parity.case.validate import CheckedSize
from parity.judge import pictures
from parity.judge.candidate import TeModules, by_recalling, finding_of_recalled, repeat, unwritten_reads
from parity.judge.directions import Direction, directions
from parity.judge.formats import describe_mixed, findings_of_formats
from parity.judge.judge import (
    NONE_DRAWN,
    Drawn,
    gradients_of,
    is_explained,
    judge,
    judged_numbers,
    merged,
    parts,
    parts_known,
    zeroed_gradients,
)
from parity.judge.limits import Table
from parity.judge.pictures import are_log_probs_of, log_prob_outputs, pictured
from parity.judge.request import CandidateRun, OnProgress, Request, ignore_progress, run_again, unchanged
from parity.judge.second_look import BY_CHANCE, choosing_alike, leaning_runs, made_by_port_alone, remark, second_look
from parity.judge.unshown import unshown_mistakes
from parity.mistakes.codes import check_accepts, finding, repairable
from parity.mistakes.hypothesis import Hypothesis
from parity.numerics.errors import TINY, GoldenTensor, norm_of, relative_l2
from parity.numerics.freedom import FUSED, UNFUSED, Port, choices_seen, steps_seen, together
from parity.numerics.kernel_choices import as_kernels_lean, may_split_k, noisy_sums
from parity.numerics.plain import plain_calls
from parity.passes.all_passes import (
    Recalled,
    Tensors,
    as_returned,
    choices_in,
    golden_tensors,
    golden_truths,
    model_tensors,
    rounding_chooses,
    run_candidate,
    run_model,
    with_golden_under,
)
from parity.passes.golden_again import check_golden_again
from parity.passes.modes import usual_modes
from parity.passes.one_pass import Pass
from parity.passes.padding import find_padding
from parity.passes.prepare import Prepared, forget, part_that_raised, prepare, release, reweighed
from parity.passes.refusals import (
    LOOKS_UP_ELSE,
    LOSES_ALL,
    WITHIN,
    gradients_missed,
    judgeable_golden,
    left_unproven,
    proves_nothing,
    remarks,
)
from parity.result import PROBED, REWEIGHED, Finding, Kind, Result, TensorResult, as_printable, label_of
from parity.shown import few_of, raised, said
from parity.stages.judge import allowed_ratio
from parity.stages.locate import Stages, judge_stages
from parity.te import PRECISIONS, Kernels, Precision, precision_named, version, why_refused, why_unavailable
from parity.te.attention_backend import AttentionBackend, NotOffered, attention_backends
from parity.te.debug_features import describe_features
from parity.te.devices import classify
from parity.te.recipes import round_alike
from parity.te.seen_formats import SeenFormats
from parity.te.state import Recomputes, own_recipes, quantization_seen
from parity.trace import effects
from parity.trace.calls import Misfit
from parity.trace.digests import checksum
from parity.trace.effects import Disturbed, RandomState, kept, undisturbed
from parity.trace.unwritten import Filled
from parity.trace.whose import (
    WITHOUT_TE,
    first_paragraph,
    part_running,
    submodule,
    te_calls,
    users_line,
    way_there,
)
from parity.user_error import INTERRUPTS, UserError

_MOST_UNSHOWN = 6  # told
NOT_SEARCHED = "the cause was not searched for, because of diagnose=False or --parity-diagnosis=no"


@dataclass(eq=False)
class Comparison:
    """One comparison, filled step by step from top to bottom. A step that ends it leaves the next ones empty.

    Attributes:
        request: what is compared, and how.
        prepared: golden and everything else that all passes share.
        known: directions of the mistakes that a port could make.
        log_probs: names of the outputs that are log-probabilities of tokens.
        candidate: the candidate's pass.
        models: the rounding model's tensors, for each way in which faithful kernels compute.
        tensors: the verdicts on every tensor, after a second look if one was needed.
        port: what the port was seen to do outside TE, as far as it affects the verdicts.
        remarks: sentences on how this and other faithful kernels changed the verdicts.
        result: the result, without the findings that a search for the cause adds.
        unshown: known mistakes that would make no difference here.
        needs_cause: whether the result is a failure whose cause is not known yet.
        parts: the comparisons of the parts, if outputs are judged in separate parts.
        whole: the request for all parts together, if the cause is to be searched for there first.
    """

    request: Request
    prepared: Prepared = field(init=False)
    known: tuple[Direction, ...] = ()
    log_probs: tuple[str, ...] = ()
    candidate: CandidateRun = field(init=False)
    models: list[Tensors] = field(default_factory=list)
    tensors: tuple[TensorResult, ...] = ()
    port: Port = field(default_factory=Port)
    remarks: tuple[str, ...] = ()
    result: Result = field(init=False)
    unshown: tuple[Hypothesis, ...] = ()
    needs_cause: bool = False
    parts: tuple[Comparison, ...] = ()
    whole: Request | None = None

    def ended(self, result: Result) -> Comparison:
        """Return this comparison, which ends with a result."""
        self.result = result
        return self

    @property
    def is_unexplained(self) -> bool:
        """Return whether there is something to explain."""
        return self.needs_cause or any(part.needs_cause for part in self.parts)

    @property
    def passed(self) -> bool:
        """Return whether every tensor is within its limits."""
        return all(tensor.passed for tensor in self.tensors)

    @property
    def unlike(self) -> str:
        """Why a candidate whose numbers are right is not a drop-in replacement; empty if it is."""
        golden, candidate = self.prepared.golden, self.candidate
        return (
            effects.written_by_candidate_alone(golden.changed_inputs, candidate.changed_inputs)
            or effects.detached_by_candidate_alone(golden.detached_outputs, candidate.detached_outputs)
            or candidate.left_out
        )


# The whole way: a verdict, and the cause of a failure.


def compare_at(
    case: Case,
    checked: CheckedSize,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    calibration: Table,
    attention: AttentionBackend | None = None,
    determinism: bool = False,
    diagnosis: float | None = 0.0,
    stages: bool = False,
    unwritten: bool = True,
    probe_weights: bool = False,
) -> Result:
    """Compare a case at one size, precision and seed, and search for the cause if it fails.

    Never raises because a module fails: the result's status and reason report that.

    Args:
        diagnosis: seconds of real time that the search may take; 0 for no limit, with which it finds the same on every
            machine; None for no search.
        stages: whether a port that passes is judged stage by stage as well.
        unwritten: whether a candidate that reads memory which nothing has written fails; takes another pass.
        probe_weights: whether a fresh model that passes is compared with probing weights as well.
    """
    at = case, checked, precision, seed, kernels, calibration, attention, determinism
    comparison = judge_at(*at, unwritten=unwritten, probe_weights=probe_weights)
    result = explain_at(comparison, diagnosis)
    return check_stages_at(comparison.request, result) if stages else result


def judge_at(
    case: Case,
    checked: CheckedSize,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    calibration: Table,
    attention: AttentionBackend | None = None,
    determinism: bool = False,
    other_kernels: bool = True,
    candidate_run: CandidateRun | None = None,
    on_progress: OnProgress = ignore_progress,
    unwritten: bool = True,
    probe_weights: bool = False,
) -> Comparison:
    """Take the first step of ``compare_at``: reach the verdict, which the search for the cause does not change.

    Args:
        other_kernels: whether to allow for what other faithful kernels may do (``parity.numerics.kernel_choices``); a
            verdict without it shows what that allowance costs.
        candidate_run: the candidate's pass, if it has been made already.
        on_progress: see ``Request``; for callers that need a verdict even if the process dies during a second look.
    """
    began = time.perf_counter()
    at = case, checked, precision, seed, kernels, calibration, attention, determinism
    golden = precision_named(case.golden) if case.golden and candidate_run is None else None
    request = Request(*at, other_kernels, candidate_run, on_progress, unwritten, probe_weights, golden)

    def end_with_error(error: BaseException) -> Comparison:
        return Comparison(request).ended(error_result(request, error))

    with usual_modes(), undisturbed(mixed(seed, "everything else")) as disturbed:
        comparison = catching(lambda: _note_unshown(_probe_weights(_judge_in_parts(request))), end_with_error)
    result = with_side_effect_notes(comparison.result, disturbed)
    return comparison.ended(as_printable(replace(result, seconds=time.perf_counter() - began)))


def explain_at(comparison: Comparison, diagnosis: float | None) -> Result:
    """Take the second step of ``compare_at``: return the result with the findings of a failure.

    ``diagnosis`` is the same as there.
    """
    result = comparison.result
    if not comparison.is_unexplained:
        return result
    if diagnosis is None:
        return replace(result, notes=(*result.notes, NOT_SEARCHED))
    began = time.perf_counter()
    # At the first failure, because most comparisons pass, but before the pair's changes of the process are watched:
    # this imports scipy.optimize, which changes the filters of warnings.
    import parity.search.explanation  # noqa: F401

    with usual_modes(), undisturbed(mixed(result.seed, "the search")) as disturbed:
        explained = catching(lambda: _explain_in_parts(comparison, diagnosis), partial(without_cause, result))
    explained = as_printable(with_side_effect_notes(explained, disturbed))
    notes = dict.fromkeys((*explained.notes, *result.notes))  # a search in parts has only their notes
    return replace(explained, notes=tuple(notes), seconds=result.seconds + time.perf_counter() - began)


def check_stages_at(request: Request, result: Result) -> Result:
    """Take a third step, if it is asked for: add the stages, and fail a port that passes at its end and not at each.

    A residual stream or a last norm may hide what one layer does wrong. No law of stages has been measured on a GPU, so
    this is no part of a verdict that nobody asked for.

    Args:
        request: the comparison, of all outputs.
        result: its result.
    """
    if result.status not in ("passed", "failed"):
        return result
    began = time.perf_counter()

    def note_error(error: BaseException) -> Result:
        note = f"judging its stages raised {_say_where_raised(error)}"
        return replace(result, notes=(*result.notes, note), device_error=classify(error))

    with usual_modes(), undisturbed(mixed(result.seed, "stages")) as disturbed:
        checked = catching(lambda: _check_stages(request, result), note_error)
    checked = as_printable(with_side_effect_notes(checked, disturbed))
    return replace(checked, seconds=result.seconds + time.perf_counter() - began)


def _check_stages(request: Request, result: Result) -> Result:
    prepared = prepared_for(request)
    try:
        stages = observe_stages(request, prepared)
    except Misfit as error:
        return replace(result, notes=(*result.notes, f"{said(error)}, so only its end was judged"))
    return with_stages(result, prepared, stages)


def with_stages(result: Result, prepared: Prepared, stages: Stages) -> Result:
    """Return the result with its stages: a failure, if it passed and one of them is off."""
    from parity.search.located import findings_of_stages, results_of_stages

    result = replace(result, stages=results_of_stages(stages))
    if not stages.flagged or not result.passed:
        return result
    reason = f"it is right at its end, but {len(stages.flagged)} of {len(stages.all)} stages are off"
    return replace(result, status="failed", reason=reason, findings=findings_of_stages(prepared, stages))


def observe_stages(request: Request, prepared: Prepared) -> Stages:
    """Run the candidate to judge every stage of its pass, and if one is off, again with what it rounds and chooses.

    Raises:
        Misfit: if the reference cannot be computed stage by stage.
    """
    with suppress(Misfit):
        stages = judge_stages(request, prepared)
        if not stages.flagged:
            return stages
    port = observe_port(request, prepared)
    return judge_stages(request, replace(prepared, made=port.choices), port.freedoms)


def prepared_for(request: Request) -> Prepared:
    """Return what all passes share, with golden in FP64 alone."""
    return prepare(request.case, request.checked, request.precision.dtype, request.seed, request.kernels)


# Outputs in parts: single numbers, such as a loss, are judged apart from larger outputs.


def _judge_in_parts(request: Request) -> Comparison:
    """Judge each part of the outputs by itself, and the whole as well if a part cannot be compared."""
    check_accepts(request.case)
    cases = list_parts(request)
    if len(cases) == 1:
        return judge_outputs(replace(request, case=cases[0]))
    parts: list[Comparison] = []
    for case in cases:
        fails = any(one.result.status == "failed" for one in parts)  # stays noted while the others are compared
        on_progress = ignore_progress if fails else request.on_progress
        parts.append(judge_outputs(replace(request, case=case, on_progress=on_progress)))
    whole = None
    if any(one.result.status == "error" for one in parts):
        parts = [judge_outputs(request), *(one for one in parts if one.result.status != "error")]
    elif parts[-1].result.status == "failed":
        whole = replace(request, on_progress=ignore_progress)
    ended = Comparison(request, parts=tuple(parts), whole=whole, unshown=parts[-1].unshown)
    return ended.ended(merged([one.result for one in parts]))


def _probe_weights(comparison: Comparison) -> Comparison:
    """Return the comparison of a fresh model that passes with the outputs that probing weights give it in FP32.

    Probing weights show formulas that are wrong, which FP32 shows best. In fewer bits they may also make rounding so
    large that no bound holds, as behind the exponential of a sum that decays.
    """
    request, result = in_fp32(comparison.request), comparison.result
    if not (request.probe_weights and result.passed) or request.candidate_run:
        return comparison
    case = reweighed(request.case, request.checked, request.kernels)
    if case is None:
        return comparison
    other = judge_outputs(replace(request, case=case, determinism=False, unwritten=False, on_progress=ignore_progress))
    overflows = not all(one.expected.finite for one in other.result.tensors)
    why = "a correct computation overflows" if overflows else other.result.reason
    if why:
        note = f"not compared with probing weights: {why}"
        return comparison.ended(replace(result, notes=(*result.notes, note)))
    tensors = tuple(replace(one, kind=REWEIGHED) for one in other.result.tensors)
    other.result = replace(other.result, tensors=tensors, notes=())
    names = {one.name for one in other.unshown}
    comparison.unshown = tuple(one for one in comparison.unshown if one.name in names)
    if other.needs_cause:
        comparison.parts = (Comparison(comparison.request).ended(result), other)
    return comparison.ended(merged([result, other.result]))


def _note_unshown(comparison: Comparison) -> Comparison:
    """Return the comparison with a note on what its pass could not have shown, and the pair does not accept."""
    result, accepts = comparison.result, comparison.request.case.accepts
    names = list(dict.fromkeys(one.name for one in comparison.unshown if one.title not in accepts))
    if not (names and result.passed):
        return comparison
    note = f"this run could not have shown: {few_of(names, _MOST_UNSHOWN)}"
    return comparison.ended(replace(result, notes=(*result.notes, note)))


def in_fp32(request: Request) -> Request:
    """Return the request for the same comparison in FP32, by any attention backend."""
    return replace(request, precision=PRECISIONS["fp32"], attention=None, golden=None)


def list_parts(request: Request) -> list[Case]:
    """Return the case once for each part of its outputs that is compared by itself."""
    case, checked, kernels = request.case, request.checked, request.kernels
    if request.candidate_run is not None:  # that pass is of all outputs together
        return [case]
    known = parts_known(case, checked)
    if known is None and why_unavailable(request.precision, kernels) is None:
        at = case, checked, request.precision.dtype, request.seed, kernels
        try:
            outputs = prepare(*at).golden
        except Exception:  # the comparison itself will report it
            return [case]
        known = parts(case, checked, outputs)
        if len(known) > 1:
            release(*at)
    return known or [case]


def _explain_in_parts(comparison: Comparison, seconds: float) -> Result:
    """Search for the cause of a failure, first in all outputs together if the larger ones failed.

    A cause of the larger outputs' errors must also explain the single numbers beside them. If only a number failed, or
    this search finds no cause, the failed parts are searched one by one.
    """
    if comparison.request.golden is not None:
        return _explain_under_golden(comparison, comparison.request.golden, seconds)
    if comparison.needs_cause:
        return _explain_failure(comparison, seconds)
    whole = None if comparison.whole is None else judge_outputs(comparison.whole)
    if whole is not None and whole.needs_cause:
        explained = _explain_failure(whole, seconds)
        if is_explained(explained):
            return replace(comparison.result, findings=explained.findings)
    return merged([_explain_failure(one, seconds) if one.needs_cause else one.result for one in comparison.parts])


def _explain_under_golden(comparison: Comparison, golden: Precision, seconds: float) -> Result:
    """Search where golden is FP64 alone; a port that agrees with that lacks the rounding, if its precision does."""
    plain = _judge_in_parts(replace(comparison.request, golden=None, on_progress=ignore_progress))
    explained = _explain_in_parts(plain, seconds) if plain.is_unexplained else plain.result
    if not explained.passed:
        note = f"the cause was searched for without {golden.name}'s rounding in golden"
        notes = *comparison.result.notes, note, *explained.notes
        return replace(comparison.result, findings=explained.findings, notes=notes)
    told = f"it agrees with the reference in FP64 without {golden.name}'s rounding"
    if _rounds_as_golden(comparison.request):
        step = "compare smaller parts of the model, of which rounding hides less"
        found = repairable("unexplained", f"{told}, so that its mistake is below that, and none was searched for", step)
    else:
        found = repairable("recipe-disabled", told, f"run it under {golden.name}, or judge it without golden=")
    return replace(comparison.result, findings=(found,))


def _rounds_as_golden(request: Request) -> bool:
    """Return whether the precision's recipe rounds operands as golden's does."""
    is_history_free = not request.precision.scaled_by_history
    return is_history_free and round_alike(replace(request.precision.rounding, shared=True), request.rounding)


def _describe_golden(comparison: Comparison, golden: Precision, tensors: Sequence[TensorResult]) -> str:
    """Say that golden rounds, and what it costs to compute without this where the precision does."""
    told = f"golden rounds as {golden.name} does"
    if _rounds_as_golden(comparison.request):
        return told
    exact, rounded = golden_tensors(prepared_for(comparison.request)), golden_tensors(comparison.prepared)

    def cost(tensor: TensorResult) -> float:
        right = rounded[tensor.key]
        return relative_l2(norm_of(exact[tensor.key] - right), norm_of(right))

    outputs = [tensor for tensor in tensors if tensor.kind == "output"]
    worst = max(outputs, key=lambda tensor: cost(tensor) / (tensor.expected.relative_l2 + TINY))
    shares = f"{100 * cost(worst):.2g} %, where {100 * worst.expected.relative_l2:.2g} % is expected"
    precision = comparison.request.precision.name
    return f"{told}, and {precision} does not: without this rounding, the reference's {worst.label} changes by {shares}"


# One part: run every pass, judge every tensor, decide.


def judge_outputs(request: Request) -> Comparison:
    """Compare the outputs of one part, or all of them."""
    comparison = Comparison(request)
    unavailable = why_refused(request.precision, request.kernels)
    if unavailable is not None:
        return comparison.ended(request.result("skipped", reason=unavailable))
    try:
        _run_passes(comparison)
    except NotOffered as error:
        return comparison.ended(request.result("skipped", reason=said(error)))
    except UserError as error:
        return comparison.ended(request.result("error", reason=said(error)))
    except _PassRaised as error:
        forget()  # the pass may have left the reference half changed
        return comparison.ended(_error_result(request, said(error), error.__cause__ or error))
    try:
        _judge_tensors(comparison)
        result = _decide_result(comparison)
    except UserError as error:  # the table has no law for it, or the reference differs from itself
        result = request.result("error", reason=said(error))
    candidate = comparison.candidate
    result = replace(
        result,
        tensors=_add_digests(result.tensors, candidate.tensors),
        attention=candidate.attention,
        determinism=candidate.determinism,
        equals=candidate.equals,
        formats=candidate.formats,
    )
    # Only a search for the cause needs the passes, which may take much memory.
    kept = comparison if comparison.needs_cause else Comparison(request, unshown=comparison.unshown)
    return kept.ended(result)


def _add_digests(judged: Sequence[TensorResult], computed: Tensors) -> tuple[TensorResult, ...]:
    """Return the verdicts with checksums of the candidate's tensors; tensors derived from these have none."""
    return tuple(
        replace(each, digest=checksum(computed[each.key])) if each.key in computed else each for each in judged
    )


# The passes.


class _PassRaised(Exception):
    """Raised if a part of the pair raised; the message says which part, what and where, and that error is its cause."""


def _run_passes(comparison: Comparison) -> None:
    """Run the reference in FP64, the candidate, and the reference under the rounding model.

    Raises:
        NotOffered: if TE does not offer the requested attention backend.
        UserError: if the pair does not fit together, or nothing could be judged.
        _PassRaised: if one of its modules raises.
    """
    request = comparison.request
    precision, golden = request.precision, request.golden
    if golden is not None and (golden.scaled_by_history or "nvfp4" in golden.families):
        raise UserError(
            f"golden={golden.name!r} has scales of earlier passes, or numbers in NVFP4, under which right ports differ "
            "too much; name a recipe in FP8 with current scaling, block scaling or MXFP8"
        )
    with _naming_what_raises("the reference in FP64"):
        prepared = prepared_for(request)
    comparison.log_probs = log_prob_outputs(prepared)
    if not request.case.is_step:
        comparison.unshown = unshown_mistakes(prepared)
    if not request.case.reweighed:  # with probing weights, what makes a difference makes a large one
        comparison.known = directions(prepared)  # before other passes, since golden's calls hold memory until then
    with _naming_what_raises("the candidate"):
        comparison.candidate = request.candidate_run or _run_candidate(request, prepared)
    if request.candidate_run:
        prepared.note_changed(request.candidate_run.changed)
    prepared = as_returned(prepared, comparison.candidate.tensors)
    if golden is not None:
        with _naming_what_raises(f"the reference in FP64 under {golden.name}"):
            prepared = with_golden_under(prepared, golden.rounding)
    comparison.prepared = prepared
    with _naming_what_raises(f"the reference under the rounding model of {precision.name}"):
        comparison.models = [model_tensors(prepared, request.rounding, freedom) for freedom in (FUSED, UNFUSED)]


def _run_candidate(request: Request, prepared: Prepared) -> CandidateRun:
    """Build and run the candidate, and watch what it does besides returning numbers."""
    case, checked, precision = request.case, request.checked, request.precision
    seed, kernels = request.seed, request.kernels
    before = RandomState.now(kernels.device)
    ran: list[Pass] = []
    recomputes, recalled, te_modules, formats = Recomputes(), Recalled(), TeModules(), SeenFormats()
    watched = te_modules.watched() if checked.has_te else te_calls()

    def watch(module: nn.Module) -> None:
        recomputes.watch(module)
        te_modules.of(module)
        formats.of(module)

    looked = quantization_seen() if precision.recipe else nullcontext([""])
    looked_closely = formats.watched() if precision.recipe else nullcontext()
    on_backend = attention_backends(request.attention)
    with on_backend as seen, watched as te_called, recomputes.recorded(), looked_closely, looked as quantized:
        candidate, unreached = run_candidate(
            *(case, checked, prepared, precision, seed, kernels, watch, ran.append, recalled)
        )
    draws = not RandomState.now(kernels.device).is_as(before)
    again = partial(run_again, request, prepared)
    left_out = te_modules.left_out(prepared.weights, prepared.golden.weight_gradients, again)
    repeated = None
    if request.determinism:
        repeated = repeat(partial(again, recalled=Recalled()), candidate, before, kernels.device)
    changed = {name.rpartition(".")[0] for name in prepared.changed}
    rows = [
        replace(row, modules=tuple(x for x in row.modules if x not in changed or asked_format(prepared.formats, x)))
        for row in formats.rows
    ]
    unwritten, padded = _run_in_other_memory(request, prepared, candidate, before) if request.unwritten else ((), {})
    return CandidateRun(
        tensors=candidate,
        unreached=unreached,
        draws=draws,
        attention=", ".join(seen),
        determinism=repeated,
        changed_inputs=ran[0].changed_inputs,
        detached_outputs=ran[0].detached_outputs,
        numbers=ran[0].numbers,
        recalled=recalled,
        formats=formats.rows,
        misformatted=findings_of_formats(rows if prepared.formats else (), prepared.formats, precision, formats.roles),
        mixed=describe_mixed(rows, prepared.formats, precision, formats.roles),
        recomputed=tuple(finding("recomputed-otherwise", told) for told in recomputes.otherwise),
        unwritten=unwritten,
        padded=padded,
        calls_te=checked.has_te or bool(te_called),
        equals="" if quantized else next(name for name, each in PRECISIONS.items() if each.dtype == precision.dtype),
        left_out=left_out,
    )


def _run_in_other_memory(
    request: Request, prepared: Prepared, candidate: Tensors, before: RandomState
) -> tuple[tuple[Finding, ...], Tensors | str]:
    """Run the candidate with its memory full of NaN, and in the same run with garbage in the padding of its inputs.

    Returns:
        The finding of ``unwritten_reads``, and ``CandidateRun.padded``.
    """
    device, padding = request.kernels.device, find_padding(prepared)
    look = partial(
        unwritten_reads, partial(run_again, request, prepared, recalled=Recalled()), candidate, before, device
    )
    if padding is None:
        return look(), {}
    with_garbage = padding.of(prepared)

    def run_padded(memory: Filled | None) -> Tensors | str:
        with kept(device), memory or nullcontext():
            before.restore(device)
            try:
                return run_again(request, with_garbage, memory.watch if memory else unchanged, recalled=Recalled())
            except INTERRUPTS:
                raise
            except BaseException as error:  # the port's code may raise anything on other numbers
                return raised(error)

    def is_same(padded: Tensors | str) -> bool:
        return not isinstance(padded, str) and padding.is_same(candidate, padded)

    # A scale for several rows changes with the garbage, so that both together would tell nothing.
    if not request.precision.rounding.quantizes and is_same(run_padded(Filled())):
        return (), {}
    if found := look():
        return found, {}
    padded = run_padded(None)
    return (), {} if is_same(padded) else padded


@contextmanager
def _naming_what_raises(which: str) -> Iterator[None]:
    try:
        yield
    except (NotOffered, UserError, *INTERRUPTS):
        raise
    except BaseException as error:
        part, where, line = part_that_raised(error) or which, submodule(error), users_line(error)
        told = f"{part} raised {type(error).__name__}: {first_paragraph(error)}"
        places = (f"in {where}" if where else "", f"at {line}" if line else "", _advise_on(error))
        raise _PassRaised("; ".join(filter(None, (told, *places)))) from error


def _advise_on(error: BaseException) -> str:
    """Return what to do about an error that is well known, or an empty text.

    Known are shapes that TE's quantized kernels do not take (``pytorch/utils.py`` and ``quantizer.cpp`` of 2.20), a
    layer that is not recomputed as it was computed, a graph that an earlier call has left, and a mask that TE does not
    take with a cache.
    """
    text = said(error)
    if "backward through the graph a second time" in text:
        return "the module reuses a tensor from an earlier call, together with its graph: compute it again in each call"
    if type(error).__name__ == "CheckpointError":
        return "torch.utils.checkpoint recomputes outside of te.autocast: under a recipe, use te.checkpoint"
    if "KV caching requires padding mask" in text:
        return 'with a cache, TE\'s attention needs attn_mask_type="padding_causal" (self_attn_mask_type of a layer)'
    if not re.search(r"FP[48] .*divisible by", text, re.DOTALL):
        return ""
    return "pad the tokens, give a size that fits, or leave this precision out: precisions=[...] in @parity.pair"


def observe_port(request: Request, prepared: Prepared) -> Port:
    """Run the candidate again, and return what it rounds outside TE's modules and what it chooses."""
    precision = request.precision
    with (
        own_recipes(precision.recipe is not None) as recipes,
        steps_seen(precision.dtype) as steps,
        choices_seen(choices_in(prepared, request.rounding)) as choices,
        # This is last, since it looks at which code surrounds the calls.
        plain_calls(precision.dtype, prepared.evaluation) as names,
    ):
        run_again(request, prepared)
    return Port(tuple(sorted(names)), together(steps), tuple(choices), tuple(dict.fromkeys(recipes)))


def find_noisy_kernels(request: Request, port: Port) -> tuple[str, ...]:
    """Return the names of the choices that add noise which the kernels of the candidate's pass may make."""
    adds_parts = request.candidate_run is not None and request.candidate_run.adds_parts
    return noisy_sums(request.precision.rounding, adds_parts or may_split_k(version(), port.plain))


# The verdicts on every tensor.


def _judge_tensors(comparison: Comparison) -> None:
    """Judge every tensor, and look again at what fails or hangs on a choice.

    Raises:
        NothingToJudge: if something fails, and the reference differs from itself.
    """
    judge_by = partial(_judge_by, comparison, golden_truths(comparison.prepared))
    try:
        comparison.tensors = judge_by(comparison.models)
    except Exception:  # golden may hold numbers that no arithmetic bears
        _check_golden_again(comparison)
        raise
    if comparison.passed:
        if rounding_chooses(comparison.prepared, comparison.request.rounding):
            _rejudge_tensors(comparison, judge_by)
        return
    _check_golden_again(comparison)
    comparison.request.on_progress(_provisional_failure(comparison), False)

    def keep_first_look(error: BaseException) -> None:
        what = f"the second look, which tells chance from a mistake, raised {_say_where_raised(error)}"
        comparison.remarks = (f"{what}; the first look counts",)

    catching(lambda: _rejudge_tensors(comparison, judge_by), keep_first_look)
    comparison.request.on_progress(None if comparison.passed else _provisional_failure(comparison), True)


def _check_golden_again(comparison: Comparison) -> None:
    """Raise an error if the reference differs from itself, unless the candidate's pass is of another time or place."""
    if comparison.request.candidate_run is None:
        check_golden_again(prepared_for(comparison.request), comparison.request.kernels.device)


def _judge_by(
    comparison: Comparison,
    truths: Mapping[tuple[Kind, str], GoldenTensor],
    modelled: Sequence[Tensors],
    drawn: Drawn = NONE_DRAWN,
    biased_runs: Sequence[Tensors] = (),
) -> tuple[TensorResult, ...]:
    """Return the verdicts on every tensor by these runs of the rounding model."""
    request, tensors = comparison.request, comparison.candidate.tensors
    modelled = _add_sums(modelled, comparison.candidate.summed)
    golden = judgeable_golden(truths, modelled, tensors)
    limits = request.precision, request.calibration, comparison.known
    return gradients_of(request.case, judge(golden, modelled, tensors, *limits, drawn, biased_runs))


def _provisional_failure(comparison: Comparison) -> Result:
    """Return the failure that stands if nothing more becomes known."""
    candidate, tensors, notes = comparison.candidate, comparison.tensors, comparison.remarks
    result = comparison.request.result("failed", tensors=tensors, findings=candidate.observed, notes=notes)
    return as_printable(replace(result, attention=candidate.attention, determinism=candidate.determinism))


def _add_sums(models: Sequence[Tensors], summed: Tensors) -> Sequence[Tensors]:
    """Return the models' tensors with what sums over micro-batches lose, added and subtracted in turn."""
    if not summed:
        return models
    signs = itertools.cycle((1.0, -1.0))
    return [
        {key: x + sign * summed[key].to(x) if key in summed else x for key, x in tensors.items()}
        for sign, tensors in zip(signs, models, strict=False)
    ]


def _rejudge_tensors(comparison: Comparison, judge_by: Callable[..., tuple[TensorResult, ...]]) -> None:
    """Judge again, allowing for what this port was seen to do and for what other kernels or roundings may do."""
    request, models, first_look = comparison.request, comparison.models, comparison.tensors
    rounding, dtype = request.rounding, request.precision.dtype
    port = observe_port(request, comparison.prepared)
    noisy = find_noisy_kernels(request, port) if request.other_kernels else ()
    log_probs = [comparison.candidate.tensors["output", name] for name in comparison.log_probs]
    if dtype.itemsize == 2 and any(are_log_probs_of(one, dtype) for one in log_probs):
        port = replace(port, plain=())  # whoever returns these in FP32 means to take them in FP32
    prepared = replace(comparison.prepared, made=port.choices)
    if port.steps is not None and not comparison.passed:
        models = [run_model(prepared, rounding, one) for one in Port(steps=port.steps).freedoms]
        first_look = judge_by(models)
    alike = first_look
    if port.choices:
        models = choosing_alike(prepared, rounding, port)
        alike = judge_by(models)
    on_plain_kernels, judge_again = alike, judge_by
    if request.other_kernels and not all(tensor.passed for tensor in alike):
        leaning = leaning_runs(prepared, rounding, port, comparison.candidate.recasts)
        judge_again = partial(judge_by, biased_runs=leaning)
        alike = judge_again(models)
    by_kernels = remark(on_plain_kernels, alike, as_kernels_lean(rounding))
    tensors = second_look(alike, models, judge_again, prepared, rounding, port, noisy)
    if tensors is not alike and made_by_port_alone(alike, prepared, comparison.known, dtype):
        tensors, port = alike, replace(port, plain=())
    by_chance = remark(alike if by_kernels else first_look, tensors, BY_CHANCE)
    owed = by_kernels, by_chance, port.steps.remark if port.steps else ""
    comparison.prepared, comparison.models = prepared, models
    comparison.tensors, comparison.port, comparison.remarks = tensors, port, tuple(filter(None, owed))


# The decision.


def _decide_result(comparison: Comparison) -> Result:
    """Return the result to which the verdicts, and what was seen beside them, lead."""
    request, prepared, candidate = comparison.request, comparison.prepared, comparison.candidate
    tensors = pictured(comparison.tensors, golden_truths(prepared), candidate.tensors, comparison.models)
    noted, numbers = judged_numbers(
        prepared, candidate.numbers, replace(request.precision, replaced=request.rounding), request.calibration
    )
    notes = (*_list_notes(comparison, tensors), *noted)
    if prepared.unlike:  # whatever else is wrong, or happens to agree
        from parity.search.held_weights import held_findings

        return request.result("failed", tensors=tensors, findings=held_findings(prepared), notes=notes)
    # A part that is detached has no gradients at all, which is reported for the whole.
    detached = request.case.part_of is not None and candidate.detached_outputs == request.case.outputs
    if all(tensor.passed or (detached and tensor.of) for tensor in tensors):
        if proves_nothing(tensors):
            reason = f"a correct {request.precision.name} computation {LOSES_ALL}"
            return request.result("error", reason=reason, notes=notes)
        if comparison.unlike:
            return request.result("error", reason=comparison.unlike, notes=notes)
        unseen = candidate.observed + _find_zeroed(comparison) + numbers + by_recalling(candidate.recalled, tensors)
        unseen += _find_padding_read(comparison)
        if unseen:
            return request.result("failed", reason=WITHIN, tensors=tensors, findings=unseen, notes=notes)
        return request.result("passed", tensors=tensors, notes=notes)
    notes += tuple(filter(None, [comparison.unlike, *(number.message for number in numbers)]))
    # Else the expected errors are those of other formats, or chance decides the numbers.
    comparison.needs_cause = not (candidate.misformatted or candidate.unwritten)
    return request.result("failed", tensors=tensors, findings=candidate.observed, notes=notes)


def _find_zeroed(comparison: Comparison) -> tuple[Finding, ...]:
    golden, candidate = golden_tensors(comparison.prepared), comparison.candidate.tensors
    return zeroed_gradients(comparison.tensors, golden, comparison.models, candidate)


def _find_padding_read(comparison: Comparison) -> tuple[Finding, ...]:
    """Return a finding if garbage in the padding of the inputs changes what counts by more than rounding explains.

    One scale for several rows couples them, and a router sends padding to experts, whose kernels then round otherwise.
    """
    request, prepared, padded = comparison.request, comparison.prepared, comparison.candidate.padded
    padding = find_padding(prepared) if padded else None
    if padding is None:
        return ()
    told = f"with garbage in the tokens that the input {padding.mark} marks as padding"
    if isinstance(padded, str):
        return (finding("not-invariant", f"{told}, the candidate raises {padded}"),)
    changes = padding.changes(comparison.candidate.tensors, padded)
    golden, rounding = golden_tensors(prepared), request.rounding
    usual = model_tensors(prepared, rounding, FUSED)
    by_recipe = padding.changes(usual, run_model(replace(padding.of(prepared), probed={}), rounding, FUSED))
    by_rounding = padding.changes(golden, usual)
    explained = {key: max(by_recipe[key], 2**0.5 * by_rounding[key]) for key in changes}
    beyond = {
        key: change
        for key, change in changes.items()
        if not change <= allowed_ratio(golden[key].numel()) * explained[key]
    }
    if beyond:
        by_chance = padding.changes(comparison.candidate.tensors, run_again(request, prepared))
        beyond = {key: change for key, change in beyond.items() if change > allowed_ratio(1) * by_chance[key]}
    if not beyond:
        return ()
    worst = max(beyond, key=lambda key: beyond[key] / (explained[key] + TINY))
    change = f"{label_of(*worst)} of the other tokens changes by {beyond[worst]:.2g} of its norm"
    return (finding("not-invariant", f"{told}, {change}, of which rounding explains {explained[worst]:.2g}"),)


def _list_notes(comparison: Comparison, tensors: tuple[TensorResult, ...]) -> Iterator[str]:
    """Yield what a reader of the verdicts should know."""
    prepared, candidate, models = comparison.prepared, comparison.candidate, comparison.models
    precision, log_probs = comparison.request.precision, comparison.log_probs
    yield from comparison.remarks
    golden_recipe = comparison.request.golden
    if golden_recipe is not None:
        yield _describe_golden(comparison, golden_recipe, tensors)
    if not comparison.request.calibration.has_laws(precision.name):
        yield f"judged by the limits of {precision.families[-1]}, since {precision.name} has none of its own"
    yield from prepared.apart
    not_compared = prepared.golden.not_compared
    compared = tensors, candidate.tensors, prepared.reference, not_compared
    is_told = candidate.mixed or candidate.misformatted  # what small errors would only suggest
    costs = precision.recipe and golden_recipe is None  # else golden has that error as well
    recipe = type(precision.new_recipe()).__name__ if costs and not is_told else None
    yield from remarks(*compared, precision.dtype, recipe, log_probs)
    golden = golden_tensors(prepared)
    yield from pictures.describe_pictures(log_probs, candidate.tensors, golden, models)
    if prepared.evaluation:
        yield from pictures.first_wrong_told(tensors, candidate.tensors, golden, models)
    if prepared.probed and not any(kind == PROBED for kind, _ in candidate.tensors):
        yield LOOKS_UP_ELSE
    yield from left_unproven(tensors, not prepared.evaluation)
    changed = prepared.golden.changed_inputs, candidate.changed_inputs
    not_te = "" if candidate.calls_te else WITHOUT_TE
    of_features = describe_features(prepared.changed)
    yield from filter(None, [effects.by_reference_alone(*changed), not_te, candidate.mixed, of_features])


# The search for the cause of a failure.


def _explain_failure(comparison: Comparison, seconds: float) -> Result:
    """Return a failure with its findings and the search's notes, or with a note on what ended the search."""
    return catching(lambda: _search_for_cause(comparison, seconds), partial(without_cause, comparison.result))


def _search_for_cause(comparison: Comparison, seconds: float) -> Result:
    """Return a failure with its findings and the notes of the search, which may take ``seconds`` of real time."""
    from parity.search.explanation import explain
    from parity.search.failure import Failure

    request, prepared, candidate = comparison.request, comparison.prepared, comparison.candidate
    result, models = comparison.result, comparison.models
    truths = judgeable_golden(golden_truths(prepared), models, candidate.tensors)
    limits = request.precision, request.calibration, comparison.known
    by_average = judge(truths, models, candidate.tensors, *limits, by_average=True)
    to_explain, is_by_average = _to_explain(comparison.tensors, gradients_of(request.case, by_average))
    failure = Failure(
        to_explain,
        candidate.tensors,
        prepared,
        request,
        run_on=prepared,
        draws=candidate.draws,
        freedoms=comparison.port.freedoms,
        own_recipes=comparison.port.recipes,
        by_average=is_by_average,
        outputs_passed=all(one.passed for one in comparison.tensors if one.kind == "output" or one.probed),
    )
    if _passes_alone(comparison):
        remembered = finding_of_recalled(candidate.recalled, "it returns something other than a new module does")
        return replace(result, findings=(*candidate.observed, remembered))
    missed = gradients_missed(candidate.unreached, prepared.weights, prepared.golden.weight_gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from references that are wrong on purpose
        found, notes = explain(failure, missed, comparison.known, seconds)
    explained = replace(result, findings=candidate.observed + found, notes=(*result.notes, *notes))
    if is_explained(explained):
        return explained
    return replace(explained, findings=explained.findings + _find_zeroed(comparison))


def _to_explain(
    tensors: Sequence[TensorResult], by_average: Sequence[TensorResult]
) -> tuple[tuple[TensorResult, ...], bool]:
    """Return the verdicts that a search should explain, and whether it should judge slices by their tensor's average.

    If some tensor fails even by the average, those that fail only in a small slice count as passed: a slice is no
    better evidence than the tensor's norm, by which hypotheses are ranked.
    """
    passing = {tensor.label: tensor for tensor in by_average if tensor.passed}
    if all(tensor.passed or tensor.label in passing for tensor in tensors):
        return tuple(tensors), False
    return tuple(tensor if tensor.passed else passing.get(tensor.label, tensor) for tensor in tensors), True


def _passes_alone(comparison: Comparison) -> bool:
    """Return whether a candidate that failed only in later calls passes if each call is its module's first."""
    request, prepared, tensors = comparison.request, comparison.prepared, comparison.tensors
    later = [tensor for tensor in tensors if tensor.probed or not prepared.probed]
    fails_at_once = not all(tensor.passed or tensor in later for tensor in tensors)
    if request.candidate_run or request.precision.warmup_passes or fails_at_once:
        return False
    try:
        alone = run_again(request, prepared, alone=True)
    except Exception:  # says nothing about its calls; the search for a cause runs it as well
        return False
    golden = judgeable_golden(golden_truths(prepared), comparison.models, alone)
    limits = request.precision, request.calibration, comparison.known
    return all(tensor.passed for tensor in judge(golden, comparison.models, alone, *limits))


# Whatever a pair's code raises, and whatever it changes in the process, a comparison has a result.


_Returned = TypeVar("_Returned")


def catching(run: Callable[[], _Returned], otherwise: Callable[[BaseException], _Returned]) -> _Returned:
    """Return what ``run`` returns or, if it raises, what ``otherwise`` makes of the error; only Ctrl-C gets through.

    Any call of a pair's code may raise anything. Because this catches it, no step has to say what it may raise.
    """
    try:
        return run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        forget()  # a pass may have left the reference half changed
        return otherwise(error)


def error_result(request: Request, error: BaseException) -> Result:
    """Return an error for what was raised where no step expects it, such as in a step of a training."""
    if isinstance(error, (UserError, NotOffered)):
        return request.result("skipped" if isinstance(error, NotOffered) else "error", reason=said(error))
    part = "the pair's code" if users_line(error) else part_running(error)
    whose = part or "parity itself, because of a bug or an unusual tensor,"
    return _error_result(request, f"{whose} raised {_say_where_raised(error)}", error)


def _error_result(request: Request, reason: str, error: BaseException) -> Result:
    return request.result("error", reason=reason, traceback=way_there(error), device_error=classify(error))


def _say_where_raised(error: BaseException) -> str:
    """Return what was raised, and the user's line that was running."""
    return "; at ".join(filter(None, (raised(error), users_line(error))))


def without_cause(verdict: Result, error: BaseException) -> Result:
    """Return the verdict, which still stands, with a note that the search for its cause raised."""
    note = f"the search for the cause raised {_say_where_raised(error)}"
    return replace(verdict, notes=(*verdict.notes, note), device_error=classify(error))


def with_side_effect_notes(result: Result, disturbed: Disturbed) -> Result:
    """Return the result with notes on what the pair's code changed in the process.

    A change that cannot be undone turns a pass into an error.
    """
    noted = replace(result, notes=(*result.notes, *filter(None, (disturbed.note, disturbed.problem))))
    if disturbed.problem and result.passed:
        return replace(noted, status="error", reason=disturbed.problem, tensors=())
    return noted
