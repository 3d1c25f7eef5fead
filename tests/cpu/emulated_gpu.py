"""TE on a GPU other than the process's own, for as long as a test needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from parity import te
from parity.cpu import cuda, emulated_gpu


@contextmanager
def emulated(gpu: cuda.DeviceProperties) -> Iterator[ModuleType]:
    """``transformer_engine.pytorch``, which within the context finds itself on ``gpu``."""
    module = te.kernels("cpu").te
    with emulated_gpu.emulated(gpu):
        yield module
