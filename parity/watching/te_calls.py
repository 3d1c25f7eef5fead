"""Whether a module without TransformerEngine's modules calls TE's functions, or is plain PyTorch throughout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from parity.watching.whose import Owner, whose

WITHOUT_TE = (
    "the candidate has no module of TransformerEngine's and calls none of its functions, so that PyTorch was compared "
    "with PyTorch"
)


@contextmanager
def te_calls(caller: CodeType) -> Iterator[list[str]]:
    """Yields a list that gets the name of the first function of TE's that runs below this code, in this thread.

    Args:
        caller: of a function of parity's; what TE does elsewhere, as where its autocast is entered, does not count.
    """
    found: list[str] = []
    before = sys.getprofile()

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not found and is_te(frame) and is_below(frame, caller):
            found.append(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(before)


def is_te(frame: FrameType) -> bool:
    """Return whether TE's code runs in a frame."""
    return whose(frame) is Owner.TE


def is_below(frame: FrameType | None, caller: CodeType) -> bool:
    """Return whether a frame runs below this code."""
    while frame is not None and frame.f_code is not caller:
        frame = frame.f_back
    return frame is not None
