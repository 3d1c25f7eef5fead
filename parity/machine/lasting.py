"""Imports that Python's garbage collector leaves alone: modules live as long as the process.

PyTorch and TE make some 350,000 objects when they are imported. Without this, the collector goes over them a dozen
times while they are made, and again whenever a comparison has left enough garbage.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting() -> Iterator[None]:
    """Nothing is collected within the context; what exists at its end is never looked at again."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.unregister(_unfreeze_for_triton)
        atexit.register(_unfreeze_for_triton)
        if collected:
            gc.enable()


def _unfreeze_for_triton() -> None:
    """Triton's extension counts at exit what was never freed, and complains; to free all takes more than a second."""
    if "triton" in sys.modules:
        gc.unfreeze()
