"""Tells from a file's text whether it uses parity, before anything is imported."""

from __future__ import annotations

from pathlib import Path

_IMPORTS = ("import parity", "from parity ", "from parity.")


def imports_parity(file: Path) -> bool:
    """Whether a line of the file imports parity."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return any(line.strip().startswith(_IMPORTS) for line in text.splitlines())
