"""``docs/te-api.md`` names everything that TE exports, and tests that exist."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from agreement import te_on_cpu
from packaging.version import Version

from parity import te as backend
from parity.cpu import extension

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "te-api.md"
MODULES = (
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.ops",
    "transformer_engine.pytorch.optimizers",
    "transformer_engine.pytorch.router",
    "transformer_engine.common.recipe",
)
# What the modules import for themselves: the extension, and the function that loads it.
INTERNAL = {"tex", "load_framework_extension"}
NO_TEST = "no test: "
OF_2_20_2 = pytest.mark.skipif(
    Version(backend.version()) != Version("2.20.2"), reason="the table is of TransformerEngine 2.20.2"
)


@cache
def rows() -> dict[str, list[list[str]]]:
    """The table's rows by the module that a heading names; each row is its cells."""
    found: dict[str, list[list[str]]] = {}
    module = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## `([\w.]+)`", line):
            module = heading[1]
        elif module and line.startswith("| `"):
            found.setdefault(module, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def all_rows() -> list[list[str]]:
    return [row for of_module in rows().values() for row in of_module]


@cache
def functions_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def exported(module: str) -> set[str]:
    """Public classes and functions of TE's own, not the submodules."""
    te_on_cpu()
    return {
        name
        for name, value in vars(importlib.import_module(module)).items()
        if not name.startswith("_")
        and name not in INTERNAL
        and str(getattr(value, "__module__", "")).startswith(("transformer_engine", "parity."))
    }


@OF_2_20_2
@pytest.mark.parametrize("module", MODULES)
def test_the_table_names_what_te_exports_each_once(module: str) -> None:
    named = Counter(row[0].strip("`") for row in rows()[module])
    assert set(named) == exported(module)
    assert max(named.values()) == 1


def asked_for() -> set[str]:
    """What TE's Python for PyTorch reads from its extension."""
    root = Path(str(te_on_cpu().__file__)).parent
    names: set[str] = set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name("tex"), attr=name) if file.name != "onnx_extensions.py":
                    names.add(name)
                case ast.ImportFrom(module=extension.NAME):
                    names.update(alias.name for alias in node.names if alias.name != "*")
    return names


@OF_2_20_2
def test_the_page_names_each_kernel_that_te_asks_for_and_that_is_missing() -> None:
    provided = vars(extension.build(Version(backend.version())))
    section = re.search(r"## Kernels that are missing\n(.*?)\n## ", TABLE.read_text(encoding="utf-8"), re.DOTALL)
    assert section is not None
    named = {name for row in re.findall(r"^\| (`.*?) \|", section[1], re.MULTILINE) for name in re.findall(r"\w+", row)}
    assert named == asked_for() - set(provided)


def test_every_row_has_a_test_or_says_why_not() -> None:
    for name, *_, proof in all_rows():
        assert "::" in proof or (len(proof) > len(NO_TEST) and proof.startswith(NO_TEST)), name


def test_every_test_that_the_table_names_exists() -> None:
    named = [match for row in all_rows() for match in re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])]
    assert len(named) > len(all_rows()) / 2
    missing = [f"{file}::{test}" for file, test in named if test not in functions_in(TESTS / file)]
    assert not missing


def test_te_tells_the_version_of_pytorch() -> None:
    assert te_on_cpu().torch_version()[:2] == Version(torch.__version__).release[:2]
