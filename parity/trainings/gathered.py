"""Compute a candidate on several ranks, and join their parts so that they are judged like a pass in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_map_only

from parity.case import transfer
from parity.case.case import Case
from parity.case.map_check import other_names
from parity.case.recipes import spell_precision
from parity.case.source import AsItIs, source_of
from parity.case.validate import CheckedSize
from parity.case.weight_map import names
from parity.judge.request import Request
from parity.mistakes.codes import repairable
from parity.numerics.formats import LayerFormats
from parity.passes.all_passes import Tensors
from parity.passes.prepare import Prepared, build
from parity.ranks.launch import RanksFailed, launch
from parity.ranks.layout import Degrees, GatheredTensor, Shard, places
from parity.result import Finding, Result
from parity.trainings.on_rank import FOR_PASSES, Given, OnRank
from parity.user_error import UserError

# Seconds that ranks may take for their passes.
TIMEOUT = 300.0
NO_RANKS = "ranks are compared only on the CPU kernels: use --parity-backend=cpu"


def given_of(case: Case, request: Request, checked: CheckedSize, prepared: Prepared, made: Degrees) -> Given:
    """Return the input of every rank.

    Raises:
        UserError: if another process cannot find the case.
    """
    return Given(
        AsItIs(case) if _is_rank() else source_of(case),
        made,
        checked,
        spell_precision(request.precision.name),
        request.seed,
        request.kernels.backend,
        request.attention,
        on_cpu(prepared.inputs),
        prepared.input_names,
        on_cpu(prepared.candidate_weights),
        on_cpu(prepared.cotangents),
        other_names(build(case, checked, request.seed, request.kernels).candidate).tied if made.pp > 1 else {},
    )


def on_cpu(tensors: Any) -> Any:
    """Return a nested structure with all its tensors detached and on the CPU."""
    return tree_map_only(Tensor, lambda x: x.detach().cpu(), tensors)


def on_all_ranks(function: Callable[[Any], Any], given: Any, made: Degrees, timeout: float) -> list[Any]:
    """Return a function's result on each rank: of this process's group if it is in one, else of newly launched ranks.

    Raises:
        RanksFailed: if a rank raised, died or did not return in time.
        UserError: if this process's group has another number of ranks than asked for.
    """
    if not _is_rank():
        return launch(function, made.count, [given], timeout=timeout, imported_before=FOR_PASSES)
    count = distributed.get_world_size()
    if count != made.count:
        raise UserError(f"{made.label} needs {made.count} ranks, but this process group has {count}")
    ran: list[Any] = [None] * count
    distributed.all_gather_object(ran, function(given))
    return ran


def _is_rank() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def ended(request: Request, error: RanksFailed, made: Degrees) -> Result:
    """Return the result of a comparison whose ranks failed."""
    first = error.failures[0]
    told = f"rank {first.rank} of {made.count} ({made.label}) {first.how}: {first.what}"
    others = f"; {len(error.failures) - 1} more failed as well" if len(error.failures) > 1 else ""
    return request.result("error", reason=told + others, traceback=first.where)


def put_together(ran: Sequence[OnRank], made: Degrees, prepared: Prepared) -> list[GatheredTensor]:
    """Return each whole tensor of the candidate, with the ranks' pieces of it."""
    golden = prepared.golden
    shapes = {name: tuple(x.shape) for name, x in prepared.candidate_weights.items()}
    linear = transfer.gradients_to_candidate(prepared.weights, golden.weight_gradients, shapes)
    wholes: dict[tuple[str, str], GatheredTensor] = {}

    def add(kind: Any, name: str, rank: int, x: Tensor, split: Any, exact: Tensor) -> None:
        one = wholes.setdefault((kind, name), GatheredTensor(kind, name, exact, []))
        one.pieces.append(Shard(rank, x, split, places(exact.shape, split, made, rank)))

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


def with_parts_joined(whole: GatheredTensor, made: Degrees) -> GatheredTensor:
    """Return an input's gradient, with the parts of it on data and context parallel ranks joined.

    If an input is whole on each rank, the pair itself may divide it. Then each rank has the gradient of its part, and
    zeros elsewhere. The computation that precedes the pair handles each part separately, so nothing need be reduced. If
    several stages of a pipeline use an input, each has only the gradient that flows back through it, so these are
    summed.
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


def changed_by(ran: Sequence[OnRank]) -> dict[str, LayerFormats]:
    """Return what debug features changed of layers' formats, by whole parameters."""
    return {name: changed for one in ran for name, changed in one.changed.items()}


def in_reference_layout(wholes: Sequence[GatheredTensor], prepared: Prepared) -> Tensors:
    """Return the ranks' outputs and gradients, joined and in the reference's layout."""
    tensors: Tensors = {
        (kind, one.name): one.joined() for one in wholes for kind in ("output", "input gradient") if one.kind == kind
    }
    own = {one.name: one.joined() for one in wholes if one.kind == "weight gradient"}
    missing = {name: torch.zeros_like(x) for name, x in prepared.candidate_weights.items() if name not in own}
    moved = transfer.gradients_to_reference(
        prepared.weights, own | missing, transfer.parameter_shapes(prepared.reference)
    )
    return tensors | {("weight gradient", name): x for name, x in moved.items()}


def replicas_apart(wholes: Sequence[GatheredTensor]) -> Finding | None:
    """Return a finding if ranks that hold the same part of a tensor have different values, else None."""
    found = [(one, ranks) for one in wholes if (ranks := one.find_differing_ranks())]
    if not found:
        return None
    first, (a, b) = found[0]
    more = f" (and {len(found) - 1} more likewise)" if len(found) > 1 else ""
    return repairable(
        "replicas-differ",
        f"ranks {a} and {b} hold the same part of the {first.kind} {first.name}, with different values{more}",
        "compute it on both from the same values, or reduce it over both",
    )


def with_limits(wholes: Sequence[GatheredTensor], result: Result, prepared: Prepared) -> list[GatheredTensor]:
    """Return the tensors with the limits on their errors; if the reference has one in parts, with the largest limit."""
    limits: dict[tuple[str, str], float] = {}
    of_parameter = {
        left: right for side, own in prepared.weights.items() for left in names(side) for right in names(own)
    }
    for tensor in result.tensors:
        name = of_parameter.get(tensor.name, tensor.name) if tensor.kind == "weight gradient" else tensor.name
        limits[tensor.kind, name] = max(limits.get((tensor.kind, name), 0.0), tensor.tolerance_relative_l2)
    return [dataclasses.replace(one, limit=limits.get((one.kind, one.name), 0.0)) for one in wholes]
