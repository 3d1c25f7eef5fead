"""What becomes of a run that compares nothing, of strict runs, and the defaults that a project sets."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugin_runs import recorded, run, run_with_workers, write

from parity.cli import suite
from parity.report import record
from parity.user_error import UserError

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("stand_ins")
PAIRS = """
    import parity, pytest

    @parity.pair("mlp", marks=[{marks}])
    def mlp(te): ...

    @parity.pair("proves_nothing", precisions=["fp32"])
    def proves_nothing(te): ...
"""
SKIPPED = ["my_pairs.py::mlp[fp8_current-]", "my_pairs.py::mlp[mxfp8-]"]


@pytest.mark.parametrize(
    ("arguments", "marks", "code", "said"),
    [
        (SKIPPED, "", 5, "skipped 2 items: no FP8 on this machine"),
        (["my_pairs.py::mlp[bf16-]"], "'skip'", 5, "skipped 1 item: unconditional skip"),
        (["-n", "1", *SKIPPED], "", 5, "skipped 2 items: no FP8 on this machine"),
        (["my_pairs.py::mlp[bf16-]", *SKIPPED], "", 0, "*1 of 1 item passed*2 skipped*"),
        (["test_other.py", *SKIPPED], "", 0, "*nothing was compared*"),
        (["--parity-resume=yes", *SKIPPED], "", 5, "skipped 2 items: no FP8 on this machine"),
    ],
)
def test_a_run_that_compares_nothing_does_not_pass_and_says_why(
    pytester: pytest.Pytester, arguments: list[str], marks: str, code: int, said: str
) -> None:
    write(pytester, PAIRS.format(marks=marks))
    write(pytester, "def test_it(): ...", "test_other")
    result = run_with_workers(pytester, 1, *arguments[2:]) if "-n" in arguments else run(pytester, *arguments)
    assert result.ret == code
    result.stdout.fnmatch_lines([said])


def test_parity_run_tells_what_was_not_compared_from_what_does_not_exist(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    write(pytester, PAIRS.format(marks=""))
    assert suite.run(["my_pairs.py"], ["-n", "0", "--parity-precisions=mxfp8"]) == suite.MISTAKE
    printed = capsys.readouterr()
    assert "nothing was compared" in printed.out
    assert "no FP8 on this machine" in printed.out
    assert "there is no pair" not in printed.err


@pytest.mark.parametrize(
    ("arguments", "marks", "reasons"),
    [
        ([SKIPPED[0], "--parity-seeds=3"], "", ["no FP8 on this machine"]),
        (["my_pairs.py::mlp[bf16-]"], "'skip'", ["unconditional skip"]),
        (["my_pairs.py::proves_nothing"], "", ["nothing is known of the backward pass"]),
        (["my_pairs.py::mlp[bf16-]"], "", []),
        (["my_pairs.py::mlp[bf16-]"], "'xfail'", []),
    ],
)
def test_a_strict_run_records_tells_and_returns_an_error_where_nothing_is_proven(
    pytester: pytest.Pytester, arguments: list[str], marks: str, reasons: list[str]
) -> None:
    write(pytester, PAIRS.format(marks=marks))
    assert run(pytester, "--parity-strict=no", *arguments).ret in (0, 5)
    result = run(pytester, "--parity-strict", *arguments)
    assert result.ret == (1 if reasons else 0)
    found = [kept for kept in recorded(pytester).results if kept.status == "error"]
    assert [kept.reason.partition(" (an error")[0] for kept in found] == reasons
    for reason in reasons:
        result.stdout.fnmatch_lines([f"*{reason} (an error because of --strict)*", "*1 of 1 item failed*"])


def project(pytester: pytest.Pytester, *lines: str) -> Path:
    """Write a pyproject.toml, and a file of pairs in a folder below it."""
    (pytester.path / "pyproject.toml").write_text("\n".join(("[tool.parity]", *lines)))
    folder = pytester.mkdir("below")
    (folder / "my_pairs.py").write_text("import parity\n@parity.pair('mlp')\ndef mlp(te): ...\n")
    return folder


def test_a_project_sets_defaults_and_the_command_line_overrides_them(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project(
        pytester,
        *('precisions = ["fp32", "bf16"]', "seeds = [3, 5]", 'report = "out"', 'name = "night"', "timeout = 60"),
        *("diagnosis = false", "workers = 3", "strict = true", "keep-runs = 2", 'ci = ["junit"]'),
    )
    monkeypatch.chdir(folder)
    assert run(pytester, "my_pairs.py").ret == 0
    found = record.read(pytester.path / "out/night.jsonl")
    assert [(each.precision, each.seed) for each in found.results] == [
        ("fp32", 3),
        ("fp32", 5),
        ("bf16", 3),
        ("bf16", 5),
    ]
    assert found.environment.asked is not None
    assert found.environment.asked.options["--parity-strict"] == "yes"
    assert suite.workers_of_project(["my_pairs.py"]) == "3"
    run(pytester, "my_pairs.py", "--parity-precisions=fp32", "--parity-seeds=7,", "--parity-name=day")
    assert [each.seed for each in record.read(pytester.path / "out/day.jsonl").results] == [7]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sedes = 3", "*pyproject.toml: *tool.parity*: sedes is not an option; there are precisions, *"),
        ("timeout = {s = 3}", "*timeout is {'s': 3}, but must be as on the command line"),
        ("report = 3", "*report is 3, but must be a text"),
        ("name = true", "*name is True, but must be a text"),
        ("seeds = true", "*seeds is 'yes', but must be a count*"),
        ('strict = "maybe"', "*strict is 'maybe', but must be yes or no"),
        ("strict = 1", "*strict is '1', but must be yes or no"),
        ('precisions = ["fp33"]', "*unknown precision 'fp33' in --parity-precisions*"),
        ("timeout = [[3]]", "*timeout is *3*, but must be a number of seconds*"),
    ],
)
def test_a_projects_mistake_is_told_by_its_key(pytester: pytest.Pytester, line: str, said: str) -> None:
    folder = project(pytester, line)
    result = run(pytester, str(folder / "my_pairs.py"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([said])
    if line.startswith(("sedes", "report", "name")):
        with pytest.raises(UserError, match=line.split()[0]):
            suite.workers_of_project([str(folder / "my_pairs.py")])
    assert run(pytester, "--collect-only", "--ignore=below").ret == pytest.ExitCode.NO_TESTS_COLLECTED
