"""Which versions of TransformerEngine the CPU kernels serve, and what differs between them."""

from __future__ import annotations

import enum
import warnings
from importlib import metadata
from types import ModuleType

from packaging.version import Version

OLDEST = Version("2.14")
NEWEST = Version("2.20")


class UnsupportedTEVersion(RuntimeError):
    """The installed TransformerEngine is too old for the CPU kernels, or there is none."""


def installed_version() -> Version:
    """The version of the installed ``transformer-engine`` package.

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
        warnings.warn(
            f"TransformerEngine {version} is newer than {NEWEST}, the newest that the CPU kernels were tried with",
            stacklevel=2,
        )
    return version


def adapt_extension(extension: ModuleType, version: Version) -> None:
    """Change what an older TE expects of ``transformer_engine_torch``."""
    if version < Version("2.16"):  # cuDNN's attention for short sequences was removed in 2.16
        backends = {member.name: member.value for member in extension.NVTE_Fused_Attn_Backend}
        extension.NVTE_Fused_Attn_Backend = enum.IntEnum(  # type: ignore[attr-defined]
            "NVTE_Fused_Attn_Backend", backends | {"NVTE_F16_max512_seqlen": 0}, module=__name__
        )
