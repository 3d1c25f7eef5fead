"""Put TE on another emulated GPU for as long as a test needs it, and see which kernels TE chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from parity import te
from te_on_cpu import cuda


@contextmanager
def emulated(
    gpu: cuda.DeviceProperties, cublaslt_version: int | None = None, cudnn_version: int | None = None
) -> Iterator[ModuleType]:
    """Yield ``transformer_engine.pytorch``, which finds ``gpu`` and these versions of libraries within the context."""
    module = te.kernels("cpu").te
    cublaslt, cudnn = cublaslt_version or cuda.cublaslt_version(), cudnn_version or cuda.cudnn_version()
    with (
        mock.patch.multiple(cuda, cublaslt_version=lambda: cublaslt, cudnn_version=lambda: cudnn),
        cuda.emulated(gpu),
    ):
        yield module


def record_calls(
    monkeypatch: pytest.MonkeyPatch, names: Iterable[str], describe: Callable[[str, tuple[Any, ...]], Any] | None = None
) -> list[Any]:
    """Return a list that gets an entry for each later call of these functions of TE's extension.

    Args:
        describe: makes the entry from the function's name and arguments. Default: the name.
    """
    import transformer_engine_torch as tex

    choose_again()
    calls: list[Any] = []

    def recorded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(describe(name, arguments) if describe else name)
            return kernel(*arguments)

        return call

    for name in names:
        monkeypatch.setattr(tex, name, recorded(name, getattr(tex, name)))
    return calls


def choose_again() -> None:
    """Make TE read the environment again, because it keeps its choice until an argument changes."""
    from transformer_engine.pytorch.attention import dot_product_attention

    for module in (dot_product_attention, dot_product_attention.dot_product_attention):
        if hasattr(module, "_attention_backends"):
            module._attention_backends["backend_selection_requires_update"] = True
