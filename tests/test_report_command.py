"""``parity report``: what it draws, prints and exits with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, result

from parity import cli
from parity.report import record
from parity.report.record import Uncollected
from parity.result import Result


@dataclass(frozen=True)
class Ended:
    code: int | str | None
    stdout: str
    stderr: str


Command = Callable[..., Ended]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr("sys.argv", ["parity", "report", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Ended(ended.value.code, *capsys.readouterr())

    return run


def write(name: str, *results: Result, planned: int = 1) -> Path:
    path = Path(name)
    record.start(path, record.environment_line(replace(ENVIRONMENT, items=planned)))
    for each in results:
        record.append(path, record.result_line(each))
    return path


def test_a_record_is_drawn_again_beside_it(report: Command) -> None:
    write("night.jsonl", result(notes=("no TE",)))
    done = report("night.jsonl")
    assert (done.code, done.stderr) == (0, "")
    assert "1 of 1 item passed" in done.stdout
    assert "note of 1 item: no TE" in done.stdout
    assert Path("night.md").read_text().startswith("# Parity report: night\n")


def test_a_record_of_a_run_that_failed_ends_with_code_1_as_the_run_did(report: Command) -> None:
    write("night.jsonl", result(margin=9.0))
    assert report("night.jsonl").code == 1


def test_a_record_that_lacks_items_of_its_run_ends_with_code_1(report: Command) -> None:
    write("night.jsonl", result(), planned=2)
    assert report("night.jsonl").code == 1


def test_a_record_of_a_run_that_could_not_collect_a_pair_ends_with_code_1(report: Command) -> None:
    path = write("night.jsonl", result())
    record.append(path, record.uncollected_line(Uncollected("my_pairs.py::misfits", "fc1.weight is 128x64")))
    done = report("night.jsonl")
    assert done.code == 1
    assert done.stdout.startswith("⚠️ 1 of 1 item passed")
    assert "; 1 pair not collected; " in done.stdout


def test_last_lines_that_are_damaged_are_told_with_the_number_of_results_that_were_read(report: Command) -> None:
    path = write("night.jsonl", result(), result(seed=1))
    path.write_text(path.read_text()[:-40])
    assert report("night.jsonl").stderr == (
        "parity: night.jsonl: line 3 is damaged or cut short, and left out; 1 result was read\n"
    )
    path.write_text(path.read_text() + "\n\0")
    assert "lines 3 to 4 are damaged" in report("night.jsonl").stderr


def test_the_folder_of_the_report_is_made(report: Command) -> None:
    write("night.jsonl", result())
    assert report("night.jsonl", "-o", "new/folder/drawn.md").code == 0
    assert "1 of 1 item passed" in Path("new/folder/drawn.md").read_text()


def test_a_report_that_cannot_be_written_ends_in_a_sentence_and_code_2(report: Command) -> None:
    write("night.jsonl", result())
    done = report("night.jsonl", "-o", "night.jsonl/drawn.md")
    assert done.code == 2
    assert "that is a file, but should be a folder" in done.stderr


@pytest.mark.parametrize("target", ["old.jsonl", "new.jsonl"])
def test_a_report_never_replaces_a_record_that_it_is_drawn_from(report: Command, target: str) -> None:
    write("old.jsonl", result())
    write("new.jsonl", result())
    done = report("new.jsonl", "--against", "old.jsonl", "-o", target)
    assert done.code == 2
    assert f"would replace its record {target}" in done.stderr
    assert len(record.read(Path(target)).results) == 1


def test_an_item_that_newly_fails_ends_with_code_1(report: Command) -> None:
    write("old.jsonl", result())
    write("new.jsonl", result(margin=9.0))
    done = report("new.jsonl", "--against", "old.jsonl")
    assert (done.code, done.stderr) == (1, "")
    assert done.stdout == "❌ 1 item newly failing\nreport: new_against_old.md\n"
    assert Path("new_against_old.md").read_text().startswith("# Parity report: new.jsonl against old.jsonl\n")


def test_an_item_that_failed_before_as_well_ends_with_code_0(report: Command) -> None:
    write("old.jsonl", result(margin=9.0))
    write("new.jsonl", result(margin=9.0))
    assert report("new.jsonl", "--against", "old.jsonl").code == 0


def test_the_factor_by_which_a_margin_has_to_change_can_be_chosen(report: Command) -> None:
    write("old.jsonl", result(margin=0.2))
    write("new.jsonl", result(margin=0.5))
    assert "1 with a margin that changed by more than 1.5 times" in report("new.jsonl", "--against", "old.jsonl").stdout
    assert "1 as before" in report("new.jsonl", "--against", "old.jsonl", "--factor", "3").stdout
