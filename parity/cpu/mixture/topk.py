"""The k largest of each row, in the order, and with the choice among equals, that the router's GPU kernels have.

Follows ``common/fused_router/utils.h`` of TransformerEngine 2.20.2: few experts are found one by one, by a warp of 32
lanes each of which looks at every 32nd; many by a radix selection.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

_LANES = 32
_LARGEST_RADIX_ROW = 255 * _LANES


def uses_radix(k: int, columns: int) -> bool:
    """Whether TE selects by radix; the environment variable ``NVTE_RADIX_TOPK_THRESHOLD`` (16) says from which k on."""
    return k >= int(os.environ.get("NVTE_RADIX_TOPK_THRESHOLD", "16")) and columns <= _LARGEST_RADIX_ROW


def largest(scores: Tensor, k: int, radix: bool) -> Tensor:
    """Where the k largest of each row are.

    Args:
        scores: FP32 ``[rows, columns]``, no NaN.
        k: at most ``columns``.
        radix: one by one, they come in falling order, and of equals the one that the warp's reduction meets first.
            By radix, the smallest of them come last; otherwise, and among equals, the lower column comes first.

    Returns:
        Columns, int64 ``[rows, k]``.
    """
    if not radix:
        order = _warp_order(scores.shape[1])
        return order[scores[:, order].sort(dim=1, descending=True, stable=True).indices[:, :k]]
    chosen = _ordered(scores).sort(dim=1, descending=True, stable=True)
    smallest, columns = chosen.values[:, k - 1 : k], chosen.indices[:, :k]
    is_smallest = (chosen.values[:, :k] == smallest) * scores.shape[1]
    return columns.gather(1, (columns + is_smallest).argsort(1))


def _warp_order(columns: int) -> Tensor:
    """The columns in the order of preference among equals.

    A lane keeps the first of the equals that it meets. When two lanes compare, each keeps its own: lanes that differ by
    16 compare first, neighbours last, and lane 0 tells the result, so the bits of a lane's number count in reverse.
    """
    column = torch.arange(columns)
    lane = column % _LANES
    reversed_lane = sum(((lane >> bit) & 1) << (4 - bit) for bit in range(5))
    return (reversed_lane * columns + column).argsort()


def _ordered(scores: Tensor) -> Tensor:
    """Int32 that are ordered as FP32 are, -0 below 0."""
    bits = scores.contiguous().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
