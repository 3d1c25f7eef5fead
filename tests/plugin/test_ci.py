"""What a run reports to a CI system: JUnit properties, GitHub's summary, and annotations of lines."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from plugin_runs import run, run_with_workers, write

from parity.report import ci
from parity.report.ci import Place

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("stand_ins")

PAIRS = """
    import parity

    @parity.pair("sound", sizes=[dict(n=2)], precisions=["fp32"])
    def sound(te, n): ...

    @parity.pair("fails", sizes=[dict(n=2)], precisions=["bf16"])
    def fails(te, n): ...
"""


@pytest.fixture
def summary(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of GitHub's summary for a job that compares these pairs."""
    write(pytester, PAIRS)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path.parent))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    return pytester.path / "summary.md"


@pytest.mark.parametrize("workers", [0, 2])
def test_junit_has_precision_margin_worst_tensor_and_finding(pytester: pytest.Pytester, workers: int) -> None:
    write(pytester, PAIRS)
    arguments = "my_pairs.py", "--junitxml=junit.xml"
    if workers:
        run_with_workers(pytester, workers, *arguments)
    else:
        run(pytester, *arguments)
    cases = {
        case.get("name"): [(each.get("name"), each.get("value")) for each in case.iter("property")]
        for case in ET.parse(pytester.path / "junit.xml").iter("testcase")
    }
    assert cases == {
        "sound[fp32-2]": [
            *(("parity_precision", "fp32"), ("parity_seeds", "0"), ("parity_margin", "0.43")),
            ("parity_worst_tensor", "output"),
        ],
        "fails[bf16-2]": [
            *(("parity_precision", "bf16"), ("parity_seeds", "0"), ("parity_margin", "100")),
            *(("parity_worst_tensor", "output"), ("parity_finding", "PAR101 gate-up-swapped")),
        ],
    }


def test_a_summary_has_headline_matrix_and_failures(pytester: pytest.Pytester, summary: Path) -> None:
    summary.write_text("an earlier step's\n")
    run(pytester, "my_pairs.py")
    text = summary.read_text()
    assert text.startswith("an earlier step's\n## Parity: parity\n\n**❌ 1 of 2 items failed")
    assert "| `fails` |" in text
    assert "`fails[bf16-2]`: margin 100 at output (seed 0)\n- **PAR101 gate-up-swapped**: fc1_weight" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_is_marked_at_the_line_of_its_pair(pytester: pytest.Pytester, summary: Path, workers: int) -> None:
    result = run_with_workers(pytester, workers, "my_pairs.py") if workers else run(pytester, "my_pairs.py")
    marks = [line for line in result.outlines if line.startswith("::")]
    file = f"{pytester.path.name}/my_pairs.py"
    text = (pytester.path / "my_pairs.py").read_text()
    line = 1 + text.partition('@parity.pair("fails"')[0].count("\n")
    assert len(marks) == 1
    assert marks[0].startswith(
        f"::error file={file},line={line},title=fails[bf16-2]::PAR101 gate-up-swapped: margin 100 at"
    )
    assert "(seed 0)%0A" in marks[0]
    assert "fc1_weight matches" in marks[0]


def test_a_pair_that_was_not_collected_is_marked_at_its_file(pytester: pytest.Pytester, summary: Path) -> None:
    write(pytester, PAIRS.replace('"fails"', '"misfits"'))
    result = run(pytester, "my_pairs.py", "--continue-on-collection-errors")
    [mark] = [line for line in result.outlines if line.startswith("::error")]
    assert f"my_pairs.py,title=not collected::{'my_pairs.py'}" in mark
    assert "fc1.weight is 128x64" in mark


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("all", {"junit", "summary", "annotations"}),
        ("none", set()),
        ("junit", {"junit"}),
        ("summary,annotations", {"summary", "annotations"}),
    ],
)
def test_each_can_be_turned_off(pytester: pytest.Pytester, summary: Path, asked: str, told: set[str]) -> None:
    result = run(pytester, "my_pairs.py", "--junitxml=junit.xml", f"--parity-ci={asked}")
    found = {
        "junit": "parity_margin" in (pytester.path / "junit.xml").read_text(),
        "summary": summary.exists(),
        "annotations": any(line.startswith("::error") for line in result.outlines),
    }
    assert {name for name, is_there in found.items() if is_there} == told


def test_elsewhere_nothing_is_marked(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    write(pytester, PAIRS)
    assert not [line for line in run(pytester, "my_pairs.py").outlines if line.startswith("::")]


def test_a_summary_that_cannot_be_written_costs_nothing_else(
    pytester: pytest.Pytester, summary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary / "below" / "a file"))
    assert run(pytester, "my_pairs.py").ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    ("place", "title", "message", "command"),
    [
        (Place("a.py", 3), "x[bf16]", "wrong", "::error file=a.py,line=3,title=x[bf16]::wrong"),
        (Place("a.py"), "x", "50% off,\nor: more", "::error file=a.py,title=x::50%25 off,%0Aor: more"),
        (Place("a,b:c.py", 1), "x%", "", "::error file=a%2Cb%3Ac.py,line=1,title=x%25::"),
        (Place("a.py", 1), "x\n::error::y", "a\r\n::error::b", None),
    ],
)
def test_a_command_is_one_line_whatever_names_hold(place: Place, title: str, message: str, command: str | None) -> None:
    told = ci.annotation(place, title, message)
    assert len(told.splitlines()) == 1
    assert command is None or told == command


def test_of_many_failures_ten_are_marked(pytester: pytest.Pytester, summary: Path) -> None:
    sizes = ", ".join(f"dict(n={n})" for n in range(2, 14))
    write(pytester, PAIRS.replace('"fails", sizes=[dict(n=2)]', f'"fails", sizes=[{sizes}]'))
    marks = [line for line in run(pytester, "my_pairs.py").outlines if line.startswith("::")]
    assert len(marks) == 11
    assert marks[-1] == "::notice::2 other failures of parity, in the summary of this job"
