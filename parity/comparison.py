"""Runs one case at one precision: the only place where the flow from a case to its result is written down."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from torch import nn

from parity import te
from parity.attention_backend import AttentionBackend, NotOffered, attention_backends
from parity.calibration.table import Table, packaged
from parity.case import Case, Pair, as_case
from parity.conditioning import ill_conditioned
from parity.determinism import RandomState, repeat
from parity.device_errors import classify
from parity.diagnosis import UNEXPLAINED, Failure, findings
from parity.directions import Direction, directions
from parity.directions import findings as mistakes
from parity.execute import Pass
from parity.judge import judge
from parity.judgeable import LOSES_ALL, answerable, gradients_missed, proves_nothing, remarks
from parity.passes import Tensors, golden_tensors, run_candidate, run_model
from parity.precision import PRECISIONS, Precision, why_unavailable
from parity.prepare import prepare
from parity.result import PROBED, Determinism, Finding, Result, TensorResult
from parity.rounding import FUSED, UNFUSED
from parity.second_look import remark, second_look
from parity.te import Backend, Kernels
from parity.user_error import UserError
from parity.validate import CheckedSize, attention_of, check_case


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
        UserError: if the pair's weight map or inputs do not fit, or a precision or attention backend is unknown.
        parity.te.BackendUnavailable: if the backend cannot be had on this machine.
    """
    case = as_case(pair)
    unknown = [name for name in precisions if name not in PRECISIONS]
    if unknown:
        raise UserError(f"unknown precision {unknown[0]!r}; there are {', '.join(PRECISIONS)}")
    kernels = te.kernels(backend)
    chosen = [PRECISIONS[name] for name in precisions if case.precisions is None or name in case.precisions]
    seeds = list(seeds)
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
    ran: Iterable[str] = ()
    repeated: Determinism | None = None

    def result(**fields: object) -> Result:
        return Result(
            case=case.name,
            precision=precision.name,
            size=dict(checked.size),
            size_label=checked.label,
            seed=seed,
            backend=kernels.backend,
            seconds=time.perf_counter() - began,
            path=str(case.path),
            attention=", ".join(ran),
            forced_attention=attention or "",
            determinism=repeated,
            **fields,  # type: ignore[arg-type]
        )

    def rerun(change: Callable[[nn.Module], None]) -> Tensors:
        with attention_backends(attention):
            return run_candidate(case, checked, prepared, precision, seed, kernels, change)[0]

    unavailable = why_unavailable(precision, kernels)
    if unavailable is not None:
        return result(status="skipped", reason=unavailable)
    step = "the reference in FP64"
    try:
        prepared = prepare(case, checked, precision.dtype, seed, kernels)
        # What an earlier precision left counts as well: how long a search may take is no matter of which came first.
        began_on_processor = time.process_time() - sum(prepared.spent.values())
        step = f"the reference under the rounding model of {precision.name}"
        models = [run_model(prepared, precision.rounding, freedom) for freedom in (FUSED, UNFUSED)]
        step = "the candidate"
        random_state = RandomState.now(kernels.device) if determinism else None
        with attention_backends(attention) as ran:
            candidate, unreached = run_candidate(case, checked, prepared, precision, seed, kernels)
        if random_state is not None:
            repeated = repeat(rerun, candidate, random_state, kernels.device)
    except NotOffered as error:
        return result(status="skipped", reason=str(error))
    except UserError as error:
        return result(status="error", reason=str(error))
    except Exception as error:
        prepare.cache_clear()
        run_model.cache_clear()
        reason = f"{step} raised {type(error).__name__}: {error}"
        return result(status="error", reason=reason, device_error=classify(error))
    golden, known = answerable(golden_tensors(prepared), models), directions(prepared)

    def judge_by(modelled: Sequence[Tensors]) -> tuple[TensorResult, ...]:
        return judge(golden, modelled, candidate, precision, calibration, known)

    first_look = judge_by(models)
    tensors = second_look(first_look, models, judge_by, prepared, precision.rounding)
    notes: tuple[str, ...] = () if tensors is first_look else (remark(first_look),)
    notes += remarks(
        tensors,
        golden,
        candidate,
        prepared.reference,
        prepared.golden.not_compared,
        precision.dtype,
        precision.recipe,
    )
    if all(tensor.passed for tensor in tensors):
        if proves_nothing(tensors):
            return result(status="error", reason=f"a faithful {precision.name} computation {LOSES_ALL}", notes=notes)
        return result(status="passed", tensors=tensors, notes=notes)
    failure = Failure(
        tensors,
        candidate,
        prepared,
        precision,
        time.process_time() - began_on_processor,
        judge=lambda truth, modelled: judge(truth, modelled, candidate, precision, calibration, ()),
        rerun=rerun,
    )
    missed = gradients_missed(unreached, prepared.weights, prepared.reference)
    try:
        explained = _explained(failure, missed, known)
    except Exception as error:  # the comparison stands, whatever becomes of its explanation
        notes = (*notes, f"the search for the cause raised {type(error).__name__}: {error}")
        return result(status="failed", tensors=tensors, notes=notes, device_error=classify(error))
    return result(status="failed", tensors=tensors, findings=explained, notes=notes)


def _explained(failure: Failure, unreached: Sequence[str], known: Sequence[Direction]) -> tuple[Finding, ...]:
    """The findings of the inputs as they were drawn, or, where they show nothing wrong, of the probing ones."""
    shaky = ill_conditioned([tensor for tensor in failure.results if not tensor.passed], failure.prepared)
    if shaky is not None:
        return (shaky,)
    drawn = [tensor for tensor in failure.results if not tensor.probed]
    if all(tensor.passed for tensor in drawn):
        return findings(_on_probe(failure))
    found = findings(dataclasses.replace(failure, results=drawn), unreached)
    if all(finding.code in UNEXPLAINED for finding in found):
        return tuple(mistakes(drawn, known)) or found
    return found


def _on_probe(failure: Failure) -> Failure:
    """The same failure as the probing inputs show it: their outputs in the place of the others."""
    prepared = failure.prepared
    probed = dataclasses.replace(prepared, inputs=prepared.probe, golden=Pass(prepared.probed, {}, {}, ()))
    return dataclasses.replace(
        failure,
        results=_as_outputs([tensor for tensor in failure.results if tensor.probed]),
        candidate={("output", name): tensor for (kind, name), tensor in failure.candidate.items() if kind == PROBED},
        prepared=probed,
        judge=lambda truth, models: _as_outputs(failure.judge(_as_probed(truth), [_as_probed(m) for m in models])),
        rerun=None,
    )


def _as_outputs(probed: Sequence[TensorResult]) -> list[TensorResult]:
    return [dataclasses.replace(tensor, kind="output") for tensor in probed]


def _as_probed(tensors: Tensors) -> Tensors:
    return {(PROBED, name): tensor for (kind, name), tensor in tensors.items() if kind == "output"}
