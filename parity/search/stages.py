"""Find what is wrong between the stages of a pipeline: what they hold, their order, and what they add to gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parity.mistakes.codes import repairable
from parity.passes.micro_batches import shares_made
from parity.passes.on_rank import OnRank
from parity.passes.one_pass import as_arguments
from parity.passes.prepare import Prepared
from parity.ranks.layout import Degrees
from parity.ranks.pipeline import Pipeline
from parity.result import Finding, Result
from parity.search.over_ranks import Piece, Whole
from parity.search.steps import listed, micro_batches_explained

_ROUNDED = 2.0**-8  # what weights may be off, as in ``over_ranks``


def explained_by_stages(
    wholes: Sequence[Whole],
    ran: Sequence[OnRank],
    made: Degrees,
    gradients: Mapping[str, Tensor],
    prepared: Prepared,
    result: Result,
) -> tuple[Finding, ...]:
    """Return what stages have wrong, if that explains a failure.

    Args:
        wholes: the tensors.
        ran: what each rank has.
        made: how many ranks there are.
        gradients: of the candidate's weights, by the reference's names.
        prepared: the comparison.
        result: its verdict.
    """
    held: dict[str, set[int]] = {}
    for rank, one in enumerate(ran):
        for part in one.held.values():
            held.setdefault(part.whole, set()).add(made.place(rank)["pp"])
    found = (
        _of_missing(prepared.candidate_weights, held)
        or _of_loading(wholes, made)
        or _of_order(prepared.candidate_weights, held, result)
        or _of_micro_batches(ran[0].pipeline, gradients, prepared, result)
        or _of_tied(wholes, made)
    )
    return (found,) if found else ()


def _of_missing(weights: Mapping[str, Tensor], held: Mapping[str, set[int]]) -> Finding | None:
    missing = [name for name in weights if name not in held]
    if not missing:
        return None
    return repairable(
        "stages",
        f"no stage holds {listed(missing)}",
        "assign the layers to stages so that each layer is on one of them",
    )


def _of_loading(wholes: Sequence[Whole], made: Degrees) -> Finding | None:
    """Return which stage holds the numbers of another parameter than its own."""
    weights = [one for one in wholes if one.kind == "weight"]
    for one in weights:
        for piece in one.pieces:
            if one.off([piece]) <= _ROUNDED:
                continue
            for other in weights:
                if other.exact.shape == one.exact.shape and other.off([piece]) <= _ROUNDED:
                    return repairable(
                        "stages",
                        f"on stage {made.place(piece.rank)['pp']}, {one.name} has the values of {other.name}",
                        "add the number of layers on earlier stages to the layer's number when you load weights",
                    )
    return None


def _of_order(weights: Mapping[str, Tensor], held: Mapping[str, set[int]], result: Result) -> Finding | None:
    """Return whether later stages hold earlier layers, by the order in which the whole candidate has them."""
    if all(one.passed for one in result.tensors if one.kind == "output"):
        return None
    first: dict[int, int] = {}
    for at, name in enumerate(weights):
        if len(held[name]) == 1:
            first.setdefault(next(iter(held[name])), at)
    order = sorted(first, key=lambda stage: first[stage])
    if order == sorted(order):
        return None
    names = list(weights)
    told = " and ".join(f"stage {stage} from {names[first[stage]]} on" for stage in sorted(first))
    return repairable(
        "stages",
        f"the order of the stages is not the order of their layers in the whole candidate: {told}",
        "put the first layers on stage 0, since activations go from stage 0 on",
    )


def _of_tied(wholes: Sequence[Whole], made: Degrees) -> Finding | None:
    """Return whether the gradient of a weight that several stages hold is right once what they have is added up."""
    for whole in (one for one in wholes if one.kind == "weight gradient"):
        for told, repair, pieces in _otherwise(whole, made):
            if whole.off() and whole.off(pieces) <= whole.may_be_left():
                return repairable("tied-over-stages", f"the weight gradient {whole.name} {told}", repair)
    return None


def _otherwise(whole: Whole, made: Degrees) -> Iterator[tuple[str, str, list[Piece]]]:
    own = {one.rank: one for one in whole.pieces}
    groups = [group for peers in made.peers("pp") if len(group := [own[rank] for rank in peers if rank in own]) > 1]
    if not groups or sum(map(len, groups)) < len(own):
        return
    stages = [made.place(one.rank)["pp"] for one in groups[0]]
    held = f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"
    if not all(torch.equal(one.values, group[0].values) for group in groups for one in group):
        added = [torch.stack([one.values.double() for one in group]).sum(0) for group in groups]
        yield (
            f"is only a part of the sum on each of {held}, which share the weight",
            "all-reduce it over a group of these stages after the backward pass",
            [replace(one, values=x) for group, x in zip(groups, added, strict=True) for one in group],
        )
    count = len(stages)
    yield (
        f"is {count} times too large on {held}, which share the weight: it is summed over them twice",
        "reduce it over these stages once",
        [replace(one, values=one.values.double() / count) for group in groups for one in group],
    )
    yield (
        f"is 1/{count} of the right one on {held}, which share the weight: it is averaged over them",
        "sum it over these stages, and do not average",
        [replace(one, values=one.values.double() * count) for group in groups for one in group],
    )


def _of_micro_batches(
    pipeline: Pipeline, gradients: Mapping[str, Tensor], prepared: Prepared, result: Result
) -> Finding | None:
    """Return which micro-batches do not count as they should in the weight gradients."""
    if any(not one.passed for one in result.tensors if one.kind == "output"):
        return None
    calls = [as_arguments(one) for one in pipeline.parts(prepared.inputs)]
    made = shares_made(prepared, calls, gradients, pipeline.parts(dict(prepared.cotangents)))
    limits = {
        one.name: one.tolerance_relative_l2 for one in result.tensors if one.kind == "weight gradient" and one.numel
    }
    return None if made is None else micro_batches_explained(1, limits, made)
