"""Load the plugin where the package is not installed, and declare this repository's own option of pytest."""

import pytest

pytest_plugins = ["parity.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``; only a conftest in the root folder may add options."""
    parser.addoption("--full", action="store_true", help="run every row of parametrized tests (tests/covering.py)")
