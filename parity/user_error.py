"""The one exception whose text is meant for the person who made the mistake, and is all that they need to see."""

from __future__ import annotations

INTERRUPTS = (KeyboardInterrupt, GeneratorExit)
"""What is no mistake in a user's code where that raises it; ``sys.exit()`` and ``pytest.skip()`` are."""


class UserError(Exception):
    """A mistake in a user's pair, file or arguments; the message says what is wrong, where, and what to do."""
