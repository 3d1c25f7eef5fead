"""Find the files that declare pairs, without importing torch."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from types import CodeType, FrameType

# Find out from a file's text whether it uses parity, before anything is imported.


_NAME = "parity"
# For a file that cannot be parsed: its error is reported when it is imported.
_LOOKS_LIKE_AN_IMPORT = re.compile(rf"(?m)^[^#\n]*\b(import|from)\s[^#\n]*\b{_NAME}\b")


def imports_parity(file: Path) -> bool:
    """Return whether the file, or a module beside it that it imports, imports parity or something from it in any form.

    Such a module may declare pairs for the file. The modules beside a file are those in its folder, and those below
    the folder of its outermost package.
    """
    seen: set[Path] = set()
    front = [file]
    while front:
        current = front.pop()
        if current in seen:
            continue
        seen.add(current)
        modules = list(_list_imports(current))
        if any(module.partition(".")[0] == _NAME for module in modules):
            return True
        front += [found for module in modules for found in _find_module_files(current, module)]
    return False


def text_of(file: Path) -> str:
    """Return a file's text; empty for anything but a regular file, such as a FIFO, and if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig", errors="replace") if is_regular(file) else ""
    except (OSError, MemoryError):
        return ""


def is_regular(file: Path) -> bool:
    """Return whether a regular file, or a link to one, has this path. A FIFO or a device must not even be opened."""
    try:
        return file.is_file()
    except (OSError, ValueError):  # such as a name that is too long, or a folder that may not be entered
        return False


def _list_imports(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports, with leading dots if they are relative, and also names of functions."""
    text = text_of(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the text, such as invalid escapes; the import will warn
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


def _find_module_files(file: Path, module: str) -> Iterator[Path]:
    """Yield the files that a module's name can mean in this file."""
    name = module.lstrip(".")
    level = len(module) - len(name)
    for base in [file.parents[min(level, len(file.parents)) - 1]] if level else [file.parent, _find_import_root(file)]:
        place = base.joinpath(*name.split("."))
        yield from (found for found in (place.with_suffix(".py"), place / "__init__.py") if is_regular(found))


def _find_import_root(file: Path) -> Path:
    """Return the folder of the outermost package that the file is in, from which its absolute imports start."""
    folder = file.parent
    while is_regular(folder / "__init__.py") and folder != folder.parent:
        folder = folder.parent
    return folder


# A declaration belongs to the file that is being imported, wherever the declaring function is written.


@dataclass(frozen=True, eq=False)
class Place:
    """Say where a pair is declared.

    Attributes:
        path: the file.
        line: its innermost line that led to the declaration, from 1.
        module: the name under which the file is imported.
        body: the code of the module whose import declares the pair, a new object each time the file is imported; None
            if a function that is called later declares it.
    """

    path: Path = Path()
    line: int = 0
    module: str = ""
    body: CodeType | None = None


def place_of(caller: FrameType | None) -> Place:
    """Return the place of a declaration that this frame makes.

    Outside of an import, as in a script, a notebook or a test, it is the frame's own place.
    """
    if caller is None:
        return Place()
    body = _being_imported(caller)
    if body is None:
        return _make_place(caller, None)
    frame: FrameType | None = caller
    while frame is not None and frame.f_code.co_filename != body.f_code.co_filename:
        frame = frame.f_back
    return _make_place(frame or body, body.f_code)


def _make_place(frame: FrameType, body: CodeType | None) -> Place:
    name = str(frame.f_globals.get("__name__", ""))
    return Place(Path(frame.f_code.co_filename).resolve(), frame.f_lineno, name, body)


def _being_imported(frame: FrameType | None) -> FrameType | None:
    """Return the body of the innermost module that is being imported; a main program does not count."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and _is_import(frame):
            return frame
        frame = frame.f_back
    return None


def _is_import(body: FrameType) -> bool:
    """Return whether the frame runs a module's own file, and not a text that ``exec`` runs under the module's name."""
    origin = getattr(body.f_globals.get("__spec__"), "origin", None)
    if origin is None or body.f_globals.get("__name__") == "__main__":
        return False
    return Path(origin).resolve() == Path(body.f_code.co_filename).resolve()


# Where the built-in cases are: beside the package in a checkout, inside it in an installation.


MODULE = "parity.cases"


def checkout() -> Path | None:
    """Return the folder of the cases in the checkout whose package is running; None if it runs from an installation."""
    root = Path(__file__).resolve().parents[2]
    return root / "cases" if (root / "pyproject.toml").is_file() else None


def folder() -> Path:
    """Return the folder of the cases that belong to the running package."""
    found = checkout()
    if found is not None:
        return found
    spec = util.find_spec(MODULE)
    assert spec is not None  # an installation contains it
    return Path(next(iter(spec.submodule_search_locations or ())))
