"""Compare a candidate that several ranks compute together: the reference runs once, whole, and each rank its part.

The candidate is built whole in this process, too, so that the pair's weight map, its inputs and the rounding model are
those of any comparison. What the ranks computed is put together, and judged like a pass of the whole.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_map_only

from parity.case import transfer
from parity.case.case import Case, mixed
from parity.case.map_check import other_names
from parity.case.validate import CheckedSize
from parity.case.weight_map import names
from parity.comparison import Judged, broken_off, explain_at, judge_at, noting, unless_raised, without_cause
from parity.judge.asked import Asked, CandidateRun
from parity.judge.limits import Table
from parity.mistakes.codes import repairable
from parity.numerics.golden import in_fp64
from parity.passes.all_passes import Tensors
from parity.passes.modes import usual_modes
from parity.passes.on_rank import AsItIs, Given, OnRank, pass_on_rank, source_of
from parity.passes.one_pass import named_inputs, outputs_of, run, with_inputs
from parity.passes.prepare import Prepared, build, cast, prepare
from parity.ranks.launch import RanksFailed, launch
from parity.ranks.layout import Degrees, places
from parity.result import Finding, Result, as_printable, label_of_way
from parity.search.over_ranks import (
    Piece,
    Whole,
    explained_by_inputs,
    explained_by_outputs,
    explained_by_positions,
    explained_over_ranks,
)
from parity.search.stages import explained_by_stages, remarks_on_dropout, wrong_dropout, wrong_norm
from parity.search.steps import listed
from parity.te import Kernels, Precision, why_unavailable
from parity.te.attention_backend import AttentionBackend
from parity.trace.effects import undisturbed
from parity.user_error import UserError, said

# Seconds that ranks may take for their passes.
TIMEOUT = 300.0
NO_RANKS = "ranks are compared only on the CPU kernels: use --parity-backend=cpu"


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
    """Compare a case whose candidate ranks compute together, and say what is wrong if it fails.

    Never raises because of a module or a rank that fails: the result's status and reason tell.

    Args:
        made: how many ranks there are, by axis.
        diagnosis: seconds of real time for the search for a cause, 0 for no limit; None for no search.
        timeout: seconds after which ranks that have not answered are ended.
    """
    began = time.perf_counter()
    labelled = dataclasses.replace(checked, label=label_of_way(checked.label, ranks=made.label))
    whole = dataclasses.replace(case, probe=False)
    asked = Asked(whole, labelled, precision, seed, kernels, calibration, attention)
    unavailable = why_unavailable(precision, kernels)
    if unavailable is None and kernels.backend == "gpu":
        unavailable = NO_RANKS
    if unavailable is not None:
        return dataclasses.replace(asked.result("skipped", reason=unavailable), ranks=made.label)
    with usual_modes(), undisturbed(mixed(seed, "everything else")) as disturbed:
        result = unless_raised(
            lambda: _compared(asked, case, checked, made, diagnosis, timeout), partial(error_of, asked)
        )
    result = as_printable(noting(result, disturbed))
    return dataclasses.replace(result, ranks=made.label, seconds=time.perf_counter() - began)


def error_of(asked: Asked, error: BaseException) -> Result:
    """Return the error of a comparison over ranks or of a training in which something raised, such as its step."""
    if isinstance(error, UserError):
        return asked.result("error", reason=said(error))
    return broken_off(asked, error).result


def _compared(
    asked: Asked, case: Case, checked: CheckedSize, made: Degrees, diagnosis: float | None, timeout: float
) -> Result:
    precision, seed, kernels = asked.precision, asked.seed, asked.kernels
    prepared = prepare(asked.case, checked, precision.dtype, seed, kernels)
    try:
        ran = on_all_ranks(pass_on_rank, given_of(case, asked, checked, prepared, made), made, timeout)
    except RanksFailed as error:
        return ended(asked, error, made)
    wholes = put_together(ran, made, prepared)
    tensors = in_reference_layout(wholes, prepared)
    unreached = unreached_by(ran)
    attention = ", ".join(dict.fromkeys(one.attention for one in ran if one.attention))
    at = (checked, precision, seed, kernels, asked.calibration, asked.attention)
    judged = judge_at(asked.case, *at, made=CandidateRun(tensors, unreached, attention=attention))
    result = dataclasses.replace(judged.result, size_label=asked.checked.label)
    apart = replicas_apart(wholes)
    if result.status == "passed":
        result = _between_ranks(result, ran, wholes, apart, made, prepared)
    if result.findings:
        return result
    if result.status != "failed" or diagnosis is None:
        return result
    return unless_raised(
        lambda: _explained(result, judged, wholes, apart, ran, made, prepared, asked, at, diagnosis),
        partial(without_cause, result),
    )


def _between_ranks(
    result: Result,
    ran: Sequence[OnRank],
    wholes: Sequence[Whole],
    apart: Finding | None,
    made: Degrees,
    prepared: Prepared,
) -> Result:
    """Return the result of ranks whose numbers are right together, if what each of them has is as it should be."""
    checks: list[tuple[str, Finding | None]] = [
        ("ranks do not agree", apart),
        ("the norm of all gradients is not that of the whole", wrong_norm([one.norm for one in ran], wholes, made)),
    ]
    with_dropout = [one.dropped for one in ran if one.dropped is not None]
    if with_dropout:
        if not any(one.drops for one in ran):
            reason = "nothing was dropped, though parallel=parity.Parallel(dropout=True): leave it out, or set dropout"
            return dataclasses.replace(result, status="error", reason=reason)
        dropped = put_together(with_dropout, made, prepared)
        checks.append(("ranks do not drop what they should", wrong_dropout(ran, dropped, made)))
        result = dataclasses.replace(result, notes=(*result.notes, *remarks_on_dropout(ran, made)))
    for reason, told in checks:
        if told is not None:
            return dataclasses.replace(result, status="failed", reason=reason, findings=(told,))
    return result


def given_of(case: Case, asked: Asked, checked: CheckedSize, prepared: Prepared, made: Degrees) -> Given:
    """Return what every rank is given.

    Raises:
        UserError: if another process cannot find the case.
    """
    return Given(
        AsItIs(case) if _is_rank() else source_of(case),
        made,
        checked,
        asked.precision.name,
        asked.seed,
        asked.kernels.backend,
        asked.attention,
        on_cpu(prepared.inputs),
        prepared.input_names,
        on_cpu(prepared.candidate_weights),
        on_cpu(prepared.cotangents),
        other_names(build(case, checked, asked.seed, asked.kernels).candidate).tied if made.pp > 1 else {},
    )


def on_cpu(tensors: Any) -> Any:
    """Return the same with all tensors on the CPU."""
    return tree_map_only(Tensor, lambda x: x.detach().cpu(), tensors)


def on_all_ranks(function: Callable[[Any], Any], given: Any, made: Degrees, timeout: float) -> list[Any]:
    """Return what a function returns on each rank: of this process's own group, if it is one of these, else of new
    ones.

    Raises:
        RanksFailed: if a rank raised, died or did not return in time.
        UserError: if this process's group is not of as many ranks as asked for.
    """
    if not _is_rank():
        return launch(function, made.count, [given], timeout=timeout)
    count = distributed.get_world_size()
    if count != made.count:
        raise UserError(f"{made.label} needs {made.count} ranks, but this process group has {count}")
    ran: list[Any] = [None] * count
    distributed.all_gather_object(ran, function(given))
    return ran


def _is_rank() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def ended(asked: Asked, error: RanksFailed, made: Degrees) -> Result:
    """Return the result of ranks that have not answered."""
    first = error.failures[0]
    told = f"rank {first.rank} of {made.count} ({made.label}) {first.how}: {first.what}"
    others = f"; so did {len(error.failures) - 1} more" if len(error.failures) > 1 else ""
    return asked.result("error", reason=told + others, traceback=first.where)


def put_together(ran: Sequence[OnRank], made: Degrees, prepared: Prepared) -> list[Whole]:
    """Return each whole tensor of the candidate, with the ranks' pieces of it."""
    golden = prepared.golden
    shapes = {name: tuple(x.shape) for name, x in prepared.candidate_weights.items()}
    linear = transfer.gradients_to_candidate(prepared.weights, golden.weight_gradients, shapes)
    wholes: dict[tuple[str, str], Whole] = {}

    def add(kind: Any, name: str, rank: int, x: Tensor, split: Any, exact: Tensor) -> None:
        one = wholes.setdefault((kind, name), Whole(kind, name, exact, []))
        one.pieces.append(Piece(rank, x, split, places(exact.shape, split, made, rank)))

    for rank, one in enumerate(ran):
        for name, x in one.outputs.items():
            add("output", name, rank, x, one.splits[name], golden.outputs[name])
        for name, x in one.input_gradients.items():
            add("input gradient", name, rank, x, one.splits[name], golden.input_gradients[name])
        for name, x in one.weights.items():
            held = one.held[name]
            add("weight", held.whole, rank, x, held.split, prepared.candidate_weights[held.whole])
        for name, x in one.weight_gradients.items():
            held = one.held[name]
            if held.whole in linear:
                add("weight gradient", held.whole, rank, x, held.split, linear[held.whole])
    return [with_parts_joined(one, made) if one.kind == "input gradient" else one for one in wholes.values()]


def with_parts_joined(whole: Whole, made: Degrees) -> Whole:
    """Return an input's gradient, with what data and context parallel ranks have of it joined.

    An input that is whole on each rank may be divided by the pair itself. Then each rank has the gradient of its part,
    and zeros elsewhere. What comes before is computed for each part by itself, so nothing need be reduced. Of an input
    that several stages of a pipeline use, each has what flows back through it.
    """
    pieces = {one.rank: one for one in whole.pieces}
    for peers in made.peers("pp") if made.pp > 1 else ():
        total = torch.stack([pieces[rank].values for rank in peers]).sum(0)
        pieces |= {rank: dataclasses.replace(pieces[rank], values=total) for rank in peers}
    for axis in ("dp", "cp"):
        for peers in made.peers(axis):
            group = [pieces[rank] for rank in peers if rank in pieces]
            is_same_part = all(torch.equal(one.places, group[0].places) for one in group)
            if len(group) < 2 or not is_same_part:
                continue
            values = torch.stack([one.values for one in group])
            if bool(((values != 0).sum(0) <= 1).all()):
                joined = values.sum(0)
                pieces |= {one.rank: dataclasses.replace(one, values=joined) for one in group}
    return dataclasses.replace(whole, pieces=list(pieces.values()))


def unreached_by(ran: Sequence[OnRank]) -> tuple[str, ...]:
    """Return the whole parameters that no gradient reached on any rank that holds them."""
    unreached = {one.held[name].whole for one in ran for name in one.unreached}
    reached = {held.whole for one in ran for name, held in one.held.items() if name not in one.unreached}
    return tuple(sorted(unreached - reached))


def in_reference_layout(wholes: Sequence[Whole], prepared: Prepared) -> Tensors:
    """Return the ranks' outputs and gradients as a candidate in one process has them."""
    tensors: Tensors = {
        (kind, one.name): one.joined() for one in wholes for kind in ("output", "input gradient") if one.kind == kind
    }
    own = {one.name: one.joined() for one in wholes if one.kind == "weight gradient"}
    missing = {name: torch.zeros_like(x) for name, x in prepared.candidate_weights.items() if name not in own}
    moved = transfer.gradients_to_reference(
        prepared.weights, own | missing, transfer.parameter_shapes(prepared.reference)
    )
    return tensors | {("weight gradient", name): x for name, x in moved.items()}


def replicas_apart(wholes: Sequence[Whole]) -> Finding | None:
    """Return which tensors are not the same on ranks that hold the same part of them."""
    found = [(one, ranks) for one in wholes if (ranks := one.apart())]
    if not found:
        return None
    first, (a, b) = found[0]
    more = f" (and so for {len(found) - 1} more)" if len(found) > 1 else ""
    return repairable(
        "replicas-differ",
        f"ranks {a} and {b} hold the same part of the {first.kind} {first.name}, with different values{more}",
        "compute it on both from the same values, or reduce it over both",
    )


def _explained(
    result: Result,
    judged: Judged,
    wholes: Sequence[Whole],
    apart: Finding | None,
    ran: Sequence[OnRank],
    made: Degrees,
    prepared: Prepared,
    asked: Asked,
    at: tuple[Any, ...],
    diagnosis: float,
) -> Result:
    """Return the failed result with what is wrong: with the module, if it is wrong in one process, else over ranks."""
    alone = judge_at(asked.case, *at)
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
    if not found and apart is None:  # else something is computed that no module in one process computes
        told = explain_at(judged, diagnosis)
        if told.findings and told.findings[0].title not in ("unexplained", "first-divergence"):
            notes = (*result.notes, *told.notes, "the candidate is right in one process, and wrong over ranks")
            return dataclasses.replace(result, findings=told.findings, notes=notes)
    if not found:
        wrong = listed([one.label for one in result.tensors if not one.passed])
        right = listed([one.label for one in result.tensors if one.passed])
        besides = f"; these are right: {right}" if right else ""
        found = (
            apart
            or repairable(
                "wrong-over-ranks",
                f"the candidate is right in one process, but over {made.count} ranks ({made.label}) it is wrong in "
                f"{wrong}{besides}",
                "look at what is split, gathered and reduced there",
            ),
        )
    return dataclasses.replace(result, findings=found)


def with_limits(wholes: Sequence[Whole], result: Result, prepared: Prepared) -> list[Whole]:
    """Return the tensors with the bounds on their errors; of one that the reference has in parts, the largest."""
    limits: dict[tuple[str, str], float] = {}
    of_parameter = {
        left: right for side, own in prepared.weights.items() for left in names(side) for right in names(own)
    }
    for tensor in result.tensors:
        name = of_parameter.get(tensor.name, tensor.name) if tensor.kind == "weight gradient" else tensor.name
        limits[tensor.kind, name] = max(limits.get((tensor.kind, name), 0.0), tensor.tolerance_relative_l2)
    return [dataclasses.replace(one, limit=limits.get((one.kind, one.name), 0.0)) for one in wholes]


def _flowing_back_from(prepared: Prepared, output: str) -> Mapping[tuple[str, str], Tensor]:
    """Return the gradients that the reference has of one output alone, by kind and name of the candidate, in FP64."""
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
    """Return what the reference makes of other inputs, by their names, in FP64."""
    others = with_inputs(prepared.inputs, prepared.input_names, inputs)
    with torch.no_grad(), in_fp64():
        return outputs_of(prepared.reference.double(), prepared.call, others)
