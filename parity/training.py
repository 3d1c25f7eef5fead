"""Compare a training: each step of the candidate's by itself, and what it leaves to the next.

A training is chaotic: two right ones drift apart, since Adam moves a weight whose gradient is nearly 0 up or down by
chance. So no step is compared with a step of another training. The candidate trains as it does. At each step the
reference gets the weights that the candidate has, and loss and gradients are judged like those of any pass; the
reference's optimizer gets the candidate's gradients, and must make the same step. A training is right if each of its
steps is, and where one is not, that step is where to look.
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
from typing import Any

import torch
from torch import Tensor

from parity.case.case import Case, Training, mixed
from parity.case.training import reference_optimizer
from parity.case.validate import CheckedSize
from parity.case.weight_map import names
from parity.comparison import broken_off, explain_at, judge_at, noting, unless_raised, without_cause
from parity.judge.asked import Asked, CandidateRun
from parity.judge.limits import Table
from parity.judge.pictures import thinned
from parity.judge.steps import Replay, deviations, holds, not_as, wrong_scaling
from parity.mistakes.codes import Code, repairable
from parity.parallel import NO_RANKS, ended
from parity.passes.courses import Beside, of_reference, side_by_side
from parity.passes.micro_batches import shares_made
from parity.passes.modes import usual_modes
from parity.passes.prepare import Prepared, prepare
from parity.passes.refusals import NothingToJudge
from parity.passes.steps import Named, Stepped, Trainee, Update, is_interrupted, step_case
from parity.passes.switches import Journal, NotCaptured, backends, compiled_anew
from parity.ranks.launch import RanksFailed
from parity.ranks.layout import Degrees
from parity.result import Finding, Result, Step, Switch, as_printable, label_of_way
from parity.search.steps import (
    Guess,
    Setting,
    diverging,
    factor_in_words,
    gradients_explained,
    listed,
    lost_state,
    micro_batches_explained,
    optimizer_explained,
    scale_of,
    some_scaled,
    stale_transposes,
)
from parity.search.switched import (
    Replayed,
    compiled_otherwise,
    not_captured,
    offload_explained,
    out_of_step,
    replay_explained,
    replay_frozen,
)
from parity.te import Kernels, Precision, why_unavailable
from parity.te.attention_backend import AttentionBackend, attention_backends
from parity.te.state import fresh_caches, fresh_quantization, is_quantized
from parity.trace.effects import undisturbed
from parity.training_over_ranks import TraineeOverRanks
from parity.user_error import UserError, said

_NOT_COMPILED = (
    "torch.compile compiles nothing of this candidate, so there is nothing to compare: TransformerEngine leaves most "
    "of its modules to Python (no_torch_dynamo), and parity does not compile what call_candidate does besides calling "
    "the candidate"
)
_NOT_OFFLOADED = (
    "TransformerEngine offloads nothing of this candidate, so there is nothing to compare: no module of its own in it "
    "saves anything; say how it is offloaded by parity.Training(offload=...)"
)
_WITHOUT: dict[str, str] = {"graph": "graphs", "offload": "offloading"}
# By how much a clipping may be off, in relation to itself: an FP32 norm of gradients in 16 bits.
_CLIPPING = 1e-2


@dataclass
class _Run:
    """Hold what is known of a training so far.

    Attributes:
        history: what the optimizer did in each step to a few elements of each parameter.
        steps: each step as a result tells it.
        gradients: the sum of the candidate's weight gradients over all earlier steps, for one that is not zeroed.
        limits: of each weight gradient the largest bound on its relative error, over all steps.
        amaxes: of each operand the largest magnitude that delayed scaling has seen.
        is_narrow: whether the precision's dtype holds all weights that the optimizer made.
        weights: the weights before the previous step; None at the first.
        worst: of each tensor the verdict with the largest margin.
        notes: what is to be said of the whole training.
    """

    history: list[Update] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    gradients: Named = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    amaxes: dict[int, Tensor] = field(default_factory=dict)
    is_narrow: bool = True
    weights: Named | None = None
    worst: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


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
    """Train the candidate for some steps, judge each, and say what is wrong with the first that is.

    Never raises because of a module that fails: the result's status and reason tell.

    Args:
        steps: how many, from 1.
        switch: ``resume``, ``resume-dcp`` or ``resume-safetensors`` to save the training in the middle, and to go on
            with a new module that loads it, which must compute the same to the bit; ``rollback`` to load it into the
            module that has gone on; ``recompute`` to make each call by ``te.checkpoint``; ``micro-batches`` to make
            each step's gradients of up to four parts of its batch; ``graph`` to replay CUDA graphs, each step of which
            must be that of the same training without graphs to the bit; ``compile`` to call it by ``torch.compile``;
            ``offload`` to keep its activations on the host, with the same steps as without to the bit.
        diagnosis: seconds of real time for the search for a cause, 0 for no limit; None for no search.
        made: how many ranks train it together; None for this process alone.

    Returns:
        One result, whose tensors are those with the largest margins of all steps.
    """
    began = time.perf_counter()
    labelled = dataclasses.replace(
        checked, label=label_of_way(checked.label, steps, switch, made.label if made else "")
    )
    asked = Asked(case, labelled, precision, seed, kernels, calibration, attention)
    unavailable = why_unavailable(precision, kernels)
    if unavailable is None and made is not None and kernels.backend == "gpu":
        unavailable = NO_RANKS
    if unavailable is not None:
        return dataclasses.replace(asked.result("skipped", reason=unavailable), ranks=made.label if made else "")
    with (
        usual_modes(),
        compiled_anew() if switch == "compile" else nullcontext() as graphs_compiled,
        undisturbed(mixed(seed, "everything else")) as disturbed,
        attention_backends(attention),
        ExitStack() as resuming,
    ):
        result = unless_raised(
            lambda: _trained(asked, checked, steps, switch, diagnosis, resuming, made), partial(_broken_off, asked)
        )
        if graphs_compiled is not None and result.passed and not graphs_compiled():
            result = asked.result("skipped", reason=_NOT_COMPILED)
    result = as_printable(noting(result, disturbed))
    return dataclasses.replace(result, ranks=made.label if made else "", seconds=time.perf_counter() - began)


def _broken_off(asked: Asked, error: BaseException) -> Result:
    """Return the error of a training in which something raised, such as the port's own step."""
    if isinstance(error, UserError):
        return asked.result("error", reason=said(error))
    return broken_off(asked, error).result


def _trained(
    asked: Asked,
    checked: CheckedSize,
    steps: int,
    switch: Switch,
    diagnosis: float | None,
    resuming: ExitStack,
    made: Degrees | None,
) -> Result:
    case, precision, seed, kernels = asked.case, asked.precision, asked.seed, asked.kernels
    run, at = _Run(), (checked, precision, seed, kernels, asked.calibration, asked.attention)
    first = step_case(case, 1, None, seed)
    prepared = prepare(first, checked, precision.dtype, seed, kernels)
    make = partial(Trainee, case, checked, prepared, precision, seed, kernels, switch)
    without = None
    trainee: Trainee | TraineeOverRanks
    if made is not None:
        try:
            trainee = TraineeOverRanks(asked, checked, prepared, steps, made, switch)
        except RanksFailed as error:
            return ended(asked, error, made)
    elif switch == "graph":
        try:
            trainee, without = side_by_side(make, steps, seed, resuming, Trainee.capture, "in a graph")
        except NotCaptured as error:
            return asked.result(
                "failed", reason="step 1 cannot be captured in a graph", findings=(not_captured(error),)
            )
    elif switch == "offload":
        trainee, without = side_by_side(make, steps, seed, resuming, Trainee.offload)
    else:
        trainee = make()
        trainee.settle()
    run.notes += without.notes if without else []
    training = trainee.training
    replay = _replay(prepared, training)
    for number in range(1, steps + 1):
        weights = trainee.weights
        held = trainee.quantized  # which scales that have settled may have changed before the first step
        step = step_case(case, number, weights, seed, held) if held or number > 1 else first
        if number > 1 and (why := _too_large("its weights", weights.values(), precision.dtype)):
            return _diverged(asked, checked, run, number, why)
        prepared = prepare(step, checked, precision.dtype, seed, kernels)
        golden = (*prepared.golden.outputs.values(), *prepared.golden.weight_gradients.values())
        if number > 1 and (why := _too_large("the reference's loss and gradients", golden, torch.float32)):
            return _diverged(asked, checked, run, number, why)
        if precision.warmup_passes:
            prepared.past.is_followed, prepared.past.before = True, run.amaxes
        lost = beside = None
        if isinstance(trainee, TraineeOverRanks):
            stepped = trainee.step(prepared)
            lost = trainee.lost_state()
        elif without is not None:
            try:
                stepped, computed = without.made(trainee, number, prepared)
            except Exception as error:
                if told := out_of_step(number, trainee.journal, error):
                    return asked.result(
                        "failed",
                        reason=f"step {number} is the first that is not right",
                        tensors=thinned(list(run.worst.values())),
                        findings=(told,),
                        notes=tuple(run.notes),
                        steps=tuple(run.steps),
                    )
                raise
            beside = (Beside if switch == "offload" else Replayed)(number, stepped, computed, without)
            if beside.differing and not beside.is_reproducible:
                run.notes.append(
                    f"from step {number} on, the training without {_WITHOUT[switch]} is not the same to the bit when "
                    f"it is made again, so that steps with {_WITHOUT[switch]} are judged only by the limits"
                )
                without = beside = None
        elif is_interrupted(switch, number, steps):
            new = partial(_new_trainee, resuming, case, checked, prepared, precision, seed, kernels)
            trainee, stepped, resumption = trainee.resumed(switch, new, prepared)
            lost = lost_state(number, resumption)
        else:
            stepped = trainee.step(prepared)
        judged = judge_at(
            step, *at, made=CandidateRun(stepped.tensors, stepped.unreached, summed=stepped.summed)
        ).result
        run.history.append(stepped.update.remembered())
        _note(run, number, judged, prepared, stepped)
        known = prepared, asked, checked, trainee.is_plain, diagnosis
        findings: tuple[Finding, ...] = ()
        multiplied = _multiplied(prepared)
        if isinstance(trainee, TraineeOverRanks):
            scale = trainee.gradients_scale
            multiplied = {key: scale * amax if key[1] else amax for key, amax in multiplied.items()}
        scaled = wrong_scaling(stepped.scaling, multiplied, trainee.is_plain)
        between = trainee.between_ranks(judged, prepared) if isinstance(trainee, TraineeOverRanks) else None
        if lost is not None:
            findings = (lost,)
        elif between is not None:
            findings = (between,)
        elif beside is not None and isinstance(trainee, Trainee) and beside.differing:
            explained = partial(_explained, run, number, judged, stepped, *known)
            differing = dataclasses.replace(judged, status="failed") if judged.passed else judged
            judged = unless_raised(
                partial(_of_graph, beside, differing, None if judged.passed else explained, diagnosis)
                if isinstance(beside, Replayed)
                else partial(_of_offload, beside, trainee.journal, differing, diagnosis),
                partial(without_cause, differing),
            )
            findings = judged.findings
        elif stepped.stale:
            findings = (stale_transposes(number, stepped.stale),)
        elif judged.status != "passed":
            judged = unless_raised(
                partial(_explained, run, number, judged, stepped, *known),
                partial(without_cause, judged),
            )
            if switch == "compile" and [one.title for one in judged.findings] == ["state-between-steps"]:
                anew = partial(_is_right_anew, step, prepared, asked, checked)
                tried = () if training.compile else backends(kernels)
                judged = dataclasses.replace(judged, findings=(compiled_otherwise(number, tried, anew),))
            is_unknown = all(one.title == "state-between-steps" for one in judged.findings)
            if scaled is not None and is_unknown:
                judged = dataclasses.replace(judged, findings=(scaled,))
            elif is_unknown and number == 1 and trainee.is_plain and isinstance(trainee, TraineeOverRanks):
                judged = dataclasses.replace(judged, findings=(trainee.unexplained(judged, prepared),))
            findings = judged.findings
            if number > 1 and {one.title for one in findings} == {"precision-overflows"}:
                why = f"a faithful {precision.name} computation of the step overflows"
                return _diverged(asked, checked, run, number, why)
        elif scaled is not None:
            findings = (scaled,)
        elif wrong := _of_optimizer(run, replay, stepped, trainee, prepared, precision):
            findings = (wrong,)
        if judged.status != "passed" or findings:
            return _result(asked, run, "failed" if judged.status == "passed" else judged.status, judged, findings)
        run.weights, run.amaxes = weights, prepared.past.after_step()
        _add(run.gradients, stepped)
    if switch == "offload" and not training.offload and isinstance(trainee, Trainee) and not trainee.journal.offloaded:
        return asked.result("skipped", reason=_NOT_OFFLOADED)
    return _result(asked, run, "passed", judged, ())


def _new_trainee(resuming: ExitStack, *of: Any) -> Trainee:
    """Return a new candidate, with TE's state as a new process has it until ``resuming`` is left."""
    resuming.enter_context(fresh_quantization())
    return Trainee(*of)


def _too_large(what: str, tensors: Iterable[Tensor], dtype: torch.dtype) -> str:
    """Say of tensors that one is not finite, or larger than any number of a dtype; an empty text if none is."""
    limit = torch.finfo(dtype).max
    largest = max((float(x.abs().max()) for x in tensors if x.numel()), key=lambda one: math.inf if one != one else one)
    if largest <= limit:
        return ""
    name = str(dtype).removeprefix("torch.")
    return f"{what} reach {largest:.2g}, and the largest number of {name} is {limit:.2g}"


def _diverged(asked: Asked, checked: CheckedSize, run: _Run, number: int, why: str) -> Result:
    """Return the verdict on a training of which no further step can be judged."""
    own: list[float] | None = None
    with suppress(NothingToJudge):
        at = checked, asked.precision, asked.seed, asked.kernels
        own = of_reference(asked.case, *at, number).losses
    return asked.result(
        "failed",
        reason=f"step {number} is the first that cannot be judged",
        tensors=thinned(list(run.worst.values())),
        findings=(diverging(number, why, own),),
        notes=tuple(run.notes),
        steps=tuple(run.steps),
    )


def _is_right_anew(step: Case, prepared: Prepared, asked: Asked, checked: CheckedSize, backend: str) -> bool:
    """Return whether a new candidate makes a step right if a backend compiles it, or the pair where that is empty."""
    at = checked, asked.precision, asked.seed, asked.kernels
    with fresh_caches(), fresh_quantization(), compiled_anew():
        trainee = Trainee(asked.case, checked, prepared, *at[1:], "compile", backend)
        trainee.settle()
        stepped = trainee.step(prepared)
    made = CandidateRun(stepped.tensors, stepped.unreached, summed=stepped.summed)
    return judge_at(step, *at, asked.calibration, asked.attention, made=made).result.status == "passed"


def _replay(prepared: Prepared, training: Training, setting: Setting | None = None) -> Replay:
    edit = setting.edit if setting else (lambda optimizer: optimizer)
    return Replay(prepared.reference, reference_optimizer(training), training.scheduler, edit)


def _fused(prepared: Prepared) -> dict[str, tuple[str, ...]]:
    """Return the candidate's parameters that hold several of the reference's, with the names of these."""
    sides = ((list(names(right)), tuple(names(left))) for left, right in prepared.weights.items())
    return {own[0]: held for own, held in sides if len(own) == 1 < len(held)}


def _multiplied(prepared: Prepared) -> dict[tuple[str, bool], float]:
    """Return the largest magnitude of what each of the candidate's weights is multiplied by, as the reference has it;
    by the weight's name, and by whether that is a gradient.
    """
    found: dict[tuple[str, bool], float] = {}
    for left, right in prepared.weights.items():
        for name, own in itertools.product(names(left), names(right)):
            for is_gradient in (False, True):
                amax = prepared.past.multiplied.get((name, is_gradient))
                if amax is not None:
                    found[own, is_gradient] = max(float(amax), found.get((own, is_gradient), 0.0))
    return found


def _note(run: _Run, number: int, judged: Result, prepared: Prepared, stepped: Stepped) -> None:
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
    run.steps.append(Step(number, loss, golden, judged.margin))


def _add(total: Named, stepped: Stepped) -> None:
    for (kind, name), x in stepped.tensors.items():
        if kind == "weight gradient":
            total[name] = total[name] + x if name in total else x.float()


def _explained(
    run: _Run,
    number: int,
    judged: Result,
    stepped: Stepped,
    prepared: Prepared,
    asked: Asked,
    checked: CheckedSize,
    is_plain: bool,
    diagnosis: float | None,
) -> Result:
    """Return the verdict on a step whose loss or gradients are wrong, with what makes them so."""
    if judged.status != "failed" or diagnosis is None:
        return judged
    candidate = {name: x for (kind, name), x in stepped.tensors.items() if kind == "weight gradient"}
    golden = prepared.golden.weight_gradients
    precision, seed, kernels = asked.precision, asked.seed, asked.kernels

    def golden_of(number: int, weights: Named | None) -> Mapping[str, Tensor]:
        other = step_case(asked.case, number, weights, seed)
        return prepare(other, checked, precision.dtype, seed, kernels).golden.weight_gradients

    factor = scale_of(candidate, golden)
    guesses = [
        Guess("", "", "", lambda: golden),  # the loss alone is wrong
        Guess(
            "stale-gradient",
            f"in step {number} the optimizer gets no gradients",
            "call backward before the optimizer's step",
            lambda: {name: torch.zeros_like(x) for name, x in golden.items()},
        ),
        Guess(
            "loss-scale",
            f"the loss that step {number} differentiates is {factor_in_words(factor)} times the reference's",
            "divide the loss by what it is averaged over once, whatever the number of micro-batches, and undo a loss "
            "scale before the gradients are used",
            lambda: {name: factor * x for name, x in golden.items()},
        ),
    ]
    factors = {name: scale_of({name: candidate[name]}, {name: x}) for name, x in golden.items()}
    if scaled := some_scaled(number, factors, run.limits, golden):
        guesses.append(
            Guess(
                "gradient-scale",
                scaled,
                "look for code that scales, zeroes or reduces these gradients by themselves, such as a hook or a "
                "norm of each, and for parameters that no gradient reaches",
                lambda: {name: factors[name] * x for name, x in golden.items()},
            )
        )
    largest = max((float(x.abs().max()) for x in candidate.values() if x.numel()), default=0.0)
    if any(bool((x.abs() > largest).any()) for x in golden.values()):
        guesses.append(
            Guess(
                "gradient-clipping",
                f"in step {number} each element of the gradients is clipped to {largest:.2g}, which the reference does "
                "not do",
                "clip by the norm of all gradients, with nn.utils.clip_grad_norm_ in place of clip_grad_value_",
                lambda: {name: x.clamp(-largest, largest) for name, x in golden.items()},
                keeps_errors=True,
            )
        )
    if number > 1:
        sums = run.gradients
        guesses += [
            Guess(
                "gradient-not-zeroed",
                f"the gradients of step {number} are the sum of its own and those of the steps before",
                "set gradients to zero in each step, including main_grad if TE adds to it",
                lambda: {name: x + sums[name].to(x) for name, x in golden.items()},
            ),
            Guess(
                "stale-weights",
                f"the gradients of step {number} are those of the weights before the last update",
                "update every copy of the weights after each step, such as FP8 weights that is_first_microbatch=False "
                "keeps, FP32 master weights that are not copied back, or those of a graph",
                lambda: golden_of(number, run.weights),
            ),
            Guess(
                "weight-cache-stale",
                f"the gradients of step {number} are those of the weight matrices before the last update, of which FP8 "
                "copies are kept",
                "call the module with is_first_microbatch=True, or None, once after each update",
                lambda: golden_of(number, {**prepared_weights(prepared), **_matrices(run.weights or {})}),
            ),
            Guess(
                "stale-gradient",
                f"the gradients of step {number} are those of the step before",
                "call backward before the optimizer's step, and make one step for each batch",
                lambda: golden_of(number - 1, run.weights),
            ),
            Guess(
                "stale-batch",
                f"the gradients of step {number} are those of the batch before",
                "copy each batch into the buffers that a graph or a loader reads",
                lambda: golden_of(number - 1, prepared_weights(prepared)),
            ),
        ]
    at = (checked, precision, seed, kernels, asked.calibration, asked.attention)
    held = {name: x for name, x in prepared.candidate_weights.items() if is_quantized(x)}
    weights = prepared_weights(prepared) if held or number > 1 else None
    alone = judge_at(step_case(asked.case, number, weights, seed, held), *at)
    if alone.result.status != "passed":
        told = explain_at(alone, diagnosis)
        return dataclasses.replace(judged, findings=told.findings, notes=(*judged.notes, *told.notes))
    worst = f", first {judged.worst.label}" if judged.worst else ""
    found = gradients_explained(run.limits, candidate, guesses)
    if found is None and (made := shares_made(prepared, stepped.calls, candidate)):
        found = micro_batches_explained(number, run.limits, made)
    if found is None and number == 1 and not is_plain:
        found = repairable(
            "state-between-steps",
            f"one pass of a new module with the same weights is right, but the gradients of the pair's training step "
            f"are not{worst}",
            "look at what that step does besides one pass, such as micro-batches, or gradients that it changes",
        )
    found = found or repairable(
        "state-between-steps",
        f"a new module with the same weights computes step {number} correctly, but the trained module does not{worst}",
        "look at what earlier steps have left in the module, such as FP8 scales, cached weights and buffers, and at "
        "what your training step does besides one pass",
    )
    return dataclasses.replace(judged, findings=(found,))


def _of_graph(
    replayed: Replayed, judged: Result, explained: Callable[[], Result] | None, diagnosis: float | None
) -> Result:
    """Return the verdict with what makes a step of a graph another than without one: something that the graph keeps,
    else a mistake that any training may have, such as FP8 weights that are cached.
    """
    if diagnosis is None:
        return judged
    if found := replay_explained(replayed):
        return dataclasses.replace(judged, findings=(found,))
    frozen, is_named = replay_frozen(replayed)
    told = explained().findings if explained else ()
    if not told or told[0].title == "state-between-steps":
        return dataclasses.replace(judged, findings=(frozen,))
    return dataclasses.replace(judged, findings=(frozen, *told) if is_named else told)


def _of_offload(beside: Beside, journal: Journal, judged: Result, diagnosis: float | None) -> Result:
    """Return the verdict with what makes a step with offloading another than without."""
    if diagnosis is None:
        return judged
    return dataclasses.replace(judged, findings=(offload_explained(beside, journal),))


def prepared_weights(prepared: Prepared) -> Named:
    """Return the reference's weights of a prepared step."""
    return {name: parameter.detach().clone() for name, parameter in prepared.reference.named_parameters()}


def _matrices(weights: Named) -> Named:
    return {name: x for name, x in weights.items() if x.dim() > 1}


def _of_optimizer(
    run: _Run,
    replay: Replay,
    stepped: Stepped,
    trainee: Trainee | TraineeOverRanks,
    prepared: Prepared,
    precision: Precision,
) -> Finding | None:
    """Return why the optimizer's step is not the reference's; None if it is."""
    training = trainee.training
    expected = 1.0 if training.clip is None else _clipping(training.clip, stepped)
    if abs(stepped.clipped - expected) > _CLIPPING * expected:
        return repairable(
            "gradient-clipping",
            f"gradients are multiplied by {stepped.clipped:.4g} before the optimizer gets them, but the reference "
            f"multiplies them by {expected:.4g}",
            "clip to the same largest norm, and take the norm of the same gradients",
        )
    run.is_narrow = run.is_narrow and holds(precision.dtype, stepped.update)
    dtype = precision.dtype if run.is_narrow else torch.float32
    right = replay.step(stepped.update)
    made = deviations(stepped.update, right, dtype)
    wrong = [one for one in made if not one.is_right]
    if wrong and isinstance(trainee, TraineeOverRanks):
        apart = trainee.of_shards({one.name: not_as(stepped.update, right, one.name, dtype) for one in wrong})
        if apart is not None:
            return apart
    if wrong:
        return optimizer_explained(
            run.history,
            wrong,
            lambda setting: _replay(prepared, training, setting),
            dtype,
            trainee.settings,
            _fused(prepared),
        )
    if stepped.apart:
        return repairable(
            "master-weights",
            f"after step {len(run.history)} the module does not hold the weights that its optimizer computed: "
            f"{listed(stepped.apart)} {'is' if len(stepped.apart) == 1 else 'are'} not the rounded FP32 master weights",
            "copy the master weights to the module after each step, and let nothing else write to its weights, such as "
            "an average of them",
        )
    if dtype is not torch.float32 and any(one.rounding > 0.5 for one in made):
        return repairable(
            "master-weights",
            f"there are weights only in {str(dtype).removeprefix('torch.')}, which loses most of a step that is "
            "smaller than half the distance between two of its numbers",
            "keep FP32 master weights, as te.optimizers.FusedAdam(..., master_weights=True) does",
            Code(then=("master_weights=True",)),
        )
    return None


def _clipping(largest: float, stepped: Stepped) -> float:
    """Return by what clipping to the largest norm multiplies the candidate's gradients."""
    gradients = (x.double() for (kind, _), x in stepped.tensors.items() if kind == "weight gradient")
    norm = sum(float(x.square().sum()) for x in gradients) ** 0.5
    return min(1.0, largest / (norm + 1e-6))


def _result(asked: Asked, run: _Run, status: Any, judged: Result, findings: tuple[Finding, ...]) -> Result:
    tensors = thinned(list(run.worst.values()))
    reason = judged.reason
    if status == "failed":
        reason = f"step {len(run.steps)} is the first that is not right"
    return asked.result(
        status,
        reason=reason,
        tensors=tensors,
        findings=findings,
        notes=(*run.notes, *judged.notes),
        steps=tuple(run.steps),
    )
