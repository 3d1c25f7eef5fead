"""Tells from a file's text whether it uses parity, before anything is imported."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

_IMPORTS = ("import parity", "from parity ", "from parity.")


def imports_parity(file: Path) -> bool:
    """Whether a line of the file imports parity."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return any(line.strip().startswith(_IMPORTS) for line in text.splitlines())


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
