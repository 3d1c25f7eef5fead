"""What every medium shows of a run: reports, the page, the terminal, GitHub and JUnit."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from fakes import ENVIRONMENT, result

from parity.report import changes, ci, failure, html, markdown
from parity.report.changes import Comparison
from parity.report.markdown import digest
from parity.report.record import Item, Record
from parity.result import Finding, Result

HELD = Finding("PAR112", "weights-not-as-mapped", "fc1_weight is not what the map makes of it")


def in_every_medium(*results: Result) -> dict[str, str]:
    """Return what each report, the terminal and CI say about a run, and about its change since one that passed."""
    run = digest(Record(ENVIRONMENT, results))
    before = tuple(replace(each, status="passed", findings=(), reason="") for each in results)
    runs = Comparison(Record(ENVIRONMENT, before), Record(ENVIRONMENT, results), ("before", "now"))
    return {
        "markdown": markdown.draw(run, "x"),
        "page": html.draw_with("", run, "x", runs),
        "summary": ci.summary(run, "x"),
        "junit": "\n".join(f"{name}={value}" for item in run.items for name, value in ci.properties(item.results)),
        "terminal": "\n".join([markdown.verdict(run), *failure.lines_of_failures(run.items, run.failed)]),
        "message": "\n".join(failure.message(item) for item in run.items if item.bad),
        "changes": changes.draw(runs),
        "changes in lines": "\n".join(changes.lines(runs)),
    }


@pytest.mark.parametrize("reason", ["", "step 3 is the first that is not right"])
@pytest.mark.parametrize("tensors", [1, 0])
def test_a_failure_that_no_margin_explains_shows_none_and_is_worse_than_any_pass(reason: str, tensors: int) -> None:
    bad = result(margin=0.56, status="failed", reason=reason, findings=(HELD,))
    bad = replace(bad, tensors=bad.tensors[:tensors])
    told = in_every_medium(bad, result(size_label="4x64", margin=0.93), result("other", margin=0.2))
    for medium, text in told.items():
        assert not re.search(r"margin[^\n]{0,60}0\.56|0\.56 times|[✕❌] (failed )?0\.56|=0\.56", text), medium
    for medium in ("markdown", "page", "summary", "terminal", "changes"):
        assert "0.93" not in told[medium].partition("## Case by case")[0].partition('id="cases"')[0], medium
    assert "❌ failed" in told["markdown"]
    assert "❌ failed" in told["changes"]
    assert '<span aria-hidden="true">✕</span> failed</a>' in told["page"]


def test_failures_in_a_terminal_come_in_the_order_of_their_severity() -> None:
    results = (
        result("a", margin=0.5, status="failed"),
        result("b", margin=40.0),
        result("c", status="error", tensors=(), reason="broken"),
        result("d", margin=math.inf),
    )
    items = [Item((each,)) for each in results]
    told = [line.split("[")[0].strip() for line in failure.lines_of_failures(items, 4)]
    assert told == ["c", "d", "b", "a"]
