"""Test what a report of trainings says of their bands."""

from __future__ import annotations

import pytest

from parity.judge.band import Band, Left
from parity.report.markdown import Curve, left, over_seeds, write
from parity.result import Result, Step


def result(seed: int = 0) -> Result:
    steps = tuple(Step(number, 5.0 - number, 5.0 - number, 0.5) for number in (1, 2))
    return Result("mlp", "bf16", {}, "s", seed, "cpu", "passed", steps=steps)


def curve(loss: Left | None = None, weights: Left | None = None, seed: int = 0, deviation: float = 1.0) -> Curve:
    return Curve(result(seed), Band((4.0, 3.0), 6, (3.9, 2.9), (4.1, 3.1), loss, weights, deviation))


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (Curve(result()), ""),
        (curve(), ""),
        (curve(Left(2)), "the loss leaves its band at step 2"),
        (curve(weights=Left(1, ("a",))), "after step 1, a is farther from"),
        (curve(Left(2), Left(1, tuple("abcd"))), "at step 2; after step 1, a, b, c and 1 more are farther"),
    ],
)
def test_where_a_training_leaves_its_band_is_told(one, told):
    assert told in left(one)
    assert bool(told) == bool(left(one))


def test_seeds_are_told_together():
    assert over_seeds([curve()]) == ""
    told = over_seeds([curve(seed=seed, deviation=2.0) for seed in range(4)])
    assert "|       4 |" in told
    assert "0 ± 0.61" in told


def test_the_report_has_the_band(tmp_path):
    path = tmp_path / "training.md"
    write([curve(Left(2))], path)
    text = path.read_text()
    assert "| low" in text
    assert "| 3.9" in text
    assert "The loss leaves its band at step 2." in text
    assert "once in 20 times" in text
    write([Curve(result())], path)
    assert "band" not in path.read_text().replace("the band says", "")
