"""TE on an emulated GPU other than the process's own, for a part of the process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from parity.cpu import cuda

_CachedFunction = type(functools.cache(len))


@contextmanager
def emulated(gpu: cuda.DeviceProperties) -> Iterator[None]:
    """Within the context, TE's modules on CPU kernels find themselves on ``gpu``, in this thread."""
    token = cuda.chosen_gpu.set(gpu)
    _forget_gpu()
    try:
        yield
    finally:
        cuda.chosen_gpu.reset(token)
        _forget_gpu()


@contextmanager
def emulated_libraries(cuda_version: str = cuda.CUDA_VERSION, cublaslt: int = cuda.DEFAULT_CUBLASLT) -> Iterator[None]:
    """Within the context, TE's modules on CPU kernels find these versions; for questions, since kernels stay the same.

    Args:
        cuda_version: as ``torch.version.cuda``.
        cublaslt: as ``cublasLtGetVersion`` encodes it.
    """
    before = cuda.CUDA_VERSION, cuda.cublaslt_version
    cuda.CUDA_VERSION, cuda.cublaslt_version = cuda_version, functools.cache(lambda: cublaslt)
    _forget_gpu()
    try:
        yield
    finally:
        cuda.CUDA_VERSION, cuda.cublaslt_version = before
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
