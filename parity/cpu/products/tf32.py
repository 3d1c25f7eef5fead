"""Whether emulated GEMMs of FP32 operands round them to TF32, as TE's do; a small effect shows only if they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_rounds: ContextVar[bool] = ContextVar("tf32", default=True)


@contextmanager
def left_out() -> Iterator[None]:
    """Within the context, FP32 GEMMs of this thread compute in FP32; backward passes that are started in it too."""
    token = _rounds.set(False)
    try:
        yield
    finally:
        _rounds.reset(token)


def rounds() -> bool:
    """Whether FP32 GEMMs of this thread round their operands."""
    return _rounds.get()
