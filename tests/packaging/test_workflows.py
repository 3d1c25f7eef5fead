"""The workflows of GitHub run what exists here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from parity.cli import app

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs_of(file: Path) -> dict[str, Any]:
    content: dict[Any, Any] = yaml.safe_load(file.read_text())
    assert content[True], "YAML reads `on` as True"
    jobs: dict[str, Any] = content["jobs"]
    return jobs


def commands_of(file: Path) -> Iterator[list[str]]:
    for job in jobs_of(file).values():
        for step in job["steps"]:
            for line in re.split(r"\n|&&", step.get("run", "")):
                if line.strip():
                    yield shlex.split(line)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_what_a_workflow_runs_exists(file: Path) -> None:
    targets = re.findall(r"^([$()\w/-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = typer.main.get_command(app).commands
    for words in commands_of(file):
        program = words[0]
        if program == "make":
            assert words[1].replace(".venv", "$(VENV)") in targets
        elif program.endswith("/parity"):
            assert words[1] in commands
        elif program in ("bash", ".venv/bin/python") and words[1] != "-m":
            assert (ROOT / words[1]).is_file()


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_every_job_ends_by_itself(file: Path) -> None:
    assert all(job["timeout-minutes"] > 0 for job in jobs_of(file).values())
