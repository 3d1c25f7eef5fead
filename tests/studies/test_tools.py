"""The tools of studies: power laws, dither, expectations, number formats, and statistics over seeds."""

from __future__ import annotations

import math
import statistics

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.studies.reporting import all_of, between, fit, interval, mean_digits, ratio_interval, ratios_between
from lab.studies.stepwise import FORMATS, HARDWARE, UNLIMITED, carrier, full_fp32_products
from lab.studies.training_curves.study import Band, dithered, prediction_band, unit_roundoff
from parity.case.case import Rng
from parity.numerics import formats
from parity.numerics.formats import Rounding
from parity.te import PRECISIONS

# Power laws fitted to errors over sizes.


REFERENCE = {"hidden": 256.0, "depth": 1.0}
SIZES = [{"hidden": hidden, "depth": depth} for hidden, depth in ((256, 1), (512, 1), (1024, 1), (256, 4), (256, 32))]
exponents = st.floats(-2, 2)


@given(st.floats(1e-8, 1.0), exponents, exponents)
def test_the_law_that_measurements_follow_is_found(base: float, a: float, c: float) -> None:
    law = fit([(sizes, base * (sizes["hidden"] / 256) ** a * sizes["depth"] ** c) for sizes in SIZES], REFERENCE)
    assert law is not None
    assert law.base == pytest.approx(base)
    assert law.exponents == pytest.approx({"hidden": a, "depth": c}, abs=1e-6)
    assert law.worst_factor == pytest.approx(1)
    assert law.at({"hidden": 512, "depth": 2}) == pytest.approx(base * 2**a * 2**c)


def test_growth_by_a_factor_is_told_from_a_power_law_where_it_may_occur() -> None:
    sizes = [{"hidden": 256.0, "depth": float(depth)} for depth in (1, 2, 4, 8)]
    law = fit([(each, 0.001 * 1.5 ** (each["depth"] - 1)) for each in sizes], REFERENCE, ["depth"])
    assert law is not None
    assert law.rates == pytest.approx({"depth": 1.5})
    assert law.at({"hidden": 256, "depth": 3}) == pytest.approx(0.001 * 1.5**2)
    law = fit([(each, 0.001 * each["depth"] ** 0.5) for each in sizes], REFERENCE, ["depth"])
    assert law is not None
    assert law.exponents == pytest.approx({"depth": 0.5})
    assert not law.rates


def test_a_size_that_does_not_vary_has_no_exponent() -> None:
    law = fit([({"hidden": hidden, "depth": 1}, 0.1) for hidden in (256, 512)], REFERENCE)
    assert law is not None
    assert set(law.exponents) == {"hidden"}


def test_the_worst_factor_tells_how_far_a_measurement_is_from_the_law() -> None:
    law = fit([({"hidden": 256, "depth": 1}, 1.0), ({"hidden": 256, "depth": 1}, 4.0)], REFERENCE)
    assert law is not None
    assert (law.base, law.worst_factor) == pytest.approx((2.0, 2.0))


def test_errors_of_zero_and_missing_ones_are_left_out() -> None:
    sizes = {"hidden": 256, "depth": 1}
    law = fit([(sizes, 0.0), (sizes, math.nan), (sizes, math.inf), (sizes, 0.5)], REFERENCE)
    assert law is not None
    assert law.base == pytest.approx(0.5)
    assert fit([(sizes, 0.0)], REFERENCE) is None


# Dithered rounding has errors of the same size as plain rounding, but elsewhere.


RECIPES = [name for name, precision in PRECISIONS.items() if precision.rounding.inputs and precision.recipe]


def values(seed: int = 0) -> Tensor:
    return torch.randn(256, 128, generator=torch.Generator().manual_seed(seed))


def compare(error: Tensor, dithered_error: Tensor) -> tuple[float, float]:
    """Return the ratio of the norms, and the correlation."""
    product = (error * dithered_error).sum() / (error.norm() * dithered_error.norm())
    return (dithered_error.norm() / error.norm()).item(), product.item()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("operand", ["inputs", "weights"])
def test_errors_of_operands_keep_their_size_and_lose_their_sign(name: str, operand: str) -> None:
    rounding, x = PRECISIONS[name].rounding, values()
    plain, shaken = getattr(rounding, operand), getattr(dithered(rounding, 1), operand)
    size, correlation = compare(plain(x, 1) - x, shaken(x, 1) - x)
    assert size == pytest.approx(1, abs=0.05)
    assert abs(correlation) < 0.2


def test_errors_of_storage_keep_their_size_and_lose_their_sign() -> None:
    rounding, x = Rounding(torch.bfloat16), values()
    size, correlation = compare(rounding.store(x) - x, dithered(rounding, 1).store(x) - x)
    assert size == pytest.approx(1, abs=0.02)
    assert abs(correlation) < 0.05


def test_realisations_differ_by_their_seeds_alone() -> None:
    rounding, x = PRECISIONS["fp8_current"].rounding, values()
    first, again, other = (dithered(rounding, seed).store(x) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_zeros_and_what_is_stored_already_stay() -> None:
    rounding = dithered(Rounding(torch.bfloat16), 3)
    assert torch.equal(rounding.store(torch.zeros(8)), torch.zeros(8))
    stored = values().bfloat16()
    assert rounding.store(stored) is stored
    assert rounding.inputs is None


@pytest.mark.parametrize(("name", "bits"), [("fp8_current", 4), ("mxfp8", 4)])
def test_a_unit_roundoff_is_that_of_the_format(name: str, bits: int) -> None:
    inputs = PRECISIONS[name].rounding.inputs
    assert inputs is not None
    assert unit_roundoff(inputs) == pytest.approx(2.0**-bits, rel=0.1)


# Prediction bands against simulation and against the textbook.


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


# Number formats round to nearest, ties to even, and keep to their range.


floats = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
NUMPY = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


@pytest.mark.parametrize("name", NUMPY)
@given(values=st.lists(floats, min_size=1, max_size=20))
def test_a_format_is_that_of_its_dtype(name: str, values: list[float]) -> None:
    limit = LARGEST.get(name, 3e38)
    expected = np.clip(np.array(values, np.float32), -limit, limit)
    with np.errstate(over="ignore"):
        expected = expected.astype(NUMPY[name]).astype(np.float32)
    np.testing.assert_array_equal(FORMATS[name].round(torch.tensor(values)).numpy(), expected)


@given(values=st.lists(floats, min_size=1, max_size=20))
def test_tf32_is_the_rounding_model_s_but_for_ties(values: list[float]) -> None:
    x = torch.tensor(values)
    ours, theirs = FORMATS["tf32"].round(x), formats.tf32(x)
    tie = (ours - x).abs() == (theirs - x).abs()
    assert (tie | (ours == theirs)).all()


@pytest.mark.parametrize("name", FORMATS)
@given(values=st.lists(floats, min_size=2, max_size=20))
def test_rounding_twice_is_rounding_once_and_keeps_the_order(name: str, values: list[float]) -> None:
    rounded = FORMATS[name].round(torch.tensor(sorted(values)))
    assert torch.equal(FORMATS[name].round(rounded), rounded)
    assert (rounded[1:] >= rounded[:-1]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_next_to_one_are_the_unit_in_the_last_place_apart(name: str) -> None:
    unit = 2.0 ** -FORMATS[name].mantissa_bits
    near = torch.tensor([1.0, 1 + unit * 0.4, 1 + unit * 0.6, 1 + unit * 0.5, 1 + unit * 1.5], dtype=torch.float64)
    rounded = FORMATS[name].round(near)
    if name == "fp64":
        assert torch.equal(rounded, near)
    else:
        assert rounded.tolist() == [1.0, 1.0, 1 + unit, 1.0, 1 + 2 * unit]


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - LARGEST.keys()))
def test_infinities_stay_where_the_format_has_them(name: str) -> None:
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(FORMATS[name].round(infinite), infinite)


@pytest.mark.parametrize("limited", UNLIMITED)
def test_a_format_without_limits_rounds_as_its_like_between_them(limited: str) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    x = x[x.abs() > 2**-5]
    assert torch.equal(FORMATS[UNLIMITED[limited]].round(x), FORMATS[limited].round(x))
    assert FORMATS[UNLIMITED[limited]].round(torch.tensor(1e-20)) > 0
    assert FORMATS[limited].round(torch.tensor(1e-20)) == 0


def test_fp64_alone_needs_to_be_carried_in_fp64() -> None:
    assert {name for name in HARDWARE if carrier([name]) == torch.float64} == {"fp64"}
    assert carrier(["bf16", "fp64"]) == torch.float64


def test_fp32_products_are_asked_for_in_fp32_and_what_was_set_comes_back() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with full_fp32_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


# Statistics of a figure over seeds: intervals, verdicts and digits.


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
