"""The band of correct trainings' curves: drawn trainings stay inside, and a wrong training leaves it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from lab.corpus.trained_ports.trainings import Declared, case_of, plain
from parity import Training, te
from parity.case.case import Rng
from parity.case.training import ADAM
from parity.case.validate import check_case
from parity.te import PRECISIONS
from parity.trainings.band import Band, Left, band, band_of
from parity.trainings.courses import Course

STEPS = 6


def banded(training: Declared, precision: str, host: str = "mlp") -> Band:
    kernels = te.kernels("cpu")
    case = case_of(host, training)
    (checked,) = check_case(case, kernels.te)
    return band_of(case, checked, PRECISIONS[precision], 0, kernels, STEPS)


def test_right_trainings_stay_in_their_bands_but_for_one_in_20():
    found = [
        banded(plain, precision, host) for precision in ("fp32", "bf16", "fp8_current") for host in ("mlp", "llama")
    ]
    for one in found:
        assert len(one.free) == STEPS
        assert all(low < exact < high for low, exact, high in zip(one.low, one.free, one.high, strict=True))
    assert sum(one.loss_left is not None for one in found) <= 2  # three of six happen in 1 of 400 cases
    assert sum(one.weights_left is not None for one in found) <= 2


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_another_learning_rate_leaves_it(precision):
    def faster(model: Any) -> Any:
        return AdamW(model.parameters(), **{**ADAM, "lr": 2e-3})

    adam = lambda model: AdamW(model.parameters(), **ADAM)  # noqa: E731
    found = banded(lambda te: Training(adam, faster), precision)
    assert found.loss_left is not None
    assert found.loss_left.step > 1
    assert found.weights_left is not None


def test_the_parameter_that_leaves_it_first_is_told():
    rate = 0.01

    def other(model: Any) -> Any:
        own = dict(model.named_parameters())
        slow = [one for name, one in own.items() if name != "fc1_bias"]
        return SGD([dict(params=slow), dict(params=[own["fc1_bias"]], lr=3 * rate)], lr=rate)

    found = banded(lambda te: Training(lambda model: SGD(model.parameters(), lr=rate), other), "fp32")
    assert found.weights_left is not None
    assert (found.weights_left.step, found.weights_left.where[0]) == (1, "1.bias")


# The band itself, computed from numbers.


def course(number: int, off: float, error: float = 1e-3) -> Course:
    """Return a course of ten steps, whose losses and weights are off by ``off`` and by drawn numbers."""
    rng = Rng(number, "a course")
    losses = [float(x) for x in 5.0 + off + error * rng.normal(10)]
    moving = torch.linspace(0.0, 1.0, 11, dtype=torch.float64)
    weights = [{"w": x.expand(100) + off + error * rng.normal(100).double()} for x in moving]
    return Course(losses, weights)


RIGHT = [course(number, 0.0) for number in range(1, 7)]
FREE = course(0, 0.0, error=0.0)


def test_as_many_right_trainings_leave_the_band_as_it_says():
    found = [band(FREE, [course(100 * i + j, 0.0) for j in range(6)], course(100 * i + 6, 0.0)) for i in range(1, 101)]
    left = sum(one.loss_left is not None for one in found)
    assert left <= 12  # one in 20 is expected, and 13 of 100 happen in 1 of 1,000 cases
    assert sum(one.weights_left is not None for one in found) <= 12
    assert abs(sum(one.deviation for one in found)) < 4 * math.sqrt(100 * 6 / 4)


@pytest.mark.parametrize(("off", "left"), [(0.0, None), (0.1, Left(1))])
def test_a_loss_far_off_has_left_it(off, left):
    assert band(FREE, RIGHT, course(7, off)).loss_left == left


def test_a_loss_that_is_no_number_has_left_it():
    lost = course(7, 0.0)
    lost.losses[3] = math.nan
    assert band(FREE, RIGHT, lost).loss_left == Left(4)


def test_a_parameter_that_no_training_moves_is_left_out():
    def with_frozen(one: Course) -> Course:
        return Course(one.losses, [{**weights, "frozen": torch.zeros(4)} for weights in one.weights])

    assert (
        band(with_frozen(FREE), [with_frozen(one) for one in RIGHT], with_frozen(course(7, 0.0))).weights_left is None
    )
