"""Share fixtures among the tests of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from emulated_gpu import emulated

from te_on_cpu import cuda


@pytest.fixture(scope="module")
def blackwell() -> Iterator[ModuleType]:
    """Yield ``transformer_engine.pytorch`` on an emulated Blackwell until the module's last test."""
    with emulated(cuda.BLACKWELL) as module:
        yield module
