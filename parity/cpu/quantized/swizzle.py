"""Scales in the order that cuBLAS reads on a Blackwell: nothing to do here, as the CPU's GEMM reads TE's plain order.

TransformerEngine 2.20.2 swizzles in ``csrc/extensions/swizzle.cpp``, and marks the tensor. Here a tensor stays
unmarked, so that whatever else reads its scales finds them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "grouped_swizzle_for_gemm",
    "multi_tensor_swizzle_scales_for_gemm_",
    "multi_tensor_swizzle_scales_for_gemm_unchecked_",
    "swizzle_scales_for_gemm_",
]


def grouped_swizzle_for_gemm(tensor: Any, rowwise: bool, columnwise: bool) -> None:
    """Leave a TE grouped tensor as it is."""


def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Leave a TE quantized tensor as it is."""


def multi_tensor_swizzle_scales_for_gemm_(tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool) -> None:
    """Leave TE quantized tensors as they are."""


def multi_tensor_swizzle_scales_for_gemm_unchecked_(
    tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool
) -> None:
    """Leave TE quantized tensors as they are."""
