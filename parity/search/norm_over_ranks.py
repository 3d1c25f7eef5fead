"""Find what is wrong with the norm to which ranks clip their gradients.

It is held against the gradients that the ranks have, whatever their errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parity.mistakes.codes import repairable
from parity.ranks.layout import AXES, Degrees
from parity.result import Finding
from parity.search.over_ranks import Whole

# How exact a norm is: summed in FP32, or in the gradients' own 16 bits, as torch.nn.utils.get_total_norm does it.
_NORM, _NARROW_NORM = 1e-4, 1e-2


def wrong_norm(
    norms: Sequence[float | None], wholes: Sequence[Whole], made: Degrees, exact: float = _NORM
) -> Finding | None:
    """Return what is wrong with the norm of all gradients that ranks computed; None if nothing is, or none did.

    Args:
        norms: by rank.
        wholes: the tensors.
        made: how many ranks there are.
        exact: how exact these norms are, in relation to themselves.
    """
    gradients = [one for one in wholes if one.kind == "weight gradient"]
    right = math.sqrt(sum(_square(one.joined()) for one in gradients))
    known = {rank: norm for rank, norm in enumerate(norms) if norm is not None}
    wrong = [rank for rank, norm in known.items() if not _is_norm(norm, right, exact)]
    if not wrong:
        return None
    rank = wrong[0]
    own = [0.0] * made.count
    for piece in (piece for one in gradients for piece in one.pieces):
        own[piece.rank] += _square(piece.values)
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
        ("neither one rank's nor that of all gradients, each counted once", f"{add_up}, and count each weight once"),
    )
    return repairable(
        "gradient-norm",
        f"on rank {rank} the norm of all gradients is {known[rank]:.5g}, but should be {right:.5g}; it is {told}",
        repair,
    )


def _counted_otherwise(one: Whole, rank: int, right: float) -> dict[str, tuple[float, str]]:
    """Return the square of the norm if one gradient is counted otherwise, and what to do, by what is wrong with it."""
    once, held = _square(one.joined()), [_square(piece.values) for piece in one.pieces]
    own = next((_square(piece.values) for piece in one.pieces if piece.rank == rank), 0.0)
    first = _square(one.pieces[0].values)
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


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())
