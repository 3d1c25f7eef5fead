"""Error measures."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.numerics import errors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
finite = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30)


def measure(x, golden):
    return errors.measure(x, golden, torch.float32)


def fp64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_relative_l2_is_the_norm_of_the_error_over_the_norm_of_golden():
    assert measure(fp64(3.0, 4.5), fp64(3.0, 4.0)).relative_l2 == pytest.approx(0.5 / 5.0)


def test_relative_l2_of_two_zeros_is_zero_and_of_golden_zero_alone_infinite():
    assert measure(fp64(0.0), fp64(0.0)).relative_l2 == 0.0
    assert measure(fp64(1.0), fp64(0.0)).relative_l2 == math.inf


def test_sqnr_counts_20_db_for_each_factor_of_10():
    assert measure(fp64(1.01), fp64(1.0)).sqnr_db == pytest.approx(40.0)


@given(finite)
def test_an_fp32_ulp_is_numpys_spacing(value):
    value, spacing = float(np.float32(value)), float(np.spacing(np.float32(value)))
    assert errors.measure(fp64(value + spacing), fp64(value), torch.float32).max_ulps == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_next_number_up_is_one_ulp_away(dtype):
    x = torch.tensor([1.0, 1.5, 3.0, 100.0, 1e-3], dtype=dtype)
    up = torch.nextafter(x.float(), torch.full_like(x, math.inf).float()) if dtype == torch.float32 else None
    bits = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}[dtype]
    next_up = (x.view(bits) + 1).view(dtype)
    if up is not None:
        assert torch.equal(next_up, up)
    assert errors.measure(next_up, x.double(), dtype).max_ulps == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_near_zero_an_ulp_is_the_smallest_subnormal(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert errors.measure(fp64(smallest), fp64(0.0), dtype).max_ulps == 1.0


def test_cosine_does_not_see_scale_but_sees_direction():
    assert measure(fp64(2.0, 0.0), fp64(1.0, 0.0)).cosine == 1.0
    assert measure(fp64(0.0, 1.0), fp64(1.0, 0.0)).cosine == 0.0
    assert measure(fp64(-1.0, 0.0), fp64(1.0, 0.0)).cosine == -1.0
    assert measure(fp64(0.0, 0.0), fp64(0.0, 0.0)).cosine == 1.0
    assert measure(fp64(1.0, 0.0), fp64(0.0, 0.0)).cosine == 0.0


def test_a_nan_is_counted_and_located_and_the_rest_is_measured():
    golden = torch.ones(2, 3, dtype=torch.float64)
    x = golden.clone()
    x[1, 2] = math.nan
    x[0, 1] = 2.0
    measured = errors.measure(x, golden, torch.float32)
    assert (measured.nans, measured.infs, measured.first_non_finite) == (1, 0, (1, 2))
    assert measured.max_abs == 1.0
    assert not measured.finite


def test_an_infinity_of_the_golden_value_is_not_blamed_on_the_candidate():
    measured = errors.measure(fp64(math.inf, 1.0), fp64(math.inf, 1.0), torch.float32)
    assert (measured.nans, measured.infs, measured.golden_non_finite) == (0, 0, 1)
    assert not measured.finite


def test_an_empty_tensor_has_no_error():
    measured = errors.measure(torch.zeros(0), torch.zeros(0, dtype=torch.float64), torch.float32)
    assert (measured.relative_l2, measured.max_abs, measured.finite) == (0.0, 0.0, True)


def test_different_shapes_are_an_error_that_names_both():
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        errors.measure(torch.zeros(2), torch.zeros(3), torch.float32)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.floats(1e-6, 1e6))
def test_relative_measures_do_not_depend_on_units(values, unit):
    golden = fp64(*values)
    x = golden * 1.001
    assert measure(x * unit, golden * unit).relative_l2 == pytest.approx(measure(x, golden).relative_l2, rel=1e-6)
    assert measure(x * unit, golden * unit).cosine == pytest.approx(1.0)
