"""TE on a GPU other than the process's own, for as long as a test needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

from parity import te
from parity.cpu import cuda


@contextmanager
def emulated(gpu: cuda.DeviceProperties, cublaslt_version: int | None = None) -> Iterator[ModuleType]:
    """``transformer_engine.pytorch``, which within the context finds itself on ``gpu``, and with this cuBLASLt."""
    module = te.kernels("cpu").te
    version = cublaslt_version or cuda.cublaslt_version()
    with mock.patch.object(cuda, "cublaslt_version", return_value=version), cuda.emulated(gpu):
        yield module
