"""What changed from one run to another, and how it is drawn."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from fakes import ENVIRONMENT, result

from parity.report import changes
from parity.report.changes import Comparison, Kind, between
from parity.report.environment import Environment
from parity.report.record import Record, Uncollected
from parity.result import Result

FAILED = result(margin=9.0)
ERROR = result(status="error", tensors=(), reason="the candidate raised ValueError: no")
SKIPPED = result(status="skipped", tensors=(), reason="no FP8")


def compared(before: list[Result], after: list[Result], then: Environment = ENVIRONMENT) -> Comparison:
    return Comparison(Record(then, tuple(before)), Record(ENVIRONMENT, tuple(after)), ("old", "new"), factor=1.5)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (result(), FAILED, "newly failing"),
        (result(), ERROR, "newly failing"),
        (SKIPPED, FAILED, "newly failing"),
        (None, FAILED, "newly failing"),
        (FAILED, result(), "newly passing"),
        (ERROR, result(), "newly passing"),
        (SKIPPED, result(), "newly passing"),
        (None, result(), "new"),
        (FAILED, None, "gone"),
        (FAILED, ERROR, "otherwise"),
        (result(), SKIPPED, "otherwise"),
        (result(margin=0.2), result(margin=0.31), "margin"),
        (result(margin=0.31), result(margin=0.2), "margin"),
        (FAILED, result(margin=90.0), "margin"),
        (FAILED, result(margin=math.inf), "margin"),
        (result(margin=0.2), result(margin=0.29), "none"),
        (SKIPPED, SKIPPED, "none"),
        (result(margin=math.inf), result(margin=math.inf), "none"),
    ],
)
def test_an_item_has_one_kind_of_change(before: Result | None, after: Result | None, kind: Kind) -> None:
    [change] = between(filter(None, [before]), filter(None, [after]))
    assert change.kind(factor=1.5) == kind


def test_an_item_is_compared_by_its_worst_seed() -> None:
    [change] = between([result(), result(seed=1, margin=3.0)], [result(margin=6.0), result(seed=1)])
    assert change.growth == 2.0


def test_an_item_is_the_same_wherever_the_run_was_started() -> None:
    [change] = between([result(path="my_pairs.py")], [result(path="models/my_pairs.py")])
    assert change.kind(factor=1.5) == "none"


def test_the_verdict_counts_every_kind_of_change() -> None:
    before = [result(), result("norm", margin=3.0), result("linear"), result("rope")]
    after = [FAILED, result("norm"), result("linear", margin=0.9), result("attention")]
    assert changes.verdict(compared(before, after)) == (
        "❌ 1 item newly failing, 1 newly passing, 1 with a margin that changed by more than 1.5 times, 1 new, 1 gone"
    )
    assert changes.verdict(compared(before, before)) == "✅ no item newly fails, 4 as before"


def test_runs_that_have_nothing_in_common_are_told_to() -> None:
    assert changes.verdict(compared([result("norm")], [result()])).startswith("⚠️ the runs have no item in common; ")


def test_the_report_shows_margins_before_and_now_with_the_finding() -> None:
    rows = changes.draw(compared([result()], [FAILED])).splitlines()
    [row] = [row for row in rows if row.startswith("| `mlp[bf16-2x64]`")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["`mlp[bf16-2x64]`", "✅ 0.43", "❌ 9", "21", "`output`", "PAR101 gate-up-swapped"]


def test_the_report_names_both_machines_and_versions_and_marks_what_differs() -> None:
    then = replace(ENVIRONMENT, cpu="An Older Processor", transformer_engine="2.19.0", torch="2.12.0", seeds=(0, 1))
    text = changes.draw(compared([result()], [result()], then))
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("|")]
    assert ["processor", "An Older Processor", "A Processor", "≠"] in rows
    assert ["TransformerEngine", "2.19.0", "2.20.2", "≠"] in rows
    assert ["PyTorch", "2.12.0", "2.13.0", "≠"] in rows
    assert ["Python", "3.11.7", "3.11.7", ""] in rows
    assert ["seeds", "0, 1", "0", "≠"] in rows


def test_what_could_not_be_collected_is_named() -> None:
    runs = compared([result()], [result()])
    broken = replace(runs.after, uncollected=(Uncollected("my_pairs.py::misfits", "fc1.weight is 128x64"),))
    assert re.search(r"\| not collected +\| +\| my_pairs.py::misfits +\| ≠", changes.draw(replace(runs, after=broken)))


def test_what_was_not_compared_comes_with_its_reason() -> None:
    assert "| – no FP8 |" in changes.draw(compared([result()], [SKIPPED]))
