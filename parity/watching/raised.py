"""Where in a user's code something runs, or has raised: the innermost line of theirs, and the way there."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

from parity.watching.whose import Owner, whose

_INSTALLED = {"site-packages", "dist-packages"}


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
    return _line(_innermost(_told(reversed(list(traceback.walk_stack(sys._getframe()))))))


def _innermost(frames: list[tuple[FrameSummary, Owner]]) -> FrameSummary | None:
    of_packages = [frame for frame, owner in frames if owner is Owner.USER]
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
    first = next((i for i, (_, owner) in enumerate(frames) if owner is Owner.USER), 0)
    lines = [
        f'  File "{_shown(frame)}", line {frame.lineno}, in {frame.name}\n    {frame.line}'
        for frame, _ in frames[first:]
    ]
    told = "".join(traceback.format_exception_only(type(error), error)).strip()
    return "\n".join(["Traceback (most recent call last):", *lines, told])


def _frames(error: BaseException) -> list[tuple[FrameSummary, Owner]]:
    return _told(traceback.walk_tb(error.__traceback__))


def _told(walked: Iterable[tuple[FrameType, int]]) -> list[tuple[FrameSummary, Owner]]:
    """Return each frame as a traceback tells it, and whose code it is; a user looks into none but a user's."""
    frames = list(walked)
    owners = [whose(frame) for frame, _ in frames]
    return list(zip(StackSummary.extract(iter(frames)), owners, strict=True))


def _shown(frame: FrameSummary) -> str:
    """The file, below the current folder or below where Python imports from; no name of a folder above."""
    file = Path(frame.filename)
    roots = [Path.cwd(), *(Path(entry) for entry in sys.path if entry)]
    below = [file.relative_to(root).as_posix() for root in roots if file.is_relative_to(root)]
    return min(below, key=len) if below else file.name
