"""``docs/whole-model.md`` in order: its files are written, its changes made, and its commands print what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest

pytest.importorskip("transformers", reason="te-parity[examples] is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "whole-model.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_each_step_does_what_the_page_shows(tmp_path: Path) -> None:
    for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            (tmp_path / text.split()[1]).write_text(text, encoding="utf-8")
        elif language == "diff":
            change(tmp_path / "llama_port.py", text)
        else:
            for command, shown in commands(text):
                check(command, shown, tmp_path)


def change(file: Path, diff: str) -> None:
    """Replace the lines of a diff that were there by those that are to be."""
    before, after = ("".join(line[1:] for line in diff.splitlines(True) if line[0] in kept) for kept in (" -", " +"))
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1
    file.write_text(text.replace(before, after), encoding="utf-8")


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command, and the lines that are shown below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, shown


def check(command: str, shown: list[str], folder: Path) -> None:
    """Run a command, which must print the shown lines in this order, except for its figures and what ``...`` hides."""
    command, _, target = command.partition(" > ")
    ran = run(shlex.split(command), folder)
    printed = ran.stdout + ran.stderr
    assert ran.returncode == any("✗" in line for line in shown), printed
    if target:
        (folder / target).write_text(ran.stdout, encoding="utf-8")
    rest = iter(without_figures(printed))
    for line in without_figures("\n".join(line for line in shown if line.strip() != "...")):
        pattern = ".*".join(map(re.escape, line.split("...")))
        assert any(re.fullmatch(pattern, one) for one in rest), f"{command} does not print {line!r}:\n{printed}"


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = words
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if program == "parity":
        return forked.run("-m", "parity", *arguments, folder=folder, environment=environment)
    if program == "python":
        return forked.run("-m", arguments[0].removesuffix(".py"), folder=folder, environment=environment)
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def without_figures(text: str) -> list[str]:
    """Return lines in which no number with a point or an exponent is left, since these depend on the processor."""
    return [
        re.sub(r"(?<![\w.])[-+]?\d+(\.\d+)?(e-?\d+)?(?!\w)", spell, " ".join(line.split()))
        for line in text.splitlines()
    ]


def spell(found: re.Match[str]) -> str:
    return "#" if found[1] or found[2] else found[0]
