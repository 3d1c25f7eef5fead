"""Compare a candidate that several ranks compute together: the reference runs once as a whole, each rank runs its part.

The whole candidate is also built in this process, so that the pair's weight map, its inputs and the rounding model are
the same as in any comparison. The ranks' tensors are put together and judged like those of one pass.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.case import transfer
from parity.case.case import Case, mixed
from parity.case.validate import CheckedSize
from parity.comparison import (
    Comparison,
    catching,
    error_result,
    explain_at,
    judge_at,
    with_side_effect_notes,
    without_cause,
)
from parity.judge.limits import Table
from parity.judge.request import CandidateRun, Request
from parity.mistakes.codes import repairable
from parity.numerics.golden import in_fp64
from parity.passes.all_passes import Tensors
from parity.passes.modes import usual_modes
from parity.passes.one_pass import named_inputs, outputs_of, run, with_inputs
from parity.passes.prepare import Prepared, cast, prepare
from parity.ranks.launch import RanksFailed
from parity.ranks.layout import Degrees, GatheredTensor
from parity.result import Finding, Result, as_printable, label_of_way
from parity.shown import few_of
from parity.te import Kernels, Precision, why_refused
from parity.te.attention_backend import AttentionBackend
from parity.trace.effects import undisturbed
from parity.trainings.gathered import (
    NO_RANKS,
    TIMEOUT,
    changed_by,
    ended,
    given_of,
    in_reference_layout,
    on_all_ranks,
    put_together,
    replicas_apart,
    unreached_by,
    with_limits,
)
from parity.trainings.on_rank import OnRank, pass_on_rank
from parity.trainings.why_over_ranks import (
    explained_by_inputs,
    explained_by_outputs,
    explained_by_positions,
    explained_over_ranks,
)
from parity.trainings.why_stages import explained_by_stages, remarks_on_dropout, wrong_dropout, wrong_norm


def compare_over_ranks_at(
    case: Case,
    checked: CheckedSize,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    calibration: Table,
    made: Degrees,
    attention: AttentionBackend | None = None,
    diagnosis: float | None = 0.0,
    timeout: float = TIMEOUT,
) -> Result:
    """Compare a case whose candidate is computed by several ranks, and search for the cause if it fails.

    Never raises because a module or a rank fails: the result's status and reason report that.

    Args:
        made: how many ranks there are, by axis.
        diagnosis: seconds of real time for the search for a cause, 0 for no limit; None for no search.
        timeout: seconds after which ranks that have not answered are ended.
    """
    began = time.perf_counter()
    labelled = dataclasses.replace(checked, label=label_of_way(checked.label, ranks=made.label))
    whole = dataclasses.replace(case, probe=False)
    request = Request(whole, labelled, precision, seed, kernels, calibration, attention)
    unavailable = why_refused(precision, kernels)
    if unavailable is None and kernels.backend == "gpu":
        unavailable = NO_RANKS
    if unavailable is not None:
        return dataclasses.replace(request.result("skipped", reason=unavailable), ranks=made.label)
    with usual_modes(), undisturbed(mixed(seed, "everything else")) as disturbed:
        result = catching(
            lambda: _compare_over_ranks(request, case, checked, made, diagnosis, timeout),
            partial(error_result, request),
        )
    result = as_printable(with_side_effect_notes(result, disturbed))
    return dataclasses.replace(result, ranks=made.label, seconds=time.perf_counter() - began)


def _compare_over_ranks(
    request: Request, case: Case, checked: CheckedSize, made: Degrees, diagnosis: float | None, timeout: float
) -> Result:
    precision, seed, kernels = request.precision, request.seed, request.kernels
    prepared = prepare(request.case, checked, precision.dtype, seed, kernels)
    try:
        ran, wholes = _run_over_ranks(case, request, checked, prepared, made, timeout)
    except RanksFailed as error:
        return ended(request, error, made)
    tensors = in_reference_layout(wholes, prepared)
    unreached = unreached_by(ran)
    attention = ", ".join(dict.fromkeys(one.attention for one in ran if one.attention))
    at = (checked, precision, seed, kernels, request.calibration, request.attention)
    run = CandidateRun(tensors, unreached, attention=attention, changed=changed_by(ran), adds_parts=True)
    judged = judge_at(request.case, *at, candidate_run=run)
    result = dataclasses.replace(judged.result, size_label=request.checked.label)
    apart = replicas_apart(wholes)
    if result.status == "passed":
        result = _between_ranks(result, ran, wholes, apart, made, prepared)
    if result.findings:
        return result
    if result.status != "failed" or diagnosis is None:
        return result
    return catching(
        lambda: _explain_failure(result, judged, wholes, apart, ran, made, prepared, request, at, diagnosis),
        partial(without_cause, result),
    )


def _run_over_ranks(
    case: Case, request: Request, checked: CheckedSize, prepared: Prepared, made: Degrees, timeout: float
) -> tuple[list[OnRank], list[GatheredTensor]]:
    ran = on_all_ranks(pass_on_rank, given_of(case, request, checked, prepared, made), made, timeout)
    return ran, put_together(ran, made, prepared)


def tensors_over_ranks(request: Request, prepared: Prepared, made: Degrees) -> Tensors:
    """Return the outputs and gradients of a candidate that several ranks compute, in the reference's layout.

    Raises:
        RanksFailed: if a rank raised, died or did not answer in time.
        UserError: if the pair does not fit on so many ranks.
    """
    _, wholes = _run_over_ranks(request.case, request, request.checked, prepared, made, TIMEOUT)
    return in_reference_layout(wholes, prepared)


def _between_ranks(
    result: Result,
    ran: Sequence[OnRank],
    wholes: Sequence[GatheredTensor],
    apart: Finding | None,
    made: Degrees,
    prepared: Prepared,
) -> Result:
    """Return the result of ranks whose combined tensors are right; failed if the ranks' own numbers are not."""
    checks: list[tuple[str, Finding | None]] = [
        ("ranks do not agree", apart),
        ("the norm of all gradients is wrong", wrong_norm([one.norm for one in ran], wholes, made)),
    ]
    with_dropout = [one.dropped for one in ran if one.dropped is not None]
    if with_dropout:
        if not any(one.drops for one in ran):
            reason = (
                "nothing was dropped, although the pair has parity.Parallel(dropout=True): leave that out, or give the "
                "modules a dropout rate"
            )
            return dataclasses.replace(result, status="error", reason=reason)
        dropped = put_together(with_dropout, made, prepared)
        checks.append(("ranks do not drop what they should", wrong_dropout(ran, dropped, made)))
        result = dataclasses.replace(result, notes=(*result.notes, *remarks_on_dropout(ran, made)))
    for reason, told in checks:
        if told is not None:
            return dataclasses.replace(result, status="failed", reason=reason, findings=(told,))
    return result


def _explain_failure(
    result: Result,
    judged: Comparison,
    wholes: Sequence[GatheredTensor],
    apart: Finding | None,
    ran: Sequence[OnRank],
    made: Degrees,
    prepared: Prepared,
    request: Request,
    at: tuple[Any, ...],
    diagnosis: float,
) -> Result:
    """Return the failed result with findings: about the module if it is wrong in one process, else about the ranks."""
    alone = judge_at(request.case, *at)
    if alone.result.status != "passed":
        told = explain_at(alone, diagnosis)
        notes = (*result.notes, *told.notes, "the candidate is wrong in one process as well")
        return dataclasses.replace(result, findings=told.findings, notes=notes)
    wholes = with_limits(wholes, result, prepared)
    splits = {name: split for one in ran for name, split in one.splits.items()}
    found: tuple[Finding, ...] = ()
    if made.pp > 1:
        own = {
            name: x for (kind, name), x in in_reference_layout(wholes, prepared).items() if kind == "weight gradient"
        }
        found = explained_by_stages(wholes, ran, made, own, prepared, result)
    if not found:
        found = explained_over_ranks(wholes, made, prepared.candidate_weights)
    if not found:
        named = named_inputs(cast(prepared.inputs, torch.float64), prepared.input_names)
        found = explained_by_inputs(wholes, made, splits, named, partial(_reference_on, prepared))
    if not found:
        found = explained_by_positions(wholes, made, splits, prepared)
    if not found:
        found = explained_by_outputs(wholes, partial(_flowing_back_from, prepared))
    if not found and apart is None:  # else no module in one process computes the same
        told = explain_at(judged, diagnosis)
        if told.findings and told.findings[0].title not in ("unexplained", "first-divergence", "gradient-zeroed"):
            notes = (*result.notes, *told.notes, "the candidate is right in one process, but wrong over ranks")
            return dataclasses.replace(result, findings=told.findings, notes=notes)
    if not found:
        wrong = few_of([one.label for one in result.tensors if not one.passed])
        right = few_of([one.label for one in result.tensors if one.passed])
        besides = f"; these are right: {right}" if right else ""
        found = (
            apart
            or repairable(
                "wrong-over-ranks",
                f"the candidate is right in one process, but over {made.count} ranks ({made.label}) it is wrong in "
                f"{wrong}{besides}",
                "check what is split, gathered and reduced in the modules that compute it",
            ),
        )
    return dataclasses.replace(result, findings=found)


def _flowing_back_from(prepared: Prepared, output: str) -> Mapping[tuple[str, str], Tensor]:
    """Return the reference's gradients of one output alone, in FP64, by kind and the candidate's name."""
    with in_fp64():
        ran = run(
            prepared.reference.double(),
            prepared.call,
            cast(prepared.inputs, torch.float64),
            prepared.input_names,
            lambda outputs: {
                name: prepared.cotangents[name].double() * (name == output) for name, one in outputs.items()
            },
        )
    shapes = {name: tuple(x.shape) for name, x in prepared.candidate_weights.items()}
    weights = transfer.gradients_to_candidate(prepared.weights, ran.weight_gradients, shapes)
    return {("input gradient", name): x for name, x in ran.input_gradients.items()} | {
        ("weight gradient", name): x for name, x in weights.items()
    }


def _reference_on(prepared: Prepared, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the reference's outputs for other inputs, which are given by name, in FP64."""
    others = with_inputs(prepared.inputs, prepared.input_names, inputs)
    with torch.no_grad(), in_fp64():
        return outputs_of(prepared.reference.double(), prepared.call, others)
