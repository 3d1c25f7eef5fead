"""Test that pages and messages claim what reports counted, and that reports name their commit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from parity.judge import limits, statistics
from parity.measuring.false_alarms import upper_bound
from parity.measuring.record import write_sections
from parity.report import environment

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import judge_constants  # noqa: E402
import stale_reports  # noqa: E402


def counted() -> list[list[int]]:
    """Return the counts of each precision: ports, checks, statistics, and ports that were rejected."""
    rows = []
    for name in ("false_alarms", "false_alarms_blackwell"):
        for line in (ROOT / "reports" / f"{name}.md").read_text(encoding="utf-8").splitlines():
            if re.match(r"\| `\w+` +\| +\d+ +\| +\d+ +\| +\d+ +\|", line):
                cells = [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
                rows.append([int(cells[place]) for place in (1, 4, 5, 6)])
    return rows


def test_the_rate_that_messages_and_pages_tell_is_the_bound_of_what_was_counted():
    rows = counted()
    ports, rejected = sum(row[0] for row in rows), sum(row[3] for row in rows)
    bound = upper_bound(rejected, ports)
    told = [re.search(r"one in ([\d,]+)", limits.COUNTED), re.search(r"of ([\d,]+) right", limits.COUNTED)]
    every, of = (int(each[1].replace(",", "")) for each in told if each)
    assert of == ports
    assert f" {rejected} was rejected" in limits.COUNTED
    assert bound <= 1 / every < 1.01 * bound
    for page in ("docs/verdicts.md", "docs/statistics.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"{ports:,}" in text
        assert f"{every:,}" in text
    _, checks, judged, _ = rows[1]
    assert f"| {checks:,} | 0 | {upper_bound(0, checks):.1e} |".replace("e-0", "e-") in text
    assert f"| {judged:,} | 0 | {upper_bound(0, judged):.1e} |".replace("e-0", "e-") in text


def test_pages_count_the_laws_that_the_least_spread_decides_as_they_are():
    laws = limits.packaged().laws
    narrower = sum(law.spread < limits.LEAST_SPREADS.get(key[2], limits._LEAST_SPREAD) for key, law in laws.items())
    text = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    assert f"of the {len(laws)} laws in the packaged table, {narrower} are narrower" in text


def test_every_report_names_a_commit():
    for pattern in ("reports/**/*.md", "benchmarks/results/*.json"):
        files = [file for file in ROOT.glob(pattern) if not {"quick", "runs"} & set(file.parts)]
        texts = {file.as_posix(): file.read_text(encoding="utf-8") for file in files}
        assert texts
        # The run that these tests belong to begins its own report anew.
        ended = {file: text for file, text in texts.items() if "This run has not ended" not in text}
        assert [file for file, text in ended.items() if not stale_reports.told_commit(text, file)[0]] == []


def test_a_report_ends_with_its_command_and_the_commit_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "at_commit", lambda: " at commit abc1234")
    path = write_sections(tmp_path / "new" / "one.md", ["# One"], "parity one")
    assert path.read_text(encoding="utf-8") == "# One\n\nMade by `parity one` at commit abc1234.\n"


@pytest.mark.parametrize(
    ("text", "file", "told"),
    [
        ("Made by `parity zoo` at commit abc1234 with changes.", "a.md", ("abc1234", True)),
        ("| parity | 1.0 at commit abc1234 |", "a.md", ("abc1234", True)),
        ("No commit was recorded when this was made; it was committed at commit abc1234.", "a.md", ("abc1234", False)),
        ("Made by `parity zoo`.", "a.md", ("", False)),
        ('{"machine": {"commit": "abc1234"}}', "a.json", ("abc1234", True)),
        ('{"machine": {"commit": "abc1234, the last before this date"}}', "a.json", ("abc1234", False)),
        ('{"machine": {}}', "a.json", ("", True)),
    ],
)
def test_the_commit_of_a_report_is_read(text, file, told):
    assert stale_reports.told_commit(text, file) == told


def test_what_reports_depend_on_exists():
    for pattern, parts in stale_reports.DEPENDS.items():
        missing = [part for part in parts if "{" not in part and not (ROOT / "parity" / part).exists()]
        assert not missing, (pattern, missing)


# The numbers that are set by hand.


def test_the_table_of_numbers_knows_only_numbers_that_there_are():
    known = judge_constants.numbers()
    modules = {key.partition(".")[0] for key in known}
    assert len(known) > 60
    assert {*judge_constants.FROM, *judge_constants.UNREAD} <= {*known, *modules}
    assert not [key for key in known if not judge_constants.why_unread(key) and not known[key].why]


def test_a_changed_number_counts_wherever_it_is_read_and_only_as_long():
    law = limits.Law(0.0, 0.1, 100, 100, 1.0)
    before = law.limit("norm"), statistics._DEVIATIONS, statistics._compute_chance_factor(100.0)
    with judge_constants.multiplied("limits.STATISTICS_A_RUN", 0.5):
        assert law.limit("norm") < before[0]
        assert before[1] > statistics._DEVIATIONS
        assert statistics.STATISTICS_A_RUN == limits.STATISTICS_A_RUN == 10_000
    with judge_constants.multiplied("statistics._BY_CHANCE", 2.0):
        assert statistics._compute_chance_factor(100.0) == pytest.approx(1.6)
    assert (law.limit("norm"), statistics._DEVIATIONS, statistics._compute_chance_factor(100.0)) == before


def test_verdicts_on_passes_that_are_kept_are_those_on_new_ones():
    asked = judge_constants.Judging("bf16", ("rmsnorm", "norm-statistics-in-bf16 in rmsnorm"))
    once = judge_constants.judged(asked)
    with judge_constants.passes_made_once():
        assert judge_constants.judged(asked) == judge_constants.judged(asked) == once
