"""Imports that Python's garbage collector leaves alone: modules live as long as the process.

PyTorch and TE make some 350,000 objects when they are imported. Without this, the collector goes over them a dozen
times while they are made, and again whenever a comparison has left enough garbage.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting() -> Iterator[None]:
    """Nothing is collected within the context; what exists at its end is not looked at again before the exit."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)  # extensions count what was never freed, and complain
        if collected:
            gc.enable()
