"""Gradients that a module clips by their norm in its forward pass: seen, and clipped otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from parity.private_functions import CLIP, exchanged


@contextmanager
def clips_recorded() -> Iterator[list[float]]:
    """Appends the largest norm of each clipping inside of the context."""
    norms: list[float] = []

    def see(max_norm: float) -> float:
        norms.append(max_norm)
        return max_norm

    with clipping_at(see):
        yield norms


@contextmanager
def clipping_at(norm: Callable[[float], float]) -> Iterator[None]:
    """Within the context gradients are clipped at another largest norm, from the one that is asked for."""

    def clip(original: Callable[..., Any], parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        return original(parameters, norm(float(max_norm)), *args, **kwargs)

    with exchanged(CLIP, clip):
        yield
