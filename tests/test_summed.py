"""Sums that are taken once equal those taken anew."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.numerics.errors import Summed

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def draw(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(shape=SHAPES, seed=st.integers(0, 100))
def test_norm_and_largest_are_those_of_all_elements(shape, seed):
    x = draw(shape, seed)
    summed = Summed(x)
    assert summed.norm == pytest.approx(torch.linalg.vector_norm(x).item())
    assert summed.max_abs == x.abs().max().item()


@given(shape=SHAPES.filter(len))
def test_squares_are_summed_over_any_dimensions(shape):
    x = draw(shape)
    summed = Summed(x)
    for size in range(1, len(shape) + 1):
        for dims in combinations(range(len(shape)), size):
            torch.testing.assert_close(summed.squares_over(dims), x.square().sum(dims))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_shows(value):
    x = draw((3, 4))
    x[1, 2] = value
    assert not Summed(x).is_finite
    assert not math.isfinite(Summed(x).max_abs)


def test_nothing_sums_to_zero():
    empty = Summed(draw((2, 0)))
    assert (empty.norm, empty.max_abs, empty.is_finite) == (0.0, 0.0, True)


def test_a_product_is_the_same_when_asked_for_again():
    x, y = Summed(draw((3, 4))), Summed(draw((3, 4), seed=1))
    assert x.dot(y) == x.dot(y) == pytest.approx((x.values * y.values).sum().item())
    assert x.dot(x) == pytest.approx(x.total)
