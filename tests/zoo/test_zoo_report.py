"""What the zoo reports: its bugs, and how correct kernels may differ."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.__main__ import app
from lab.corpus.catalogue import PORTS
from lab.zoo import report
from lab.zoo.report import PARITY, Count, Place
from lab.zoo.rivals import RULES
from lab.zoo.trial import CLEAN, Asked, Plan, Signal, Trial, Verdict, _sections, asked_of, is_rejected, shown
from parity.numerics.kernel_choices import CHOICES

# The zoo's counts, report and command.


BUG = "gate-up-swapped"
HOST = "swiglu_mlp"


def verdict(failed: int = 0, findings: tuple[str, ...] = (), rivals: int = 0, signal: Signal | None = None) -> Verdict:
    return Verdict(
        status="failed" if failed else "passed",
        margin=2.0 if failed else 0.5,
        worst="output",
        findings=findings,
        tensors=5,
        failed_tensors=failed,
        rejected=dict.fromkeys(RULES, rivals),
        signals={"output": signal} if signal else {},
    )


VERDICTS = {
    Trial(CLEAN, HOST, "small", "fp32", 0): verdict(rivals=2),
    Trial(CLEAN, HOST, "small", "fp32", 1): verdict(),
    Trial(CLEAN, HOST, "small", "fp32", 2): verdict(),
    Trial(BUG, HOST, "small", "fp32", 0): verdict(3, (BUG,), 5, Signal(100.0, 0.1)),
    Trial(BUG, HOST, "small", "fp32", 1): verdict(1, ("activation",), 0, Signal(100.0, -0.1)),
    Trial(BUG, HOST, "small", "fp32", 2): verdict(signal=Signal(100.0, 0.1)),
    Trial(BUG, HOST, "small", "bf16", 0): Verdict("error", math.nan, "", (), 0, 0, {}, reason="it raised"),
}
PLAN = Plan((PORTS[BUG, HOST],), ("fp32", "bf16"), {"small": 3})


def test_detections_and_false_alarms_are_counted_apart():
    planted, clean = (report.judged(VERDICTS, is_clean, "fp32") for is_clean in (False, True))
    assert report.rejections(planted, PARITY) == Count(2, 3)
    assert report.rejections(planted, "RMSE") == Count(1, 3)
    assert report.rejections(clean, PARITY) == Count(0, 3)
    assert report.rejections(clean, "RMSE") == Count(1, 3)


def test_a_bug_is_told_apart_where_the_right_port_is_accepted():
    trials = [trial for trial in VERDICTS if trial.bug == BUG and trial.precision == "fp32"]
    assert report.told_apart(VERDICTS, trials, PARITY) == Count(2, 3)
    assert report.told_apart(VERDICTS, trials, "RMSE") == Count(0, 3)


def test_each_tensor_of_a_right_port_is_a_check():
    clean = report.judged(VERDICTS, True, "fp32")
    assert report.rejected_tensors(clean, PARITY) == Count(0, 15)
    assert report.rejected_tensors(clean, "RMSE") == Count(2, 15)


def test_a_detected_bug_counts_as_named_by_its_first_finding():
    assert report.named_first(report.judged(VERDICTS, False, "fp32")) == Count(1, 2)


def test_a_port_that_raised_is_judged_by_no_rule():
    assert report.judged(VERDICTS, False, "bf16") == []
    assert [trial.precision for trial, _ in report.errors(VERDICTS)] == ["bf16"]


def test_a_filter_is_judged_by_its_scatter_over_seeds():
    found = report.by_place(VERDICTS)[Place(BUG, HOST, "small", "fp32")]
    assert report.strength_of(found) == report.Strength(100.0, pytest.approx(10.0))


def test_the_report_has_totals_misses_errors_and_a_plot(tmp_path: Path):
    text = report.write(VERDICTS, PLAN, {"mxfp8": "it needs a Blackwell"}, tmp_path / "zoo.md").read_text("utf-8")
    assert "| `fp32`      | 2 of 3" in text
    assert "❌ 2/3 0.5" in text
    assert "`mxfp8` did not run: it needs a Blackwell" in text
    assert "`gate-up-swapped` in `swiglu_mlp`, small, `bf16`, seed 0: it raised" in text
    assert (tmp_path / "zoo.png").is_file()


def test_the_command_plants_bugs_and_names_its_report(tmp_path: Path):
    out = tmp_path / "zoo.md"
    options = ["--bugs", "window-one-*", "--precisions", "fp32", "--sizes", "small", "--out", str(out)]
    result = CliRunner().invoke(app, ["zoo", *options])
    assert result.exit_code == 0, result.output
    assert f"report: {out}" in result.output
    assert "2 of 2" in out.read_text("utf-8")
    assert len(out.with_suffix(".jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precisions", "fp9"], "unknown precision 'fp9' in --precision; "),
        (["--seeds", "3,1,1"], "--seeds must be a count for all sizes or one for each of small, large, at least 1"),
        (["--sizes", "huge"], "there is no size 'huge'; there are small, large"),
    ],
)
def test_a_name_that_there_is_not_is_told(options: list[str], message: str):
    result = CliRunner().invoke(app, ["zoo", *options])
    assert message in str(result.exception)


# The page of kernel freedoms: every choice that shows here is tried, and its counts are those of the judged items.


LINEAR = Trial(CLEAN, "linear", "small", "fp32", 0)


def test_each_choice_is_tried_on_right_ports_and_on_bugs_with_and_without_what_is_granted():
    asked = asked_of(1)
    for choice in CHOICES:
        mine = [one for one in asked if one.kernels == choice.name]
        kinds = {(one.trial.bug == CLEAN, one.granted) for one in mine}
        assert len(kinds) == (4 if shown(choice) else 0), choice.name
    assert len(set(asked)) == len(asked)


def test_right_port_on_truncating_kernels_passes_by_what_is_granted_alone():
    verdicts = {granted: is_rejected(Asked(LINEAR, "tf32-truncated", granted)) for granted in (False, True)}
    assert verdicts == {False: True, True: False}


def test_page_counts_what_was_judged_and_names_what_is_missed():
    bug = Trial("some-bug", "linear", "small", "fp32", 0)
    page = "\n".join(
        _sections(
            {
                Asked(LINEAR, "", False): False,
                Asked(LINEAR, "", True): False,
                Asked(bug, "", False): True,
                Asked(bug, "", True): False,
            },
            1,
        )
    )
    (row,) = [line for line in page.splitlines() if line.startswith("| default")]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["default", "`fp32`", "1", "0", "0", "1", "1", "0"]
    assert "- `some-bug` in `linear`, fp32, seed 0" in page
