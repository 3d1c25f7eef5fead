"""Compute the band in which a right training's curves lie, from trainings of the reference whose roundings are drawn.

The band is for information only, and no verdict depends on it. A right training may drift as far as chaos takes it, and
the results of each step are judged at the weights that the candidate has.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from scipy import special
from torch import Tensor

from parity.case.case import Case
from parity.case.validate import CheckedSize
from parity.numerics.freedom import UNFUSED
from parity.passes.all_passes import Tensors, run_model
from parity.passes.modes import usual_modes
from parity.passes.prepare import Prepared
from parity.result import Kind
from parity.trainings.courses import Course, of_candidate, of_reference

if TYPE_CHECKING:
    from parity.te import Kernels, Precision

DRAWN = 6
"""The default number of trainings of the reference for a band."""
# The probability that a right training leaves its band somewhere, if its errors are normal and as large as the model's.
_LEAVES = 0.05
_HALF_ULP = torch.finfo(torch.float32).eps / 2  # what an operation in FP32 rounds by, at most
_OPERATIONS = 10  # of an optimizer's step, about


@dataclass(frozen=True)
class Left:
    """The place where a training first leaves the band of right ones.

    Attributes:
        step: the step's number, from 1.
        where: the reference's parameters, the farthest out first; empty for the loss.
    """

    step: int
    where: tuple[str, ...] = ()


@dataclass(frozen=True)
class Band:
    """The band of a training's losses, and where the training leaves it.

    Attributes:
        free: the losses of the reference's own training in FP64.
        drawn: how many trainings of the reference were drawn.
        low, high: the bounds of each step's loss.
        loss_left: where the loss first leaves these bounds; None if it never does.
        weights_left: the first step after which parameters are farther from those in FP64 than right trainings take
            them; None if there is none.
        deviation: the distance of the last loss from that in FP64, over the root mean square of the drawn trainings'.
    """

    free: tuple[float, ...]
    drawn: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    loss_left: Left | None
    weights_left: Left | None
    deviation: float


def band_of(
    case: Case,
    checked: CheckedSize,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    steps: int,
    drawn: int = DRAWN,
) -> Band:
    """Train the reference in FP64 and ``drawn`` times with drawn roundings, train the candidate, and return the band.

    This costs a pass in FP64 or of the rounding model for each step of these trainings, and the candidate's training
    once more.

    Raises:
        NothingToJudge: if a step of any of them cannot be compared with.
    """
    at = case, checked, precision, seed, kernels, steps
    with usual_modes():
        free, candidate = of_reference(*at), of_candidate(*at)
        is_wide = torch.finfo(candidate.dtype).bits > torch.finfo(precision.dtype).bits
        right = [of_reference(*at, partial(_run_drawn_step, precision, is_wide, run, steps)) for run in range(drawn)]
    return band(free, right, candidate)


def _run_drawn_step(
    precision: Precision, is_wide: bool, run: int, steps: int, prepared: Prepared, number: int
) -> Tensors:
    """Run a step with roundings drawn for it alone, as kernels that fuse nothing, since these round the most.

    Drawn rounding has twice the variance of rounding to nearest, except for weights, which every port rounds alike. So
    a drawn training is off by as much as a right one, or by up to 1.4 times that.
    """
    wide: frozenset[tuple[Kind, str]] = frozenset({("output", "output")} if is_wide else ())
    freedom = dataclasses.replace(UNFUSED, jitter=run * steps + number, dithers=True)
    return run_model(dataclasses.replace(prepared, wide=wide), precision.rounding, freedom)


def band(free: Course, right: Sequence[Course], candidate: Course) -> Band:
    """Return the band of right trainings, and where the candidate's training leaves it.

    If numbers come from one normal distribution around zero, the ratio of another one to the root mean square of ``n``
    of them has Student's distribution with ``n`` degrees of freedom. The difference of a loss from that in FP64 is such
    a number. It may leave the band on either side in each step.

    A parameter's distance from the training in FP64 is positive. Its logarithm has the mean and the deviation of the
    drawn trainings', and the next one lies within ``t * s * sqrt(1 + 1 / n)`` of the mean. Two effects are granted that
    drawn trainings need not show. An optimizer's step is computed in FP32 in one order or another, and each of about
    ten operations rounds by half an ulp. And rounding may decide the sign of a small gradient, so that Adam moves an
    element the other way. If that has happened in none of ``n`` trainings, it happens ``m`` times in another with a
    probability of ``(n + 1) ** -m`` (Poisson, with a flat prior).
    """
    steps, runs = min(len(one.losses) for one in (free, candidate, *right)), len(right)
    times = -float(special.stdtrit(runs, _LEAVES / (2 * max(1, steps))))
    low, high, deviation, left = [], [], 0.0, None
    for step in range(steps):
        exact = free.losses[step]
        size = math.sqrt(statistics.fmean((one.losses[step] - exact) ** 2 for one in right))
        low.append(exact - times * size)
        high.append(exact + times * size)
        off = candidate.losses[step] - exact
        deviation = off / size if size else math.copysign(math.inf, off) if off else 0.0
        if left is None and not abs(off) <= times * size:
            left = Left(step + 1)
    return Band(
        *(tuple(free.losses[:steps]), runs, tuple(low), tuple(high)),
        *(left, _weights_left(free, right, candidate, steps), deviation),
    )


def _weights_left(free: Course, right: Sequence[Course], candidate: Course, steps: int) -> Left | None:
    """Return the first step after which a parameter is farther off than right trainings take it; None if none is."""
    names = free.weights[0] if steps else {}
    probability = _LEAVES / max(1, steps * len(names))
    quantile = -float(special.stdtrit(len(right) - 1, probability)) * math.sqrt(1.0 + 1.0 / len(right))
    elements = -math.log(probability) / math.log(len(right) + 1)
    arithmetic, moved = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for step in range(1, steps + 1):
        beyond = {}
        for name in names:
            exact, before = free.weights[step][name], free.weights[step - 1][name]
            update = (exact - before).abs()
            arithmetic[name] += _HALF_ULP * float((exact.abs() + _OPERATIONS * update).norm())
            moved[name] = max(moved[name], float(update.max()))
            granted = arithmetic[name] + 2.0 * moved[name] * math.sqrt(elements)
            if not granted:
                continue
            logarithms = [math.log(granted + _compute_distance(one.weights[step][name], exact)) for one in right]
            limit = math.exp(statistics.fmean(logarithms) + quantile * statistics.stdev(logarithms))
            own = _compute_distance(candidate.weights[step][name], exact)
            if not own <= limit:
                beyond[name] = own / limit
        if beyond:
            return Left(step, tuple(sorted(beyond, key=lambda name: -beyond[name])))
    return None


def _compute_distance(x: Tensor, y: Tensor) -> float:
    return float((x.cpu() - y.cpu()).norm())
