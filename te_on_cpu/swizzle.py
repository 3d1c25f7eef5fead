"""Block scales in the order in which cuBLAS reads them on a Blackwell: each tile of 128 x 4 is contiguous.

Follows ``gemm_swizzled_scale_idx`` in ``common/cast/mxfp8/swizzle.cuh``, and ``csrc/extensions/swizzle.cpp``, of
TransformerEngine 2.20.2. A quantizer with ``optimize_for_gemm`` writes scales of MXFP8 and NVFP4 in this order, and
``swizzle_scales_for_gemm_`` reorders those of a tensor. ``_with_gemm_swizzled_scales`` is set if a tensor's scales are
swizzled.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

FLAG = "with_gemm_swizzled_scales"
_BANDS, _LANES, _ACROSS = 4, 32, 4


def is_wanted(quantizer: Any) -> bool:
    """Return whether a TE quantizer asks for swizzled scales."""
    return bool(getattr(quantizer, "optimize_for_gemm", False))


def is_swizzled(tensor: Any) -> bool:
    """Return whether the scales of a TE tensor are swizzled."""
    return bool(getattr(tensor, f"_{FLAG}", False))


def ordered(scales: Tensor, quantizer: Any, transposed: bool = False) -> Tensor:
    """Return the scales, swizzled if the quantizer asks for it."""
    return swizzle(scales, transposed) if is_wanted(quantizer) else scales


def scales_of(tensor: Any, columnwise: bool, transposed: bool = False) -> Tensor:
    """Return the unswizzled scales of a TE tensor in one direction."""
    stored = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    return unswizzle(stored, transposed) if is_swizzled(tensor) else stored


def swizzle(scales: Tensor, transposed: bool = False) -> Tensor:
    """Return scales ``[outer up to 128, blocks up to 4]`` in cuBLAS's order, in a matrix of the same shape.

    In a tile, row ``32 * band + lane`` is followed by the row of the same lane in the next band.

    Args:
        transposed: whether the scales and the result are ``[blocks up to 4, outer up to 128]``.
    """
    if transposed:
        return swizzle(scales.t()).view(scales.shape)
    outer, blocks = scales.shape
    tiles = scales.reshape(outer // (_BANDS * _LANES), _BANDS, _LANES, blocks // _ACROSS, _ACROSS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(outer, blocks)


def unswizzle(stored: Tensor, transposed: bool = False) -> Tensor:
    """Undo ``swizzle``."""
    if transposed:
        return unswizzle(stored.reshape(stored.shape[::-1])).t()
    outer, blocks = stored.shape
    tiles = stored.reshape(outer // (_BANDS * _LANES), blocks // _ACROSS, _LANES, _BANDS, _ACROSS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(outer, blocks)
