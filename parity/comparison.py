"""Run one case at one precision. This is the one place that shows the whole way from a case to its result."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import nn

from parity.case.case import Case, mixed
from parity.case.validate import CheckedSize
from parity.judge import pictures
from parity.judge.asked import Asked, CandidateRun, Noted, run_again, unnoted
from parity.judge.candidate import TeModules, by_recalling, repeat, told
from parity.judge.directions import Direction, directions
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
)
from parity.judge.limits import Table
from parity.judge.pictures import log_prob_outputs, pictured
from parity.judge.second_look import BY_CHANCE, choosing_alike, leaning_runs, made_by_port_alone, remark, second_look
from parity.mistakes.codes import finding
from parity.numerics.freedom import FUSED, UNFUSED, Port, choices_seen, steps_seen, together
from parity.numerics.kernel_choices import as_kernels_lean, noisy_sums
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
)
from parity.passes.modes import usual_modes
from parity.passes.one_pass import Pass
from parity.passes.prepare import Prepared, forget, part_that_raised, prepare, release
from parity.passes.refusals import (
    LOOKS_UP_ELSE,
    LOSES_ALL,
    WITHIN,
    answerable,
    gradients_missed,
    left_unproven,
    proves_nothing,
    remarks,
)
from parity.result import PROBED, Result, TensorResult, as_printable
from parity.shown import raised, said
from parity.te import PRECISIONS, Kernels, Precision, why_refused, why_unavailable
from parity.te.attention_backend import AttentionBackend, NotOffered, attention_backends
from parity.te.devices import classify
from parity.te.state import Recomputes, own_recipes, quantization_seen
from parity.trace import effects
from parity.trace.digests import checksum
from parity.trace.effects import Disturbed, RandomState, undisturbed
from parity.trace.whose import WITHOUT_TE, first_paragraph, submodule, te_calls, users_line, way_there
from parity.user_error import INTERRUPTS, UserError

NOT_SEARCHED = "the cause was not searched for, because of diagnose=False or --parity-diagnosis=no"


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
) -> Result:
    """Compare a case at one size, precision and seed, and search for the cause if it fails.

    Never raises because a module fails: the result's status and reason report that.

    Args:
        diagnosis: seconds of real time that the search may take; 0 for no limit, with which it finds the same on every
            machine; None for no search.
    """
    judged = judge_at(case, checked, precision, seed, kernels, calibration, attention, determinism)
    return explain_at(judged, diagnosis)


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
    made: CandidateRun | None = None,
    noted: Noted = unnoted,
) -> Judged:
    """Take the first step of ``compare_at``: reach the verdict, which the search for the cause does not change.

    Args:
        other_kernels: whether to allow for what other faithful kernels may do (``parity.numerics.kernel_choices``); a
            verdict without it shows what that allowance costs.
        made: the candidate's pass, if it has been made already.
        noted: see ``Asked``; for callers that need a verdict even if the process dies during a second look.
    """
    began = time.perf_counter()
    asked = Asked(
        *(case, checked, precision, seed, kernels, calibration, attention, determinism, other_kernels, made, noted)
    )
    with usual_modes(), undisturbed(mixed(seed, "everything else")) as disturbed:
        judged = unless_raised(lambda: _judged_in_parts(asked), partial(broken_off, asked))
    result = dataclasses.replace(noting(judged.result, disturbed), seconds=time.perf_counter() - began)
    return dataclasses.replace(judged, result=as_printable(result))


def explain_at(judged: Judged, diagnosis: float | None) -> Result:
    """Take the second step of ``compare_at``: return the result with the findings of a failure.

    ``diagnosis`` is the same as there.
    """
    result = judged.result
    if not judged.is_unexplained:
        return result
    if diagnosis is None:
        return dataclasses.replace(result, notes=(*result.notes, NOT_SEARCHED))
    began = time.perf_counter()
    with usual_modes(), undisturbed(mixed(result.seed, "the search")) as disturbed:
        explained = unless_raised(lambda: _explained_in_parts(judged, diagnosis), partial(without_cause, result))
    explained = as_printable(noting(explained, disturbed))
    notes = dict.fromkeys((*explained.notes, *result.notes))  # a search in parts has only their notes
    return dataclasses.replace(explained, notes=tuple(notes), seconds=result.seconds + time.perf_counter() - began)


def noting(result: Result, disturbed: Disturbed) -> Result:
    """Return the result with notes on what the pair's code changed in the process.

    A change that cannot be undone turns a pass into an error.
    """
    noted = dataclasses.replace(result, notes=(*result.notes, *filter(None, (disturbed.note, disturbed.problem))))
    if disturbed.problem and result.passed:
        return dataclasses.replace(noted, status="error", reason=disturbed.problem, tensors=())
    return noted


_Told = TypeVar("_Told")


def unless_raised(run: Callable[[], _Told], otherwise: Callable[[BaseException], _Told]) -> _Told:
    """Return what ``run`` returns or, if it raises, what ``otherwise`` makes of the error; only Ctrl-C gets through.

    Any call of a pair's code may raise anything. Because this catches it, no step has to say what it may raise, and a
    comparison always has a result.
    """
    try:
        return run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        forget()  # a pass may have left the reference half changed
        return otherwise(error)


def broken_off(asked: Asked, error: BaseException) -> Judged:
    """Return an error for a comparison that raised where no step expects it, such as in the candidate's later calls."""
    is_users = bool(users_line(error))
    whose = "the pair's code" if is_users else "parity itself, because of a bug or an unusual tensor,"
    reason = f"{whose} raised {_raised_at(error)}"
    return Judged(asked.result("error", reason=reason, traceback=way_there(error), device_error=classify(error)))


def error_of(asked: Asked, error: BaseException) -> Result:
    """Return an error for a comparison over ranks or a training in which something raised, such as a step."""
    if isinstance(error, UserError):
        return asked.result("error", reason=said(error))
    return broken_off(asked, error).result


def _raised_at(error: BaseException) -> str:
    """Return what was raised, and the user's line that was running."""
    return "; at ".join(filter(None, (raised(error), users_line(error))))


def without_cause(verdict: Result, error: BaseException) -> Result:
    """Return the verdict, which still stands, with a note that the search for its cause raised."""
    note = f"the search for the cause raised {_raised_at(error)}"
    return dataclasses.replace(verdict, notes=(*verdict.notes, note), device_error=classify(error))


@dataclass(frozen=True, eq=False)
class _Ran:
    """Hold what a comparison computes before it judges.

    Attributes:
        prepared: golden and everything else that all passes share.
        known: directions of the mistakes that a port could make.
        models: the rounding model's tensors, for each way in which faithful kernels compute.
        made: the candidate's pass.
        log_probs: names of the outputs that are log-probabilities of tokens.
    """

    prepared: Prepared
    known: tuple[Direction, ...]
    models: list[Tensors]
    made: CandidateRun
    log_probs: tuple[str, ...] = ()

    @property
    def unlike(self) -> str:
        """Why a candidate whose numbers are right is not a drop-in replacement; empty if it is."""
        golden = self.prepared.golden
        return (
            effects.written_by_candidate_alone(golden.changed_inputs, self.made.changed_inputs)
            or effects.detached_by_candidate_alone(golden.detached_outputs, self.made.detached_outputs)
            or self.made.left_out
        )


@dataclass(frozen=True, eq=False)
class Judged:
    """A result up to the verdict, before the search for a cause.

    Attributes:
        result: the result without findings.
        unexplained: what a search for the cause needs; None if there is nothing to explain.
        parts: the verdicts on the parts, if outputs are judged in separate parts.
        whole: the request, if the cause is to be searched for in all outputs together first.
    """

    result: Result
    unexplained: _Unexplained | None = None
    parts: tuple[Judged, ...] = ()
    whole: Asked | None = None

    @property
    def is_unexplained(self) -> bool:
        """Return whether there is something to explain."""
        return self.unexplained is not None or any(part.unexplained is not None for part in self.parts)


class _PassRaised(Exception):
    """Raised if a part of the pair raised; the message says which part, what and where, and that error is its cause."""


def _judged_in_parts(asked: Asked) -> Judged:
    """Judge each part of the outputs by itself, and the whole as well if a part cannot be compared."""
    cases = _parts(asked)
    if len(cases) == 1:
        return _compared(dataclasses.replace(asked, case=cases[0]))
    judged: list[Judged] = []
    for case in cases:
        fails = any(one.result.status == "failed" for one in judged)  # stays noted while the others are compared
        judged.append(_compared(dataclasses.replace(asked, case=case, noted=unnoted if fails else asked.noted)))
    if any(one.result.status == "error" for one in judged):
        judged = [_compared(asked), *(one for one in judged if one.result.status != "error")]
        return Judged(merged([one.result for one in judged]), parts=tuple(judged))
    whole = dataclasses.replace(asked, noted=unnoted) if judged[-1].result.status == "failed" else None
    return Judged(merged([one.result for one in judged]), parts=tuple(judged), whole=whole)


def _explained_in_parts(judged: Judged, seconds: float) -> Result:
    """Search for the cause of a failure, first in all outputs together if the larger ones failed.

    A cause of the larger outputs' errors must also explain the single numbers beside them. If only a number failed, or
    this search finds no cause, the failed parts are searched one by one.
    """
    if judged.unexplained is not None:
        return _explained(judged.result, judged.unexplained, seconds)
    whole = None if judged.whole is None else _compared(judged.whole)
    if whole is not None and whole.unexplained is not None:
        explained = _explained(whole.result, whole.unexplained, seconds)
        if is_explained(explained):
            return dataclasses.replace(judged.result, findings=explained.findings)
    parts = (
        one.result if one.unexplained is None else _explained(one.result, one.unexplained, seconds)
        for one in judged.parts
    )
    return merged(list(parts))


def _parts(asked: Asked) -> list[Case]:
    """Return the case once for each part of its outputs that is compared by itself."""
    case, checked, precision, seed, kernels = asked.case, asked.checked, asked.precision, asked.seed, asked.kernels
    if asked.made is not None:  # that pass is of all outputs together
        return [case]
    known = parts_known(case, checked)
    if known is None and why_unavailable(precision, kernels) is None:
        try:
            outputs = prepare(case, checked, precision.dtype, seed, kernels).golden
        except Exception:  # the comparison itself will report it
            return [case]
        known = parts(case, checked, outputs)
        if len(known) > 1:
            release(case, checked, precision.dtype, seed, kernels)
    return known or [case]


def _compared(asked: Asked) -> Judged:
    unavailable = why_refused(asked.precision, asked.kernels)
    if unavailable is not None:
        return Judged(asked.result("skipped", reason=unavailable))
    try:
        ran = _run(asked)
    except NotOffered as error:
        return Judged(asked.result("skipped", reason=said(error)))
    except UserError as error:
        return Judged(asked.result("error", reason=said(error)))
    except _PassRaised as error:
        forget()  # the pass may have left the reference half changed
        cause = error.__cause__ or error
        told = asked.result("error", reason=said(error), traceback=way_there(cause), device_error=classify(cause))
        return Judged(told)
    try:
        judged = _judged(asked, ran)
    except UserError as error:  # the table has no law for it
        judged = Judged(asked.result("error", reason=said(error)))
    result = dataclasses.replace(
        judged.result,
        tensors=_with_digests(judged.result.tensors, ran.made.tensors),
        attention=ran.made.attention,
        determinism=ran.made.determinism,
        equals=ran.made.equals,
    )
    return dataclasses.replace(judged, result=result)


def _with_digests(judged: Sequence[TensorResult], computed: Tensors) -> tuple[TensorResult, ...]:
    """Return the verdicts with checksums of the candidate's tensors; tensors derived from these have none."""
    return tuple(
        dataclasses.replace(each, digest=checksum(computed[each.key])) if each.key in computed else each
        for each in judged
    )


def _run(asked: Asked) -> _Ran:
    """Run every pass.

    Raises:
        NotOffered: if TE does not offer the requested attention backend.
        UserError: if the pair does not fit together, or nothing could be judged.
        _PassRaised: if one of its modules raises.
    """
    case, checked, precision, seed, kernels = asked.case, asked.checked, asked.precision, asked.seed, asked.kernels
    with _step("the reference in FP64"):
        prepared = prepare(case, checked, precision.dtype, seed, kernels)
    of_tokens = log_prob_outputs(prepared)
    known = directions(prepared)  # before other passes, since golden's calls hold memory until then
    with _step("the candidate"):
        made = asked.made or _candidate_run(asked, prepared)
    prepared = as_returned(prepared, made.tensors)
    with _step(f"the reference under the rounding model of {precision.name}"):
        models = [model_tensors(prepared, precision.rounding, freedom) for freedom in (FUSED, UNFUSED)]
    return _Ran(prepared, known, models, made, of_tokens)


def _candidate_run(asked: Asked, prepared: Prepared) -> CandidateRun:
    """Build and run the candidate, and watch what it does besides returning numbers."""
    case, checked, precision, seed, kernels = asked.case, asked.checked, asked.precision, asked.seed, asked.kernels
    before = RandomState.now(kernels.device)
    ran: list[Pass] = []
    recomputes, recalled, te_modules = Recomputes(), Recalled(), TeModules()
    watched = te_modules.watched() if checked.has_te else te_calls()

    def watch(module: nn.Module) -> None:
        recomputes.watch(module)
        te_modules.of(module)

    looked = quantization_seen() if precision.recipe else nullcontext([""])
    with attention_backends(asked.attention) as seen, watched as te_called, recomputes.recorded(), looked as quantized:
        candidate, unreached = run_candidate(
            *(case, checked, prepared, precision, seed, kernels, watch, ran.append, recalled)
        )
    draws = not RandomState.now(kernels.device).is_as(before)
    again = partial(run_again, asked, prepared)
    left_out = te_modules.left_out(prepared.weights, prepared.golden.weight_gradients, again)
    repeated = None
    if asked.determinism:
        repeated = repeat(partial(again, recalled=Recalled()), candidate, before, kernels.device)
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
        recomputed=tuple(finding("recomputed-otherwise", told) for told in recomputes.otherwise),
        calls_te=checked.has_te or bool(te_called),
        equals="" if quantized else next(name for name, each in PRECISIONS.items() if each.dtype == precision.dtype),
        left_out=left_out,
    )


@contextmanager
def _step(which: str) -> Iterator[None]:
    try:
        yield
    except (NotOffered, UserError, *INTERRUPTS):
        raise
    except BaseException as error:
        part, where, line = part_that_raised(error) or which, submodule(error), users_line(error)
        told = f"{part} raised {type(error).__name__}: {first_paragraph(error)}"
        places = (f"in {where}" if where else "", f"at {line}" if line else "", _advice(error))
        raise _PassRaised("; ".join(filter(None, (told, *places)))) from error


def _advice(error: BaseException) -> str:
    """Return what to do about an error that is well known, or an empty text.

    Known are shapes that TE's FP8 kernels do not take (``pytorch/utils.py`` of 2.20.2), a layer that is not recomputed
    as it was computed, and a graph that an earlier call has left.
    """
    text = said(error)
    if "backward through the graph a second time" in text:
        return "the module reuses a tensor from an earlier call, together with its graph: compute it again in each call"
    if type(error).__name__ == "CheckpointError":
        return "torch.utils.checkpoint recomputes outside of te.autocast: under a recipe, use te.checkpoint"
    if "FP8 execution requires" not in text:
        return ""
    return "pad the tokens, give a size that fits, or leave FP8 out for this pair: precisions=[...] in @parity.pair"


def _seen_of_port(asked: Asked, prepared: Prepared) -> Port:
    """Run the candidate again, and return what it rounds outside TE's modules and what it chooses."""
    precision = asked.precision
    with (
        own_recipes(precision.recipe is not None) as recipes,
        steps_seen(precision.dtype) as steps,
        choices_seen(choices_in(prepared, precision.rounding)) as choices,
        plain_calls(precision.dtype) as names,  # last, since it looks at which code surrounds the calls
    ):
        run_again(asked, prepared)
    return Port(tuple(sorted(names)), together(steps), tuple(choices), tuple(dict.fromkeys(recipes)))


@dataclass(frozen=True)
class _Verdicts:
    """The verdicts on every tensor, after a second look if one was needed.

    Attributes:
        tensors: the verdicts.
        port: what the port was seen to do outside TE, as far as it affects the verdicts.
        remarks: sentences on how this and other faithful kernels changed the verdicts.
        ran: the passes that they judge, in which the model chooses as the port did.
    """

    tensors: tuple[TensorResult, ...]
    port: Port
    remarks: tuple[str, ...]
    ran: _Ran


def _verdicts(asked: Asked, ran: _Ran) -> _Verdicts:
    prepared, precision, known = ran.prepared, asked.precision, ran.known
    truths = golden_truths(prepared)

    def judge_by(
        modelled: Sequence[Tensors], drawn: Drawn = NONE_DRAWN, leaning: Sequence[Tensors] = ()
    ) -> tuple[TensorResult, ...]:
        modelled = _with_sums(modelled, ran.made.summed)
        golden = answerable(truths, modelled, ran.made.tensors)
        judged = judge(golden, modelled, ran.made.tensors, precision, asked.calibration, known, drawn, leaning)
        return gradients_of(asked.case, judged)

    first_look = judge_by(ran.models)
    if all(tensor.passed for tensor in first_look):
        if not rounding_chooses(prepared, precision.rounding):
            return _Verdicts(first_look, Port(), (), ran)
        return _looked_at_again(asked, ran, judge_by, first_look)
    asked.noted(_so_far(asked, ran, first_look), False)

    def first_look_alone(error: BaseException) -> _Verdicts:
        told = f"the second look, which tells chance from a mistake, raised {_raised_at(error)}; the first look counts"
        return _Verdicts(first_look, Port(), (told,), ran)

    verdicts = unless_raised(lambda: _looked_at_again(asked, ran, judge_by, first_look), first_look_alone)
    passes = all(tensor.passed for tensor in verdicts.tensors)
    asked.noted(None if passes else _so_far(asked, ran, verdicts.tensors, verdicts.remarks), True)
    return verdicts


def _so_far(asked: Asked, ran: _Ran, tensors: Sequence[TensorResult], notes: tuple[str, ...] = ()) -> Result:
    """Return the failure that stands if nothing more becomes known."""
    made = ran.made
    told = asked.result("failed", tensors=tuple(tensors), findings=made.recomputed, notes=notes)
    return as_printable(dataclasses.replace(told, attention=made.attention, determinism=made.determinism))


def _with_sums(models: Sequence[Tensors], summed: Tensors) -> Sequence[Tensors]:
    """Return the models' tensors with what sums over micro-batches lose, added and subtracted in turn."""
    if not summed:
        return models
    signs = itertools.cycle((1.0, -1.0))
    return [
        {key: x + sign * summed[key].to(x) if key in summed else x for key, x in tensors.items()}
        for sign, tensors in zip(signs, models, strict=False)
    ]


def _looked_at_again(
    asked: Asked, ran: _Ran, judge_by: Callable[..., tuple[TensorResult, ...]], first_look: tuple[TensorResult, ...]
) -> _Verdicts:
    """Judge again, allowing for what this port was seen to do and for what other kernels or roundings may do."""
    precision, models = asked.precision, ran.models
    port = _seen_of_port(asked, ran.prepared)
    prepared = dataclasses.replace(ran.prepared, made=port.choices)
    if port.steps is not None and not all(tensor.passed for tensor in first_look):
        models = [run_model(prepared, precision.rounding, one) for one in Port(steps=port.steps).freedoms]
        first_look = judge_by(models)
    alike = first_look
    if port.choices:
        models = choosing_alike(prepared, precision.rounding, port)
        alike = judge_by(models)
    on_plain_kernels, judge_again = alike, judge_by
    if asked.other_kernels and not all(tensor.passed for tensor in alike):
        judge_again = partial(judge_by, leaning=leaning_runs(prepared, precision.rounding, port))
        alike = judge_again(models)
    by_kernels = remark(on_plain_kernels, alike, as_kernels_lean(precision.rounding))
    noisy = noisy_sums(precision.rounding) if asked.other_kernels else ()
    tensors = second_look(alike, models, judge_again, prepared, precision.rounding, port, noisy)
    if tensors is not alike and made_by_port_alone(alike, prepared, ran.known, precision.dtype):
        tensors, port = alike, dataclasses.replace(port, plain=())
    by_chance = remark(alike if by_kernels else first_look, tensors, BY_CHANCE)
    owed = by_kernels, by_chance, port.steps.remark if port.steps else ""
    ran = dataclasses.replace(ran, prepared=prepared, models=models)
    return _Verdicts(tensors, port, tuple(filter(None, owed)), ran)


@dataclass(frozen=True, eq=False)
class _Unexplained:
    """A failure whose cause is not known yet.

    Attributes:
        asked, ran, verdicts: the request, the passes and the verdicts that led to it.
    """

    asked: Asked
    ran: _Ran
    verdicts: _Verdicts


def _judged(asked: Asked, ran: _Ran) -> Judged:
    verdicts, precision = _verdicts(asked, ran), asked.precision
    ran, prepared = verdicts.ran, verdicts.ran.prepared
    tensors = pictured(verdicts.tensors, golden_truths(prepared), ran.made.tensors, ran.models)
    changed = prepared.golden.changed_inputs, ran.made.changed_inputs
    not_compared = prepared.golden.not_compared
    notes = verdicts.remarks + prepared.apart
    notes += tuple(
        remarks(
            *(tensors, ran.made.tensors, prepared.reference, not_compared, precision.dtype, precision.recipe),
            ran.log_probs,
        )
    )
    golden = golden_tensors(prepared)
    notes += tuple(pictures.told(ran.log_probs, ran.made.tensors, golden, ran.models))
    notes += (
        tuple(pictures.first_wrong_told(tensors, ran.made.tensors, golden, ran.models)) if prepared.evaluation else ()
    )
    if prepared.probed and not any(kind == PROBED for kind, _ in ran.made.tensors):
        notes += (LOOKS_UP_ELSE,)
    notes += tuple(left_unproven(tensors, not prepared.evaluation))
    notes += tuple(filter(None, [effects.by_reference_alone(*changed), "" if ran.made.calls_te else WITHOUT_TE]))
    noted, numbers = judged_numbers(prepared, ran.made.numbers, precision, asked.calibration)
    notes += noted
    if prepared.unlike:  # whatever else is wrong, or happens to agree
        from parity.search.held_weights import held_findings

        return Judged(asked.result("failed", tensors=tensors, findings=held_findings(prepared), notes=notes))
    # A part that is detached has no gradients at all, which is reported for the whole.
    detached = asked.case.part_of is not None and ran.made.detached_outputs == asked.case.outputs
    if all(tensor.passed or (detached and tensor.of) for tensor in tensors):
        if proves_nothing(tensors):
            reason = f"a faithful {precision.name} computation {LOSES_ALL}"
            return Judged(asked.result("error", reason=reason, notes=notes))
        if ran.unlike:
            return Judged(asked.result("error", reason=ran.unlike, notes=notes))
        unseen = ran.made.recomputed + numbers + by_recalling(ran.made.recalled, tensors)
        if unseen:
            return Judged(asked.result("failed", reason=WITHIN, tensors=tensors, findings=unseen, notes=notes))
        return Judged(asked.result("passed", tensors=tensors, notes=notes))
    notes += tuple(filter(None, [ran.unlike, *(number.message for number in numbers)]))
    unexplained = _Unexplained(asked, ran, verdicts)
    return Judged(asked.result("failed", tensors=tensors, findings=ran.made.recomputed, notes=notes), unexplained)


def _passes_alone(asked: Asked, ran: _Ran, tensors: Sequence[TensorResult]) -> bool:
    """Return whether a candidate that failed only in later calls passes if each call is its module's first."""
    later = [tensor for tensor in tensors if tensor.probed or not ran.prepared.probed]
    if asked.made or asked.precision.warmup_passes or not all(tensor.passed or tensor in later for tensor in tensors):
        return False
    try:
        alone = run_again(asked, ran.prepared, alone=True)
    except Exception:  # says nothing about its calls; the search for a cause runs it as well
        return False
    golden = answerable(golden_truths(ran.prepared), ran.models, alone)
    judged = judge(golden, ran.models, alone, asked.precision, asked.calibration, ran.known)
    return all(tensor.passed for tensor in judged)


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


def _explained(result: Result, unexplained: _Unexplained, seconds: float) -> Result:
    """Return a failure with its findings and the search's notes, or with a note on what ended the search."""
    return unless_raised(lambda: _searched_for(result, unexplained, seconds), partial(without_cause, result))


def _searched_for(result: Result, unexplained: _Unexplained, seconds: float) -> Result:
    """Return a failure with its findings and the notes of the search, which may take ``seconds`` of real time."""
    from parity.search.explanation import explain  # imported at the first failure: most comparisons pass
    from parity.search.failure import Failure

    asked, ran, verdicts = unexplained.asked, unexplained.ran, unexplained.verdicts
    prepared, precision, tensors = ran.prepared, asked.precision, verdicts.tensors

    truths = answerable(golden_truths(prepared), ran.models, ran.made.tensors)
    by_average = judge(
        *(truths, ran.models, ran.made.tensors, precision, asked.calibration, ran.known), by_average=True
    )
    to_explain, is_by_average = _to_explain(tensors, gradients_of(asked.case, by_average))
    failure = Failure(
        to_explain,
        ran.made.tensors,
        prepared,
        asked,
        run_on=prepared,
        draws=ran.made.draws,
        freedoms=verdicts.port.freedoms,
        own_recipes=verdicts.port.recipes,
        by_average=is_by_average,
        outputs_passed=all(tensor.passed for tensor in tensors if tensor.kind == "output" or tensor.probed),
    )
    if _passes_alone(asked, ran, tensors):
        remembered = told(ran.made.recalled, "it returns something other than a new module does")
        return dataclasses.replace(result, findings=(*ran.made.recomputed, remembered))
    missed = gradients_missed(ran.made.unreached, prepared.weights, prepared.golden.weight_gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from references that are wrong on purpose
        found, notes = explain(failure, missed, ran.known, seconds)
    return dataclasses.replace(result, findings=ran.made.recomputed + found, notes=(*result.notes, *notes))
