"""Tell mistakes of the user from all other exceptions."""

from __future__ import annotations

from parity.cpu import UserError  # which imports nothing of parity, so the class lies there

__all__ = ["INTERRUPTS", "UserError"]

INTERRUPTS = (KeyboardInterrupt, GeneratorExit)
"""These are not mistakes if a user's code raises them; ``sys.exit()`` and ``pytest.skip()`` are."""
