"""TE's global state of quantization, a fresh one for each candidate.

TE keeps the amax buffers of every module that ever ran with delayed scaling, and goes over them all after each pass, so
that the hundredth candidate of a process pays for those before it. What a pass leaves that raised inside of a recipe's
context stays as well. Source: ``FP8GlobalStateManager`` in ``pytorch/quantization.py`` of TE 2.14 to 2.20.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fresh() -> Iterator[None]:
    """Within the context TE knows of no module that ran before; afterwards its state is what it was."""
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is None:
        yield
        return
    manager = quantization.FP8GlobalStateManager
    before = {
        name: value
        for name, value in vars(manager).items()
        if not name.startswith("__") and not isinstance(value, (classmethod, staticmethod))
    }
    manager.reset()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(manager, name, value)
