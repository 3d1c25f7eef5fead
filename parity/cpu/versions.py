"""Which versions of TransformerEngine the CPU kernels serve, and what differs between them."""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from packaging.version import Version

from parity.cpu.user_error import UserError

OLDEST = Version("2.14")
NEWEST = Version("2.20")


class UnsupportedTEVersion(UserError, RuntimeError):
    """The installed TransformerEngine is too old for the CPU kernels, or there is none."""


def installed_version() -> Version:
    """Return the version of the installed ``transformer-engine`` package; one newer than ``NEWEST`` is warned of once.

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
    """Warn in the name of the caller's caller, the first time."""
    warnings.warn(
        f"TransformerEngine {version} is newer than {NEWEST}, the newest that the CPU kernels were tried with",
        stacklevel=3,
    )


def has_cross_entropy_gradient_in_forward(version: Version) -> bool:
    """Return whether TE's forward pass of cross entropy computes the gradient of the logits too."""
    return version < Version("2.19")


def has_cross_entropy_gradient_in_fp32(version: Version) -> bool:
    """Return whether that gradient is FP32; before, it overwrote the logits."""
    return version >= Version("2.18")


def adapt_extension(extension: ModuleType, version: Version) -> None:
    """Change what an older TE expects of ``transformer_engine_torch``."""
    if version < Version("2.16"):  # cuDNN's attention for short sequences was removed in 2.16
        backends = _with_member(extension.NVTE_Fused_Attn_Backend, "NVTE_F16_max512_seqlen", 0)
        extension.NVTE_Fused_Attn_Backend = backends  # type: ignore[attr-defined]
    if version < Version("2.17"):  # the router's kernels were told the numbers of tokens and experts
        for name in ("fused_topk_with_score_function_bwd", "fused_score_for_moe_aux_loss_bwd"):
            setattr(extension, name, _without_sizes(getattr(extension, name)))
    elif version < Version("2.18"):
        name = "fused_topk_with_score_function_bwd"
        setattr(extension, name, _without_dense_indices(getattr(extension, name)))
    if version < Version("2.15"):
        extension.fused_attn_fwd = _with_formats_of_forward(extension)  # type: ignore[attr-defined]
        extension.fused_attn_bwd = _with_formats_of_backward(extension)  # type: ignore[attr-defined]


def _with_member(enumeration: type[enum.IntEnum], name: str, value: int) -> type[enum.IntEnum]:
    members = {member.name: member.value for member in enumeration}
    return enum.IntEnum(enumeration.__name__, {**members, name: value}, module=__name__)  # type: ignore[return-value]


def _without_sizes(kernel: Callable[..., None]) -> Callable[..., None]:
    """A router kernel as it was before 2.17: called with two sizes that its tensors tell as well."""

    def call(num_tokens: int, num_experts: int, *arguments: Any, **named: Any) -> None:
        kernel(*arguments, **named)

    return call


def _without_dense_indices(kernel: Callable[..., None]) -> Callable[..., None]:
    """``fused_topk_with_score_function_bwd`` as it was in 2.17: its last argument is the format of the map."""

    def call(*arguments: Any) -> None:
        kernel(*arguments[:-1], False, arguments[-1])

    return call


def _with_formats_of_forward(extension: ModuleType) -> Callable[..., Any]:
    """``fused_attn_fwd`` as it was before 2.15: the output's format is the query's, and FP8 had one more statistic.

    That one, ZInv, cuDNN's graph did not fill any more.
    """
    kernel, format_unset = extension.fused_attn_fwd, extension.NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
    query = 14

    def call(*arguments: Any) -> Any:
        output, statistics, *rest = kernel(*arguments[:7], format_unset, format_unset, *arguments[7:])
        unused = [statistics.new_empty(statistics.shape)] if hasattr(arguments[query], "_quantizer") else []
        return [output, statistics, *unused, *rest]

    return call


def _with_formats_of_backward(extension: ModuleType) -> Callable[..., Any]:
    """``fused_attn_bwd`` as it was before 2.15: formats are the inputs', and the dtype of gradients was an argument."""
    kernel, format_unset = extension.fused_attn_bwd, extension.NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
    layout_unset = extension.NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET
    unset = (format_unset, format_unset, layout_unset, format_unset, format_unset)
    gradient_dtype, from_forward = 20, 21

    def call(*arguments: Any) -> Any:
        statistics, *rest = arguments[from_forward]
        rest = rest[1:] if rest[0].is_floating_point() else rest  # ZInv stands where the RNG state should
        last = arguments[from_forward + 1 :]
        return kernel(*arguments[:6], *unset, *arguments[6:gradient_dtype], [statistics, *rest], *last)

    return call
