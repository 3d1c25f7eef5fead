"""The one exception whose text is meant for the person who made the mistake, and what is no mistake of theirs."""

from __future__ import annotations

from parity.cpu.user_error import UserError  # which imports nothing of parity, so the class lies there

__all__ = ["INTERRUPTS", "UserError"]

INTERRUPTS = (KeyboardInterrupt, GeneratorExit)
"""What is no mistake in a user's code where that raises it; ``sys.exit()`` and ``pytest.skip()`` are."""
