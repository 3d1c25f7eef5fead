"""Studies by name, and their options as a person writes them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
from lab.__main__ import app
from lab.studies import catalogue
from lab.studies.fp8_accumulation.study import Settings
from parity.user_error import UserError


def test_options_are_parsed_as_their_defaults() -> None:
    settings = catalogue.with_options(Settings(), ["lengths=64,128", "seeds=2", "distributions=normal"])
    assert settings == Settings(lengths=(64, 128), seeds=2, distributions=("normal",))


@dataclasses.dataclass(frozen=True)
class Options:
    counts: tuple[int, ...] = (1, 2)
    rises: tuple[int, ...] = (0, 1)
    exponents: tuple[int, ...] = (-3, 0)
    rate: float = 1e-3
    parts: bool = True


def test_an_element_that_is_named_twice_counts_once() -> None:
    assert catalogue.with_options(Settings(), ["lengths=64,128,64"]).lengths == (64, 128)


@pytest.mark.parametrize(("answer", "meant"), [("yes", True), ("no", False)])
def test_yes_and_no_are_options(answer: str, meant: bool) -> None:
    assert catalogue.with_options(Options(), [f"parts={answer}"]).parts is meant


def test_numbers_may_be_as_small_as_their_defaults_say() -> None:
    settings = catalogue.with_options(Options(), ["rises=0", "exponents=-12,4"])
    assert settings == Options(rises=(0,), exponents=(-12, 4))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("length=64", "with their defaults, are counts=1,2, rises=0,1, exponents=-3,0, rate=0.001, parts=yes"),
        ("counts", "'counts' is not an option of this study"),
        ("counts=many", r"'many' is not a valid value \(the default is '1,2'\)"),
        ("counts=", "'' is not a valid value"),
        ("counts=3,0", "must be greater than 0"),
        ("rises=-1", "must not be negative"),
        ("rate=nan", "must be finite"),
        ("rate=-1", "must be greater than 0"),
        ("parts=maybe", "'maybe' is not a valid value"),
    ],
)
def test_options_that_do_not_fit_are_told(option: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        catalogue.with_options(Options(), [option])


def test_a_study_that_there_is_not_is_told() -> None:
    with pytest.raises(UserError, match=f"there are {', '.join(catalogue.STUDIES)}"):
        catalogue.load("fp8")


@pytest.mark.parametrize("name", catalogue.STUDIES)
def test_each_study_has_what_the_command_needs(name: str) -> None:
    study = catalogue.load(name)
    assert isinstance(study.FULL, study.Settings)
    assert isinstance(study.QUICK, study.Settings)
    assert callable(study.measured)


def test_the_command_runs_a_study_with_options_and_names_its_report(tmp_path: Path) -> None:
    options = ["rows=4", "seeds=1", "lengths=64,128", "interval_length=64", "intervals=32"]
    arguments = [argument for option in options for argument in ("--set", option)]
    result = CliRunner().invoke(app, ["study", "fp8_accumulation", "--quick", "-o", str(tmp_path), *arguments])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "fp8_accumulation.md").is_file()
    assert str(tmp_path / "fp8_accumulation.md") in result.output


SMALL = ["rows=4", "seeds=1", "lengths=64", "distributions=normal", "interval_length=64", "intervals=32"]


def run_small(folder: Path, *further: str) -> Any:
    arguments = [argument for option in SMALL for argument in ("--set", option)]
    result = CliRunner().invoke(app, ["study", "fp8_accumulation", "-o", str(folder), *arguments, *further])
    assert result.exit_code == 0, result.output
    return result


def test_results_of_other_code_are_used_and_told_and_computed_again_when_asked_for(tmp_path: Path) -> None:
    assert "computed by other code" not in run_small(tmp_path).stderr
    assert "computed by other code" not in run_small(tmp_path).stderr
    path = tmp_path / "fp8_accumulation.jsonl"
    code, *results = path.read_text().splitlines()
    other = json.loads(code)
    other["code"]["parity.numerics.formats"] = "of before"
    spoiled = results[0].replace(": 0.", ": 9.")
    path.write_text("\n".join([json.dumps(other), spoiled]) + "\n")
    told = run_small(tmp_path).stderr
    assert "1 of 1 results were computed by other code (changed since: parity.numerics.formats)" in told
    assert "--again" in told
    assert spoiled in path.read_text()
    run_small(tmp_path, "--again")
    assert path.read_text().splitlines() == [code, *results]


def test_an_interruption_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str, settings: Any, folder: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalogue, "run", interrupted)
    result = CliRunner().invoke(app, ["study", "fp8_accumulation", "-o", str(tmp_path)])
    assert result.exit_code == 130
    assert "the same command goes on from there" in result.stderr


def test_without_a_name_the_command_shows_what_there_is() -> None:
    assert set(catalogue.STUDIES) <= set(CliRunner().invoke(app, ["study"]).output.split())


def test_all_runs_each_study_after_the_other_and_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, Any]] = []

    def run(name: str, settings: Any, folder: Path) -> Path:
        ran.append((name, settings))
        return folder / f"{name}.md"

    monkeypatch.setattr(catalogue, "load", lambda name: SimpleNamespace(QUICK=Settings(seeds=1), FULL=Settings()))
    monkeypatch.setattr(catalogue, "run", run)
    result = CliRunner().invoke(app, ["study", "--all", "--quick", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert ran == [(name, Settings(seeds=1)) for name in catalogue.STUDIES]
    for position, name in enumerate(catalogue.STUDIES, start=1):
        assert f"study {position} of {len(catalogue.STUDIES)}: {name}" in result.stderr
        assert f"report: {tmp_path / name}.md" in result.output


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["study", "flops", "-o", str(tmp_path / "file" / "folder")])
    assert isinstance(result.exception, UserError)
    assert "cannot make the folder" in str(result.exception)


def test_options_of_several_studies_at_once_are_refused() -> None:
    result = CliRunner().invoke(app, ["study", "--all", "--quick", "--set", "seeds=1"])
    assert isinstance(result.exception, UserError)
    assert "--set is an option of one study" in str(result.exception)
