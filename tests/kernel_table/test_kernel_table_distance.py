"""Test how far two tensors are apart, in bits and in numbers of their format."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.lab.kernel_table.table import distance_of, ordinal

FORMATS = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
CODES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", FORMATS[1:3])
def test_numbers_in_order_have_ordinals_in_order(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[~numbers.isnan()]
    by_value, by_ordinal = numbers.double().sort().values, numbers[ordinal(numbers).argsort()].double()
    assert torch.equal(by_value, by_ordinal)


@pytest.mark.parametrize("dtype", FORMATS[3:])
def test_fp8_codes_have_the_order_of_their_values(dtype: torch.dtype) -> None:
    numbers = CODES.view(dtype)
    numbers = numbers[~numbers.float().isnan()]
    steps = ordinal(numbers)[numbers.float().argsort()].diff()
    assert set(steps.tolist()) <= {0, 1}


def test_e8m0_scales_are_one_apart_for_each_factor_of_two() -> None:
    scales = torch.tensor([1.0, 2.0, 0.25]).to(torch.float8_e8m0fnu)
    assert ordinal(scales).diff().tolist() == [1, -3]


@given(st.integers(0, 0x7F000000), st.sampled_from([1.0, -1.0]), st.integers(1, 9))
def test_stepping_through_the_numbers_counts_as_many_ulps(bits: int, sign: float, steps: int) -> None:
    x = torch.tensor([bits], dtype=torch.int32).view(torch.float32) * sign
    y = x
    for _ in range(steps):
        y = torch.nextafter(y, torch.tensor(math.inf))
    assert distance_of(x, y).max_ulps == steps


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_tensor_is_equal_to_itself_nans_included(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -0.0, math.nan, 448.0]).to(dtype)
    assert distance_of(x, x.clone()) == distance_of(x, x)
    assert (distance_of(x, x).different, distance_of(x, x).max_ulps) == (0, 0)


def test_zeros_of_other_sign_differ_in_a_bit_and_are_no_ulp_apart() -> None:
    distance = distance_of(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (distance.elements, distance.different, distance.max_ulps) == (2, 1, 0)


def test_nans_of_other_bits_are_no_ulp_apart() -> None:
    x, y = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert (distance_of(x, y).different, distance_of(x, y).max_ulps) == (1, 0)


def test_a_nan_on_one_side_is_infinitely_far() -> None:
    assert distance_of(torch.tensor([math.nan, 1.0]), torch.tensor([2.0, 1.0])).max_ulps == math.inf


def test_infinity_is_one_number_from_the_largest() -> None:
    assert distance_of(torch.tensor([math.inf]), torch.tensor([torch.finfo(torch.float32).max])).max_ulps == 1


def test_empty_tensors_are_equal() -> None:
    assert distance_of(torch.empty(0), torch.empty(0)).max_ulps == 0


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)])
def test_tensors_of_other_shape_or_dtype_are_not_compared(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        distance_of(torch.zeros(2), other)


def test_the_relative_distance_is_the_difference_s_norm_over_the_first_tensor_s() -> None:
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert distance_of(x, y).relative == pytest.approx(0.1)


def test_elements_that_are_not_finite_have_no_part_in_the_relative_distance() -> None:
    x, y = torch.tensor([3.0, 4.0, math.inf]), torch.tensor([3.0, 4.5, math.nan])
    assert distance_of(x, y).relative == pytest.approx(0.1)


def test_integers_may_be_names_and_have_no_relative_distance() -> None:
    assert math.isnan(distance_of(torch.tensor([1, 2]), torch.tensor([1, 3])).relative)
