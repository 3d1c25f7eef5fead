"""Studies by their names, and options as a person writes them."""

from __future__ import annotations

from pathlib import Path

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
    with pytest.raises(UserError, match=r"there are .*fp8_accumulation, .*training_curves"):
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
