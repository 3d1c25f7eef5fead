"""TE on a GPU other than the process's own, for as long as a test needs it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

from parity import te
from parity.cpu import cuda

_CachedFunction = type(functools.cache(len))


@contextmanager
def emulated(gpu: cuda.DeviceProperties, cublaslt_version: int | None = None) -> Iterator[ModuleType]:
    """``transformer_engine.pytorch``, which within the context finds itself on ``gpu``, and with this cuBLASLt."""
    module = te.kernels("cpu").te
    version = cublaslt_version or cuda.cublaslt_version()
    with (
        mock.patch.object(cuda, "emulated_gpu", return_value=gpu),
        mock.patch.object(cuda, "cublaslt_version", return_value=version),
    ):
        _forget_gpu()
        try:
            yield module
        finally:
            _forget_gpu()


def _forget_gpu() -> None:
    """Make TE ask anew what its GPU can do: it keeps the answers in caches and in variables named ``..._SUPPORT``."""
    modules = [module for name, module in sys.modules.items() if name.startswith("transformer_engine.")]
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, _CachedFunction):
                value.cache_clear()
            elif name.startswith("_") and name.endswith("_SUPPORT") and isinstance(value, tuple):
                setattr(module, name, None)
