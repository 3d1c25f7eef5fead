"""What a new draw from a distribution is expected to be, when only some earlier draws of it are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Band:
    """An interval at each of several points.

    Attributes:
        low: lower ends.
        high: upper ends.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def margin(self, curve: Sequence[float]) -> float:
        """The largest distance of a curve from the band's middle, in half widths: up to 1 it is inside everywhere.

        Infinite if the curve is NaN somewhere, or off a band without width.
        """
        low, high, values = (np.asarray(x, dtype=np.float64) for x in (self.low, self.high, curve))
        distance, half = np.abs(values - (low + high) / 2), (high - low) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(distance == 0, 0.0, distance / half)
        return math.inf if np.isnan(ratio).any() else float(ratio.max())


def prediction_band(draws: Sequence[Sequence[float]], false_alarms: float) -> Band:
    """Where one more curve lies at all of its points, but for a share ``false_alarms`` of curves.

    At each point, n normal draws with mean m and standard deviation s (n - 1 degrees of freedom) bound the next one by
    ``m ± t s sqrt(1 + 1/n)``, with t the quantile of Student's distribution (Hahn and Meeker, "Statistical Intervals",
    1991, section 4.7). The false alarms are shared out to the points in equal parts (Bonferroni), so points may depend
    on each other.

    Args:
        draws: at least two curves of equal length.
        false_alarms: between 0 and 1, of the whole curve.
    """
    values = np.asarray(draws, dtype=np.float64)
    count, points = values.shape
    quantile = stats.t.ppf(1 - false_alarms / (2 * points), count - 1)
    half = quantile * values.std(axis=0, ddof=1) * math.sqrt(1 + 1 / count)
    mean = values.mean(axis=0)
    return Band(tuple((mean - half).tolist()), tuple((mean + half).tolist()))
