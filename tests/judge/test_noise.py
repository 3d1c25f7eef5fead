"""Differences between correct kernels are measured, and grow with the number of statistics and in small tensors."""

from __future__ import annotations

import math
import random

import pytest
import torch

from parity.judge import limits, noise
from parity.judge.limits import Table
from parity.judge.noise import Growth, Kernels
from parity.result import Check
from parity.te import PRECISIONS
from parity.trace.digests import checksum


@pytest.mark.parametrize(
    ("statistic", "before", "after", "growth"),
    [
        ("norm", 1.0, math.e, 1.0),
        ("norm", math.e, 1.0, -1.0),
        ("norm", 0.001, 1.0, 0.0),  # rounding less than expected is right, and so is rounding as much
        ("norm", 0.001, math.e, 1.0),
        ("norm", math.inf, math.inf, 0.0),
        ("norm", 1.0, math.inf, math.inf),
        ("gain", 0.5, 3.0, 2.5),
        ("gain", -0.5, 3.0, 3.5),
        ("gain", -3.0, -0.5, -2.5),
        ("mistake", 3.0, -3.5, 6.5),
    ],
)
def test_growth_is_counted_from_what_is_expected(statistic: str, before: float, after: float, growth: float) -> None:
    limit = limits.packaged().limit("bf16", "output", statistic)
    checks = (Check(statistic, value, limit) for value in (before, after))
    assert noise.growth(*checks, "bf16", "output") == pytest.approx(growth)


def test_what_a_limit_allows_beyond_the_packaged_one_counts_for_less() -> None:
    limit = 2 * limits.packaged().limit("bf16", "output", "norm")
    assert noise.growth(Check("norm", 2.0, limit), Check("norm", 3.0, limit), "bf16", "output") == math.log(1.5)


@pytest.mark.parametrize("kernels", ["alike", "others"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("statistic", ["norm", "largest", "row", "slice", "shift", "gain", "mistake"])
def test_every_statistic_has_a_law(kernels: Kernels, precision: str, statistic: str) -> None:
    of_one, of_many = (noise.allowed(kernels, precision, statistic, 2**16, count) for count in (1, 20_000))
    assert 0 < of_one < of_many


def test_a_small_tensor_scatters_more() -> None:
    few, many = (noise.allowed("alike", "bf16", "norm", elements, 100) for elements in (64, 2**16))
    assert few > 3 * many


def test_other_kernels_may_differ_by_more() -> None:
    assert noise.allowed("others", "bf16", "norm", 2**16, 100) > noise.allowed("alike", "bf16", "norm", 2**16, 100)


def test_a_law_is_that_of_the_runs_that_differ_most() -> None:
    drawn = random.Random(0)
    measured = [
        Growth("others", runs, "bf16", "norm", str(tensor), drawn.gauss(0.0, spread))
        for runs, spread in (("one", 0.0), ("two", 0.1), ("three", 0.01))
        for tensor in range(200)
    ]
    [law] = noise.laws(measured).values()
    assert 0.09 < law.spread < 0.16
    assert law.tensors == 200


def test_right_versions_raise_no_more_false_alarms_than_is_promised() -> None:
    """Draw 2,000 comparisons of 500 statistics with the spread of the law; 2 false alarms are expected."""
    drawn = torch.Generator().manual_seed(0)
    measured = 0.1 * torch.randn(400, generator=drawn, dtype=torch.float64)
    growths = [Growth("others", "one", "bf16", "norm", str(n), value) for n, value in enumerate(measured.tolist())]
    allowed = noise.allowed("others", "bf16", "norm", 2**16, 500, Table(noise.laws(growths), {}))
    alarms = (0.1 * torch.randn(2000, 500, generator=drawn, dtype=torch.float64) > allowed).any(1).sum()
    assert alarms <= 4


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.arange(4.0), torch.arange(4.0), True),
        (torch.arange(6.0).reshape(2, 3).T, torch.arange(6.0).reshape(2, 3).T.contiguous(), True),
        (torch.arange(4.0), torch.arange(4.0).reshape(2, 2), False),
        (torch.zeros(4), -torch.zeros(4), False),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32), False),
        (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16), True),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.tensor(1.0), torch.tensor(1.0).nextafter(torch.tensor(2.0)), False),
    ],
)
def test_a_checksum_tells_bytes_apart(one: torch.Tensor, other: torch.Tensor, same: bool) -> None:
    assert (checksum(one) == checksum(other)) is same
