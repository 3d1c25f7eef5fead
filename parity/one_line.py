"""An exception in one line, for a cell of a table."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Its type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
