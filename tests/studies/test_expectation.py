"""Prediction bands against simulation and against the textbook."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy")
from parity.lab.studies.training_curves import Band, prediction_band


def test_one_point_is_bounded_as_by_the_textbook() -> None:
    band = prediction_band([[1.0], [2.0], [3.0]], false_alarms=0.05)
    half = 4.302653 * 1.0 * math.sqrt(1 + 1 / 3)  # Student's t, two degrees of freedom, 97.5 %
    assert (band.low[0], band.high[0]) == (pytest.approx(2 - half), pytest.approx(2 + half))


@pytest.mark.parametrize("correlated", [False, True])
def test_no_more_than_the_stated_share_of_new_curves_leaves_the_band(correlated: bool) -> None:
    rng = np.random.default_rng(0)
    trials, count, points, share = 2000, 6, 10, 0.1

    def curve() -> list[float]:
        noise = rng.normal(size=points)
        return (3.0 + (noise.cumsum() if correlated else noise)).tolist()

    left = sum(prediction_band([curve() for _ in range(count)], share).margin(curve()) > 1 for _ in range(trials))
    assert left / trials < share + 3 * math.sqrt(share * (1 - share) / trials)
    assert left > 0


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_a_margin_is_the_distance_from_the_middle_in_half_widths(middle: float, half: float) -> None:
    band = Band((middle - half,) * 2, (middle + half,) * 2)
    assert band.margin([middle, middle + half]) == pytest.approx(1, rel=1e-3)
    assert band.margin([middle - 3 * half, middle]) == pytest.approx(3, rel=1e-3)


def test_a_nan_is_outside_every_band() -> None:
    assert Band((0.0,), (1.0,)).margin([math.nan]) == math.inf


def test_a_band_without_width_holds_nothing_but_its_middle() -> None:
    band = Band((2.0,), (2.0,))
    assert band.margin([2.0]) == 0
    assert band.margin([2.1]) == math.inf
