"""The memory of tensors: what a process has freed is kept for its next ones, and it comes in large pages.

A comparison allocates and frees tensors of the same sizes over and over. By itself glibc gives the memory of large ones
back each time, and the kernel clears every page that it hands out again: a tenth of a large comparison's time. Pages of
2 MiB instead of 4 KiB save another tenth, most of it in a process's first comparisons.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from parity.machine import host

# ``malloc.h`` of glibc: how much may be free at the heap's end before it is given back, and how many blocks may lie
# outside of the heap, from where they are always given back.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1  # that ``mallopt`` takes


def use_huge_pages() -> None:
    """Ask the kernel for large pages where a tensor has 2 MiB or more, unless the environment says otherwise.

    PyTorch looks when it allocates its first tensor (``THP_MEM_ALLOC_ENABLE``, ``c10/core/impl/alloc_cpu.cpp`` of
    2.13); later it is too late, and changes nothing.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed() -> bool:
    """Keep what is freed from now on, up to a share of the machine's memory.

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
