"""What TE's sources find as ``importlib.metadata``: packages whose kernels run on a GPU alone are not installed.

TE imports them where it finds their versions, and would then call them with tensors that are on the CPU.
"""

from __future__ import annotations

from importlib import metadata
from importlib.metadata import PackageNotFoundError, distribution

__all__ = ["PackageNotFoundError", "distribution", "version"]

_GPU_ONLY = ("flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-frontend")


def version(distribution_name: str) -> str:
    """Return the version of an installed distribution.

    Raises:
        PackageNotFoundError: if it is not installed, or runs on a GPU alone.
    """
    if distribution_name in _GPU_ONLY:
        raise PackageNotFoundError(distribution_name)
    return metadata.version(distribution_name)
