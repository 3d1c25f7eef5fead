"""The claims of the study ``fp8_accumulation`` at small sizes, and resuming the study."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from interrupted import run_again

pytest.importorskip("matplotlib")
from lab.studies import catalogue
from lab.studies.fp8_accumulation import study as study
from lab.studies.fp8_accumulation.study import (
    FAST,
    SPLIT,
    Cost,
    Costs,
    Run,
    Settings,
    claims,
    costs_of,
    growth,
    mean,
    runs,
)
from parity.user_error import UserError

SMALL = Settings(lengths=(256, 1024, 4096), interval_length=4096, intervals=(32, 128, 1024), rows=16, seeds=2)


@pytest.fixture(scope="module")
def found() -> dict[Run, Costs]:
    return {entry: costs_of(entry, SMALL) for entry in runs(SMALL)}


@pytest.mark.parametrize("distribution", SMALL.distributions)
def test_fast_sums_lose_more_the_longer_they_are_and_split_ones_do_not(
    found: dict[Run, Costs], distribution: str
) -> None:
    assert min(growth(found, SMALL, distribution, FAST)) > 0.5
    assert max(map(abs, growth(found, SMALL, distribution, SPLIT))) < 0.1


def test_sums_of_one_sign_lose_faster_than_sums_that_cancel(found: dict[Run, Costs]) -> None:
    assert min(growth(found, SMALL, "positive", FAST)) > max(growth(found, SMALL, "normal", FAST)) + 0.4


@pytest.mark.parametrize("distribution", SMALL.distributions)
def test_the_error_grows_with_the_interval_between_promotions(found: dict[Run, Costs], distribution: str) -> None:
    costs = [mean(found, distribution, 4096, way).relative_l2 for way in ("32", "128", "1024", FAST)]
    assert costs == sorted(costs)
    assert mean(found, distribution, 4096, "fp32").relative_l2 < 0.01 * costs[0]


def test_at_4096_random_matrices_lose_about_what_deepseek_reports(found: dict[Run, Costs]) -> None:
    normal, positive = (mean(found, name, 4096, FAST).max_over_rms for name in ("normal", "positive"))
    assert 0.005 < normal < 0.02 < positive


def test_where_sums_cancel_the_cast_to_fp8_hides_what_fast_sums_lose(found: dict[Run, Costs]) -> None:
    normal, positive = (
        {way: mean(found, name, 4096, way) for way in (FAST, "cast")} for name in ("normal", "positive")
    )
    assert normal[FAST].relative_l2 < 0.1 * normal["cast"].relative_l2
    assert positive[FAST].relative_l2 > 10 * positive["cast"].relative_l2


def test_a_study_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Settings(("normal",), lengths=(64, 128), interval_length=128, intervals=(32,), rows=4, seeds=2)
    run = partial(catalogue.run, "fp8_accumulation", tiny, tmp_path)
    made, report = run_again(monkeypatch, study, "costs_of", run, after=3)
    assert sorted(map(str, made)) == sorted(map(str, runs(tiny)))
    assert "What it means" in report.read_text()
    assert (tmp_path / "fp8_accumulation.png").stat().st_size > 0


def test_an_interval_that_no_tensor_core_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="100 is not a multiple of an instruction's 32"):
        catalogue.run("fp8_accumulation", Settings(intervals=(100,)), tmp_path)


TWO = Settings(("normal", "positive"), lengths=(1024, 4096), interval_length=4096, intervals=(32,), seeds=3)


def recorded(fast: float, split: float, largest: float, scatter: float, growth: float) -> dict[Run, Costs]:
    """Return errors at K = 4096 that scatter by a factor between seeds, and grow as a power of K."""

    def costs(run: Run) -> Costs:
        by_seed = scatter ** (run.seed - 1)
        of_length = (run.length / 4096) ** (growth + 0.1 * (run.seed - 1))
        errors = {FAST: fast * of_length, SPLIT: split, "cast": 0.04, "fp32": 1e-7}
        return {way: Cost(error * by_seed, largest * by_seed, 0.0) for way, error in errors.items()}

    return {run: costs(run) for run in runs(TWO)}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (dict(fast=0.002, split=0.0002, largest=0.02, scatter=1.01, growth=1.5), ["yes", "yes", "yes", "yes"]),
        (dict(fast=1e6, split=1e6, largest=1e6, scatter=1.01, growth=0.5), ["no", "no", "no", "no"]),
        (
            dict(fast=0.05, split=0.03, largest=0.03, scatter=4.0, growth=1.0),
            ["cannot tell", "no", "partly", "cannot tell"],
        ),
    ],
)
def test_each_claim_depends_on_what_was_measured(numbers: dict[str, float], expected: list[str]) -> None:
    assert [claim.agrees for claim in claims(recorded(**numbers), TWO)] == expected


def test_distributions_that_disagree_agree_in_part() -> None:
    found = recorded(fast=0.002, split=0.0002, largest=0.02, scatter=1.01, growth=1.5)
    large = {
        run: {way: dataclasses.replace(cost, max_over_rms=0.2) for way, cost in costs.items()}
        for run, costs in found.items()
        if run.distribution == "positive"
    }
    assert next(claims(found | large, TWO)).agrees == "partly"
