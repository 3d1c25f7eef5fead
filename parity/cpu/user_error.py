"""The one exception whose text is meant for the person who made the mistake, and is all that they need to see."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in a user's pair, file, arguments or environment; says what is wrong, where, and what to do."""

    __module__ = "parity"  # as users import it, and read it in tracebacks
