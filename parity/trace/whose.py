"""Find out whether code that runs is Python's, PyTorch's, TransformerEngine's, parity's or a user's.

This depends on the code's module and on where that module was loaded from, never on a name in a path: a file in a
user's folder ``transformer_engine_port`` is the user's. Scripts, notebook cells and code that ``exec`` runs are the
user's as well, because they do not come from an imported module.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

from parity.result import ProvesNothing
from parity.shown import advised, said

# Find the owner of code.


class Owner(Enum):
    """The author of code. Code that belongs to none of the others is a user's."""

    PYTHON = ""
    TORCH = "torch"
    TE = "transformer_engine"
    PARITY = "parity"
    USER = "user"


PORTS = ("parity.cases", "parity.reference", "parity.measuring.hosts", "parity.measuring.right_ports")
"""Parity's own modules and packages with pairs like those of a user, so that their code counts as a user's."""

_LIBRARIES = {owner.value: owner for owner in (Owner.TORCH, Owner.TE, Owner.PARITY)} | {"te_on_cpu": Owner.PARITY}
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(_PYTHON + folder for folder in ("site-packages", "dist-packages"))


def whose(frame: FrameType) -> Owner:
    """Return the owner of the code that runs in this frame."""
    spec = frame.f_globals.get("__spec__")
    return Owner.USER if spec is None else _find_owner(spec)


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code runs in this frame, or an empty text if it was not imported."""
    return str(getattr(frame.f_globals.get("__spec__"), "name", ""))


def is_of_te(kind: type) -> bool:
    """Return whether a class is TransformerEngine's own; a class that is derived from one may be a user's."""
    spec = getattr(sys.modules.get(kind.__module__), "__spec__", None)
    return spec is not None and _find_owner(spec) is Owner.TE


def _find_owner(spec: Any) -> Owner:
    name, origin = spec.name, spec.origin or ""
    package = name.partition(".")[0]
    owner = _LIBRARIES.get(package)
    if owner is not None and _lies_in(origin, sys.modules.get(package)):
        return Owner.USER if owner is Owner.PARITY and _is_port(name) else owner
    is_pythons = origin in ("frozen", "built-in") or (origin.startswith(_PYTHON) and not origin.startswith(_INSTALLED))
    return Owner.PYTHON if is_pythons else Owner.USER


def _lies_in(origin: str, package: Any) -> bool:
    """Return whether a file is in the folder that the package is imported from, not in one that was added to it."""
    return any(origin.startswith(folder + os.sep) for folder in [*getattr(package, "__path__", ())][:1])


def _is_port(name: str) -> bool:
    return any(name == port or name.startswith(port + ".") for port in PORTS)


# Find the innermost line of a user's code that runs or has raised, and the traceback to it.


_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}


def users_frame(error: BaseException) -> FrameSummary | None:
    """Return the innermost line of the user's own code that was running.

    If there was none, because a package's module is compared, this is the innermost line of that package. If only
    PyTorch was running, as in a backward pass, it is None.
    """
    return _find_innermost_frame(_list_frames(error))


def users_line(error: BaseException) -> str:
    """Return the line of ``users_frame`` as ``models.py:12 in forward``, or an empty text if there is none."""
    return _describe_line(users_frame(error))


def interrupted_at(error: BaseException) -> str:
    """Return a message that says where code was interrupted."""
    line = users_line(error)
    return f"it was interrupted at {line}" if line else "it was interrupted"


def forget_handler(error: BaseException) -> None:
    """Remove the frame of the signal handler that raised an error, which is the innermost one, from its traceback."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None and last.tb_next.tb_next is not None:
        last = last.tb_next
    if last is not None and last.tb_next is not None and whose(last.tb_next.tb_frame) is Owner.PARITY:
        last.tb_next = None


def submodule(error: BaseException) -> str:
    """Return the name of the innermost submodule of the outermost module that was running; empty for that module."""
    selves = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    running: list[Any] = [one for one in selves if hasattr(one, "named_modules")]  # avoids an import of torch
    names = {id(part): name for name, part in running[0].named_modules()} if running else {}
    return next((names[id(one)] for one in reversed(running) if names.get(id(one))), "")


def part_running(error: BaseException) -> str:
    """Return ``the pair's optimizer`` or ``TransformerEngine`` if that was running, else an empty text."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if whose(frame) is not Owner.PARITY]
    if any(hasattr(frame.f_locals.get("self"), "param_groups") for frame in frames):
        return "the pair's optimizer"
    return "TransformerEngine" if any(whose(frame) is Owner.TE for frame in frames) else ""


def line_running() -> str:
    """Return ``users_line`` for the code that is running now."""
    return _describe_line(
        _find_innermost_frame(_pair_with_owners(reversed(list(traceback.walk_stack(sys._getframe())))))
    )


_CALLS_PAIRS = ("parity.passes.one_pass", "parity.case.case")  # modules that call modules and factories of pairs


def allocating_line(names: Mapping[int, str]) -> str:
    """Return the line of TE's or of a pair's code that runs now, who called it, and in which module.

    Args:
        names: names of modules by their ``id``.
    """
    walked = takewhile(lambda at: module_of(at[0]) not in _CALLS_PAIRS, traceback.walk_stack(sys._getframe(1)))
    inner = [*walked]
    modules = (names.get(id(frame.f_locals.get("self"))) for frame, _ in inner)
    frames = _pair_with_owners(reversed(inner))
    te = next((frame for frame, owner in reversed(frames) if owner is Owner.TE), None)
    own = _find_innermost_frame(frames)
    places = [_describe_line(te), f"called at {_describe_line(own)}" if te and own else _describe_line(own)]
    module = next(filter(None, modules), "")
    return ", ".join(filter(None, (*places, module and f"in {module}"))) or "a line that is not known"


def _find_innermost_frame(frames: list[tuple[FrameSummary, Owner]]) -> FrameSummary | None:
    of_packages = [frame for frame, owner in frames if owner is Owner.USER]
    own = [frame for frame in of_packages if not _INSTALLED_FOLDERS & set(Path(frame.filename).parts)]
    return next(reversed(own or of_packages), None)


def _describe_line(frame: FrameSummary | None) -> str:
    return "" if frame is None else f"{_shorten_path(frame)}:{frame.lineno} in {frame.name}"


def first_paragraph(error: BaseException) -> str:
    """Return an error's message up to the first empty line, because PyTorch lists all of its kernels below that."""
    return advised(said(error).strip().partition("\n\n")[0])


def way_there(error: BaseException) -> str:
    """Return the traceback as Python prints it, from the user's first line on, with short names of files."""
    frames = _list_frames(error)
    first = next((i for i, (_, owner) in enumerate(frames) if owner is Owner.USER), 0)
    lines = [
        f'  File "{_shorten_path(frame)}", line {frame.lineno}, in {frame.name}\n    {frame.line}'
        for frame, _ in frames[first:]
    ]
    told = "".join(traceback.format_exception_only(type(error), error)).strip()
    return "\n".join(["Traceback (most recent call last):", *lines, told])


def _list_frames(error: BaseException) -> list[tuple[FrameSummary, Owner]]:
    return _pair_with_owners(traceback.walk_tb(error.__traceback__))


def _pair_with_owners(walked: Iterable[tuple[FrameType, int]]) -> list[tuple[FrameSummary, Owner]]:
    """Return each frame as a traceback shows it, with the owner of its code."""
    frames = list(walked)
    owners = [whose(frame) for frame, _ in frames]
    return list(zip(StackSummary.extract(iter(frames)), owners, strict=True))


def _shorten_path(frame: FrameSummary) -> str:
    """Return a frame's file relative to the current folder or to where Python imports from, or else its name."""
    file = Path(frame.filename)
    roots = [Path.cwd(), *(Path(entry) for entry in sys.path if entry)]
    below = [file.relative_to(root).as_posix() for root in roots if file.is_relative_to(root)]
    return min(below, key=len) if below else file.name


# Watch the functions that run while a pass calls a module. The rest of a comparison is not watched, because Python
# calls a profile function at the start and end of every function, which takes longer than many functions themselves.


class _Calls(threading.local):
    """Whether this thread is calling a pair's module, and the profile function that watches such calls, if any."""

    running = False
    see: Callable[[FrameType, str, Any], object] | None = None


_calls = _Calls()


@contextmanager
def watching_calls(see: Callable[[FrameType, str, Any], object]) -> Iterator[None]:
    """Set the profile function that runs within ``call_of_pair``, in this thread and within the context.

    Args:
        see: a profile function, as for ``sys.setprofile``.
    """
    before, _calls.see = _calls.see, see
    try:
        yield
    finally:
        _calls.see = before


@contextmanager
def call_of_pair() -> Iterator[None]:
    """Mark the context as a pass's call of a pair's module, including the pair's own code around the module."""
    running, before = _calls.running, sys.getprofile()
    _calls.running = True
    if _calls.see is not None:
        sys.setprofile(_calls.see)
    try:
        yield
    finally:
        if _calls.see is not None:
            sys.setprofile(before)
        _calls.running = running


def is_in_call() -> bool:
    """Return whether this thread is calling a pair's module."""
    return _calls.running


# Find out whether a candidate without TransformerEngine's modules calls TE's functions, or is plain PyTorch.


WITHOUT_TE = ProvesNothing(
    "the candidate has no module of TransformerEngine's and calls none of its functions, so PyTorch was compared "
    "with PyTorch"
)


@contextmanager
def te_calls() -> Iterator[list[str]]:
    """Yield a list that receives the name of the first TE function that runs when a module is called in this thread.

    TE functions that run elsewhere, such as when its autocast is entered, do not count.
    """
    found: list[str] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not found and is_te(frame):
            found.append(frame.f_code.co_name)

    with watching_calls(see):
        yield found


def is_te(frame: FrameType) -> bool:
    """Return whether TE's code runs in a frame."""
    return whose(frame) is Owner.TE
