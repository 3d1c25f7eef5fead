"""Tell errors of the device from errors of the port: memory ran out, or a kernel broke the process's CUDA context."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from parity.result import DeviceError
from parity.user_error import said

# PyTorch's CPU allocator, cuBLAS, and the texts of cudaErrorMemoryAllocation and CUDNN_STATUS_ALLOC_FAILED.
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|_ALLOC_FAILED", re.IGNORECASE)

# The texts of those CUDA errors after which "the process must be terminated and relaunched" (CUDA runtime API,
# cudaError_t): numbers 214, 220, 700, 702, and 710 to 719.
_BROKEN = re.compile(
    "uncorrectable ECC error|uncorrectable NVLink error|illegal memory access|launch timed out and was terminated|"
    "device-side assert triggered|hardware stack error|illegal instruction|misaligned address|"
    "operation not supported on global/shared address space|invalid program counter|unspecified launch failure",
    re.IGNORECASE,
)


def classify(error: BaseException, context_works: Callable[[], bool] | None = None) -> DeviceError:
    """Return what an exception says about the device.

    Args:
        error: as it was caught.
        context_works: asked whether CUDA still works, if the text alone does not tell; asks CUDA by default.

    Returns:
        ``out of memory``: the same may succeed when others hold less. ``broken``: every later CUDA call of this process
        fails. Empty: it is not an error of the device.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "out of memory"
    if not isinstance(error, RuntimeError):
        return ""
    text = said(error)
    if _BROKEN.search(text):
        return "broken"
    if _OUT_OF_MEMORY.search(text):
        return "out of memory"
    return "" if (context_works or cuda_works)() else "broken"


def cuda_works() -> bool:
    """Return whether CUDA answers; a context that an error has broken repeats it at every call."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
