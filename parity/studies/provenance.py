"""Which code computes a study's results: a checksum of each module of parity that they depend on.

A result is kept until it is asked for with other settings, also when the code that computed it changes afterwards. So
the record names that code, and a person who resumes it is told.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from parity.report.environment import cpu_model, gpu_name

PACKAGE = "parity"
# What keeps results and names where they come from has no part in them.
_NO_PART = (
    *(f"parity.studies.{name}" for name in ("record", "resume", "provenance", "device", "names")),
    "parity.user_error",
)


@functools.cache
def of(module: str) -> Mapping[str, str]:
    """Checksums of a module and of all that it and they import at their top level; torch's version, and the machine.

    A study imports what draws its report inside of the function that does: reports are drawn from the record each
    time, so a change of theirs is none of the results. Nor are changes of comments, docstrings or formatting.

    Args:
        module: name of one of parity's.
    """
    found: dict[str, str] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = None if name in found or name in _NO_PART else _path(name)
        if path is not None:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            pending += _imported(tree)
            found[name] = checksum(tree)
    machine = gpu_name() if torch.cuda.is_available() else cpu_model()
    return {"torch": torch.__version__, "machine": machine} | dict(sorted(found.items()))


def checksum(tree: ast.Module) -> str:
    """Of a module's statements without docstrings; the same for the same statements, however they are written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return f"{zlib.crc32(ast.unparse(tree).encode()):08x}"


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of what is not what it was."""
    return [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names of parity that a module imports at its top level: modules, and what may be one."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == PACKAGE)


def _path(name: str) -> Path | None:
    """Where a module's source lies; None for what is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name inside of a module
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)
