"""Errors against the two bounds that a report shows."""

import dataclasses
import math

import pytest

from parity.numerics.errors import Tolerance, margin
from parity.result import Errors

ERRORS = Errors(relative_l2=1e-3, max_abs=1e-2, max_ulps=1.0, cosine=1.0, sqnr_db=60.0, golden_rms=1.0)


def test_the_margin_is_the_larger_of_both_errors_over_their_bounds():
    assert margin(ERRORS, Tolerance(relative_l2=1e-2, max_abs=2e-2)) == pytest.approx(0.5)
    assert margin(ERRORS, Tolerance(relative_l2=5e-4, max_abs=1.0)) == pytest.approx(2.0)


def test_an_error_where_none_is_allowed_fails_and_no_error_passes():
    nothing = Tolerance(0.0, 0.0)
    assert margin(ERRORS, nothing) == math.inf
    assert margin(dataclasses.replace(ERRORS, relative_l2=0.0, max_abs=0.0), nothing) == 0.0


@pytest.mark.parametrize("field", ["nans", "infs", "golden_non_finite"])
def test_what_is_not_finite_never_passes(field):
    errors = dataclasses.replace(ERRORS, relative_l2=0.0, max_abs=0.0, **{field: 1})
    assert margin(errors, Tolerance(1.0, 1.0)) == math.inf
