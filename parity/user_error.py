"""Distinguish mistakes of the user from all other exceptions."""

from __future__ import annotations

from parity.cpu import UserError  # defined there because parity.cpu imports nothing else of parity

__all__ = ["INTERRUPTS", "UserError"]

INTERRUPTS = (KeyboardInterrupt, GeneratorExit)
"""Exceptions that are not mistakes if a user's code raises them; ``sys.exit()`` and ``pytest.skip()`` are mistakes."""
