"""The site builds without a warning, its notebook finds its bugs, and its tables are those of the record."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import parity

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_site_builds_and_a_warning_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="te-parity[docs] is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in ("index", "first-port", "api", "findings"):
        assert (tmp_path / f"{page}.html").is_file()
    loaded = re.findall(
        r'<(?:script|link|img)[^>]* (?:src|href)="(https?:[^"]+)', (tmp_path / "index.html").read_text()
    )
    assert loaded == [], "a page loads nothing from elsewhere"


def test_the_api_page_has_each_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: parity\.(\w+)$", page, re.MULTILINE)) == set(parity.__all__)


def test_the_tables_of_normal_errors_are_those_of_the_record() -> None:
    normal_errors = script("normal_errors")
    text = normal_errors.PAGE.read_text(encoding="utf-8")
    assert normal_errors.page(text, normal_errors.tables(normal_errors.measured())) == text


def test_the_notebook_runs_and_prints_what_the_page_shows() -> None:
    nbclient = pytest.importorskip("nbclient", reason="te-parity[dev] is not installed")
    nbformat = pytest.importorskip("nbformat")
    shown = nbformat.read(DOCS / "first-port.ipynb", as_version=4)
    ran = nbformat.read(DOCS / "first-port.ipynb", as_version=4)
    nbclient.NotebookClient(ran, timeout=600, resources={"metadata": {"path": str(DOCS)}}).execute()
    assert [verdicts(cell) for cell in ran.cells] == [verdicts(cell) for cell in shown.cells]
    assert "PAR201 norm-eps" in str(ran.cells)


def verdicts(cell: dict) -> list[str]:
    """Return what a cell says of pairs, without numbers, which another processor may have otherwise."""
    printed = "".join(output.get("text", "") for output in cell.get("outputs", ()))
    return re.findall(r"PAR\d+ [\w-]+|passed|failed", printed)


def script(name: str) -> ModuleType:
    """Import a file of ``scripts/``."""
    specification = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
