"""Distances of weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from parity.lab.studies.training_drift import between, wasserstein

numbers = st.floats(-1e3, 1e3, width=32)
pairs = st.integers(1, 30).flatmap(
    lambda size: st.tuples(
        st.lists(numbers, min_size=size, max_size=size), st.lists(numbers, min_size=size, max_size=size)
    )
)


@given(pairs)
def test_wasserstein_is_scipy_s(pair: tuple[list[float], list[float]]) -> None:
    one, other = (torch.tensor(values, dtype=torch.float64) for values in pair)
    assert wasserstein(one, other) == pytest.approx(stats.wasserstein_distance(*pair), rel=1e-9, abs=1e-9)


def test_weights_that_change_places_are_no_distance_apart_as_a_set() -> None:
    one = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert wasserstein(one, one.flip(0)) == 0.0
    assert between({"w": one}, {"w": one.flip(0)}).whole.maximum > 0


def test_weights_that_all_move_are_as_far_apart_as_they_moved() -> None:
    one = torch.arange(10.0)
    distance = between({"w": one}, {"w": one + 3})
    assert distance.whole.wasserstein == distance.whole.maximum == 3.0


def test_the_whole_is_one_set_of_numbers() -> None:
    one = {"a": torch.zeros(1), "b": torch.ones(3)}
    other = {"a": torch.ones(1), "b": torch.tensor([0.0, 1.0, 1.0])}
    distance = between(one, other)
    assert distance.whole.wasserstein == 0.0
    assert [each.wasserstein for each in distance.tensors.values()] == [1.0, pytest.approx(1 / 3)]


def test_sets_of_other_sizes_are_told() -> None:
    with pytest.raises(ValueError, match="3 numbers cannot be matched with 4"):
        wasserstein(torch.zeros(3), torch.zeros(4))
