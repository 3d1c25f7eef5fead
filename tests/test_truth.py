"""Errors are taken in FP32 where it holds them, to its precision, and in FP64 elsewhere."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.numerics.errors import Truth, difference, in_fp32


def golden(scale=1.0, shape=(8, 64)):
    return scale * torch.randn(shape, dtype=torch.float64)


@given(st.floats(-8, 8), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.floats(-7, 0))
def test_errors_agree_with_fp64s(exponent, dtype, relative):
    truth = golden(10.0**exponent)
    computed = (truth * (1.0 + 10.0**relative * golden())).to(dtype)
    exact = difference(computed, truth)
    found = Truth(truth).deviations([computed])
    assert found.golden.values.dtype == found.errors[0].values.dtype == torch.float32
    assert torch.allclose(found.errors[0].values.double(), exact, rtol=1e-6, atol=1e-7 * exact.abs().max().item())
    assert found.errors[0].norm == pytest.approx(exact.norm().item(), rel=1e-6)


def test_what_golden_has_beyond_fp32_is_part_of_the_error():
    truth = torch.full((4, 8), 1.0 + 2.0**-30, dtype=torch.float64)
    (error,) = Truth(truth).deviations([torch.ones(4, 8)]).errors
    assert torch.equal(error.values.double(), torch.full_like(truth, -(2.0**-30)))


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_values_near_the_ends_of_fp32s_range_are_judged_in_fp64(scale):
    truth = golden(scale)
    found = Truth(truth).deviations([truth.float()])
    assert torch.equal(found.golden.values, truth)
    assert torch.equal(found.errors[0].values, difference(truth.float(), truth))


def test_one_error_out_of_range_puts_all_in_fp64():
    truth = golden()
    found = Truth(truth).deviations([truth.float(), 1e18 * truth.float()])
    assert {summed.values.dtype for summed in (found.golden, *found.errors)} == {torch.float64}
    assert found.errors[1].norm == pytest.approx(1e18 * truth.norm().item())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_error_that_is_not_finite_is_told(wrong):
    computed = golden().float()
    computed[3, 5] = wrong
    found = Truth(golden()).deviations([golden().float(), computed])
    assert [error.is_finite for error in found.errors] == [True, False]


def test_zeros_have_no_error():
    (error,) = Truth(torch.zeros(4, 8, dtype=torch.float64)).deviations([torch.zeros(4, 8)]).errors
    assert error.norm == 0.0


def test_another_shape_is_no_tensor_in_its_place():
    with pytest.raises(ValueError, match="shapes differ"):
        Truth(golden(shape=(8, 64))).deviations([torch.zeros(64)])


def test_a_tensor_too_small_for_fp32_stays_as_it_is():
    assert in_fp32(golden(1e-3)).values.dtype is torch.float32
    assert in_fp32(golden(1e-30)).values.dtype is torch.float64
