"""The claims of the study ``fp8_accumulation`` on small sizes, and that it goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
from parity.studies.fp8_accumulation import study
from parity.studies.fp8_accumulation.report import FAST, SPLIT, growth
from parity.studies.fp8_accumulation.study import Costs, Run, Settings, costs_of, mean, runs
from parity.user_error import UserError

SMALL = Settings(lengths=(256, 1024, 4096), interval_length=4096, intervals=(32, 128, 1024), rows=16, seeds=2)


@pytest.fixture(scope="module")
def found() -> dict[Run, Costs]:
    return {entry: costs_of(entry, SMALL) for entry in runs(SMALL)}


@pytest.mark.parametrize("distribution", SMALL.distributions)
def test_fast_sums_lose_more_the_longer_they_are_and_split_ones_do_not(
    found: dict[Run, Costs], distribution: str
) -> None:
    assert growth(found, SMALL, distribution, FAST) > 0.5
    assert abs(growth(found, SMALL, distribution, SPLIT)) < 0.1


def test_sums_of_one_sign_lose_faster_than_sums_that_cancel(found: dict[Run, Costs]) -> None:
    assert growth(found, SMALL, "positive", FAST) > growth(found, SMALL, "normal", FAST) + 0.4


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
    made: list[Run] = []
    limit = 3

    def counted(entry: Run, settings: Settings) -> Costs:
        if len(made) == limit:
            raise KeyboardInterrupt
        made.append(entry)
        return costs_of(entry, settings)

    monkeypatch.setattr(study, "costs_of", counted)
    with pytest.raises(KeyboardInterrupt):
        study.run(tiny, tmp_path)
    with (tmp_path / study.RECORD).open("a") as file:
        file.write('{"run": {"cut')
    limit = 100
    report = study.run(tiny, tmp_path)
    assert sorted(map(str, made)) == sorted(map(str, runs(tiny)))
    assert "What it means" in report.read_text()
    assert (tmp_path / "fp8_accumulation.png").stat().st_size > 0


def test_an_interval_that_no_tensor_core_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="100 is no multiple of the 32"):
        study.run(Settings(intervals=(100,)), tmp_path)
