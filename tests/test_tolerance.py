"""From expected error to verdict."""

import dataclasses
import math

import pytest
import torch

from parity.errors import Errors, measure
from parity.tolerance import FACTOR_L2, FACTOR_MAX, margin, tolerance

EXPECTED = Errors(relative_l2=1e-3, max_abs=1e-2, max_ulps=1.0, cosine=1.0, sqnr_db=60.0, golden_rms=1.0)


def test_the_expected_error_itself_has_a_margin_of_one_over_the_factor():
    bound = tolerance(EXPECTED, torch.float32, 1)
    assert margin(EXPECTED, bound) == pytest.approx(max(1 / FACTOR_L2, 1 / FACTOR_MAX))


def test_an_error_beyond_either_bound_fails():
    bound = tolerance(EXPECTED, torch.float32, 1)
    for field in ("relative_l2", "max_abs"):
        worse = dataclasses.replace(EXPECTED, **{field: getattr(EXPECTED, field) * 100})
        assert margin(worse, bound) > 1


def test_an_exact_expectation_still_allows_the_rounding_of_the_result():
    golden = torch.rand(1000, dtype=torch.float64) + 0.5
    exact = measure(golden, golden, torch.bfloat16)
    rounded = measure(golden.bfloat16(), golden, torch.bfloat16)
    assert margin(rounded, tolerance(exact, torch.bfloat16, 1)) < 1


def test_the_order_of_an_fp32_sum_is_a_kernels_own_choice():
    terms = torch.randn(4096, 64)
    golden = terms.double().sum(0)
    one_by_one = terms[0].clone()
    for row in terms[1:]:
        one_by_one += row
    exact = measure(golden, golden, torch.float32)
    errors = measure(one_by_one, golden, torch.float32)
    assert margin(errors, tolerance(exact, torch.float32, 1)) > 1
    assert margin(errors, tolerance(exact, torch.float32, len(terms))) < 1


@pytest.mark.parametrize("field", ["nans", "infs", "golden_non_finite"])
def test_what_is_not_finite_never_passes(field):
    errors = dataclasses.replace(EXPECTED, relative_l2=0.0, max_abs=0.0, **{field: 1})
    assert margin(errors, tolerance(EXPECTED, torch.float32, 1)) == math.inf
