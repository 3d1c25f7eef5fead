"""A run held against the packaged limits, from its record alone."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import fakes

from parity.judge import limits as table
from parity.lab.gpu_report import limits
from parity.report import record
from parity.result import Check, Result
from parity.user_error import UserError

KEY = ("bf16", "output", "norm")


def result(*values: float) -> Result:
    """One output whose ``norm`` has each of these values, in limits."""
    limit = table.packaged().limit(*KEY)
    checks = tuple(Check("norm", value * limit, limit) for value in values)
    return fakes.result(tensors=(replace(fakes.tensor(), checks=checks),))


def test_values_are_counted_in_standard_deviations_of_their_law() -> None:
    law = table.packaged().laws[KEY]
    center = math.exp(law.center) / table.packaged().limit(*KEY)
    (found,) = limits.deviations([result(center)]).values()
    assert found.values == pytest.approx((0.0,), abs=1e-9)


def test_what_lies_beyond_its_limit_is_counted_and_the_largest_is_named() -> None:
    found = limits.deviations([result(0.5, 1.5), result(2.0)])
    assert found[KEY].beyond == 2
    verdict = limits.verdict(found)
    assert verdict.startswith("2 of 3 values lie beyond the packaged limit")
    assert "2 of it (bf16, output, norm)" in verdict


def test_results_without_a_law_are_left_out() -> None:
    assert limits.deviations([replace(result(1.5), precision="fp7")]) == {}
    assert limits.verdict({}) == "no statistic was judged"


def test_the_command_writes_a_table_and_its_code_says_if_all_lie_within(tmp_path: Path) -> None:
    file, report = tmp_path / "suite.jsonl", tmp_path / "limits.md"
    for value, code in ((0.5, 0), (1.5, 1)):
        record.start(file, record.environment_line(fakes.ENVIRONMENT))
        record.append(file, record.result_line(result(value)))
        assert limits._main(str(file), str(report)) == code
    assert "emulated" in report.read_text()
    assert "| bf16" in report.read_text()


def test_a_run_in_which_nothing_was_judged_is_no_pass(tmp_path: Path) -> None:
    file = tmp_path / "suite.jsonl"
    record.start(file, record.environment_line(fakes.ENVIRONMENT))
    record.append(file, record.result_line(fakes.result(status="skipped", reason="no FP8", tensors=())))
    assert limits._main(str(file), str(tmp_path / "limits.md")) == 2


def test_without_a_record_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert limits._main(str(tmp_path / "absent.jsonl"), str(tmp_path / "limits.md")) == 2
    assert "cannot read" in capsys.readouterr().err


def test_limits_of_another_table_are_told_by_the_widest(tmp_path: Path) -> None:
    packaged = table.packaged()
    wider = replace(packaged.laws[KEY], spread=1.0)
    table.save(table.Table({KEY: wider}, {}), tmp_path / "other.json")
    ratio, key = limits.widest(tmp_path / "other.json")
    assert key == KEY
    assert ratio > 1
    table.save(table.Table({}, {}), tmp_path / "empty.json")
    with pytest.raises(UserError, match="shares no law"):
        limits.widest(tmp_path / "empty.json")


def test_signed_statistics_are_counted_by_their_magnitude() -> None:
    checks = tuple(Check("gain", value, 5.0) for value in (-2.0, 2.0))
    tensors = (replace(fakes.tensor(), checks=checks),)
    (found,) = limits.deviations([fakes.result(tensors=tensors)]).values()
    assert found.values[0] == found.values[1] > 0
    assert found.margins == (0.4, 0.4)
