"""Distinguish mistakes of the user from all other exceptions."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in a user's pair, file, arguments or environment. It says what is wrong, where, and what to do."""

    __module__ = "parity"  # as users import it, and read it in tracebacks


INTERRUPTS = (KeyboardInterrupt, GeneratorExit)
"""Exceptions that are not mistakes if a user's code raises them; ``sys.exit()`` and ``pytest.skip()`` are mistakes."""
