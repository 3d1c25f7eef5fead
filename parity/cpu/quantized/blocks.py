"""Matrices cut into blocks that share a scale: the largest magnitude of each, and one factor for each.

A block is ``(rows, columns)``, and a matrix ``[m, n]`` has ``ceil(m / rows) * ceil(n / columns)`` of them; those at the
end may be smaller. What holds one number a block is a matrix too, ``[blocks down, blocks across]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Block = tuple[int, int]
_BITS = {2: torch.int16, 4: torch.int32}


def directions(quantizer: Any) -> list[str]:
    """The directions that a TE quantizer is to make data for: ``rowwise``, ``columnwise``."""
    return [name for name in ("rowwise", "columnwise") if getattr(quantizer, f"{name}_usage")]


def matrix(values: Tensor) -> Tensor:
    """``[*leading, last]`` as ``[rows, last]``; a scalar as ``[1, 1]``."""
    return values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """The size of ``matrix`` of a tensor of this shape."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1] if len(shape) else 1


def amax(values: Tensor, block: Block) -> Tensor:
    """The largest magnitude in each block of ``[m, n]``, FP32; NaNs do not count, as in CUDA's ``fmaxf``."""
    magnitudes = _tiles(values, block).abs()
    # Without signs, the bits of numbers are ordered as the numbers, NaNs last; PyTorch's maximum of integers is several
    # times faster over short rows, and over one dimension at a time.
    bits = magnitudes.view(_BITS[magnitudes.itemsize])
    largest = bits.amax(1).amax(2).view(magnitudes.dtype).float()
    if largest.isnan().any():
        infinity = float("inf")
        largest = amax(values.nan_to_num(nan=0.0, posinf=infinity, neginf=-infinity), block)
    return largest


def multiply(values: Tensor, factors: Tensor, block: Block) -> Tensor:
    """``[m, n]`` times the factor of each block: a new tensor, FP32 if the factors are."""
    rows, columns = values.shape
    product = _tiles(values, block) * factors[:, None, :, None]
    return product.flatten(2).flatten(0, 1)[:rows, :columns]


def expand(numbers: Tensor, block: Block, shape: Sequence[int]) -> Tensor:
    """The number of its block for each element of a matrix of this shape."""
    spread = numbers.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread[: shape[0], : shape[1]]


def fill_up(numbers: Tensor, shape: Sequence[int]) -> Tensor:
    """A contiguous matrix of this shape, with zeros after the rows and columns of ``numbers``."""
    missing = (0, shape[1] - numbers.shape[1], 0, shape[0] - numbers.shape[0])
    return pad(numbers, missing).contiguous() if any(missing) else numbers.contiguous()


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _tiles(values: Tensor, block: Block) -> Tensor:
    """``[m, n]`` as ``[blocks down, block rows, blocks across, block columns]``, with zeros in the last ones."""
    rows, columns = (round_up(size, length) for size, length in zip(values.shape, block, strict=True))
    values = fill_up(values, (rows, columns))
    return values.view(rows // block[0], block[0], columns // block[1], block[1])
