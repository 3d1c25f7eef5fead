"""Earlier runs keep their numbers and records their names; the end of a run compares it with an earlier one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fakes
import pytest
from plugin_runs import recorded, run, run_with_workers, write

from parity.report import earlier
from parity.result import Check
from parity.user_error import UserError

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("stand_ins")

SOUND = """
    import parity

    @parity.pair("sound", sizes=[dict(n=2)], precisions=["fp32", "bf16"])
    def sound(te, n): ...
"""
# A mistake far beyond its limit, and far beyond noise.
WITH_GAIN = replace(fakes.tensor(), checks=(Check("gain", 4.0, 5.6),), margin=4.0 / 5.6)
WRONG = SOUND.replace('"sound"', '"fails"')


def files(folder: Path) -> list[str]:
    return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file())


# Earlier runs.


@pytest.mark.parametrize(
    ("runs", "arguments", "kept"),
    [
        (1, [], []),
        (2, [], ["0001"]),
        (4, [], ["0001", "0002", "0003"]),
        (4, ["--parity-keep-runs=2"], ["0002", "0003"]),
        (4, ["--parity-keep-runs=0"], []),
    ],
)
def test_earlier_runs_keep_numbers(pytester: pytest.Pytester, runs: int, arguments: list[str], kept: list[str]) -> None:
    write(pytester, SOUND)
    for _ in range(runs):
        run(pytester, "my_pairs.py", *arguments)
    earlier = [f"runs/parity-{number}.{ending}" for number in kept for ending in ("html", "jsonl", "md")]
    assert files(pytester.path / "reports") == sorted(["parity.html", "parity.jsonl", "parity.md", *earlier])


def test_numbers_go_on_after_the_oldest_were_removed(pytester: pytest.Pytester) -> None:
    write(pytester, SOUND)
    for _ in range(4):
        run(pytester, "my_pairs.py", "--parity-keep-runs=1")
    assert earlier.numbers(pytester.path / "reports/runs", "parity") == [3]


def test_names_have_numbers_of_their_own(pytester: pytest.Pytester) -> None:
    write(pytester, SOUND)
    for name in ("night", "night", "night-1", "night-1"):
        run(pytester, "my_pairs.py", f"--parity-name={name}")
    assert earlier.numbers(pytester.path / "reports/runs", "night") == [1]
    assert earlier.numbers(pytester.path / "reports/runs", "night-1") == [1]


def test_it_is_told_where_the_run_before_is(pytester: pytest.Pytester) -> None:
    write(pytester, WRONG)
    run(pytester, "my_pairs.py")
    before = recorded(pytester).results
    write(pytester, SOUND)
    run(pytester, "my_pairs.py").stdout.fnmatch_lines(["the run before is kept as *reports/runs/parity-0001.jsonl"])
    assert recorded(pytester, "runs/parity-0001").results == before
    assert "2 of 2 items failed" in (pytester.path / "reports/runs/parity-0001.md").read_text()


def test_a_run_that_is_resumed_gets_no_number(pytester: pytest.Pytester) -> None:
    write(pytester, SOUND)
    for _ in range(2):
        run(pytester, "my_pairs.py", "--parity-resume=yes")
    assert not (pytester.path / "reports/runs").exists()


# Baselines.


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_compared_with_a_baseline_at_its_end(pytester: pytest.Pytester, workers: int) -> None:
    def started(*arguments: str) -> pytest.RunResult:
        arguments = "my_pairs.py", *arguments
        return run_with_workers(pytester, workers, *arguments) if workers else run(pytester, *arguments)

    write(pytester, SOUND)
    started("--parity-save-as=good").stdout.fnmatch_lines(["baseline: *.parity/baselines/good.jsonl"])
    again = started("--parity-against=good")
    assert again.ret == 0
    again.stdout.fnmatch_lines(["against good: ✅ nothing regressed, 2 *", "report: *parity_against_good.md"])


def edited(record: Path, old: str, new: str) -> None:
    record.write_text(record.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        (('"status": "passed"', '"status": "passed" '), 0, "2 changed within noise"),
        (('"statistic": "gain", "value": 4.0', '"statistic": "gain", "value": 0.0'), 1, "2 items regressed"),
        (('"case": "sound"', '"case": "another"'), pytest.ExitCode.USAGE_ERROR, "have no item in common"),
        (('"status": "passed"', '"status": "skipped"'), 0, "2 newly passing"),
        (('"torch": "', '"torch": "0.'), 0, "differs: PyTorch: 0."),
    ],
)
def test_the_exit_code_tells_what_became_of_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], code: int, told: str
) -> None:
    write(pytester, SOUND)
    sound = fakes.result
    monkeypatch.setattr(
        fakes, "result", lambda *given, **fields: replace(sound(*given, **fields), tensors=(WITH_GAIN,))
    )
    run(pytester, "my_pairs.py", "--parity-save-as=good")
    edited(pytester.path / ".parity/baselines/good.jsonl", *change)
    result = run(pytester, "my_pairs.py", "--parity-against=good")
    assert result.ret == code
    assert told in result.stdout.str()


def test_a_baseline_of_the_same_name_is_replaced_and_told(pytester: pytest.Pytester) -> None:
    write(pytester, SOUND)
    for _ in range(2):
        result = run(pytester, "my_pairs.py", "--parity-save-as=good")
    result.stdout.fnmatch_lines(["baseline: *good.jsonl, in place of the one before"])


def test_a_run_that_lacks_results_makes_no_baseline(pytester: pytest.Pytester) -> None:
    write(pytester, SOUND + '\n    @parity.pair("misfits", sizes=[dict(n=2)])\n    def misfits(te, n): ...\n')
    result = run(pytester, "my_pairs.py", "--parity-save-as=good", "--continue-on-collection-errors")
    result.stdout.fnmatch_lines(["no baseline good was made, since not everything was compared"])
    assert not (pytester.path / ".parity").exists()


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--parity-against=god", "no baseline in .parity/baselines (good; "),
        ("--parity-against=notes.jsonl", "notes.jsonl is not a record"),
        ("--parity-save-as=a/b", "--parity-save-as is 'a/b', but must be a file name"),
        ("--parity-keep-runs=-1", "--parity-keep-runs is '-1', but must be a number of runs from 0"),
        ("--parity-ci=junit,x", "--parity-ci is 'junit,x', but must be all, none, or some of junit"),
    ],
)
def test_what_is_misspelt_is_told_before_anything_is_compared(
    pytester: pytest.Pytester, option: str, told: str
) -> None:
    write(pytester, SOUND)
    (pytester.path / "notes.jsonl").write_text("my notes\n")
    run(pytester, "my_pairs.py", "--parity-save-as=good", "--parity-name=first")
    result = run(pytester, "my_pairs.py", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert told in result.stderr.str()
    assert not (pytester.path / "reports/parity.jsonl").exists()


# Names that a user may give a record.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("good", ".parity/baselines/good.jsonl"),
        ("reports/night.jsonl", "reports/night.jsonl"),
        ("7", "reports/runs/parity-0007.jsonl"),
        ("parity-7", "reports/runs/parity-0007.jsonl"),
        ("night-0002", "reports/runs/night-0002.jsonl"),
        ("missing.jsonl", "missing.jsonl"),
    ],
)
def test_a_record_is_found_by_its_path_its_name_or_its_number(tmp_path: Path, text: str, found: str) -> None:
    for file in (".parity/baselines/good", "reports/night", "reports/runs/parity-0007", "reports/runs/night-0002"):
        (tmp_path / f"{file}.jsonl").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{file}.jsonl").touch()
    assert earlier.find(text, tmp_path, "--against") == tmp_path / found


@pytest.mark.parametrize("text", ["x" * 5000, "a\0b", "", "../x", "[a]-7", "\u0667"])
def test_what_names_no_record_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="which is no file, no baseline in"):
        earlier.find(text, tmp_path, "--against")
