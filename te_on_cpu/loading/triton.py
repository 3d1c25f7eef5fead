"""A replacement for ``triton`` in TransformerEngine's modules: enough to import them, and to launch CPU counterparts.

Triton has no CPU target and cannot be installed on macOS. Most wrappers that TE's features call are replaced entirely
(``te_on_cpu.triton.replacements``), so their kernels only need a definition. Other wrappers remain TE's own, and
launch the counterpart of a kernel (``te_on_cpu.triton.kernel``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from te_on_cpu import triton
from te_on_cpu.graphs import recorded

__version__ = "0"


class _Kernel:
    """A kernel that launches its counterpart on any grid; without a counterpart, launching it raises an error."""

    def __init__(self, function: Callable[..., Any]) -> None:
        name = f"{function.__module__}.{function.__qualname__}"

        def launch(*_args: Any, **_kwargs: Any) -> None:
            raise NotImplementedError(f"the CPU kernels have no counterpart to the Triton kernel {name}")

        self._launch = recorded(triton.kernel(name) or launch)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self._launch


class _Name:
    """Any name of Triton in an annotation, a default or a list of configurations, where its value does not matter."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __call__(self, *_args: Any, **_kwargs: Any) -> _Name:
        return self

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """Return a kernel that launches its counterpart; called with or without options, like ``triton.jit``."""
    return jit if function is None else _Kernel(function)


def autotune(*_args: Any, **_options: Any) -> Callable[[_Kernel], _Kernel]:
    """Return the kernel as it is, in place of ``triton.autotune``, which picks a kernel's fastest configuration."""
    return lambda kernel: kernel


heuristics = autotune


def cdiv(x: int, y: int) -> int:
    """Return ``x / y``, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name()
