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
    """Whether the file imports parity or something of it, in whatever form, or a module beside it does that it imports.

    Such a module may declare pairs for the file. Beside it are the modules in its folder, and those below the folder
    of its outermost package.
    """
    seen: set[Path] = set()
    front = [file]
    while front:
        current = front.pop()
        if current in seen:
            continue
        seen.add(current)
        modules = list(_imported(current))
        if any(module.partition(".")[0] == _NAME for module in modules):
            return True
        front += [found for module in modules for found in _beside(current, module)]
    return False


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


def _imported(file: Path) -> Iterator[str]:
    """Modules that a file imports, with leading dots where they are relative; names of functions among them."""
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's text, such as invalid escapes; its import gives them
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        yield from [_NAME] if _LOOKS_LIKE_AN_IMPORT.search(text) else []
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from [module] if node.module else []
            yield from (f"{module}{'.' if node.module else ''}{alias.name}" for alias in node.names)


def _beside(file: Path, module: str) -> Iterator[Path]:
    """The files that a module's name can mean from this file."""
    name = module.lstrip(".")
    level = len(module) - len(name)
    for base in [file.parents[min(level, len(file.parents)) - 1]] if level else [file.parent, _root(file)]:
        place = base.joinpath(*name.split("."))
        yield from (found for found in (place.with_suffix(".py"), place / "__init__.py") if found.is_file())


def _root(file: Path) -> Path:
    """The folder that holds the outermost package that the file is in, from which its absolute imports start."""
    folder = file.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder
