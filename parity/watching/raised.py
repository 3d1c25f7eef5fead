"""Where in a user's code something runs, or has raised: the innermost line of theirs, and the way there."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary
from typing import Any

_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = ("torch", "transformer_engine", "parity")


def users_frame(error: BaseException) -> FrameSummary | None:
    """The innermost line of the user's own code that was running.

    Where none was, as where a package's module is compared, the innermost line of that package; where PyTorch alone
    was running, as in a backward pass, None.
    """
    return _innermost(_frames(error))


def users_line(error: BaseException) -> str:
    """That line as ``models.py:12 in forward``; empty where there is none."""
    return _line(users_frame(error))


def submodule(error: BaseException) -> str:
    """The innermost part of the outermost module that was running, by its name there; empty for that module itself."""
    selves = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    running: list[Any] = [one for one in selves if hasattr(one, "named_modules")]  # without an import of torch
    names = {id(part): name for name, part in running[0].named_modules()} if running else {}
    return next((names[id(one)] for one in reversed(running) if names.get(id(one))), "")


def line_running() -> str:
    """As ``users_line``, of what runs now."""
    return _line(_innermost(list(traceback.extract_stack())))


def _innermost(frames: list[FrameSummary]) -> FrameSummary | None:
    of_packages = [frame for frame in frames if not _is_library(frame)]
    own = [frame for frame in of_packages if not _INSTALLED & set(Path(frame.filename).parts)]
    return next(reversed(own or of_packages), None)


def _line(frame: FrameSummary | None) -> str:
    return "" if frame is None else f"{_shown(frame)}:{frame.lineno} in {frame.name}"


def first_paragraph(error: BaseException) -> str:
    """What it says up to an empty line; below, PyTorch lists every kernel that it has."""
    return str(error).strip().partition("\n\n")[0]


def way_there(error: BaseException) -> str:
    """The traceback as Python prints it, from the user's first line on; files are named without the folders above."""
    frames = _frames(error)
    first = next((i for i, frame in enumerate(frames) if not _is_library(frame)), 0)
    lines = [
        f'  File "{_shown(frame)}", line {frame.lineno}, in {frame.name}\n    {frame.line}' for frame in frames[first:]
    ]
    told = "".join(traceback.format_exception_only(type(error), error)).strip()
    return "\n".join(["Traceback (most recent call last):", *lines, told])


def _frames(error: BaseException) -> list[FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def _is_library(frame: FrameSummary) -> bool:
    """Whether the line is Python's, PyTorch's, TransformerEngine's or parity's, and so none that a user looks into."""
    file = Path(frame.filename)
    if frame.filename.startswith("<") and not frame.filename.startswith("<ipython"):
        return True
    if _INSTALLED & set(file.parts):
        return any(library in file.parts for library in _LIBRARIES)
    return any(file.is_relative_to(folder) for folder in _folders())


def _folders() -> list[Path]:
    """Of Python's own modules, and of the libraries where they are not installed but run from a checkout."""
    modules = [sys.modules.get(name) for name in _LIBRARIES]
    files = [module.__file__ for module in modules if module is not None and module.__file__]
    return [Path(sysconfig.get_path("stdlib")), *(Path(file).parent for file in files)]


def _shown(frame: FrameSummary) -> str:
    """The file, below the current folder or below where Python imports from; no name of a folder above."""
    file = Path(frame.filename)
    roots = [Path.cwd(), *(Path(entry) for entry in sys.path if entry)]
    below = [file.relative_to(root).as_posix() for root in roots if file.is_relative_to(root)]
    return min(below, key=len) if below else file.name
