"""Where the built-in cases lie: beside the package in a checkout, inside it where it is installed."""

from __future__ import annotations

from importlib import util
from pathlib import Path

MODULE = "parity.cases"


def checkout() -> Path | None:
    """The folder of the cases in the checkout whose package is running, or None if it runs from an installation."""
    root = Path(__file__).resolve().parents[2]
    return root / "cases" if (root / "pyproject.toml").is_file() else None


def folder() -> Path:
    """The folder of the cases that belong to the running package."""
    found = checkout()
    if found is not None:
        return found
    spec = util.find_spec(MODULE)
    assert spec is not None  # the package is installed with it
    return Path(next(iter(spec.submodule_search_locations or ())))
