"""Tells from a file's text whether it uses parity, before anything is imported."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

_NAME = "parity"
# Of a file that cannot be parsed: its error is told when it is imported.
_LOOKS_LIKE_AN_IMPORT = re.compile(rf"(?m)^[^#\n]*\b(import|from)\s[^#\n]*\b{_NAME}\b")


def imports_parity(file: Path) -> bool:
    """Whether the file imports parity or something of it, wherever and in whatever form it does."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if _NAME not in text:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's text, such as invalid escapes; its import gives them
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return bool(_LOOKS_LIKE_AN_IMPORT.search(text))
    return any(_is_parity(name) for node in ast.walk(tree) for name in _imported(node))


def _imported(node: ast.AST) -> Iterator[str]:
    """Full names of the modules that a statement imports, or imports from."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module


def _is_parity(module: str) -> bool:
    return module.partition(".")[0] == _NAME


def that_import_parity(
    paths: Iterable[Path], patterns: Sequence[str], ignored_folders: Sequence[str]
) -> Iterator[Path]:
    """Those of these files that do, and of those below these folders.

    Args:
        paths: files and folders.
        patterns: of the files that count in a folder, as in pytest's ``python_files``.
        ignored_folders: patterns of names, as in pytest's ``norecursedirs``.
    """
    for path in paths:
        if path.is_file():
            if imports_parity(path):
                yield path
            continue
        for folder, subfolders, files in os.walk(path):
            subfolders[:] = [name for name in subfolders if not any(fnmatch(name, p) for p in ignored_folders)]
            candidates = (Path(folder, name) for name in files)
            yield from (file for file in candidates if any(file.match(p) for p in patterns) and imports_parity(file))
