"""Find the blocks of a reference and its candidate that hold the same parameters, and lay out values alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parity.case.weight_map import Copies, Side, WeightMap, names, renamed
from parity.proof.blocks import Blocks, Key
from parity.user_error import UserError


@dataclass(frozen=True)
class Matched:
    """Calls of two blocks that should return the same.

    Attributes:
        reference, candidate: the calls.
        weights: the map between the blocks' own parameters.
    """

    reference: Key
    candidate: Key
    weights: WeightMap


def match_blocks(
    weights: WeightMap, reference: Blocks, candidate: Blocks, calls: Iterable[Key], others: Iterable[Key]
) -> list[Matched]:
    """Return the calls of blocks that should return the same, in the reference's order.

    A block's counterpart holds all of its parameters, by the map, and no others. If several do, as with a head that is
    tied to the embedding, the order of calls decides.

    Args:
        weights: the pair's map.
        reference, candidate: the blocks of both.
        calls, others: the calls that both have made, in order.
    """
    left, found = list(others), list[Matched]()
    for key in calls:
        own = _find_own_names(reference, key)
        touched = {ours: theirs for ours, theirs in weights.items() if set(names(ours)) <= own.keys()}
        for other in left:
            within = _map_within(touched, own, _find_own_names(candidate, other))
            if within is not None:
                found.append(Matched(key, other, within))
                left.remove(other)
                break
    return found


def _find_own_names(blocks: Blocks, key: Key) -> dict[str, str]:
    """Return the names that a block has for its parameters, by those of the whole module."""
    return {first: name for name, first in blocks.names[key[0]].items()}


def _map_within(weights: WeightMap, own: dict[str, str], other: dict[str, str]) -> WeightMap | None:
    """Return the part of a map that is about two blocks, in their own names; None if it does not cover both."""
    within: dict[Side, Side] = {}
    for left, right in weights.items():
        if isinstance(right, Copies):
            right = replace(right, parts=tuple(part for part in right.parts if set(names(part)) <= other.keys()))
        if any(names(right)) and set(names(right)) <= other.keys():
            within[renamed(left, own.__getitem__)] = renamed(right, other.__getitem__)
    covered = [{name for side in sides for name in names(side)} for sides in (within.keys(), within.values())]
    return within if covered == [set(own.values()), set(other.values())] else None


def laid_out_like(like: Tensor, x: Tensor) -> Tensor:
    """Return a value in the other side's layout, which may have tokens before batches, or both as one dimension.

    Raises:
        UserError: if it has another number of elements.
    """
    if x.numel() != like.numel():
        raise UserError(
            f"the candidate has a value {tuple(x.shape)} where the reference has {tuple(like.shape)}: a proof "
            "needs ports that compute the same tokens; `parity run` compares others as a whole"
        )
    both = [x, x.transpose(0, 1)] if x.dim() > 1 else [x]
    return min((one.reshape(like.shape) for one in both), key=lambda one: distance(one, like))


def distance(x: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error."""
    apart, size = (torch.linalg.vector_norm(one).item() for one in (x.double() - exact.double(), exact.double()))
    return apart / size if size else float(apart > 0)
