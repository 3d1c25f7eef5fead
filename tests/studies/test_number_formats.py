"""Number formats round to nearest, ties to even, and keep to their range."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.lab.studies.stepwise import FORMATS, HARDWARE, UNLIMITED, carrier, full_fp32_products
from parity.numerics import formats

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
