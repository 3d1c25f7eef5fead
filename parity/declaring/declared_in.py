"""Which file a declaration belongs to: the one that is being imported, wherever the declaring function is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType


@dataclass(frozen=True, eq=False)
class Place:
    """Where a pair is declared.

    Attributes:
        path: the file.
        line: its innermost line that led to the declaration, from 1.
        module: the name under which the file is imported.
        body: the code of the module whose import declares the pair, another object each time that the file is
            imported; None where no import does, but a function that is called later.
    """

    path: Path = Path()
    line: int = 0
    module: str = ""
    body: CodeType | None = None


def place_of(caller: FrameType | None) -> Place:
    """The place of a declaration that this frame makes.

    Outside of an import it is the frame's own, in a script, a notebook or a test.
    """
    if caller is None:
        return Place()
    body = _being_imported(caller)
    if body is None:
        return _place(caller, None)
    frame: FrameType | None = caller
    while frame is not None and frame.f_code.co_filename != body.f_code.co_filename:
        frame = frame.f_back
    return _place(frame or body, body.f_code)


def _place(frame: FrameType, body: CodeType | None) -> Place:
    name = str(frame.f_globals.get("__name__", ""))
    return Place(Path(frame.f_code.co_filename).resolve(), frame.f_lineno, name, body)


def _being_imported(frame: FrameType | None) -> FrameType | None:
    """The body of the innermost module that is being imported; a main program is not."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and _is_import(frame):
            return frame
        frame = frame.f_back
    return None


def _is_import(body: FrameType) -> bool:
    """Whether it runs a module's own file; ``exec`` runs a text under the module's name."""
    origin = getattr(body.f_globals.get("__spec__"), "origin", None)
    if origin is None or body.f_globals.get("__name__") == "__main__":
        return False
    return Path(origin).resolve() == Path(body.f_code.co_filename).resolve()
