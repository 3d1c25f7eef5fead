"""Tell mistakes of the user from all other exceptions, and write an exception in one line."""

from __future__ import annotations

from parity.cpu.user_error import UserError  # which imports nothing of parity, so the class lies there

__all__ = [
    "INTERRUPTS",
    "UserError",
]

# The one exception whose text is meant for the user who made the mistake, and what is not a mistake of theirs.


INTERRUPTS = (KeyboardInterrupt, GeneratorExit)
"""These are not mistakes if a user's code raises them; ``sys.exit()`` and ``pytest.skip()`` are."""


# An exception in one line, for a cell of a table.


def one_line(error: BaseException) -> str:
    """Return its type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
