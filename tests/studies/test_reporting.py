"""Test what seeds tell of a figure: intervals, verdicts and digits."""

from __future__ import annotations

import math
import statistics

import pytest

pytest.importorskip("scipy")
from parity.case.case import Rng
from parity.lab.studies.reporting import all_of, between, interval, mean_digits, ratio_interval, ratios_between


@pytest.mark.parametrize(
    ("of_seeds", "verdict"),
    [
        ([1.0, 1.1, 0.9], "yes"),
        ([1e6, 1.1e6, 0.9e6], "no"),
        ([-1e6, -1.1e6, -0.9e6], "no"),
        ([1.0, 1.9, 0.2], "cannot tell"),
        ([1.0], "cannot tell"),
        ([math.inf, 1.0], "no"),
        ([math.nan, 1.0], "no"),
    ],
)
def test_a_mean_lies_between_bounds_or_does_not_or_seeds_cannot_tell(of_seeds: list[float], verdict: str) -> None:
    assert between(of_seeds, 0.5, 1.5) == verdict


def test_ratios_are_judged_by_their_logarithms() -> None:
    assert ratios_between([0.01, 100.0], 0.5, 2.0) == "cannot tell"
    assert ratios_between([2.3, 2.4, 2.5], 2.0, math.inf) == "yes"
    assert ratio_interval([2.0, 8.0])[0] == pytest.approx(4.0)


def test_nineteen_of_twenty_intervals_hold_the_mean() -> None:
    rng = Rng(0)
    draws = [rng.normal(4, mean=3.0).tolist() for _ in range(1000)]
    held = sum(low <= 3.0 <= high for low, high in map(interval, draws))
    assert held == pytest.approx(950, abs=25)


@pytest.mark.parametrize(
    ("verdicts", "together"),
    [
        (["yes", "yes"], "yes"),
        (["no"], "no"),
        (["yes", "no", "cannot tell"], "partly"),
        (["yes", "cannot tell"], "cannot tell"),
    ],
)
def test_verdicts_on_parts_make_one(verdicts: list[str], together: str) -> None:
    assert all_of(verdicts) == together


@pytest.mark.parametrize(
    ("of_seeds", "text"),
    [
        ([0.037, 0.037], "0.037"),
        ([0.0371, 0.0372], "0.037"),
        ([0.0016, 0.0019, 0.0022], "0.002"),
        ([0.0009, 0.0012, 0.0015] * 8, "0.0012"),
        ([1.0, 5.0, 0.1], "~2"),
        ([142.3, 142.4], "142"),
        ([120.0, 150.0], "1e2"),
        ([0.0019], "~0.002"),
        ([0.0, 0.0], "0"),
        ([math.nan, 1.0], "–"),
    ],
)
def test_digits_are_those_that_seeds_share(of_seeds: list[float], text: str) -> None:
    assert mean_digits(of_seeds) == text


def test_other_seeds_hardly_ever_move_the_last_digit_by_more_than_two() -> None:
    rng = Rng(0)
    means = [float(mean_digits(rng.normal(25, mean=0.0012, std=0.0003).tolist())) for _ in range(200)]
    middle = statistics.median(means)
    assert sum(abs(each - middle) <= 0.0002001 for each in means) >= 190
