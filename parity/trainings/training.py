"""Compare a training: judge each of the candidate's steps by itself, and the state that it leaves to the next.

Training is chaotic: two right trainings drift apart, since Adam moves a weight whose gradient is nearly 0 up or down by
chance. So no step is compared with a step of another training. The candidate trains on its own. At each step the
reference gets the candidate's weights, and loss and gradients are judged like those of any pass. The reference's
optimizer gets the candidate's gradients and must make the same step. A training is right if each of its steps is; the
first step that is not shows where to look.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from parity.case.case import Case, Pair, Rng, Training, mixed
from parity.case.formats import checked_recipes
from parity.case.training import reference_optimizer
from parity.case.transfer import counterparts
from parity.case.validate import CheckedSize
from parity.case.weight_map import Copies, holds, names
from parity.comparison import (
    Comparison,
    catching,
    error_result,
    explain_at,
    judge_at,
    with_side_effect_notes,
    without_cause,
)
from parity.judge.formats import findings_of_formats
from parity.judge.judge import thinned
from parity.judge.limits import Table
from parity.judge.request import CandidateRun, Request
from parity.mistakes.codes import repairable
from parity.passes.modes import usual_modes
from parity.passes.one_pass import are_equal
from parity.passes.prepare import Prepared, prepare
from parity.passes.refusals import NothingToJudge
from parity.ranks.launch import RanksFailed
from parity.ranks.layout import Degrees
from parity.result import Code, Finding, Result, Status, Step, Switch, as_printable, label_of_way
from parity.shown import few_of
from parity.te import Kernels, Precision, precision_named, why_refused
from parity.te.attention_backend import AttentionBackend, attention_backends
from parity.te.state import fresh_caches, fresh_quantization, is_quantized, recasts
from parity.trace.effects import undisturbed
from parity.trainings.courses import BaselineTraining, PairedStep, of_reference, side_by_side
from parity.trainings.gathered import NO_RANKS, ended
from parity.trainings.micro_batches import buffers_read, shares_made
from parity.trainings.over_ranks import TraineeOverRanks
from parity.trainings.step_verdicts import Replay, deviations, holds_weights, multiple_moved, not_as, wrong_scaling
from parity.trainings.steps import Buffers, Named, Stepped, Trainee, Update, is_interrupted, step_case
from parity.trainings.switches import NotCaptured, backends, compiled_anew
from parity.trainings.watched import norm_together
from parity.trainings.why_steps import (
    Before,
    Setting,
    changed_early,
    diverging,
    gradients_explained,
    guesses_of_any_step,
    guesses_of_later_steps,
    lost_state,
    micro_batches_explained,
    moved_otherwise,
    optimizer_explained,
    read_after_change,
    stale_transposes,
    unexplained,
)
from parity.trainings.why_switched import (
    Replayed,
    compiled_otherwise,
    not_captured,
    offload_explained,
    out_of_step,
    replay_explained,
    replay_frozen,
)
from parity.user_error import UserError

_NOT_COMPILED = (
    "torch.compile compiles no part of this candidate, so there is nothing to compare: TransformerEngine excludes most "
    "of its modules (no_torch_dynamo), and parity does not compile the code of call_candidate around the candidate"
)
_NOT_OFFLOADED = (
    "TransformerEngine offloads nothing of this candidate, so there is nothing to compare: none of TE's modules in it "
    "saves an activation; say with parity.Training(offload=...) how it is offloaded"
)
_NOT_OWN = (
    "the pair's own save= and load= are used only by the switches resume and rollback; {} would not call them, because "
    "it writes and reads its own format"
)
_WITHOUT: dict[str, str] = {"graph": "graphs", "offload": "offloading"}
# The largest relative error of a clipping factor, which comes from an FP32 norm of gradients in 16 bits.
_CLIPPING = 1e-2
# Gradients that are a multiple of the right ones have at least this cosine with them: NVFP4 loses a tenth.
_ALONG = 0.98
_FEWEST_MULTIPLIED = 16


@dataclass
class _Run:
    """Hold what was asked for, and what is known of the training so far.

    Attributes:
        request, checked, steps, switch, diagnosis: what ``train_at`` was asked for.
        trainee: the candidate that is trained.
        without: the same training without a graph or offloading, if it is compared with that.
        replay: the reference's optimizer, which repeats each of the candidate's steps.
        history: what the optimizer did in each step to a few elements of each parameter.
        told: each step as the result reports it.
        gradients: the sum of the candidate's weight gradients over all earlier steps, in case they are not zeroed.
        limits: each weight gradient's largest bound on its relative error, over all steps.
        amaxes: each operand's largest magnitude that delayed scaling has seen.
        is_narrow: whether the precision's dtype holds all weights that the optimizer made.
        weights: the weights before the previous step; None at the first.
        begun: the candidate's buffers before the first step.
        moved: the reference's buffers that a forward pass has changed so far.
        buffers: the buffers of both before the step.
        strayed: how far earlier steps have moved TE's parameters from what the map makes of the reference's.
        worst: each tensor's verdict with the largest margin.
        notes: notes on the whole training.
    """

    request: Request
    checked: CheckedSize
    steps: int
    switch: Switch
    diagnosis: float | None
    trainee: Trainee | TraineeOverRanks
    without: BaselineTraining | None
    replay: Replay
    history: list[Update] = field(default_factory=list)
    told: list[Step] = field(default_factory=list)
    gradients: Named = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    amaxes: dict[int, Tensor] = field(default_factory=dict)
    is_narrow: bool = True
    weights: Named | None = None
    begun: Named = field(default_factory=dict)
    moved: Named = field(default_factory=dict)
    buffers: Buffers = field(default_factory=Buffers)
    strayed: Named = field(default_factory=dict)
    worst: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def at(self) -> tuple[CheckedSize, Precision, int, Kernels]:
        """Return where each step is compared: its size, precision, seed and kernels."""
        return self.checked, self.request.precision, self.request.seed, self.request.kernels

    def case_of(self, number: int, weights: Named | None, held: Mapping[str, Tensor] = MappingProxyType({})) -> Case:
        """Return the case of a step, with the candidate's buffers before the current step."""
        return step_case(self.request.case, number, weights, self.request.seed, held, self.buffers)

    def judge(self, step: Case, made: CandidateRun | None = None) -> Comparison:
        """Return the verdict on a step's loss and gradients; a new candidate computes them unless ``made`` is given."""
        return judge_at(step, *self.at, self.request.calibration, self.request.attention, candidate_run=made)

    def result(self, status: Status, **fields: Any) -> Result:
        """Return a result with the worst tensors of all steps, and the notes."""
        notes = (*self.notes, *fields.pop("notes", ()))
        tensors = thinned(list(self.worst.values()))
        return self.request.result(status, tensors=tensors, notes=notes, steps=tuple(self.told), **fields)


class _Ended(Exception):
    """Carry the result of a training whose next step cannot be made or judged."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.reason)
        self.result = result


@dataclass(frozen=True)
class _Made:
    """Hold one step of the candidate.

    Attributes:
        number: the step's number, from 1.
        case: the step as a case, whose output is the loss.
        prepared: the reference, with the weights that the candidate had before the step.
        stepped: what the candidate computed.
        buffers: the candidate's buffers before the step.
        beside: the same step without a graph or offloading, if it is compared with that.
        lost: what saving and loading lost before the step.
    """

    number: int
    case: Case
    prepared: Prepared
    stepped: Stepped
    buffers: Named = field(default_factory=dict)
    beside: PairedStep | None = None
    lost: Finding | None = None


@fresh_caches()
@fresh_quantization()
def train_at(
    case: Case,
    checked: CheckedSize,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    calibration: Table,
    steps: int,
    switch: Switch = "",
    attention: AttentionBackend | None = None,
    diagnosis: float | None = 0.0,
    made: Degrees | None = None,
) -> Result:
    """Train the candidate for some steps, judge each, and search for the cause of the first that is wrong.

    Never raises because a module fails: the result's status and reason report that.

    Args:
        steps: how many steps, from 1.
        switch: ``resume``, ``resume-dcp`` or ``resume-safetensors`` to save the training halfway and go on with a new
            module that loads it, which must compute the same to the bit; ``rollback`` to load it into the module that
            has gone on; ``recompute`` to make each call through ``te.checkpoint``; ``micro-batches`` to accumulate each
            step's gradients over up to four parts of its batch; ``graph`` to replay CUDA graphs, with the same steps as
            without to the bit; ``compile`` to call the candidate through ``torch.compile``; ``offload`` to keep its
            activations on the host, with the same steps as without to the bit.
        diagnosis: seconds of real time for the search for a cause, 0 for no limit; None for no search.
        made: how many ranks train it together; None for this process alone.

    Returns:
        One result, whose tensors are those with the largest margins of all steps.
    """
    began = time.perf_counter()
    labelled = dataclasses.replace(
        checked, label=label_of_way(checked.label, steps, switch, made.label if made else "")
    )
    request = Request(case, labelled, precision, seed, kernels, calibration, attention)
    unavailable = why_refused(precision, kernels)
    if unavailable is None and made is not None and kernels.backend == "gpu":
        unavailable = NO_RANKS
    if unavailable is not None:
        return dataclasses.replace(request.result("skipped", reason=unavailable), ranks=made.label if made else "")
    with (
        usual_modes(),
        compiled_anew() if switch == "compile" else nullcontext() as graphs_compiled,
        undisturbed(mixed(seed, "everything else")) as disturbed,
        attention_backends(attention),
        ExitStack() as resuming,
    ):
        result = catching(
            lambda: _train_and_judge(request, checked, steps, switch, diagnosis, resuming, made),
            partial(error_result, request),
        )
        if graphs_compiled is not None and result.passed and not graphs_compiled():
            result = request.result("skipped", reason=_NOT_COMPILED)
    result = as_printable(with_side_effect_notes(result, disturbed))
    ranks, seconds = made.label if made else "", time.perf_counter() - began
    return dataclasses.replace(result, precision=precision.name, ranks=ranks, seconds=seconds)


def _train_and_judge(
    request: Request,
    checked: CheckedSize,
    steps: int,
    switch: Switch,
    diagnosis: float | None,
    resuming: ExitStack,
    made: Degrees | None,
) -> Result:
    """Make and judge one step after another until one is wrong, and return the result."""
    case, precision, seed, kernels = request.case, request.precision, request.seed, request.kernels
    first = step_case(case, 1, None, seed)
    prepared = prepare(first, checked, precision.dtype, seed, kernels)
    try:
        trainee, without = _make_trainee(request, checked, prepared, steps, switch, resuming, made)
        if switch in ("resume-dcp", "resume-safetensors") and (trainee.training.save or trainee.training.load):
            return request.result("skipped", reason=_NOT_OWN.format(switch))
        replay = _make_replay(prepared, trainee.training)
        run = _Run(request, checked, steps, switch, diagnosis, trainee, without, replay, begun=trainee.buffers)
        run.notes += without.notes if without else []
        recipes = checked_recipes(trainee.training.recipes)
        if recipes and (switch in ("graph", "compile", "offload") or made is not None):
            raise UserError("a training that changes recipes runs in one process, without graph, compile or offload")
        for number in range(1, steps + 1):
            if number in recipes:
                _change_recipe(run, number, precision_named(recipes[number]))
            weights, run.buffers = run.trainee.weights, _find_changed_buffers(run, prepared)
            held = run.trainee.quantized  # settling the scales may have changed these before step 1
            is_first = number == 1 and (not held or prepared.unlike)  # ``held`` would hide unlike weights
            step = first if is_first else run.case_of(number, weights, held)
            prepared = _prepare_step(run, step, number, weights)
            buffers = run.trainee.buffers
            one = _make_step(run, step, number, prepared, resuming)
            one = _before_clipping(
                dataclasses.replace(one, buffers=buffers), trainee.training.clip, isinstance(trainee, Trainee)
            )
            run.history.append(one.stepped.update.remembered())
            judged = run.judge(step, _candidate_run(one.stepped, made is not None)).result
            _note_step(run, number, judged, prepared, one.stepped)
            judged = _with_findings(run, one, judged)
            if judged.status != "passed" or judged.findings:
                return _first_wrong(run, judged)
            run.weights, run.amaxes = weights, prepared.past.after_step()
            _add_gradients(run.gradients, one.stepped)
            run.strayed |= one.stepped.strayed
    except _Ended as ended_early:
        return ended_early.result
    if switch == "offload" and _offloads_nothing(run.trainee):
        return request.result("skipped", reason=_NOT_OFFLOADED)
    return run.result("passed", reason=judged.reason, notes=judged.notes)


def _find_changed_buffers(run: _Run, before: Prepared) -> Buffers:
    """Return the candidate's buffers that its training has changed, and those of the reference that are set to them.

    These are the buffers that the reference's own forward pass changes, such as running statistics, and those that the
    candidate's training step changes outside of calls.

    Args:
        run: the training.
        before: the previous step; at the first step, that step itself.
    """
    run.moved |= before.golden.buffers
    changed = {
        name: x for name, x in run.trainee.buffers.items() if name not in run.begun or not are_equal(x, run.begun[name])
    }
    by_step: set[str] = set()
    if isinstance(run.trainee, Trainee) and run.switch != "graph":  # its replays are not calls
        by_step = changed.keys() - run.trainee.moved_in_calls
    if by_step and not run.buffers.by_step:
        told = few_of([f"{name} in {str(changed[name].dtype).removeprefix('torch.')}" for name in sorted(by_step)])
        told = f"the training step changes buffers outside of the candidate's calls ({told})"
        run.notes.append(f"{told}; the reference gets their values, as it gets weights")
    held = dict(before.reference.named_buffers())
    given = counterparts(before.weights, changed, run.moved)
    given |= counterparts(before.weights, {name: changed[name] for name in by_step}, held)
    return Buffers(changed, {right: changed[own] for own, right in given.items()}, bool(by_step))


def _change_recipe(run: _Run, number: int, precision: Precision) -> None:
    """Let the candidate make the step of this number, and later ones, under another recipe.

    Raises:
        _Ended: if this machine cannot run it.
        UserError: if it has another dtype, or the candidate holds quantized weights.
    """
    if precision.dtype is not run.request.precision.dtype:
        raise UserError(
            f"recipes of a training: step {number} has {precision.name}, whose dtype is not that of "
            f"{run.request.precision.name}, so the weights would change; compare it with precisions of one dtype"
        )
    if held := list(run.trainee.quantized):
        raise UserError(
            f"recipes of a training: before step {number} the candidate holds {few_of(held)} quantized by the former "
            "recipe; build the module without quantized_model_init, or do not change its recipe"
        )
    if unavailable := why_refused(precision, run.request.kernels):
        raise _Ended(run.request.result("skipped", reason=unavailable))
    run.request, run.amaxes = dataclasses.replace(run.request, precision=precision), {}
    if isinstance(run.trainee, Trainee):
        run.trainee.change_recipe(precision, number)


def _offloads_nothing(trainee: Trainee | TraineeOverRanks) -> bool:
    """Return whether the pair leaves offloading to parity, and TE has offloaded nothing."""
    return isinstance(trainee, Trainee) and not trainee.training.offload and not trainee.journal.offloaded


def _make_trainee(
    request: Request,
    checked: CheckedSize,
    prepared: Prepared,
    steps: int,
    switch: Switch,
    resuming: ExitStack,
    made: Degrees | None,
) -> tuple[Trainee | TraineeOverRanks, BaselineTraining | None]:
    """Return the candidate before its first step and, if it uses a graph or offloading, the same training without.

    Raises:
        _Ended: if ranks or a capture failed.
    """
    make = partial(Trainee, request.case, checked, prepared, request.precision, request.seed, request.kernels, switch)
    if made is not None:
        try:
            return TraineeOverRanks(request, checked, prepared, steps, made, switch), None
        except RanksFailed as error:
            raise _Ended(ended(request, error, made)) from error
    if switch == "graph":
        try:
            return side_by_side(make, steps, request.seed, resuming, Trainee.capture, "in a graph")
        except NotCaptured as error:
            reason = "step 1 cannot be captured in a graph"
            raise _Ended(request.result("failed", reason=reason, findings=(not_captured(error),))) from error
    if switch == "offload":
        return side_by_side(make, steps, request.seed, resuming, Trainee.offload)
    trainee = make()
    trainee.settle()
    return trainee, None


def _prepare_step(run: _Run, step: Case, number: int, weights: Named) -> Prepared:
    """Return the reference of a step, with golden.

    Raises:
        _Ended: if the training's numbers have become too large to judge.
    """
    dtype = run.request.precision.dtype
    if number > 1 and (why := _too_large("its weights", weights.values(), dtype)):
        raise _Ended(_report_divergence(run, number, why))
    prepared = prepare(step, run.checked, dtype, run.request.seed, run.request.kernels)
    golden = (*prepared.golden.outputs.values(), *prepared.golden.weight_gradients.values())
    if number > 1 and (why := _too_large("the reference's loss and gradients", golden, torch.float32)):
        raise _Ended(_report_divergence(run, number, why))
    if run.request.precision.warmup_passes:
        prepared.past.follow(run.amaxes, run.request.precision.scaled_by_history)
    return prepared


def _make_step(run: _Run, step: Case, number: int, prepared: Prepared, resuming: ExitStack) -> _Made:
    """Let the candidate make a step, in the way that the switch says.

    Raises:
        _Ended: if TE's offloading breaks the step.
    """
    trainee = run.trainee
    if isinstance(trainee, TraineeOverRanks):
        stepped = trainee.step(prepared)
        return _Made(number, step, prepared, stepped, lost=trainee.lost_state())
    if run.without is not None:
        return _make_step_beside(run, step, number, prepared, trainee, run.without)
    if is_interrupted(run.switch, number, run.steps):
        at = run.checked, prepared, run.request.precision, run.request.seed, run.request.kernels
        new = partial(_new_trainee, resuming, run.request.case, *at)
        run.trainee, stepped, resumption = trainee.resumed(run.switch, new, prepared)
        return _Made(number, step, prepared, stepped, lost=lost_state(number, resumption))
    return _Made(number, step, prepared, trainee.step(prepared))


def _make_step_beside(
    run: _Run, step: Case, number: int, prepared: Prepared, trainee: Trainee, without: BaselineTraining
) -> _Made:
    """Let the candidate make a step that is compared with the same step without a graph or offloading.

    Raises:
        _Ended: if TE's offloading breaks the step.
    """
    try:
        stepped, computed = without.made(trainee, number, prepared)
    except Exception as error:
        if (told := out_of_step(number, trainee.journal, error)) is None:
            raise
        reason = f"step {number} is the first wrong step"
        raise _Ended(run.result("failed", reason=reason, findings=(told,))) from error
    beside = (PairedStep if run.switch == "offload" else Replayed)(number, stepped, computed, without)
    if not beside.differing or beside.is_reproducible:
        return _Made(number, step, prepared, stepped, beside=beside)
    what = _WITHOUT[run.switch]
    run.notes.append(
        f"from step {number} on, repeating the training without {what} does not give the same bits, so steps with "
        f"{what} are judged only by the limits"
    )
    run.without = None
    return _Made(number, step, prepared, stepped)


def _with_findings(run: _Run, made: _Made, judged: Result) -> Result:
    """Return the verdict on a step's loss and gradients, with a finding if anything is wrong with the step."""
    stepped, prepared, trainee = made.stepped, made.prepared, run.trainee
    if made.lost is not None:
        return dataclasses.replace(judged, findings=(made.lost,))
    multiplied = _find_largest_operands(prepared)
    if isinstance(trainee, TraineeOverRanks):
        if between := trainee.between_ranks(judged, prepared):
            return dataclasses.replace(judged, findings=(between,))
        multiplied = {key: trainee.gradients_scale * amax if key[1] else amax for key, amax in multiplied.items()}
    if made.beside is not None and isinstance(trainee, Trainee) and made.beside.differing:
        return _with_differences(run, made, made.beside, trainee, judged)
    if misformatted := _of_formats(run, stepped, prepared):
        return dataclasses.replace(judged, findings=misformatted)
    if stepped.stale:
        return dataclasses.replace(judged, findings=(stale_transposes(made.number, stepped.stale),))
    hands_on = run.request.precision.rounding.attention.qkv is not None
    scaled = wrong_scaling(stepped.scaling, multiplied, trainee.is_plain, hands_on)
    if judged.status != "passed":
        return _with_cause(run, made, judged, scaled)
    wrong = scaled or _of_buffers(run, made) or _of_optimizer(run, stepped, prepared)
    return dataclasses.replace(judged, findings=(wrong,)) if wrong else judged


def _of_formats(run: _Run, stepped: Stepped, prepared: Prepared) -> tuple[Finding, ...]:
    """Return a finding if modules computed in other formats than the pair, or the step's recipe, asks for."""
    precision = run.request.precision
    formats = prepared.formats if precision.recipe is not None else {}
    seen = stepped.formats if formats or run.trainee.training.recipes else ()
    return findings_of_formats(seen, formats, precision, stepped.roles)


def _with_differences(run: _Run, made: _Made, beside: PairedStep, trainee: Trainee, judged: Result) -> Result:
    """Return the verdict with the reason why a step differs from the same step without a graph or offloading."""
    explained = None if judged.passed else partial(_explain_wrong_step, run, made, judged)
    differing = dataclasses.replace(judged, status="failed") if judged.passed else judged
    if run.diagnosis is None:
        return differing
    search = (
        partial(_of_graph, beside, differing, explained)
        if isinstance(beside, Replayed)
        else lambda: dataclasses.replace(differing, findings=(offload_explained(beside, trainee.journal),))
    )
    return catching(search, partial(without_cause, differing))


def _with_cause(run: _Run, made: _Made, judged: Result, scaled: Finding | None) -> Result:
    """Return the verdict on a step whose loss or gradients are wrong, with the cause if one is found.

    Args:
        scaled: what is wrong with delayed scaling, which is reported if nothing else is known.

    Raises:
        _Ended: if a faithful computation of the step overflows as well.
    """
    number, trainee = made.number, run.trainee
    judged = catching(partial(_explain_wrong_step, run, made, judged), partial(without_cause, judged))
    if run.switch == "compile" and [one.title for one in judged.findings] == ["state-between-steps"]:
        anew = partial(_is_right_anew, run, made)
        tried = () if trainee.training.compile else backends(run.request.kernels)
        judged = dataclasses.replace(judged, findings=(compiled_otherwise(number, tried, anew),))
    is_unknown = all(one.title == "state-between-steps" for one in judged.findings)
    if scaled is not None and is_unknown:
        judged = dataclasses.replace(judged, findings=(scaled,))
    elif is_unknown and number == 1 and trainee.is_plain and isinstance(trainee, TraineeOverRanks):
        judged = dataclasses.replace(judged, findings=(trainee.unexplained(judged, made.prepared),))
    if number > 1 and {one.title for one in judged.findings} == {"precision-overflows"}:
        why = f"a correct {run.request.precision.name} computation of the step overflows"
        raise _Ended(_report_divergence(run, number, why))
    return judged


def _first_wrong(run: _Run, judged: Result) -> Result:
    """Return the result of a training whose last step is wrong, or could not be compared."""
    status = "failed" if judged.status == "passed" else judged.status
    reason = f"step {len(run.told)} is the first that is not right" if status == "failed" else judged.reason
    return run.result(status, reason=reason, findings=judged.findings, notes=judged.notes)


def _candidate_run(stepped: Stepped, over_ranks: bool = False) -> CandidateRun:
    scales = recasts(before for before, _ in stepped.scaling)
    seen, changed = (stepped.tensors, stepped.unreached), stepped.changed
    return CandidateRun(*seen, summed=stepped.summed, recasts=scales, changed=changed, adds_parts=over_ranks)


def _new_trainee(resuming: ExitStack, *of: Any) -> Trainee:
    """Return a new candidate, with TE's state as in a new process until ``resuming`` is left."""
    resuming.enter_context(fresh_quantization())
    return Trainee(*of)


def _too_large(what: str, tensors: Iterable[Tensor], dtype: torch.dtype) -> str:
    """Say that a tensor is not finite, or larger than any number of a dtype; return an empty text if none is."""
    limit = torch.finfo(dtype).max
    largest = max((float(x.abs().max()) for x in tensors if x.numel()), key=lambda one: math.inf if one != one else one)
    if largest <= limit:
        return ""
    name = str(dtype).removeprefix("torch.")
    return f"{what} reach {largest:.2g}, and the largest number of {name} is {limit:.2g}"


def _report_divergence(run: _Run, number: int, why: str) -> Result:
    """Return the result of a training whose next step cannot be judged."""
    own: list[float] | None = None
    with suppress(NothingToJudge):
        own = of_reference(run.request.case, *run.at, number).losses
    reason = f"step {number} is the first that cannot be judged"
    return run.result("failed", reason=reason, findings=(diverging(number, why, own),))


def _is_right_anew(run: _Run, made: _Made, backend: str) -> bool:
    """Return whether a new candidate makes a step right if ``backend`` compiles it, or the pair if that is empty."""
    checked, precision, seed, kernels = run.at
    whole = run.request.case

    def factory(*at: Any, **size: Any) -> Pair:
        pair = dataclasses.replace(whole.factory(*at, **size), fill=True)
        run.buffers.give(pair)
        return pair

    case = dataclasses.replace(whole, factory=factory)
    with fresh_caches(), fresh_quantization(), compiled_anew():
        trainee = Trainee(case, checked, made.prepared, precision, seed, kernels, "compile", backend)
        trainee.settle()
        stepped = trainee.step(made.prepared)
    return run.judge(made.case, _candidate_run(stepped)).result.status == "passed"


def _make_replay(prepared: Prepared, training: Training, setting: Setting | None = None) -> Replay:
    edit = setting.edit if setting else (lambda optimizer: optimizer)
    return Replay(prepared.reference, reference_optimizer(training), training.scheduler, edit)


def _find_fused_parameters(prepared: Prepared) -> dict[str, tuple[str, ...]]:
    """Return the candidate's parameters that hold several of the reference's, with the names of the latter."""
    sides = ((list(names(right)), tuple(names(left))) for left, right in prepared.weights.items())
    return {own[0]: held for own, held in sides if len(own) == 1 < len(held)}


def _find_largest_operands(prepared: Prepared) -> dict[tuple[str, bool], float]:
    """Return the largest magnitude, in the reference, of the operand that each of the candidate's weights multiplies.

    Keys are the weight's name and whether the operand is a gradient.
    """
    found: dict[tuple[str, bool], float] = {}
    for left, right in prepared.weights.items():
        for name, own in itertools.product(names(left), names(right)):
            for is_gradient in (False, True):
                amax = prepared.past.multiplied.get((name, is_gradient))
                if amax is not None:
                    found[own, is_gradient] = max(float(amax), found.get((own, is_gradient), 0.0))
    return found


def _note_step(run: _Run, number: int, judged: Result, prepared: Prepared, stepped: Stepped) -> None:
    for tensor in judged.tensors:
        if tensor.kind == "weight gradient" and tensor.numel:
            run.limits[tensor.name] = max(run.limits.get(tensor.name, 0.0), tensor.tolerance_relative_l2)
        name = "loss" if tensor.kind == "output" else tensor.name
        told = dataclasses.replace(tensor, name=name, step=number)
        known = run.worst.get(told.kind + name)
        if known is None or not known.margin > told.margin:
            run.worst[told.kind + name] = told
    loss = float(stepped.tensors["output", "output"])
    golden = float(prepared.golden.outputs["output"])
    name = run.request.precision.name if run.trainee.training.recipes else ""
    run.told.append(Step(number, loss, golden, judged.margin, name))


def _add_gradients(total: Named, stepped: Stepped) -> None:
    for (kind, name), x in stepped.tensors.items():
        if kind == "weight gradient":
            total[name] = total[name] + x if name in total else x.float()


def _explain_wrong_step(run: _Run, made: _Made, judged: Result) -> Result:
    """Return the verdict on a step whose loss or gradients are wrong, with the cause."""
    if judged.status != "failed" or run.diagnosis is None:
        return judged
    number, prepared = made.number, made.prepared
    checked, precision, seed, kernels = run.at
    candidate = {name: x for (kind, name), x in made.stepped.tensors.items() if kind == "weight gradient"}
    now = prepared_weights(prepared)

    def golden_of(number: int, weights: Named) -> Mapping[str, Tensor]:
        other = run.case_of(number, weights)
        return prepare(other, checked, precision.dtype, seed, kernels).golden.weight_gradients

    held = {name: x for name, x in prepared.candidate_weights.items() if is_quantized(x)}
    alone = run.judge(run.case_of(number, now if held or number > 1 else None, held))
    if alone.result.status != "passed":
        told = explain_at(alone, run.diagnosis)
        return dataclasses.replace(judged, findings=told.findings, notes=(*judged.notes, *told.notes))
    strayed = {name: prepared.candidate_weights[name] + far for name, far in run.strayed.items()}
    if strayed and run.judge(run.case_of(number, now, held | strayed)).result.status == "failed":
        moved = repairable(
            "state-between-steps",
            f"step {number} is right for a new module with the weights that the map gives it, and wrong once "
            f"{few_of(list(strayed))} {'has' if len(strayed) == 1 else 'have'} the values to which earlier steps moved "
            "what the reference has no parameter for",
            "freeze such a parameter, as with requires_grad_(False), or build TE's module without it",
        )
        return dataclasses.replace(judged, findings=(moved,))
    is_computed_again = run.switch == "recompute"
    if (len(made.stepped.calls) > 1 or is_computed_again) and (read := buffers_read(prepared)):
        if is_computed_again:
            return dataclasses.replace(judged, findings=(read_after_change(number, read),))
        reason = (
            f"step {number} calls the candidate {len(made.stepped.calls)} times, and its forward pass reads buffers "
            f"that it also changes ({few_of(read)}), so one pass of the reference over the whole batch cannot compute "
            "the same: call the candidate once per step, or keep these buffers fixed during the training"
        )
        return dataclasses.replace(judged, status="error", reason=reason)
    in_fp8 = precision.recipe is not None
    of_added = made.stepped.clipping.of_added / (made.stepped.clipping.factor or 1.0)  # before they were clipped
    guesses = guesses_of_any_step(number, candidate, prepared.golden.weight_gradients, run.limits, of_added)
    if run.weights is not None:
        before = Before(now, run.weights, run.gradients, golden_of)
        guesses += guesses_of_later_steps(number, prepared.golden.weight_gradients, before, in_fp8)
    found = gradients_explained(run.limits, candidate, guesses)
    if found is None and made.stepped.clipping.is_early:
        found = changed_early(number)
    elif found is None and (shares := shares_made(prepared, made.stepped.calls, candidate)):
        found = micro_batches_explained(number, run.limits, shares)
    worst = f", first {judged.worst.label}" if judged.worst else ""
    found = found or unexplained(number, worst, number == 1 and not run.trainee.is_plain, in_fp8)
    return dataclasses.replace(judged, findings=(found,))


def _of_graph(replayed: Replayed, judged: Result, explained: Callable[[], Result] | None) -> Result:
    """Return the verdict with the reason why a step in a graph differs from the one without.

    It is something that the graph keeps, else a mistake that any training may have, such as cached FP8 weights.
    """
    if found := replay_explained(replayed):
        return dataclasses.replace(judged, findings=(found,))
    frozen, is_named = replay_frozen(replayed)
    told = explained().findings if explained else ()
    if not told or told[0].title == "state-between-steps":
        return dataclasses.replace(judged, findings=(frozen,))
    return dataclasses.replace(judged, findings=(frozen, *told) if is_named else told)


def prepared_weights(prepared: Prepared) -> Named:
    """Return the reference's weights of a prepared step."""
    return {name: parameter.detach().clone() for name, parameter in prepared.reference.named_parameters()}


def _of_buffers(run: _Run, made: _Made) -> Finding | None:
    """Return a finding if a forward pass changes a buffer by a multiple of what the reference changes it by, else None.

    This cannot be told for a step that calls the candidate several times or recomputes it in its backward pass.
    """
    before, after, right = made.buffers, made.stepped.buffers, made.prepared.golden.buffers
    held = dict(made.prepared.reference.named_buffers())
    if len(made.stepped.calls) != 1 or run.switch == "recompute":
        return None
    own = {name: x for name, x in after.items() if name in right or not are_equal(x, before.get(name, x))}
    known = counterparts(made.prepared.weights, after, right) | counterparts(made.prepared.weights, own, right)
    lacking = sorted(name for name in right.keys() - set(known.values()) if right[name].is_floating_point())
    if lacking and made.number == 1:
        run.notes.append(
            f"the reference's forward pass moves its buffers {few_of(lacking)}, and the candidate has none of the same "
            "name or place, so that they are not compared"
        )
    for name, of in known.items():
        if name in before and after[name].is_floating_point() and held[of].shape == right[of].shape:
            factor = multiple_moved((before[name], after[name]), (held[of], right[of]))
            if factor != 1.0:
                return moved_otherwise(made.number, name, of, factor)
            dtype, due = after[name].dtype, right[of]
            if dtype.itemsize < 4 and made.number == 1:
                lost = float((due.to(dtype) - due).norm() / (due - held[of]).norm())
                run.notes.append(
                    f"the candidate holds its buffer {name} in {str(dtype).removeprefix('torch.')}, which loses "
                    f"{100 * lost:.2g} % of the reference's move in step 1, and more the larger the buffer is; casting "
                    "a module casts its buffers: keep one that adds up small moves in FP32"
                )
    return None


def _of_optimizer(run: _Run, stepped: Stepped, prepared: Prepared) -> Finding | None:
    """Return a finding that says why the optimizer's step is not the reference's; None if it is."""
    trainee, precision = run.trainee, run.request.precision
    training = trainee.training
    if told := _of_clipping(len(run.history), stepped, training.clip):
        return told
    run.is_narrow = run.is_narrow and holds_weights(precision.dtype, stepped.update)
    dtype = precision.dtype if run.is_narrow else torch.float32
    right = run.replay.step(stepped.update)
    made = deviations(stepped.update, right, dtype)
    wrong = [one for one in made if not one.is_right]
    if wrong and isinstance(trainee, TraineeOverRanks):
        apart = trainee.of_shards({one.name: not_as(stepped.update, right, one.name, dtype) for one in wrong})
        if apart is not None:
            return apart
    copies = {
        name: list(names(right))
        for left, right in prepared.weights.items()
        if holds(right, Copies) and set(stepped.strayed) & set(names(right))
        for name in names(left)
    }
    if wrong and all(one.name in copies for one in wrong):
        one = wrong[0].name
        return repairable(
            "optimizer",
            f"in step {len(run.history)} the candidate's optimizer moves {few_of(copies[one])} apart, though they are "
            f"one parameter in the reference, {one}, which is moved by the sum of their gradients",
            "tie them, or add up their gradients before each step and let the optimizer move them alike",
        )
    if wrong:
        return optimizer_explained(
            run.history,
            wrong,
            lambda setting: _make_replay(prepared, training, setting),
            dtype,
            trainee.settings,
            _find_fused_parameters(prepared),
            stepped.written,
        )
    if stepped.apart:
        return repairable(
            "master-weights",
            f"after step {len(run.history)} the module does not hold the weights that its optimizer computed: "
            f"{few_of(stepped.apart)} {'is' if len(stepped.apart) == 1 else 'are'} not the rounded FP32 master weights",
            "copy the master weights to the module after each step, and let nothing else write to its weights, such as "
            "an average of them",
        )
    if dtype is not torch.float32 and any(one.rounding > 0.5 for one in made):
        return repairable(
            "master-weights",
            f"the weights exist only in {str(dtype).removeprefix('torch.')}, which loses most of an update that is "
            "smaller than half the distance between two neighbouring numbers",
            "keep FP32 master weights, as te.optimizers.FusedAdam(..., master_weights=True) does",
            Code(then=("master_weights=True",)),
        )
    return None


def _before_clipping(made: _Made, clip: float | None, is_whole: bool) -> _Made:
    """Return a step with its gradients as they were before the port multiplied them without ``clip_grad_norm_``.

    It did so if the gradients that the optimizer gets have exactly the largest norm, or if those that backward passes
    left had the right norm. The multiplication has rounded the gradients once more.

    Args:
        made: the step.
        clip: the largest norm.
        is_whole: whether the optimizer gets what backward passes have left, and not a sum over ranks.
    """
    stepped, clipping = made.stepped, made.stepped.clipping
    golden = norm_together(made.prepared.golden.weight_gradients.values())
    own = {name: x for (kind, name), x in stepped.tensors.items() if kind == "weight gradient"}
    norm = norm_together(own.values())
    if clipping.is_seen and is_whole and abs(norm * clipping.after - golden) <= _CLIPPING * golden:
        return _with_gradients_before(made, own, 1.0 / clipping.after)  # a loss scale is undone after clipping
    if clipping.is_seen or not golden or not norm:
        return made
    scale = norm / clipping.of_added / golden  # of the loss
    if clip is not None and golden > clip and abs(norm - clip) <= _CLIPPING * clip:
        power = 2.0 ** round(math.log2(scale))
        is_power = is_whole and abs(scale - power) <= _CLIPPING * power
        factor = clipping.of_added * power if is_power else _multiplied_by(own, made.prepared)
    elif is_whole and abs(scale - 1.0) <= _CLIPPING < abs(clipping.of_added - 1.0) and _are_along(own, made.prepared):
        factor = clipping.of_added
    else:
        return made
    return _with_gradients_before(made, own, factor)


def _with_gradients_before(made: _Made, own: Named, factor: float) -> _Made:
    """Return a step with its gradients as they were before they were multiplied by a number."""
    if factor == 1.0:
        return made
    stepped, clipping = made.stepped, made.stepped.clipping
    tensors, summed = dict(stepped.tensors), dict(stepped.summed)
    for name, x in own.items():
        rounding = torch.finfo(x.dtype).eps / 12**0.5 * Rng(0, f"clipped {name}").normal(*x.shape).to(x.device)
        tensors["weight gradient", name] = x / factor
        summed["weight gradient", name] = summed.get(("weight gradient", name), 0.0) + rounding * (x / factor).float()
    lowest, highest = (clipping.lowest, clipping.highest) if clipping.is_seen else (1.0, 1.0)
    by = clipping.factor if clipping.is_seen else 1.0
    clipping = dataclasses.replace(clipping, factor=factor * by, lowest=factor * lowest, highest=factor * highest)
    return dataclasses.replace(
        made, stepped=dataclasses.replace(stepped, tensors=tensors, summed=summed, clipping=clipping)
    )


def _multiplied_by(gradients: Named, prepared: Prepared) -> float:
    """Return the number by which the right gradients were multiplied.

    It is taken from the gradient that is closest to a multiple of the right one. Gradients of a few elements come last,
    since one or two numbers are always close.
    """
    least, found = math.inf, 1.0
    for name, x in gradients.items():
        right = prepared.golden.weight_gradients[name].double()
        own, size = x.to(right), float(right.square().sum())
        factor = float((own * right).sum()) / size if size else 0.0
        left = float((own - factor * right).norm()) / (abs(factor) * size**0.5) if factor else math.inf
        left += right.numel() ** -0.5 if right.numel() < _FEWEST_MULTIPLIED else 0.0
        if left < least:
            least, found = left, factor
    return found


def _are_along(gradients: Named, prepared: Prepared) -> bool:
    """Return whether gradients are the right ones times a number, up to what any precision loses."""
    right = prepared.golden.weight_gradients
    along = sum(float((x.double() * right[name].to(x.device)).sum()) for name, x in gradients.items())
    return along > _ALONG * norm_together(gradients.values()) * norm_together(right.values())


def _of_clipping(number: int, stepped: Stepped, clip: float | None) -> Finding | None:
    """Return a finding that says how a step's clipping differs from the reference's; None if it does not."""
    clipping = stepped.clipping
    gradients = {name: x for (kind, name), x in stepped.tensors.items() if kind == "weight gradient"}
    expected = 1.0 if clip is None else min(1.0, clip / (norm_together(gradients.values()) + 1e-6))
    is_one_number = clipping.highest - clipping.lowest <= _CLIPPING * abs(clipping.factor)
    if abs(clipping.factor - expected) <= _CLIPPING * expected and (is_one_number or not clipping.is_early):
        return None
    if clipping.is_early:
        return changed_early(number)
    made_so = [
        f", so that their {what} is {clip:g}"
        for order, what in ((1.0, "L1 norm"), (math.inf, "largest element"))
        if clip is not None
        and is_one_number
        and abs(clipping.factor * norm_together(gradients.values(), order) - clip) <= _CLIPPING * clip
    ]
    by = f"{clipping.factor:.4g}" if is_one_number else f"numbers from {clipping.lowest:.2g} to {clipping.highest:.2g}"
    return repairable(
        "gradient-clipping",
        f"gradients are multiplied by {by} before the optimizer gets them{''.join(made_so)}, but the reference "
        f"multiplies {'them' if is_one_number else 'all of them'} by {expected:.4g}",
        "clip to the same maximum norm, computed over the same gradients after a loss scale is removed",
    )
