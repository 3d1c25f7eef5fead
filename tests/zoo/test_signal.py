"""A bug's strength against noise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.lab.zoo.trial import LEAST_SEEDS, filter_ratio, measure, measure_added

EFFECT = torch.tensor([3.0, 4.0])


def test_noise_across_the_effect_is_not_seen_by_the_filter():
    signal = measure(EFFECT, torch.tensor([-4.0, 3.0]))
    assert signal.norm_ratio == 1.0
    assert signal.coefficient == 0.0


def test_noise_along_the_effect_reads_as_its_share():
    assert measure(EFFECT, 0.5 * EFFECT).coefficient == pytest.approx(0.5)


def test_a_bug_without_effect_has_no_strength():
    signal = measure(torch.zeros(2), EFFECT)
    assert signal.norm_ratio == 0.0
    assert math.isnan(signal.coefficient)


def test_the_filter_averages_white_noise_out():
    generator = torch.Generator().manual_seed(0)
    effect = 0.1 * torch.randn(10_000, generator=generator)
    coefficients = [measure(effect, torch.randn(10_000, generator=generator)).coefficient for _ in range(40)]
    assert filter_ratio(coefficients) == pytest.approx(0.1 * math.sqrt(10_000), rel=0.3)


def test_few_seeds_do_not_tell_how_a_filter_scatters():
    assert math.isnan(filter_ratio([0.1] * (LEAST_SEEDS - 1)))


@given(st.lists(st.floats(0.01, 100.0), min_size=LEAST_SEEDS, max_size=8), st.floats(0.01, 100.0))
def test_twice_the_scatter_is_half_the_ratio(coefficients, factor):
    scaled = [factor * coefficient for coefficient in coefficients]
    assert filter_ratio(scaled) == pytest.approx(filter_ratio(coefficients) / factor)


def test_a_bug_of_rounding_counts_by_what_it_adds_to_the_noise_or_takes_away():
    noise = torch.tensor([0.0, 3.0])
    assert measure_added(torch.tensor([5.0, 0.0]), noise).norm_ratio == pytest.approx(4.0 / 3.0)
    assert measure_added(torch.tensor([3.0, 0.0]), noise).norm_ratio == 0.0
    assert measure_added(torch.zeros(2), noise).norm_ratio == 1.0
