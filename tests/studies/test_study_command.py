"""Studies by their names, and options as a person writes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
from parity.cli import app
from parity.studies import catalogue
from parity.studies.fp8_accumulation import Settings
from parity.user_error import UserError


def test_options_are_parsed_as_their_defaults() -> None:
    settings = catalogue.with_options(Settings(), ["lengths=64,128", "seeds=2", "distributions=normal"])
    assert settings == Settings(lengths=(64, 128), seeds=2, distributions=("normal",))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("length=64", "its options and their values are distributions=normal"),
        ("seeds", "is no option of this study"),
        ("seeds=many", "'many' cannot stand where '4' does"),
    ],
)
def test_options_that_do_not_fit_are_told(option: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        catalogue.with_options(Settings(), [option])


def test_a_study_that_there_is_not_is_told() -> None:
    with pytest.raises(UserError, match=f"there are {', '.join(catalogue.STUDIES)}"):
        catalogue.load("fp8")


@pytest.mark.parametrize("name", catalogue.STUDIES)
def test_each_study_has_what_the_command_needs(name: str) -> None:
    study = catalogue.load(name)
    assert isinstance(study.FULL, study.Settings)
    assert isinstance(study.QUICK, study.Settings)
    assert callable(study.run)


def test_the_command_runs_a_study_with_options_and_names_its_report(tmp_path: Path) -> None:
    options = ["rows=4", "seeds=1", "lengths=64,128", "interval_length=64", "intervals=32"]
    arguments = [argument for option in options for argument in ("--set", option)]
    result = CliRunner().invoke(app, ["study", "fp8_accumulation", "--quick", "-o", str(tmp_path), *arguments])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "fp8_accumulation.md").is_file()
    assert str(tmp_path / "fp8_accumulation.md") in result.output


def test_without_a_name_the_command_shows_what_there_is() -> None:
    assert set(catalogue.STUDIES) <= set(CliRunner().invoke(app, ["study"]).output.split())


def test_all_runs_each_study_after_the_other_and_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, Any]] = []

    def load(name: str) -> SimpleNamespace:
        def run(settings: Any, folder: Path) -> Path:
            ran.append((name, settings))
            return folder / f"{name}.md"

        return SimpleNamespace(QUICK=Settings(seeds=1), FULL=Settings(), run=run)

    monkeypatch.setattr(catalogue, "load", load)
    result = CliRunner().invoke(app, ["study", "--all", "--quick", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert ran == [(name, Settings(seeds=1)) for name in catalogue.STUDIES]
    for position, name in enumerate(catalogue.STUDIES, start=1):
        assert f"study {position} of {len(catalogue.STUDIES)}: {name}" in result.stderr
        assert f"report: {tmp_path / name}.md" in result.output


def test_options_of_several_studies_at_once_are_refused() -> None:
    result = CliRunner().invoke(app, ["study", "--all", "--quick", "--set", "seeds=1"])
    assert isinstance(result.exception, UserError)
    assert "--set is an option of one study" in str(result.exception)
