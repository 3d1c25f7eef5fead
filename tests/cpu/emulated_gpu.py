"""TE on a GPU other than the process's own for as long as a test needs it, and its attention chosen again."""

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


def choose_again() -> None:
    """TE keeps its choice until an argument changes, and would not read the environment again."""
    from transformer_engine.pytorch.attention import dot_product_attention

    for module in (dot_product_attention, dot_product_attention.dot_product_attention):
        if hasattr(module, "_attention_backends"):
            module._attention_backends["backend_selection_requires_update"] = True
