"""Stand in for ``triton`` in TransformerEngine's modules: enough to import them, and to launch kernels that have a
counterpart.

Triton has no CPU target and cannot be installed on macOS. Most wrappers that TE's features call are replaced whole
(``parity.cpu.triton.replacements``), so that their kernels need only be defined; others are TE's own, and launch a
counterpart (``parity.cpu.triton.kernel``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parity.cpu import triton
from parity.cpu.graphs import recorded

__version__ = "0"


class _Kernel:
    """A kernel whose counterpart is launched in its place, on any grid; without one it can be named, not launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        name = f"{function.__module__}.{function.__qualname__}"

        def launch(*_args: Any, **_kwargs: Any) -> None:
            raise NotImplementedError(f"the CPU kernels have no counterpart to the Triton kernel {name}")

        self._launch = recorded(triton.kernel(name) or launch)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self._launch


class _Name:
    """A name of Triton's in an annotation, a default or a list of configurations, where its value does not matter."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __call__(self, *_args: Any, **_kwargs: Any) -> _Name:
        return self

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """Return a kernel that launches its counterpart; called as ``triton.jit``, with and without options."""
    return jit if function is None else _Kernel(function)


def autotune(*_args: Any, **_options: Any) -> Callable[[_Kernel], _Kernel]:
    """Return the kernel as it is; called as ``triton.autotune``, which picks a kernel's fastest configuration."""
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
