"""Runs one case at one precision: the only place where the flow from a case to its result is written down."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from parity import te
from parity.apart import gradients_of, is_explained, merged, parts, parts_known
from parity.arguments import check_kinds, checked_precisions, checked_seeds
from parity.build import part_that_raised
from parity.case import Case, Pair, as_case
from parity.declaring.validate import CheckedSize, attention_of, check_case
from parity.device_errors import classify
from parity.diagnosis import Failure, Rerun
from parity.execute import CALL, Pass
from parity.judgeable import LOOKS_UP_ELSE, LOSES_ALL, answerable, gradients_missed, proves_nothing, remarks
from parity.judging.determinism import repeat
from parity.judging.directions import Direction, directions
from parity.judging.explanation import explain
from parity.judging.judge import NONE_DRAWN, Drawn, judge
from parity.judging.norm_roundings import made_by_port_alone
from parity.judging.second_look import choosing_alike, remark, second_look
from parity.limits.table import Table, packaged
from parity.modes import usual_modes
from parity.passes import Tensors, as_returned, golden_truths, model_tensors, rounding_chooses, run_candidate, run_model
from parity.precision import PRECISIONS, Precision, why_unavailable
from parity.prepare import Prepared, forget, prepare, release
from parity.result import PROBED, Determinism, Result, Status, TensorResult
from parity.rounding.choices import choices_seen
from parity.rounding.freedom import FUSED, UNFUSED, Port
from parity.rounding.plain_calls import plain_calls
from parity.rounding.steps import steps_seen, together
from parity.te import Backend, Kernels
from parity.te_state.attention_backend import AttentionBackend, NotOffered, attention_backends, checked_choice
from parity.te_state.own_recipes import own_recipes
from parity.truth import Truth
from parity.user_error import INTERRUPTS, UserError
from parity.watching import detached_outputs, side_effects
from parity.watching.raised import first_paragraph, submodule, users_line, way_there
from parity.watching.random_state import RandomState
from parity.watching.te_calls import WITHOUT_TE, te_calls


def compare(
    pair: Case | Pair,
    precisions: Sequence[str] = tuple(PRECISIONS),
    seeds: Iterable[int] = (0,),
    backend: Backend | Literal["auto"] = "auto",
    calibration: Table | None = None,
    attention: str = "auto",
    determinism: bool = False,
) -> list[Result]:
    """Compare a pair at each of its sizes, precisions and seeds, without pytest.

    Args:
        pair: what ``@parity.pair`` made of a function, or a ``parity.Pair`` of modules that hold their weights already.
        precisions: names from ``parity.precision.PRECISIONS``.
        seeds: of weights, inputs and output gradients.
        backend: ``gpu``, ``cpu``, or ``auto`` for TE's real kernels where they can run.
        calibration: what faithful ports show, from ``parity calibrate``; the packaged table by default.
        attention: the attention backend that TE is to take: ``flash``, ``fused``, ``unfused``, ``all`` for each in
            turn, or ``auto`` for what the pair demands, else TE's own choice.
        determinism: whether the candidate runs again, to see whether it gives the same bytes.

    Returns:
        One result for each size, precision, attention backend and seed, in this order.

    Raises:
        UserError: if an argument is not as above, or the pair's weight map or inputs do not fit.
        parity.te.BackendUnavailable: if the backend cannot be had on this machine.
    """
    case = as_case(pair)
    chosen = [PRECISIONS[name] for name in checked_precisions(precisions) if case.runs_at(name)]
    seeds = checked_seeds(seeds)
    checked_choice(attention)
    check_kinds(backend, calibration, determinism)
    kernels = te.kernels(backend)
    return [
        compare_at(case, checked, precision, seed, kernels, calibration or packaged(), forced, determinism)
        for checked in check_case(case, kernels.te)
        for precision in chosen
        for forced in attention_of(case, checked, attention)
        for seed in seeds
    ]


def compare_at(
    case: Case,
    checked: CheckedSize,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    calibration: Table,
    attention: AttentionBackend | None = None,
    determinism: bool = False,
) -> Result:
    """Compare a case at one size, precision and seed.

    Never raises for a module that fails: the result's status and reason tell.
    """
    began = time.perf_counter()
    asked = _Asked(case, checked, precision, seed, kernels, calibration, attention, determinism)
    with usual_modes():
        return dataclasses.replace(_compared_in_parts(asked), seconds=time.perf_counter() - began)


@dataclass(frozen=True, eq=False)
class _Asked:
    """What ``compare_at`` is asked for, by the same names; and whether the cause of a failure is looked for."""

    case: Case
    checked: CheckedSize
    precision: Precision
    seed: int
    kernels: Kernels
    calibration: Table
    attention: AttentionBackend | None
    determinism: bool
    explains: bool = True

    def result(self, status: Status, **fields: Any) -> Result:
        return Result(
            case=self.case.name,
            precision=self.precision.name,
            size=dict(self.checked.size),
            size_label=self.checked.label,
            seed=self.seed,
            backend=self.kernels.backend,
            path=str(self.case.path),
            forced_attention=self.attention or "",
            status=status,
            **fields,
        )


@dataclass(frozen=True, eq=False)
class _Ran:
    """What a comparison computes before it judges.

    Attributes:
        prepared: golden and what all passes share.
        known: directions of the mistakes that could be made.
        models: the rounding model's tensors, for each way in which faithful kernels compute.
        candidate: its tensors, in the reference's layout.
        unreached: TE's parameters that no gradient reached.
        draws: whether it drew random numbers.
        rerun: the candidate once more.
        attention: the attention backends that TE ran.
        determinism: whether the candidate gives the same bytes twice; None if it was not asked for.
        seconds: of processor time that a comparison takes that finds nothing cached.
        changed_inputs: names of the inputs that the candidate changes in place.
        detached_outputs: of its outputs that require no gradient.
        calls_te: whether the candidate uses TE at all.
    """

    prepared: Prepared
    known: tuple[Direction, ...]
    models: list[Tensors]
    candidate: Tensors
    unreached: tuple[str, ...]
    draws: bool
    rerun: Rerun
    attention: str
    determinism: Determinism | None
    seconds: float
    changed_inputs: tuple[str, ...]
    detached_outputs: tuple[str, ...]
    calls_te: bool

    @property
    def unlike(self) -> str:
        """Why a candidate whose numbers are right is none in the reference's place; empty where it is."""
        golden = self.prepared.golden
        return side_effects.by_candidate_alone(
            golden.changed_inputs, self.changed_inputs
        ) or detached_outputs.by_candidate_alone(golden.detached_outputs, self.detached_outputs)


class _PassRaised(Exception):
    """A part of the pair raised; the text says which, what, and where, the cause is its error."""


def _compared_in_parts(asked: _Asked) -> Result:
    """As ``_compared``, once for each part of the outputs; as a whole as well where a part cannot be compared.

    What explains the larger outputs' failure must explain the numbers beside them, so a cause is looked for in the
    whole first; one of a number alone, or one that the whole does not tell, in what failed of the parts.
    """
    cases = _parts(asked)
    if len(cases) == 1:
        return _compared(dataclasses.replace(asked, case=cases[0]))
    parts = [dataclasses.replace(asked, case=case, explains=False) for case in cases]
    results = [_compared(part) for part in parts]
    if any(result.status == "error" for result in results):
        return merged([_compared(asked), *(result for result in results if result.status != "error")])
    if results[-1].status == "failed":
        whole = _compared(asked)
        if is_explained(whole):
            return dataclasses.replace(merged(results), findings=whole.findings)
    return merged(
        [
            _compared(dataclasses.replace(part, explains=True)) if result.status == "failed" else result
            for part, result in zip(parts, results, strict=True)
        ]
    )


def _parts(asked: _Asked) -> list[Case]:
    case, checked, precision, seed, kernels = asked.case, asked.checked, asked.precision, asked.seed, asked.kernels
    known = parts_known(case, checked)
    if known is None and why_unavailable(precision, kernels) is None:
        try:
            outputs = prepare(case, checked, precision.dtype, seed, kernels).golden
        except Exception:  # of which the comparison tells
            return [case]
        known = parts(case, checked, outputs)
        if len(known) > 1:
            release(case, checked, precision.dtype, seed, kernels)
    return known or [case]


def _compared(asked: _Asked) -> Result:
    unavailable = why_unavailable(asked.precision, asked.kernels)
    if unavailable is not None:
        return asked.result("skipped", reason=unavailable)
    try:
        ran = _run(asked)
    except NotOffered as error:
        return asked.result("skipped", reason=str(error))
    except UserError as error:
        return asked.result("error", reason=str(error))
    except _PassRaised as error:
        forget()  # the pass may have left the reference half changed
        cause = error.__cause__ or error
        return asked.result("error", reason=str(error), traceback=way_there(cause), device_error=classify(cause))
    try:
        judged = _judged(asked, ran)
    except UserError as error:  # the table has no law for it
        judged = asked.result("error", reason=str(error))
    return dataclasses.replace(judged, attention=ran.attention, determinism=ran.determinism)


def _run(asked: _Asked) -> _Ran:
    """Every pass.

    Raises:
        NotOffered: if TE does not offer the attention backend that is asked for.
        UserError: if the pair does not fit together, or nothing could be judged.
        _PassRaised: if one of its modules raises.
    """
    case, checked, precision, seed, kernels = asked.case, asked.checked, asked.precision, asked.seed, asked.kernels
    with _step("the reference in FP64"):
        prepared = prepare(case, checked, precision.dtype, seed, kernels)
    known = directions(prepared)  # before other passes, since golden's calls take memory until then
    # What an earlier precision left counts as well: how long a search may take is no matter of which came first.
    began = time.process_time() - sum(prepared.spent.values())

    def rerun(change: Callable[[nn.Module], None], cotangents: Mapping[str, Tensor] | None = None) -> Tensors:
        given = prepared if cotangents is None else dataclasses.replace(prepared, cotangents=dict(cotangents))
        with attention_backends(asked.attention):
            return run_candidate(case, checked, given, precision, seed, kernels, change)[0]

    with _step("the candidate"):
        before = RandomState.now(kernels.device)
        ran: list[Pass] = []
        watched = nullcontext([str(kernels.te)]) if checked.has_te else te_calls(CALL)
        with attention_backends(asked.attention) as seen, watched as te_called:
            candidate, unreached = run_candidate(case, checked, prepared, precision, seed, kernels, seen=ran.append)
        draws = not RandomState.now(kernels.device).is_as(before)
        repeated = repeat(rerun, candidate, before, kernels.device) if asked.determinism else None
    prepared = as_returned(prepared, candidate)
    with _step(f"the reference under the rounding model of {precision.name}"):
        models = [model_tensors(prepared, precision.rounding, freedom) for freedom in (FUSED, UNFUSED)]
    seconds = time.process_time() - began
    return _Ran(
        *(prepared, known, models, candidate, unreached, draws, rerun, ", ".join(seen), repeated, seconds),
        changed_inputs=ran[0].changed_inputs,
        detached_outputs=ran[0].detached_outputs,
        calls_te=bool(te_called),
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
    """What to do about shapes that TE's FP8 kernels do not take (``pytorch/utils.py`` of 2.20.2); else empty."""
    if "FP8 execution requires" not in str(error):
        return ""
    return "pad the tokens, give a size that fits, or leave FP8 out for this pair: precisions=[...] in @parity.pair"


def _seen_of_port(ran: _Ran, precision: Precision) -> Port:
    """What the candidate rounds outside of TE's modules, and chooses."""
    with (
        own_recipes(precision.recipe is not None) as recipes,
        steps_seen(precision.dtype) as steps,
        choices_seen() as chosen,
        plain_calls(precision.dtype) as names,  # last: it asks whose code is around them
    ):
        ran.rerun(lambda module: None)
    choices = chosen.of_port(bool(ran.prepared.probed))
    return Port(tuple(sorted(names)), together(steps), choices, tuple(dict.fromkeys(recipes)))


@dataclass(frozen=True)
class _Verdicts:
    """On every tensor, after a second look where one was needed.

    Attributes:
        tensors: the verdicts.
        port: what the port was seen to do by itself, as far as it counts.
        remarks: what the verdicts owe to that.
    """

    tensors: tuple[TensorResult, ...]
    port: Port
    remarks: tuple[str, ...]


def _verdicts(asked: _Asked, ran: _Ran) -> _Verdicts:
    prepared, precision, known = ran.prepared, asked.precision, ran.known
    truths = golden_truths(prepared)

    def judge_by(modelled: Sequence[Tensors], drawn: Drawn = NONE_DRAWN) -> tuple[TensorResult, ...]:
        golden = answerable(truths, modelled, ran.candidate)
        judged = judge(golden, modelled, ran.candidate, precision, asked.calibration, known, drawn)
        return gradients_of(asked.case, judged)

    first_look, models, port = judge_by(ran.models), ran.models, Port()
    passed = all(tensor.passed for tensor in first_look)
    if not passed or rounding_chooses(prepared, precision.rounding):
        port = _seen_of_port(ran, precision)
        if port.steps is not None and not passed:
            models = [run_model(prepared, precision.rounding, one) for one in Port(steps=port.steps).freedoms]
            first_look = judge_by(models)
    alike = first_look
    if port.choices.compared:
        models = choosing_alike(prepared, precision.rounding, port)
        alike = judge_by(models)
    tensors = second_look(alike, models, judge_by, prepared, precision.rounding, port)
    if tensors is not alike and made_by_port_alone(alike, prepared, known, precision.dtype):
        tensors, port = alike, dataclasses.replace(port, plain=())
    owed = remark(first_look, tensors), port.steps.remark if port.steps else ""
    return _Verdicts(tensors, port, tuple(filter(None, owed)))


def _judged(asked: _Asked, ran: _Ran) -> Result:
    began, prepared, precision = time.process_time(), ran.prepared, asked.precision
    verdicts = _verdicts(asked, ran)
    tensors = verdicts.tensors
    changed = prepared.golden.changed_inputs, ran.changed_inputs
    not_compared = prepared.golden.not_compared
    notes = verdicts.remarks
    notes += tuple(remarks(tensors, ran.candidate, prepared.reference, not_compared, precision.dtype, precision.recipe))
    if prepared.probed and not any(kind == PROBED for kind, _ in ran.candidate):
        notes += (LOOKS_UP_ELSE,)
    notes += tuple(filter(None, [side_effects.by_reference_alone(*changed), "" if ran.calls_te else WITHOUT_TE]))
    # A part that is detached has no gradients at all, which is told of the whole.
    detached = asked.case.part_of is not None and ran.detached_outputs == asked.case.outputs
    if all(tensor.passed or (detached and tensor.of) for tensor in tensors):
        if proves_nothing(tensors):
            reason = f"a faithful {precision.name} computation {LOSES_ALL}"
            return asked.result("error", reason=reason, notes=notes)
        if ran.unlike:
            return asked.result("error", reason=ran.unlike, notes=notes)
        return asked.result("passed", tensors=tensors, notes=notes)
    notes += tuple(filter(None, [ran.unlike]))
    if not asked.explains:
        return asked.result("failed", tensors=tensors, notes=notes)
    return _explained(asked, ran, verdicts, notes, ran.seconds + time.process_time() - began)


def _explained(asked: _Asked, ran: _Ran, verdicts: _Verdicts, notes: tuple[str, ...], seconds: float) -> Result:
    """A failure with its findings; ``seconds`` is what the comparison took, which bounds the search for them."""
    prepared, precision, tensors = ran.prepared, asked.precision, verdicts.tensors

    def judge_by(
        golden: Tensors, models: Sequence[Tensors], candidate: Tensors | None = None
    ) -> tuple[TensorResult, ...]:
        truths = {key: Truth(tensor) for key, tensor in golden.items()}
        judged = judge(truths, models, candidate or ran.candidate, precision, asked.calibration, ())
        return gradients_of(asked.case, judged)

    failure = Failure(
        tensors,
        ran.candidate,
        prepared,
        precision,
        seconds,
        judge=judge_by,
        rerun=ran.rerun,
        draws=ran.draws,
        freedoms=verdicts.port.freedoms,
        own_recipes=verdicts.port.recipes,
    )
    missed = gradients_missed(ran.unreached, prepared.weights, prepared.golden.weight_gradients)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of references that were made wrong on purpose
            explained = explain(failure, missed, ran.known)
    except Exception as error:  # the comparison stands, whatever becomes of its explanation
        notes += (f"the search for the cause raised {type(error).__name__}: {error}",)
        return asked.result("failed", tensors=tensors, notes=notes, device_error=classify(error))
    return asked.result("failed", tensors=tensors, findings=explained, notes=notes)
