"""Find mistakes between ranks: in pipeline stages, in the norm to which gradients are clipped, and in dropout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parity.mistakes.codes import repairable
from parity.passes.one_pass import as_arguments
from parity.passes.prepare import Prepared
from parity.ranks.layout import AXES, AxisName, Degrees, GatheredTensor, Pipeline, Shard
from parity.result import Finding, Result
from parity.shown import few_of
from parity.trace.digests import Drop
from parity.trainings.micro_batches import shares_made
from parity.trainings.on_rank import OnRank
from parity.trainings.why_over_ranks import may_be_left
from parity.trainings.why_steps import micro_batches_explained

# The stages of a pipeline: the weights they hold, their order, and the gradients they add up.


_ROUNDED = 2.0**-8  # how far off weights may be, as in ``over_ranks``


def explained_by_stages(
    wholes: Sequence[GatheredTensor],
    ran: Sequence[OnRank],
    made: Degrees,
    gradients: Mapping[str, Tensor],
    prepared: Prepared,
    result: Result,
) -> tuple[Finding, ...]:
    """Return a finding on pipeline stages if a mistake in them explains a failure.

    Args:
        wholes: the tensors.
        ran: the results of each rank.
        made: how many ranks there are.
        gradients: the gradients of the candidate's weights, by the reference's names.
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
        f"no stage holds {few_of(missing)}",
        "assign the layers to stages so that each layer is on one of them",
    )


def _of_loading(wholes: Sequence[GatheredTensor], made: Degrees) -> Finding | None:
    """Return a finding if a stage's parameter holds the values of another parameter."""
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
    """Return a finding if later stages hold earlier layers, in the order of the whole candidate."""
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
        "put the first layers on stage 0, because activations flow from stage 0 to the later stages",
    )


def _of_tied(wholes: Sequence[GatheredTensor], made: Degrees) -> Finding | None:
    """Return a finding if the gradient of a weight that several stages hold is right once it is reduced correctly."""
    for whole in (one for one in wholes if one.kind == "weight gradient"):
        for told, repair, pieces in _guess_reductions(whole, made):
            if whole.off() and whole.off(pieces) <= may_be_left(whole):
                return repairable("tied-over-stages", f"the weight gradient {whole.name} {told}", repair)
    return None


def _guess_reductions(whole: GatheredTensor, made: Degrees) -> Iterator[tuple[str, str, list[Shard]]]:
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
    """Return a finding if micro-batches have wrong shares in the weight gradients."""
    if any(not one.passed for one in result.tensors if one.kind == "output"):
        return None
    calls = [as_arguments(one) for one in pipeline.parts(prepared.inputs)]
    made = shares_made(prepared, calls, gradients, pipeline.parts(dict(prepared.cotangents)))
    limits = {
        one.name: one.tolerance_relative_l2 for one in result.tensors if one.kind == "weight gradient" and one.numel
    }
    return None if made is None else micro_batches_explained(1, limits, made)


# The norm to which ranks clip their gradients. It is compared with the gradients that the ranks have, right or wrong.


# How exact a norm is that is summed in FP32, or in the gradients' own 16 bits as by torch.nn.utils.get_total_norm.
_NORM, _NARROW_NORM = 1e-4, 1e-2


def wrong_norm(
    norms: Sequence[float | None], wholes: Sequence[GatheredTensor], made: Degrees, exact: float = _NORM
) -> Finding | None:
    """Return a finding if a rank's norm of all gradients is wrong, else None.

    Args:
        norms: the norm that each rank computed, by rank; None if it computed none.
        wholes: the tensors.
        made: how many ranks there are.
        exact: the relative error that these norms may have.
    """
    gradients = [one for one in wholes if one.kind == "weight gradient"]
    right = math.sqrt(sum(_sum_squares(one.joined()) for one in gradients))
    known = {rank: norm for rank, norm in enumerate(norms) if norm is not None}
    wrong = [rank for rank, norm in known.items() if not _is_norm(norm, right, exact)]
    if not wrong:
        return None
    rank = wrong[0]
    own = [0.0] * made.count
    for piece in (piece for one in gradients for piece in one.pieces):
        own[piece.rank] += _sum_squares(piece.values)
    add_up = "sum the squares of all ranks' gradients before the root"
    guesses = {f"that of rank {rank}'s gradients alone": (own[rank], add_up)}
    for axis in (axis for axis in AXES if made.of(axis) > 1):
        (peers,) = (peers for peers in made.peers(axis) if rank in peers)
        told = f"that over all ranks of {axis}, which counts a weight once for each rank that holds it"
        guesses[told] = sum(own[peer] for peer in peers), "count each weight once, such as on the first of these ranks"
    for one in gradients:
        guesses |= _counted_otherwise(one, rank, right**2)
    found = (
        (text, repair)
        for text, (square, repair) in guesses.items()
        if _is_norm(known[rank], math.sqrt(max(square, 0.0)), exact)
    )
    told, repair = next(
        found,
        (
            "neither that of one rank's gradients nor that of all gradients, each counted once",
            f"{add_up}, and count each weight once",
        ),
    )
    return repairable(
        "gradient-norm",
        f"on rank {rank} the norm of all gradients is {known[rank]:.5g}, but should be {right:.5g}; it is {told}",
        repair,
    )


def _counted_otherwise(one: GatheredTensor, rank: int, right: float) -> dict[str, tuple[float, str]]:
    """Return, for each way to miscount one gradient, the square of the resulting norm and the repair."""
    once, held = _sum_squares(one.joined()), [_sum_squares(piece.values) for piece in one.pieces]
    own = next((_sum_squares(piece.values) for piece in one.pieces if piece.rank == rank), 0.0)
    first = _sum_squares(one.pieces[0].values)
    found = {
        f"without {one.name}": (0.0, f"include {one.name}"),
        f"with {one.name} once for each rank that holds it": (sum(held), f"count {one.name} once"),
    }
    if one.pieces[0].split:
        all_parts = f"count each rank's part of {one.name}, which is split over ranks"
        found |= {
            f"with {one.name} only as the first rank has it": (first, all_parts),
            f"with {one.name} only as this rank has it": (own, all_parts),
        }
    return {
        f"that of all gradients, but {text}": (right - once + square, repair)
        for text, (square, repair) in found.items()
    }


def _is_norm(norm: float, right: float, exact: float) -> bool:
    held = torch.tensor(norm)
    is_narrow = any(bool(held.to(dtype).float() == held) for dtype in (torch.bfloat16, torch.float16))
    return abs(norm - right) <= (_NARROW_NORM if is_narrow else exact) * right


def _sum_squares(x: Tensor) -> float:
    return float(x.double().square().sum())


# Dropout over ranks: they must drop the same elements of a tensor that each has, and drop others independently.


def wrong_dropout(ran: Sequence[OnRank], dropped: Sequence[GatheredTensor], made: Degrees) -> Finding | None:
    """Return a finding if ranks drop the wrong elements, else None.

    Two ranks have the same tensor if its bits are the same, so no layer needs to be known. All ranks must drop the same
    elements of hidden states that they share. Each must drop independently in its own heads or its own part of a
    sequence.

    Args:
        ran: the results of each rank, including the elements that it dropped in a separate pass.
        dropped: the tensors of that pass.
        made: how many ranks there are.
    """
    for a, b, one, other in _pair_drops(ran, made, "tp"):
        where = f"{one.function} in the forward pass of {one.module}"
        if one.given == other.given and one.state != other.state:
            return repairable(
                "ranks-drop-differently",
                f"ranks {a} and {b} of tp have the same tensor, but drop different elements of it, at {where}",
                "draw outside of the random number tracker, from a generator with the same seed on all ranks of tp",
            )
        if one.given != other.given and one.state == other.state:
            return repairable(
                "ranks-drop-alike",
                f"ranks {a} and {b} of tp have different parts, but drop the same elements of them, at {where}",
                "use a random number tracker whose seed depends on the rank within tp, passed to TE as "
                "get_rng_state_tracker=; with sequence parallelism, fork it around the whole layer",
            )
    for whole in dropped:  # dropout that is written by hand is not among the recorded calls
        if (ranks := whole.find_differing_ranks()) is not None:
            return repairable(
                "ranks-drop-differently",
                f"ranks {ranks[0]} and {ranks[1]} have the same {whole.kind} {whole.name} without dropout, and "
                "different ones with it: they drop different elements of a tensor that both hold",
                "draw what both drop from a generator with the same seed on both",
            )
    return None


def remarks_on_dropout(ran: Sequence[OnRank], made: Degrees) -> Iterator[str]:
    """Yield remarks on dropout that are worth knowing but are not mistakes; arguments as above."""
    yield "numbers were compared with dropout switched off"
    for axis in (axis for axis in AXES if axis != "tp"):
        for a, b, one, other in _pair_drops(ran, made, axis):
            if one.given != other.given and one.state == other.state:
                yield (
                    f"ranks {a} and {b} of {axis} drop the same elements of other tensors, at {one.function} in the "
                    f"forward pass of {one.module}: their generators are seeded alike, as Megatron's are by default"
                )
                break


def _pair_drops(ran: Sequence[OnRank], made: Degrees, axis: AxisName) -> Iterator[tuple[int, int, Drop, Drop]]:
    """Yield pairs of ranks along an axis with what both drop at the same place, in the order of the pass."""
    pairs = [pair for peers in made.peers(axis) for pair in itertools.combinations(peers, 2)]
    for at in range(max((len(one.drops) for one in ran), default=0)):
        for a, b in pairs:
            if at < min(len(ran[a].drops), len(ran[b].drops)):
                one, other = ran[a].drops[at], ran[b].drops[at]
                if (one.function, one.module) == (other.function, other.module):
                    yield a, b, one, other
