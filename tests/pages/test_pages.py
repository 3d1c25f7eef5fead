"""The README, the pages of ``docs/`` and the site: their Python runs, their commands exist, and no link is broken."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import SkipTest

import pytest
import torch
import typer
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

import parity
from parity.case import registry
from parity.cli import app

# The README and the pages of ``docs/`` do what they show: their Python runs, and their commands exist.


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "parity" / "SKILL.md", *sorted((ROOT / "docs").glob("*.md"))]
IN_ORDER = ROOT / "docs" / "whole-model.md"  # whose files and commands test_whole_model.py runs
LAYER = ROOT / "docs" / "port-a-layer.md"  # which other pages import as ``my_layer``

# Pairs that are wrong on purpose, and the findings that they must get. All others must pass.
NAMED = {"norm_linear": "PAR201", "my_mlp": "PAR101"}

SHELLS = ("console", "sh")
NOT_RUN = ("text", "diff", "toml")  # the output of programs, and text that is not a program


# The commands that a page shows exist and take the options shown.


def check_commands(example: Example) -> None:
    """Fail for a command that does not exist, or does not take the options and arguments on the page."""
    lines = str(example.parsed).splitlines()
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in prompted or lines:
        words = shlex.split(line.partition(" > ")[0], comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            check_command(words)


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if program == "torchrun":  # torchrun OPTIONS -m parity exec ...
        program, *arguments = words[words.index("-m") + 1 :]
    if program == "parity":
        commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        assert arguments[0] in commands, f"there is no command {arguments[0]!r}"
        commands[arguments[0]].make_context(arguments[0], arguments[1:])
    elif program == "pytest":
        of_plugin = {f"--parity-{name}" for name in option_names()}
        given = {word.split("=")[0] for word in arguments if word.startswith("--parity-")}
        assert given <= of_plugin, f"pytest has no {given - of_plugin}"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert arguments[0] in targets, f"the Makefile has no {arguments[0]}"
    elif program == "python" and arguments[0].endswith(".py"):
        somewhere = (ROOT / arguments[0], *ROOT.glob(f"examples/**/{arguments[0]}"))
        assert any(file.is_file() for file in somewhere), f"there is no {arguments[0]}"
    else:
        assert program in {"pip", "python3", ".", "ray"}, f"nobody checks {program!r}; add it here"


def option_names() -> set[str]:
    """Return what may follow ``--parity-``: the options of ``parity run``, all of which the plugin has as well."""
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    return {name.lstrip("-") for parameter in run.params for name in parameter.opts}


# Python blocks of a page run in order, in one module, and the pairs that they declare are compared.


SYBIL = Sybil(
    parsers=[
        SkipParser(),
        PythonCodeBlockParser(),
        *(CodeBlockParser(language=shell, evaluator=check_commands) for shell in SHELLS),
    ]
)


@pytest.fixture
def page_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield a module for a page's blocks, which can import ``my_layer``; no pairs are declared but theirs."""
    before = registry.cases()
    registry.restore([])
    blocks = re.findall(r"^```python\n(.*?)^```", LAYER.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_layer.py").write_text("\n\n".join(blocks), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_layer", raising=False)
    monkeypatch.setitem(sys.modules, "page", ModuleType("page"))
    yield sys.modules["page"]
    registry.restore(before)


@pytest.mark.parametrize("page", sorted({*PAGES} - {IN_ORDER}), ids=lambda page: page.stem)
def test_a_page_does_what_it_shows(page: Path, page_module: ModuleType) -> None:
    document = SYBIL.parse(page)
    document.namespace = vars(page_module)
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest:
            continue
    declared = [case for case in registry.cases() if case.path == page]
    told = {case.name: verdict(case) for case in declared}
    assert told == {case.name: NAMED.get(case.name, "passed") for case in declared}


def verdict(case: parity.Case) -> str:
    """Return ``passed``, or the finding of a pair."""
    precision = "bf16" if case.runs_at("bf16") else "fp8_current"
    found = {
        result.findings[0].code if result.findings else result.reason or result.status
        for result in parity.compare(case, [precision], steps=case.steps)
        if not result.passed
    }
    return ", ".join(sorted(found)) or "passed"


def test_modules_that_exist_already_are_compared_and_checkpoints_converted(page_module: ModuleType) -> None:
    page = SYBIL.parse(ROOT / "docs" / "pairs.md")
    page.namespace = vars(page_module)
    for example in page.examples():
        example.evaluate()
    results = page_module.compare_mine(parity.te.kernels("cpu").te)
    assert [result.passed for result in results] == [True, True]
    back = page_module.to_te_and_back(parity.te.kernels("cpu").te)
    assert {name: x.dtype for name, x in back.items()} == {"weight": torch.bfloat16, "bias": torch.bfloat16}


# No block is overlooked: its language says whether it is run, and a block that is skipped says why.


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    languages = re.findall(r"^ *```(\S*)\n.*?^ *```$", text, re.DOTALL | re.MULTILINE)
    assert set(languages) <= {"python", *SHELLS, *NOT_RUN}
    assert all(re.fullmatch(r'next ".+"', skipped) for skipped in re.findall(r"<!--+ *skip: (.*?) *-->", text))


# Files that a page names exist, in the checkout or, where the design names rooms, in `parity/`.

ROOMS = [each.name for each in (ROOT / "parity").iterdir() if each.is_dir()]
FOLDERS = ["parity", "tests", "scripts", "examples", "cases", "benchmarks", *ROOMS]
NVIDIAS = "tests/pytorch/"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:py|sh|json))", page.read_text(encoding="utf-8")))
    places = (ROOT, ROOT / "parity", ROOT / "tests")
    missing = {file for file in named if not any((place / file).is_file() for place in places)}
    assert not {file for file in missing if not file.startswith(NVIDIAS)}


# The site builds without a warning, its notebook finds its bugs, and its tables are up to date with the record.


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
    """Return what a cell says about pairs, without numbers, which may differ on another processor."""
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
