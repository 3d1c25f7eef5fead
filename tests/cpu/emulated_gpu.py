"""Put TE on another emulated GPU for as long as a test needs it, and make TE choose its attention backend again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

from parity import te
from te_on_cpu import cuda


@contextmanager
def emulated(gpu: cuda.DeviceProperties, cublaslt_version: int | None = None) -> Iterator[ModuleType]:
    """Yield ``transformer_engine.pytorch``, which finds ``gpu`` and this version of cuBLASLt within the context."""
    module = te.kernels("cpu").te
    version = cublaslt_version or cuda.cublaslt_version()
    with mock.patch.object(cuda, "cublaslt_version", return_value=version), cuda.emulated(gpu):
        yield module


def choose_again() -> None:
    """Make TE read the environment again, because it keeps its choice until an argument changes."""
    from transformer_engine.pytorch.attention import dot_product_attention

    for module in (dot_product_attention, dot_product_attention.dot_product_attention):
        if hasattr(module, "_attention_backends"):
            module._attention_backends["backend_selection_requires_update"] = True
