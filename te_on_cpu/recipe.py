"""The update of delayed scaling between two iterations, and the order in which cuBLAS reads scales.

Follows ``csrc/extensions/recipe.cpp`` and ``swizzle.cpp`` of TransformerEngine 2.20.2, and ``kernel_bulk`` of
``common/recipe/delayed_scaling.cu`` in NVIDIA's repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_on_cpu import cast, formats, swizzle
from te_on_cpu.enums import TORCH_DTYPE

__all__ = [
    "fused_amax_and_scale_update_after_reduction",
    "grouped_swizzle_for_gemm",
    "multi_tensor_swizzle_scales_for_gemm_",
    "multi_tensor_swizzle_scales_for_gemm_unchecked_",
    "swizzle_scales_for_gemm_",
]


@torch.inference_mode()  # like float8.write
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    amax_compute_algo: str,
    fp8_dtype: int,
    margin: float,
) -> None:
    """Roll each amax history in place and derive each scale from it.

    Args:
        amax_reduction_buffer: FP32, this iteration's amaxes of all tensors in a row, reduced over the ranks.
        amax_histories: FP32 ``[length, tensors]`` each; row 0 collects the amax of the current iteration.
        scales: FP32 ``[tensors]`` each.
        amax_compute_algo: ``max`` over the history, or ``most_recent``.
        fp8_dtype: E4M3 or E5M2.
        margin: scales are divided by ``2**margin``.

    Raises:
        ValueError: for any other ``amax_compute_algo``.
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(f"amax_compute_algo is 'max' or 'most_recent', got {amax_compute_algo!r}")
    target = torch.finfo(TORCH_DTYPE[int(fp8_dtype)]).max * 2.0**-margin
    sizes = [scale.numel() for scale in scales]
    reduced = amax_reduction_buffer.reshape(-1)[: sum(sizes)].split(sizes)
    for amax, history, scale in zip(reduced, amax_histories, scales, strict=True):
        recent = torch.where(amax != 0, amax, history[0])
        largest = _roll(history, recent)
        _update(scale, recent if amax_compute_algo == "most_recent" else largest, target)


def _roll(history: Tensor, recent: Tensor) -> Tensor:
    """Drop the oldest amax (row 1), append the recent one as the last row and clear row 0; return the largest.

    A tensor whose recent amax is 0 took no part in the iteration. Its history stays as it is, and its largest is 0.
    """
    took_part = recent != 0
    rolled = torch.cat([history[1:], recent[None]])
    largest = torch.where(took_part, rolled.nan_to_num(nan=0.0, posinf=float("inf")).amax(0), 0.0)
    rolled[0] = 0.0
    history.copy_(torch.where(took_part, rolled, history))
    return largest


def _update(scale: Tensor, amax: Tensor, target: float) -> None:
    """Set ``scale`` to ``target / amax``, at most the largest FP32 number, where amax is positive and finite."""
    derived = torch.full_like(amax, target).div(amax).clamp(max=torch.finfo(torch.float32).max)
    scale.copy_(torch.where(amax.isfinite() & (amax > 0), derived, scale))


# Scales in the order in which cuBLAS reads them on a Blackwell (``csrc/extensions/swizzle.cpp``).

_DIRECTIONS = ("rowwise", "columnwise")


def grouped_swizzle_for_gemm(tensor: Any, rowwise: bool, columnwise: bool) -> None:
    """Swizzle a TE grouped MXFP8 tensor's scales, and drop those of directions that are not asked for."""
    cast.swizzle_groups(tensor, rowwise, columnwise)


def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Swizzle the scales of a TE tensor in both directions, and mark it."""
    if formats.swizzle_scales(tensor, _DIRECTIONS):
        tensor._with_gemm_swizzled_scales = True


def multi_tensor_swizzle_scales_for_gemm_(tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool) -> None:
    """Swizzle the scales of TE tensors in one direction; the caller marks the tensors.

    Raises:
        RuntimeError: unless exactly one direction is asked for.
    """
    if rowwise_usage == columnwise_usage:
        raise RuntimeError("multi_tensor_swizzle_scales_for_gemm_ takes one of rowwise_usage and columnwise_usage")
    for tensor in tensors:
        formats.swizzle_scales(tensor, _DIRECTIONS[:1] if rowwise_usage else _DIRECTIONS[1:])


def multi_tensor_swizzle_scales_for_gemm_unchecked_(
    tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool
) -> None:
    """Apply ``multi_tensor_swizzle_scales_for_gemm_``; TE's kernel of this name does not check the shapes of scales."""
    multi_tensor_swizzle_scales_for_gemm_(tensors, rowwise_usage, columnwise_usage)


_DISCRETE = {"mxfp8_rowwise": (32, False), "mxfp8_columnwise": (32, True), "nvfp4": (16, False)}
"""The number of elements that share a scale, and whether they lie in a column."""


def swizzle_scales_and_pack_ptrs_for_discrete_weights(
    data_tensors: Sequence[Tensor], scale_tensors: Sequence[Tensor], swizzle_type: str, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Swizzle the scales of the experts' weights into one buffer, with 0 for the scales of padding.

    Follows ``csrc/extensions/grouped_mlp_experimental.cpp``; cuDNN's kernels for grouped products take the addresses.

    Args:
        data_tensors: codes ``[rows, columns]`` of one shape, two to a byte in NVFP4.
        scale_tensors: their scales, padded as cuBLAS needs them.
        swizzle_type: one of ``mxfp8_rowwise``, ``mxfp8_columnwise`` and ``nvfp4``.
        device: the device of the addresses.

    Returns:
        The addresses of the codes and of the swizzled scales, int64 ``[experts]`` each, and the buffer, uint8.

    Raises:
        RuntimeError: for other types, and unless there are as many scales as data.
    """
    if len(data_tensors) != len(scale_tensors):
        raise RuntimeError(
            "Expected data_tensors and scale_tensors to have matching sizes, "
            f"but got {len(data_tensors)} and {len(scale_tensors)}."
        )
    if swizzle_type not in _DISCRETE:
        raise RuntimeError(f"Unsupported swizzle type ({swizzle_type}). Expected one of: {', '.join(_DISCRETE)}.")
    block, in_columns = _DISCRETE[swizzle_type]
    swizzled = torch.zeros(len(scale_tensors), *(scale_tensors[0].shape if scale_tensors else (0,)), dtype=torch.uint8)
    for data, scales, stored in zip(data_tensors, scale_tensors, swizzled, strict=True):
        rows, columns = data.shape[0], data.shape[-1] * (2 if swizzle_type == "nvfp4" else 1)
        used = (-(-rows // block), columns) if in_columns else (rows, -(-columns // block))
        without_padding = torch.zeros_like(stored)
        without_padding[: used[0], : used[1]] = scales.view(torch.uint8)[: used[0], : used[1]]
        stored.copy_(swizzle.swizzle(without_padding, transposed=in_columns))
    addresses = ([tensor.data_ptr() for tensor in tensors] for tensors in (data_tensors, list(swizzled)))
    data_ptrs, scale_ptrs = (torch.tensor(each, dtype=torch.int64, device=device) for each in addresses)
    return data_ptrs, scale_ptrs, swizzled.flatten()
