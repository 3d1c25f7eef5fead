"""A run continues where a killed one stopped, and no run takes another one's record for its own."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from plugin_runs import names, recorded, run, run_in_a_process, run_with_workers, write

from parity.machine.files import Claim
from parity.plugin import ending
from parity.report import record
from parity.user_error import UserError

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("stand_ins")

PAIRS = """
    import parity

    @parity.pair("sound", sizes=[dict(n=2), dict(n=4)], precisions=["fp32", "bf16"])
    def sound(te, n): ...

    @parity.pair("fails", sizes=[dict(n=2)], precisions=["fp32"])
    def fails(te, n): ...
"""
ITEMS = ["sound[fp32-2]", "sound[bf16-2]", "sound[fp32-4]", "sound[bf16-4]", "fails[fp32-2]"]
RESUME = "--parity-resume=yes"


@pytest.fixture
def file(pytester: pytest.Pytester) -> Path:
    """Return the record of runs of these pairs."""
    write(pytester, PAIRS)
    return pytester.path / "reports" / "parity.jsonl"


def cut(file: Path, results: int) -> None:
    """Leave what a killed run leaves: this many results, half a line, and an unfinished report."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[: 1 + results], lines[1 + results][:50]]))


def without_times(file: Path) -> str:
    """Return the text of a run's file without dates and durations."""
    return re.sub(r'"date": "[^"]*"|"seconds": [\d.e-]+|date +\| [^|]*', "", file.read_text())


# A resumed run ends with the record, the report and the exit code of a run that was never interrupted.


@pytest.mark.parametrize("finished", range(5))
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    pytester: pytest.Pytester, file: Path, finished: int
) -> None:
    assert run(pytester, "my_pairs.py", "--parity-seeds=2").ret == 1
    whole = [without_times(each) for each in (file, file.with_suffix(".md"))]
    cut(file, 2 * finished + 1)  # one seed of two of the next item
    result = run(pytester, "my_pairs.py", "--parity-seeds=2", RESUME)
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"went on with *parity.jsonl, which had {finished} of 5 items"])
    assert sum(result.parseoutcomes().get(name, 0) for name in ("passed", "failed")) == 5 - finished
    assert [without_times(each) for each in (file, file.with_suffix(".md"))] == whole


def test_workers_go_on_as_well(pytester: pytest.Pytester, file: Path) -> None:
    run(pytester, "my_pairs.py")
    whole = recorded(pytester).results
    cut(file, 2)
    result = run_with_workers(pytester, 2, "my_pairs.py", RESUME)
    assert result.ret == 1
    assert sum(result.parseoutcomes().get(name, 0) for name in ("passed", "failed")) == 3
    key = lambda each: each.item  # noqa: E731
    assert sorted(recorded(pytester).results, key=key) == sorted(whole, key=key)


def test_a_commit_or_an_edit_that_leaves_the_code_of_comparisons_as_it_was_makes_no_other_run(
    pytester: pytest.Pytester, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pytester, "my_pairs.py")
    cut(file, 2)
    monkeypatch.setattr("parity.report.environment.at_commit", lambda: " at commit abc1234 with changes")
    assert run(pytester, "my_pairs.py", RESUME).ret == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_had_finished_is_drawn_again_with_its_exit_code(
    pytester: pytest.Pytester, file: Path, workers: int
) -> None:
    run(pytester, "my_pairs.py")
    before = file.read_bytes()
    file.with_suffix(".md").unlink()
    result = (
        run_with_workers(pytester, workers, "my_pairs.py", RESUME) if workers else run(pytester, "my_pairs.py", RESUME)
    )
    assert result.ret == 1
    assert file.read_bytes() == before
    assert "1 of 5 items failed" in file.with_suffix(".md").read_text()


def test_an_item_that_was_cut_short_is_compared_again(pytester: pytest.Pytester, file: Path) -> None:
    run(pytester, "my_pairs.py")
    lines = file.read_text().splitlines(keepends=True)
    entry = json.loads(lines[1])
    entry["result"] |= {"status": "error", "reason": ending.REASON, "cut_short": True}
    file.write_text(lines[0] + json.dumps(entry) + "\n" + "".join(lines[2:]))
    run(pytester, "my_pairs.py", RESUME)
    assert sorted((each.item, each.status) for each in recorded(pytester).results) == sorted(
        (item, "failed" if item.startswith("fails") else "passed") for item in ITEMS
    )


@pytest.mark.parametrize("name", ["dies", "exits_in_c_unheard", "fails_and_its_search_kills_it"])
def test_a_resumed_run_goes_on_after_an_item_that_ends_its_process(tmp_path: Path, name: str) -> None:
    names = ["sound", name, "reached_at_last", "too"]
    run_in_a_process(tmp_path, names)
    for _ in range(2):  # a run that has reached its end can be resumed as well
        code, printed, results = run_in_a_process(tmp_path, names, RESUME)
        assert code == 1
        assert f"because the last run's process ended while it was comparing my_pairs.py::{name}[fp32-2]" in printed
        found = {result.case: result for result in results}
        assert len(results) == len(names)
        assert {found[each].status for each in ("sound", "reached_at_last", "too")} == {"passed"}
        told = "".join([found[name].reason, *found[name].notes])
        assert found[name].status == ("failed" if "search" in name else "error")
        assert "its worker ended with exit code 0" in told or "its worker died: SIGKILL" in told
    assert "1 of 4 items failed" in (tmp_path / "reports/parity.md").read_text()


def test_an_item_that_somebody_killed_is_compared_to_its_end_when_the_run_goes_on(tmp_path: Path) -> None:
    names = ["sound", "dies_once", "another"]
    run_in_a_process(tmp_path, names)
    code, _, results = run_in_a_process(tmp_path, names, RESUME)
    assert code == 0
    assert sorted((each.case, each.status) for each in results) == [(name, "passed") for name in sorted(names)]


def test_a_line_that_is_damaged_in_the_middle_is_compared_again(pytester: pytest.Pytester, file: Path) -> None:
    run(pytester, "my_pairs.py")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], lines[1], lines[2][:99] + "\n", *lines[3:]]))
    result = run(pytester, "my_pairs.py", RESUME)
    result.stdout.fnmatch_lines(["*went on with *, which had 4 of 5 items"])
    assert sorted(each.item for each in recorded(pytester).results) == sorted(ITEMS)


def test_without_a_record_a_resumed_run_begins_anew(pytester: pytest.Pytester, file: Path) -> None:
    assert run(pytester, "my_pairs.py", RESUME).ret == 1
    assert [each.item for each in recorded(pytester).results] == ITEMS


# A resumed run must be the same run; otherwise it says what differs.


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--parity-seeds=3", "seeds were 0, now they are 0 to 2"),
        ("--parity-precisions=fp32", "--parity-precisions was 'all', now it is 'fp32'"),
        ("--parity-diagnosis=no", "--parity-diagnosis was '0', now it is 'no'"),
        ("--parity-determinism=yes", "--parity-determinism was 'no', now it is 'yes'"),
    ],
)
def test_other_options_are_told_before_anything_is_compared(
    pytester: pytest.Pytester, file: Path, option: str, told: str
) -> None:
    run(pytester, "my_pairs.py")
    cut(file, 2)
    before = file.read_bytes()
    result = run(pytester, "my_pairs.py", RESUME, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"because it belongs to a different run: {told}." in result.stderr.str()
    assert file.read_bytes() == before


def test_another_version_of_parity_is_told(
    pytester: pytest.Pytester, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pytester, "my_pairs.py")
    monkeypatch.setattr("parity.report.earlier.code_of_parity", lambda: "others")
    result = run(pytester, "my_pairs.py", RESUME)
    assert "a different run: parity's code changed." in result.stderr.str()


def edit_the_pairs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    with (pytester.path / "my_pairs.py").open("a") as pairs:
        pairs.write("# a change\n")
    return ["my_pairs.py"]


def choose_others(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["my_pairs.py", "-k", "not bf16-4"]


def set_a_variable(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    return ["my_pairs.py"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (edit_the_pairs, "my_pairs.py changed"),
        (choose_others, "the number of items was 5, now it is 4"),
        (set_a_variable, "variables NVTE_[*] and PARITY_[*] changed"),
    ],
)
def test_what_only_the_comparing_process_knows_ends_the_run_and_leaves_the_record(
    pytester: pytest.Pytester, file: Path, monkeypatch: pytest.MonkeyPatch, change, told: str
) -> None:
    run(pytester, "my_pairs.py")
    cut(file, 2)
    before = file.read_bytes()
    result = run(pytester, *change(pytester, monkeypatch), RESUME)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(
        [f"*Exit: cannot resume from this record, because it belongs to a different run: {told}*"]
    )
    assert file.read_bytes() == before


def test_what_is_no_record_is_refused(pytester: pytest.Pytester, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("my notes\n")
    result = run(pytester, "my_pairs.py", RESUME)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "is not a record of this version of parity (line 1: not JSON" in result.stderr.str()
    assert file.read_text() == "my notes\n"


# A run that begins anew keeps the old record; for complete records, see test_kept_runs.py.


def test_what_a_run_that_did_not_end_has_left_is_kept_and_told(pytester: pytest.Pytester, file: Path) -> None:
    for aside in ("parity-unfinished.jsonl", "parity-unfinished-2.jsonl"):
        run(pytester, "my_pairs.py")
        cut(file, 2)
        before = file.read_bytes()
        result = run(pytester, "my_pairs.py")
        result.stdout.fnmatch_lines([f"*parity.jsonl belonged to a run that did not finish; it is kept as */{aside}"])
        assert (file.parent / aside).read_bytes() == before
        assert [each.item for each in recorded(pytester).results] == ITEMS


def test_what_is_kept_can_be_gone_on_with_by_its_name(pytester: pytest.Pytester, file: Path) -> None:
    run(pytester, "my_pairs.py")
    cut(file, 2)
    run(pytester, "my_pairs.py")
    assert run(pytester, "my_pairs.py", RESUME, "--parity-name=parity-unfinished").ret == 1
    assert [each.item for each in recorded(pytester, "parity-unfinished").results] == ITEMS


def test_a_file_that_is_no_record_is_kept(pytester: pytest.Pytester, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("my notes\n")
    run(pytester, "my_pairs.py")
    assert (file.parent / "parity-unfinished.jsonl").read_text() == "my notes\n"


def test_no_older_report_stands_beside_a_record_that_has_begun(
    pytester: pytest.Pytester, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pytester, "my_pairs.py")
    seen: list[str] = []
    monkeypatch.setitem(
        __import__("fakes").DURING_THE_SEARCH, "fails", lambda: seen.append(file.with_suffix(".md").read_text())
    )
    run(pytester, "my_pairs.py")
    assert seen[0].startswith("# Parity report: parity\n\nThis run has not ended, or it was killed")
    assert "1 of 5 items failed" in file.with_suffix(".md").read_text()


def test_choosing_no_item_touches_nothing(pytester: pytest.Pytester, file: Path) -> None:
    run(pytester, "my_pairs.py", "--collect-only", RESUME)
    run(pytester, "my_pairs.py", "-k", "nothing")
    assert not file.parent.exists()
    assert names(pytester, "my_pairs.py") == ITEMS


# Only one run at a time writes to a record.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("option", ["--parity-resume=no", RESUME])
def test_a_second_run_into_the_same_record_is_refused(
    pytester: pytest.Pytester, file: Path, workers: int, option: str
) -> None:
    claim = Claim(file)
    claim.begin(b"the other run's\n")
    try:
        started = (
            run_with_workers(pytester, workers, "my_pairs.py", option)
            if workers
            else run(pytester, "my_pairs.py", option)
        )
    finally:
        claim.close()
    assert started.ret == pytest.ExitCode.USAGE_ERROR
    assert f"another run is writing to {file}; wait until it ends" in started.stderr.str()
    assert file.read_text() == "the other run's\n"
    assert "report:" not in started.stdout.str()


def test_a_claim_ends_with_its_process_and_no_child_keeps_it(tmp_path: Path) -> None:
    lives, end = os.pipe(), os.pipe()
    owner = os.fork()
    if owner == 0:
        Claim(tmp_path / "run.jsonl").begin(b"one\n")
        if os.fork() == 0:  # it outlives the owner
            os.close(end[1])
            os.write(lives[1], b"x")
            os.read(end[0], 1)
            os._exit(0)
        os.read(lives[0], 1)
        os.kill(os.getpid(), 9)
    os.waitpid(owner, 0)
    Claim(tmp_path / "run.jsonl").close()
    os.close(end[1])


def test_a_file_has_one_claim(tmp_path: Path) -> None:
    first = Claim(tmp_path / "run.jsonl")
    with pytest.raises(UserError, match="another run is writing to"):
        Claim(tmp_path / "run.jsonl")
    first.close()
    assert not (tmp_path / "run.jsonl").exists()  # nothing was written


# A run reports what others do to its record while it writes it, and loses as little as possible.


def delete(file: Path) -> None:
    file.unlink()


def replace(file: Path) -> None:
    file.unlink()
    file.write_text("another file\n")


def cut_short(file: Path) -> None:
    os.truncate(file, 2 * file.stat().st_size // 3)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def add(file: Path) -> None:
    with file.open("a") as other:
        other.write("half a line")


@pytest.mark.parametrize(
    ("mishap", "told", "kept"),
    [
        (delete, "*parity.jsonl was deleted during the run; *parity.jsonl has all of its lines again", 5),
        (replace, "*parity.jsonl was replaced by another file during the run; *parity-continued.jsonl has all *", 5),
        (
            cut_short,
            "*parity.jsonl was cut short during the run, from * bytes: it lacks results that the report has*",
            3,
        ),
        (empty, "*parity.jsonl was cut short during the run, from * to 0 bytes: it lacks *", 1),
        (add, "another process wrote 11 bytes to */parity.jsonl during the run", 5),
    ],
)
def test_a_record_that_somebody_touches_is_told(
    pytester: pytest.Pytester, file: Path, monkeypatch: pytest.MonkeyPatch, mishap, told: str, kept: int
) -> None:
    monkeypatch.setitem(__import__("fakes").MISHAPS, "sound", lambda: None)
    monkeypatch.setitem(__import__("fakes").DURING_THE_SEARCH, "fails", lambda: mishap(file))
    result = run(pytester, "my_pairs.py", "--parity-diagnosis=0")
    result.stdout.fnmatch_lines([told])
    name = "parity-continued" if mishap is replace else "parity"
    assert len(recorded(pytester, name).results) >= kept
    assert recorded(pytester, name).results[-1].item == "fails[fp32-2]"
    assert "1 of 5 items failed" in file.with_suffix(".md").read_text()
    assert record.read(file.with_name(f"{name}.jsonl")).environment.items == 5
