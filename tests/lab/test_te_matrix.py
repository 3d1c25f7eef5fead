"""The matrix of TransformerEngine's versions: its environments, its counts, and what it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from te_on_cpu import versions

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import te_matrix

RESULTS = """<testsuites><testsuite>
    <testcase classname="tests.test_a" name="test_good"/>
    <testcase classname="tests.test_a" name="test_bad"><failure message="assert 1 == 2&#10;more"/></testcase>
    <testcase classname="tests.test_a" name="test_lost"><error message="worker crashed"/></testcase>
    <testcase classname="tests.test_b" name="test_new[1]"><skipped message="TE 2.16 has it first"/></testcase>
    <testcase classname="tests.test_b" name="test_new[2]"><skipped message="TE 2.16 has it first"/></testcase>
</testsuite></testsuites>"""
GOOD = te_matrix.GroupRun(passed=3, skipped=(("TE 2.16 has it first", 2),))


def ask(python: Path, program: str) -> str:
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_the_matrix_spans_the_versions_that_the_kernels_serve() -> None:
    tested = [Version(version).release[:2] for version in te_matrix.VERSIONS]
    assert (min(tested), max(tested)) == (versions.OLDEST.release, versions.NEWEST.release)


def test_an_environment_sees_its_own_packages_before_those_behind_it(tmp_path: Path) -> None:
    python = te_matrix.layer(tmp_path)
    (te_matrix.site_packages(tmp_path) / "tabulate.py").write_text("mine = True")
    assert ask(python, "import tabulate; print(tabulate.mine)") == "True"
    assert ask(python, "import pytest; print(pytest.__file__)") == pytest.__file__


def test_an_environment_that_is_there_is_used_again(tmp_path: Path) -> None:
    python = te_matrix.layer(tmp_path)
    kept = te_matrix.site_packages(tmp_path) / "kept.py"
    kept.touch()
    assert te_matrix.layer(tmp_path) == python
    assert kept.exists()


def test_python_path_and_options_of_the_caller_do_not_reach_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/another/transformer_engine")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    assert not {"PYTHONPATH", "PYTEST_ADDOPTS"} & set(te_matrix.environment())


def test_results_are_counted_with_the_reasons_of_what_did_not_pass(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)
    run = te_matrix.read_results(tmp_path / "results.xml")
    assert run.passed == 1
    assert run.failed == (
        ("tests.test_a::test_bad", "assert 1 == 2"),
        ("tests.test_a::test_lost", "worker crashed"),
    )
    assert run.skipped == (("TE 2.16 has it first", 2),)


@pytest.mark.parametrize(
    "run",
    [te_matrix.GroupRun(), te_matrix.GroupRun(3, (("test", "why"),)), te_matrix.GroupRun(broken="no such folder")],
)
def test_a_group_that_ran_nothing_failed_or_broke_is_not_good(run: te_matrix.GroupRun) -> None:
    assert GOOD.good
    assert not run.good


def test_a_group_that_pytest_cannot_collect_is_broken_and_says_why(tmp_path: Path) -> None:
    run = te_matrix.run_group(Path(sys.executable), ["no/such/tests"], tmp_path, "0", "")
    assert run.broken is not None
    assert "no/such/tests" in run.broken


def test_the_report_has_a_row_a_version_and_every_reason() -> None:
    bad = te_matrix.GroupRun(1, (("tests.test_a::test_bad", "a | b"),))
    report = te_matrix.draw({"2.14.1": {"kernels": GOOD, "cases": bad}, "2.20.2": {"kernels": GOOD}})
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in report.splitlines()]
    assert ["2.14.1", "3 / 0 / 2", "-", "-", "1 / 1 / 0"] in rows
    assert ["TE 2.16 has it first", "2", "2"] in rows
    assert "tests.test_a::test_bad" in report
    assert r"a \| b" in report


def test_messages_lose_this_checkout_s_folder_and_their_further_lines() -> None:
    assert te_matrix.first_line(f"in {te_matrix.ROOT}/parity/te.py\nmore") == "in parity/te.py"
