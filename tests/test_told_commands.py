"""Commands that messages and documents tell a person to run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from parity.cli import app

ROOT = Path(__file__).parents[1]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TEXTS = [*(ROOT / "parity").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_every_option_with_which_it_is_told(command):
    told = re.compile(rf"parity {command}\b([^`\"'\n;)]*)")
    arguments = [found for text in TEXTS for found in told.findall(text.read_text(encoding="utf-8"))]
    options = {option for found in arguments for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", found)}
    assert options <= {"--help"} | {name for parameter in COMMANDS[command].params for name in parameter.opts}
