"""From what faithful ports show to limits."""

import dataclasses
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.judge.limits import FALSE_ALARMS_A_RUN, FEWEST_TENSORS, SIGNED, STATISTICS_A_RUN, Law, fit
from parity.user_error import UserError

LAW = Law(center=0.1, spread=0.2, tensors=40, samples=160, largest=1.8)


def tensors(count):
    return [f"tensor {i}" for i in range(count)]


@pytest.mark.parametrize("statistic", ["norm", "gain"])
def test_a_faithful_port_exceeds_a_limit_no_more_often_than_it_is_allowed_to(statistic):
    rng = np.random.default_rng(0)
    normal = rng.normal(0, 2.0 if statistic in SIGNED else 0.3, 100_000)
    values = normal if statistic in SIGNED else np.exp(normal)
    law = fit(values[:500], tensors(500), statistic)
    exceeding = np.mean(np.abs(values) > law.limit(statistic, probability=1e-2))
    assert 1e-4 < exceeding < 1e-2


@given(values=st.lists(st.floats(0.5, 20), min_size=FEWEST_TENSORS, max_size=50))
def test_the_law_bounds_every_value_that_it_was_fitted_to(values):
    law = fit(values, tensors(len(values)), "norm")
    quantiles = statistics.NormalDist()
    for i, value in enumerate(sorted(values)):
        quantile = quantiles.inv_cdf((i + 0.5) / len(values))
        assert quantile < 1 or law.deviations(value, "norm") <= quantile + 1e-9


def test_errors_far_below_the_models_do_not_lower_the_limit_nor_raise_it():
    values = [1.05, 1.1, 0.95, 1.02, 1.08, 0.97, 1.03, 1.06]
    small = [value if value > 1 else value / 1000 for value in values]
    names = tensors(len(values))
    assert fit(small, names, "norm").limit("norm") == pytest.approx(fit(values, names, "norm").limit("norm"), rel=0.01)


@given(tensors=st.integers(FEWEST_TENSORS, 500))
def test_the_more_tensors_were_measured_the_closer_the_limit(tensors):
    fewer, more = (dataclasses.replace(LAW, tensors=count) for count in (tensors, tensors + 1))
    assert more.limit("norm") <= fewer.limit("norm")


def test_many_seeds_of_one_tensor_are_one_tensor():
    values = list(np.exp(np.random.default_rng(0).normal(0, 0.1, 80)))
    assert fit(values, tensors(8) * 10, "norm").tensors == 8


def test_too_few_tensors_are_refused_instead_of_giving_a_limit_that_nothing_exceeds():
    with pytest.raises(UserError, match="3 different tensors"):
        fit([1.0, 1.1, 0.9], tensors(3), "norm")


def test_no_model_is_trusted_to_the_last_percent():
    exact = fit([1.0] * 100, tensors(100), "norm")
    assert exact.limit("norm") > 1.5


@pytest.mark.parametrize("statistic", ["norm", "gain"])
def test_deviations_put_the_limit_where_its_quantile_is(statistic):
    normal = dataclasses.replace(LAW, tensors=10**6, spread=1.0)
    limit = normal.limit(statistic, probability=0.02275 * (2 if statistic in SIGNED else 1))
    assert normal.deviations(limit, statistic) == pytest.approx(2.0, rel=1e-3)


def test_a_run_of_the_default_suite_is_rarely_a_false_alarm_by_construction():
    probability = FALSE_ALARMS_A_RUN / STATISTICS_A_RUN
    normal = dataclasses.replace(LAW, tensors=10**6, center=0.0, spread=1.0)
    assert SIGNED
    assert math.erfc(math.log(normal.limit("norm")) / math.sqrt(2)) / 2 == pytest.approx(probability, rel=1e-2)
