"""What runs whose roundings are drawn independently tell of the size of an error: how much it is a matter of chance.

The norm of many independent roundings hardly scatters. But where few roundings decide, as those of a saturated
softmax's scores, or of the few queries that are undecided between two keys, one faithful run's error is many times
another's. A gradient whose terms cancel but for what rounding leaves of them is nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import special
from torch import Tensor

from parity.limits.aim import FALSE_ALARMS_A_RUN, STATISTICS_A_RUN
from parity.result import TensorResult
from parity.summed import Summed

# Times its median among drawn runs, beyond which the norm of a row's error hangs on few roundings.
_SCATTERS = 2.0
# Fewer drawn runs have no median to speak of.
FEWEST_DRAWN = 4
# A row of fewer elements says too little about its own error.
_SMALLEST_ROW = 32
# A tensor whose norm scatters like that of fewer independent roundings is moved by few of them, if it has many more
# elements than that.
_FEW_ROUNDINGS = 32
_MANY_TIMES = 4
# Of a normal law, which a faithful port exceeds as often as a limit.
_DEVIATIONS = -float(special.ndtri(FALSE_ALARMS_A_RUN / STATISTICS_A_RUN))


def scatters(drawn: Sequence[Summed]) -> bool:
    """Whether few roundings decide how large an error is, as those of a saturated softmax's scores do.

    Independent ones of many elements do not: the norm of 32 scatters by an eighth of itself. They show in the norm of a
    row, or in that of the whole, if others hide them in each row, as in a mean over tokens.

    Args:
        drawn: errors of runs whose roundings are independent; those that are not finite are left out.
    """
    drawn = [error for error in drawn if error.is_finite]
    if len(drawn) < FEWEST_DRAWN:
        return False
    few = min(_FEW_ROUNDINGS, drawn[0].values.numel() / _MANY_TIMES)
    return _rows_scatter(drawn) or _roundings(drawn) < few


def slices_scatter(drawn: Sequence[Summed]) -> bool:
    """Whether few roundings decide how large an error is in a slice across one dimension, as a column whose rows agree.

    Args:
        drawn: as for ``scatters``.
    """
    drawn = [error for error in drawn if error.is_finite]
    if len(drawn) < FEWEST_DRAWN:
        return False
    dims = range(drawn[0].values.dim())
    slices = (tuple(other for other in dims if other != dim) for dim in dims)
    return any(
        _differ([error.squares_over(others) for error in drawn])
        for others in slices
        if others and math.prod(drawn[0].values.shape[other] for other in others) >= _SMALLEST_ROW
    )


def _roundings(drawn: Sequence[Summed]) -> float:
    """Of how many independent roundings the squared norm scatters like: n of them have mean n and variance ``2 n``.

    The runs of both kinds of kernels come in turn, and lose as much as one of them does.
    """
    squares = [error.total for error in drawn]
    variance = (np.var(squares[::2], ddof=1) + np.var(squares[1::2], ddof=1)) / 2.0
    return float(2.0 * np.mean(squares) ** 2 / variance) if variance > 0.0 else math.inf


def _rows_scatter(drawn: Sequence[Summed]) -> bool:
    """Whether a row's norm is far beyond its usual one in some run; the whole tensor's, where rows are short."""
    shape = drawn[0].values.shape
    sums = [torch.tensor([error.total]) for error in drawn]
    if len(shape) > 1 and shape[-1] >= _SMALLEST_ROW:
        sums = [error.squares_over((len(shape) - 1,)).flatten() for error in drawn]
    return _differ(sums)


def _differ(sums: Sequence[Tensor]) -> bool:
    """Return whether one of the squared norms is far beyond its usual one in some run."""
    squares = torch.stack(list(sums))
    return bool((squares.amax(0) > _SCATTERS**2 * squares.median(0).values).any())


def allowance(golden: Summed, model_errors: Sequence[Summed], limit: float) -> float:
    """Times its limits, what the error of a gradient may be that is lost to rounding: as much as chance makes it.

    Among the drawn runs the norms of such errors scatter by factors, those of others by a few hundredths. Their
    logarithm is taken as normal, as in a law; what lies as far above its mean as a limit does is still due to chance.

    Args:
        golden: the gradient.
        model_errors: of all models, finite; what any of them loses is expected.
        limit: of ``norm``.

    Returns:
        At least 1; 1 where no model loses all of the gradient, or none is drawn.
    """
    largest = max(error.norm for error in model_errors)
    drawn = [math.log(error.norm) for error in model_errors if error.is_drawn and error.norm > 0.0]
    if largest <= golden.norm or len(drawn) < FEWEST_DRAWN:
        return 1.0
    reached = float(np.mean(drawn) + _DEVIATIONS * np.std(drawn, ddof=1))
    return max(1.0, math.exp(reached) / (limit * largest))


def is_lost(tensor: TensorResult) -> bool:
    """Whether a tensor is a gradient that is expected to be nothing but rounding, whose size may be anything."""
    return tensor.kind.endswith("gradient") and tensor.expected.relative_l2 > 1.0
