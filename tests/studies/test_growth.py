"""Power laws fitted to errors over sizes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy")
from parity.lab.studies.reporting import fit

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
