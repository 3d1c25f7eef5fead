"""Load the plugin where the package is not installed, and declare this repository's own option of pytest."""

import pytest

pytest_plugins = ["parity.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``; only a conftest in the root folder may add options."""
    parser.addoption("--full", action="store_true", help="run every row of parametrized tests (tests/covering.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of rows that only ``--full`` runs."""
    config.addinivalue_line("markers", "only_full: a row that only --full runs, since quicker ones cover its subject")
