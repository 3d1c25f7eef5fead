"""Shows what a user's script raised as ``python SCRIPT`` would: without the frames of what runs the script."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import TracebackType

from parity.cpu.loading import script


def show(error: BaseException) -> None:
    """Hand the exception to ``sys.excepthook``, which prints it unless the script has set another.

    Args:
        error: what ``script.run`` raised, caught in the function that called it. It and the exceptions that led to it
            lose the frames of that function, of ``script.run`` and of the import system between the user's modules.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    for each in _chain(error):
        each.__traceback__ = _without_ours(each.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that Python shows with it, each once."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in found:
            continue
        found[id(each)] = each
        waiting += [each.__cause__, each.__context__]
    yield from found.values()


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    for each in reversed(list(_of_the_script(traceback))):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _of_the_script(traceback: TracebackType | None) -> Iterator[TracebackType]:
    ours = False
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        parses = ours and file == ast.__file__  # a module of the user's, for the frame above
        ours = parses or file == script.__file__ or file.startswith("<frozen importlib")
        if not ours:
            yield traceback
        traceback = traceback.tb_next
