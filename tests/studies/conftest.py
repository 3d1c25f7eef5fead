"""Share fixtures among the tests of the studies."""

from __future__ import annotations

import pytest

from parity import te


@pytest.fixture(scope="session")
def kernels() -> te.Kernels:
    return te.kernels("cpu")
