"""The versions of TransformerEngine that the CPU kernels support, and some differences between them."""

from __future__ import annotations

import functools
import warnings
from importlib import metadata

from packaging.version import Version

from te_on_cpu import EmulationError

OLDEST = Version("2.14")
NEWEST = Version("2.20")


class UnsupportedTEVersion(EmulationError, RuntimeError):
    """Raised if TransformerEngine is too old for the CPU kernels or not installed."""


def installed_version() -> Version:
    """Return the version of the installed ``transformer-engine`` package; warn once if it is newer than ``NEWEST``.

    Raises:
        UnsupportedTEVersion: if it is not installed or older than ``OLDEST``.
    """
    try:
        version = Version(metadata.version("transformer-engine"))
    except metadata.PackageNotFoundError:
        raise UnsupportedTEVersion(
            "TransformerEngine is not installed: `pip install transformer-engine` (pure Python, for the CPU kernels) "
            "or `pip install --no-build-isolation 'transformer-engine[pytorch]'` (on a GPU machine)"
        ) from None
    if version < OLDEST:
        raise UnsupportedTEVersion(
            f"TransformerEngine {version} is older than {OLDEST}, the oldest that runs on the CPU kernels"
        )
    if version.release[:2] > NEWEST.release:
        _warn_of_newer(version)
    return version


@functools.cache
def _warn_of_newer(version: Version) -> None:
    """Warn once, at the line of the caller's caller."""
    warnings.warn(
        f"TransformerEngine {version} is newer than {NEWEST}, the newest that the CPU kernels were tried with",
        stacklevel=3,
    )


def has_cross_entropy_gradient_in_forward(version: Version) -> bool:
    """Return whether TE's forward pass of cross entropy also computes the gradient of the logits."""
    return version < Version("2.19")


def has_software_stochastic_rounding(version: Version) -> bool:
    """Return whether TE rounds to FP4 stochastically where the GPU cannot (sm_120); before, it wrote zeros."""
    return version >= Version("2.20")


def has_cross_entropy_gradient_in_fp32(version: Version) -> bool:
    """Return whether that gradient is FP32; in older versions it overwrites the logits."""
    return version >= Version("2.18")
