"""How much memory can be had, of the GPU that is in use, or of the machine."""

from __future__ import annotations

import torch

from parity.machine import host


def free() -> int | None:
    """Bytes that are free on the GPU, or where none is in use, on the machine; None where the system does not tell."""
    if torch.cuda.is_initialized():
        return torch.cuda.mem_get_info()[0]
    return host.free_memory()


def in_words(number: int | None) -> str:
    """``3.2 GiB``."""
    return "an unknown amount" if number is None else f"{number / 2**30:.1f} GiB"
