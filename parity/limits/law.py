"""The distribution of one statistic over faithful ports, and the limit that it sets.

The logarithm of a ratio is taken as normal above its center, the median or 0 where that is lower: an error below the
model's is none too many, so the lower side, which has another shape, does not count. A signed statistic is taken as
normal around zero. Tensors differ, so tails are heavier than normal near the top: the spread is that of the narrowest
normal distribution whose upper tail lies nowhere below the measured one. The limit is the quantile of Student's t
distribution, which allows for the spread being known from finitely many tensors; tensors count once, however many
seeds they were measured with, since one tensor's values resemble each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from parity.limits.aim import FALSE_ALARMS_A_RUN, STATISTICS_A_RUN
from parity.user_error import UserError

SIGNED = ("gain", "mistake")
# No model of rounding is trusted more closely than this: a spread of the logarithm, wider for the worst of many, which
# a few errors decide, and of standard deviations.
_LEAST_SPREAD = 0.1
_LEAST_SPREADS = {"largest": 0.15, "row": 0.15, "slice": 0.15, "gain": 1.0, "mistake": 1.0}
# With fewer the quantiles of Student's distribution are astronomic, and a limit that nothing exceeds is none.
FEWEST_TENSORS = 8
# In standard deviations; nearer to the center a law need not fit.
_TAIL_BEGINS = 1.0
# Ratios below count as this one: they have no logarithm, and do not matter.
SMALLEST_RATIO = 1e-3


@dataclass(frozen=True)
class Law:
    """What faithful ports show.

    Attributes:
        center: median of the ratio's logarithm, at least 0; 0 for a signed statistic.
        spread: standard deviation of a normal distribution around the center that bounds the upper tail.
        tensors: how many different tensors were measured.
        samples: how many values.
        largest: the largest value that was seen, as a ratio or in standard deviations.
    """

    center: float
    spread: float
    tensors: int
    samples: int
    largest: float

    def limit(self, statistic: str, probability: float = FALSE_ALARMS_A_RUN / STATISTICS_A_RUN) -> float:
        """The value that a faithful port exceeds with this probability.

        Args:
            statistic: its name; the limit of one of ``SIGNED`` holds for its magnitude.
            probability: of a false alarm from one statistic of one tensor.
        """
        signed = statistic in SIGNED
        quantile = -special.stdtrit(self.tensors - 1, probability / 2 if signed else probability)
        distance = float(quantile * self._trusted(statistic))
        return distance if signed else _exp(self.center + distance)

    def deviations(self, value: float, statistic: str) -> float:
        """How many standard deviations a value lies above the center; the magnitude of a signed one."""
        signed = statistic in SIGNED
        distance = abs(value) if signed else math.log(max(value, SMALLEST_RATIO)) - self.center
        return distance / self._trusted(statistic)

    def _trusted(self, statistic: str) -> float:
        return max(self.spread, _LEAST_SPREADS.get(statistic, _LEAST_SPREAD))


def fit(values: Sequence[float], tensors: Sequence[str], statistic: str) -> Law:
    """The law of values that faithful ports gave.

    Args:
        values: finite, at least one.
        tensors: the tensor that each value is of, by any name.
        statistic: its name.

    Raises:
        UserError: if there are too few different tensors to extrapolate from.
    """
    count = len(set(tensors))
    if count < FEWEST_TENSORS:
        raise UserError(too_few(count))
    signed = statistic in SIGNED
    measured = np.asarray(values, dtype=float)
    if signed:
        center, distances = 0.0, np.abs(measured)
    else:
        logarithms = np.log(np.maximum(measured, SMALLEST_RATIO))
        center = max(0.0, float(np.median(logarithms)))
        distances = logarithms - center
    return Law(center, _spread(np.sort(distances), signed), count, len(measured), float(np.abs(measured).max()))


def _exp(exponent: float) -> float:
    """Of what no float can hold, infinity."""
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


def too_few(count: int) -> str:
    """Why so many tensors are not enough."""
    return (
        f"{count} different tensors cannot tell what one in a million does; give cases that have at least "
        f"{FEWEST_TENSORS} of each kind"
    )


def _spread(distances: NDArray[np.float64], signed: bool) -> float:
    """Of the narrowest normal distribution (half-normal for magnitudes) that bounds the tail of sorted distances."""
    ranks = (np.arange(len(distances)) + 0.5) / len(distances)
    quantiles = special.ndtri((1 + ranks) / 2 if signed else ranks)
    tail = quantiles >= _TAIL_BEGINS
    return max(0.0, float(np.max(distances[tail] / quantiles[tail], initial=0.0)))
