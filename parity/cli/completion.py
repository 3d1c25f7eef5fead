"""Complete what a user types in a shell: pairs, precisions and studies, without importing torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from parity.settings import PRECISION_NAMES


def precisions(incomplete: str) -> list[str]:
    """Return lists of precisions that continue this one: ``bf16,fp`` by ``bf16,fp32`` and others."""
    given, comma, last = incomplete.rpartition(",")
    chosen = given.split(",")
    return [f"{given}{comma}{name}" for name in PRECISION_NAMES if name.startswith(last) and name not in chosen]


def studies(incomplete: str) -> list[tuple[str, str]]:
    """Return the studies of this beginning, each with what it is about."""
    from parity.lab.studies.catalogue import STUDIES

    return [(name, what) for name, what in STUDIES.items() if name.startswith(incomplete)]


def pairs(incomplete: str) -> list[str]:
    """Return folders and Python files that continue a path, and ``FILE::PAIR`` where it names a file."""
    path, colons, name = incomplete.partition("::")
    if colons:
        return [f"{path}::{declared}" for declared in _declared(Path(path)) if declared.startswith(name)]
    folder, _, beginning = path.rpartition("/")
    found = [
        each
        for each in _sorted(Path(folder or "/" if "/" in path else "."))
        if each.name.startswith(beginning) and (beginning or not each.name.startswith("."))
    ]
    before = f"{folder}/" if "/" in path else ""
    files = [f"{before}{each.name}" for each in found if each.suffix == ".py"]
    folders = [f"{before}{each.name}/" for each in found if each.is_dir()]
    if files == [incomplete]:
        return [incomplete, *pairs(f"{incomplete}::")]
    return [*files, *folders]


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _declared(file: Path) -> Iterator[str]:
    """Yield the names of the pairs that stand in a file; those that it computes are left out."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _is_pair(node.func):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def _is_pair(function: ast.expr) -> bool:
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return called == "pair"
