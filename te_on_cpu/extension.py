"""Build the module that TransformerEngine imports as ``transformer_engine_torch`` from the CPU kernels."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from packaging.version import Version

from te_on_cpu import (
    activation,
    attention,
    cast,
    context_parallel,
    cuda,
    dropout,
    enums,
    expert_parallel,
    gemm,
    kernel_choices,
    multi_tensor,
    normalization,
    partial_cast,
    recipe,
    rope,
    router,
    softmax,
)
from te_on_cpu.graphs import recorded

NAME = "transformer_engine_torch"
_FAMILIES = (
    activation,
    attention,
    cast,
    context_parallel,
    dropout,
    expert_parallel,
    gemm,
    multi_tensor,
    normalization,
    partial_cast,
    recipe,
    rope,
    router,
    softmax,
)
# TE asks these questions about libraries and streams before it computes anything. They are in
# ``csrc/extensions/misc.cpp`` and ``pybind.cpp`` of TransformerEngine 2.20.2.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "device_supports_multicast": lambda device_id=-1: False,
    "get_cublasLt_version": lambda: cuda.cublaslt_version(),
    "get_cudnn_version": lambda: cuda.cudnn_version(),
    "get_num_cublas_streams": lambda: 4,
    "get_stream_priority_range": lambda device_id=-1: (0, 0),
    "nvte_built_with_cublasmp": lambda: False,
    "ubuf_built_with_mpi": lambda: False,
}
KERNELS = _ANSWERS | {name: getattr(family, name) for family in _FAMILIES for name in family.__all__}
"""TE's functions by name; names and parameters are those of TE's ``csrc/extensions/pybind.cpp``."""


class _Extension(ModuleType):
    """A module that has a function for every name; those of missing kernels raise an error when they are called."""

    version: Version

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("_"):
            raise AttributeError(name)
        return _missing_kernel(name, self.version)


def _missing_kernel(name: str, version: Version) -> Callable[..., NoReturn]:
    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        asked_by = sys._getframe(1).f_globals.get("__name__", "unknown module")
        raise NotImplementedError(
            f"{asked_by} of TransformerEngine {version} called {NAME}.{name}, which the CPU kernels do not have"
        )

    missing.__name__ = name
    return missing


def build(version: Version) -> ModuleType:
    """Return the module ``transformer_engine_torch``, with all of ``KERNELS``, as this version of TE expects it."""
    # Refuse mistakes in the environment when TE is loaded, not in the middle of a model.
    cuda.emulated_gpu(), cuda.cublaslt_version(), cuda.cudnn_version(), kernel_choices.current()
    extension = _Extension(NAME)
    extension.version = version
    for name, kernel in KERNELS.items():
        setattr(extension, name, recorded(kernel))
    extension.grouped_mlp_experimental = SimpleNamespace(  # type: ignore[attr-defined]
        swizzle_scales_and_pack_ptrs_for_discrete_weights=recorded(
            recipe.swizzle_scales_and_pack_ptrs_for_discrete_weights
        )
    )
    for name, value in vars(enums).items():
        if isinstance(value, type) and value.__module__ == enums.__name__:
            setattr(extension, name, value)
    _adapt(extension, version)
    return extension


# Changes for older versions of TE.


def _adapt(extension: ModuleType, version: Version) -> None:
    """Change ``transformer_engine_torch`` to what an older version of TE expects."""
    if version < Version("2.16"):  # cuDNN's attention for short sequences was removed in 2.16
        backends = _with_member(extension.NVTE_Fused_Attn_Backend, "NVTE_F16_max512_seqlen", 0)
        extension.NVTE_Fused_Attn_Backend = backends  # type: ignore[attr-defined]
    if version < Version("2.17"):  # the router's kernels also took the numbers of tokens and experts
        for name in ("fused_topk_with_score_function_bwd", "fused_score_for_moe_aux_loss_bwd"):
            setattr(extension, name, _without_sizes(getattr(extension, name)))
    elif version < Version("2.18"):
        name = "fused_topk_with_score_function_bwd"
        setattr(extension, name, _without_dense_indices(getattr(extension, name)))
    if version < Version("2.20"):  # other arguments; NCCL EP is new
        for name in expert_parallel.__all__:
            delattr(extension, name)
    if version < Version("2.20"):  # context parallelism merged outputs after all log-sum-exps were known
        merge = recorded(context_parallel.thd_out_correction_by_final_sums)
        extension.thd_out_correction = merge  # type: ignore[attr-defined]
    if version < Version("2.15"):
        extension.fused_attn_fwd = _with_formats_of_forward(extension)  # type: ignore[attr-defined]
        extension.fused_attn_bwd = _with_formats_of_backward(extension)  # type: ignore[attr-defined]


def _with_member(enumeration: type[enum.IntEnum], name: str, value: int) -> type[enum.IntEnum]:
    members = {member.name: member.value for member in enumeration}
    return enum.IntEnum(enumeration.__name__, {**members, name: value}, module=__name__)  # type: ignore[return-value]


def _without_sizes(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a router kernel as it was before 2.17, with two more arguments, sizes that its tensors also give."""

    def call(num_tokens: int, num_experts: int, *arguments: Any, **named: Any) -> None:
        kernel(*arguments, **named)

    return call


def _without_dense_indices(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return ``fused_topk_with_score_function_bwd`` as it was in 2.17, without the flag before the map's format."""

    def call(*arguments: Any) -> None:
        kernel(*arguments[:-1], False, arguments[-1])

    return call


def _with_formats_of_forward(extension: ModuleType) -> Callable[..., Any]:
    """Return ``fused_attn_fwd`` as it was before 2.15: O has the query's format, and FP8 has one more statistic.

    That statistic, ZInv, stays uninitialised, because cuDNN's graph no longer filled it.
    """
    kernel, format_unset = extension.fused_attn_fwd, extension.NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
    query = 14

    def call(*arguments: Any) -> Any:
        output, statistics, *rest = kernel(*arguments[:7], format_unset, format_unset, *arguments[7:])
        unused = [statistics.new_empty(statistics.shape)] if hasattr(arguments[query], "_quantizer") else []
        return [output, statistics, *unused, *rest]

    return call


def _with_formats_of_backward(extension: ModuleType) -> Callable[..., Any]:
    """Return ``fused_attn_bwd`` as it was before 2.15: without arguments for formats, but with the gradients' dtype."""
    kernel, format_unset = extension.fused_attn_bwd, extension.NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
    layout_unset = extension.NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET
    unset = (format_unset, format_unset, layout_unset, format_unset, format_unset)
    gradient_dtype, from_forward = 20, 21

    def call(*arguments: Any) -> Any:
        statistics, *rest = arguments[from_forward]
        rest = rest[1:] if rest[0].is_floating_point() else rest  # drop ZInv, which comes before the RNG state
        last = arguments[from_forward + 1 :]
        return kernel(*arguments[:6], *unset, *arguments[6:gradient_dtype], [statistics, *rest], *last)

    return call
