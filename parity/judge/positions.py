"""Find the first position at which an output is wrong, each against the error that is expected there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.numerics.errors import norm_of
from parity.passes.all_passes import Tensors
from parity.result import TensorResult

_CHANCE = 3.0  # deviations by which the norm of few elements may exceed another's
_FEWEST = 3  # positions: of two, one is first by chance
_LIKELY = 0.01
_TINY = 1e-30


@dataclass(frozen=True)
class FirstWrong:
    """Say where an output begins to be wrong.

    Attributes:
        dim: the dimension that counts positions.
        index: the first position that is wrong, at least 1: those before it are right.
        count: how many positions there are.
        error: the relative error there.
        expected: the relative error that is expected there.
    """

    dim: int
    index: int
    count: int
    error: float
    expected: float


def first_wrong(
    result: TensorResult, computed: Tensor, golden: Tensor, models: Sequence[Tensor], row: int | None = None
) -> FirstWrong | None:
    """Return where an output begins to be wrong; None if it does so at once, or if no position is by itself.

    Positions are looked for in the second dimension, as of ``[batch, seq, ...]``, then in the first.

    Args:
        result: the output's verdict.
        computed: the candidate's.
        golden: the reference's in FP64.
        models: the rounding model's.
        row: of the batch, to look at alone; None for all.
    """
    if computed.shape != golden.shape or (row is not None and golden.dim() < 2):
        return None
    dims = (1,) if row is not None else (1, 0) if golden.dim() > 1 else (0,)
    for dim in dims:
        some = [x.double() if row is None else x.double()[row : row + 1] for x in (computed, golden, *models)]
        found = _first_along(dim, result, *some)
        if found is not None:
            return found
    return None


def _first_along(
    dim: int, result: TensorResult, computed: Tensor, golden: Tensor, *models: Tensor
) -> FirstWrong | None:
    if golden.shape[dim] < _FEWEST:
        return None
    count, each = golden.shape[dim], golden.numel() // golden.shape[dim]
    sizes = _norms(golden, dim).clamp(min=_TINY)
    errors = _norms(computed - golden, dim)
    # What a model loses at one position may be little by chance, so all positions together count as well.
    typical = result.expected.relative_l2 * norm_of(golden) / count**0.5
    expected = torch.stack([_norms(model - golden, dim) for model in models]).amax(0).clamp(min=typical)
    allowed = max(result.tolerance_relative_l2 / max(result.expected.relative_l2, _TINY), 1.0)
    wrong = (errors > allowed * (1.0 + _CHANCE / each**0.5) * expected).nonzero().flatten().tolist()
    if not wrong or wrong[0] == 0:
        return None
    at = wrong[0]
    # If as many positions are right by chance as behind this one, all before it may be right by chance, too.
    if (1.0 - len(wrong) / (count - at)) ** at > _LIKELY:
        return None
    return FirstWrong(dim, at, count, float(errors[at] / sizes[at]), float(expected[at] / sizes[at]))


def _norms(x: Tensor, dim: int) -> Tensor:
    return torch.linalg.vector_norm(x.movedim(dim, 0).flatten(1), dim=1)


def told(
    results: Sequence[TensorResult], candidate: Tensors, golden: Tensors, models: Sequence[Tensors]
) -> Iterator[str]:
    """Yield a sentence for each failed output that is right up to some position."""
    for result in results:
        if result.kind != "output" or result.passed or not result.finite:
            continue
        key = result.key
        found = first_wrong(result, candidate[key], golden[key], [model[key] for model in models])
        if found is not None:
            what = "position" if found.dim == 1 else f"index of dimension {found.dim}"
            yield (
                f"{result.label} is right before {what} {found.index} (of {found.count}, from 0), where the relative "
                f"error is {found.error:.2g}, and {found.expected:.2g} is expected"
            )
