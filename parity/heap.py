"""The C library's heap: what a process has freed is kept for its next tensors, up to a share of the machine's memory.

A comparison allocates and frees tensors of the same sizes over and over. By itself glibc gives the memory of large ones
back each time, and the kernel clears every page that it hands out again: a tenth of a large comparison's time.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from parity import host

# ``malloc.h`` of glibc: how much may be free at the heap's end before it is given back, and how many blocks may lie
# outside of the heap, from where they are always given back.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1  # that ``mallopt`` takes


def keep_freed() -> bool:
    """Keep what is freed from now on.

    Returns:
        Whether that was possible: the C library is glibc, the environment says nothing else of its heap, and the system
        tells how much memory is free.
    """
    libc, free = _glibc(), host.free_memory()
    if libc is None or free is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    limit = min(host.share_to_keep(free), _LARGEST)
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, limit) and libc.mallopt(_M_MMAP_MAX, 0))


def give_back() -> None:
    """Give back what is free now; for another process that needs the memory."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> Any:
    """The C library of this process; None if it is another."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
