"""4over6: for each NVFP4 block the better of two scales, one that maps its amax to 6 and one that maps it to 4.

Follows TransformerEngine 2.20.2: ``common/cast/nvfp4/quantize_4over6_nvfp4.cuh`` and TE's own reference,
``custom_recipes/reference_nvfp4.py``, without ``NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH``. E2M1 has nothing between 4 and
6, so a block whose values crowd there is better served by a scale 1.5 times as large.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.cpu.quantized import block_scaling, float4, float8
from parity.cpu.quantized.float4 import E4M3, encoding_scale


@dataclass(frozen=True)
class Choice:
    """By what the two are compared.

    Attributes:
        amax: FP32, of the tensor, ``[1, 1]``, or of each row, ``[rows, 1]``.
        scale: the global encoding scale for it, likewise.
        limit: the largest block scale: 448 or 256.
        error: ``MAE`` or ``MSE``, of the decoded values in a block.
    """

    amax: Tensor
    scale: Tensor
    limit: float
    error: str


def encode(matrix: Tensor, block_amax: Tensor, block: block_scaling.Block, choice: Choice) -> tuple[Tensor, Tensor]:
    """Codes ``[rows, columns]``, and the E4M3 bytes of each block; a tie goes to 6.

    Args:
        matrix: FP32, FP16 or BF16, ``[rows, columns]``.
        block_amax: FP32, one a block.
        block: ``(1, 16)`` or ``(16, 16)``.
    """
    base = block_amax / float4.LIMIT * choice.scale
    six, four = (float8.cast(base * factor, E4M3) for factor in (1.0, 1.5))
    codes_six, codes_four = (
        float4.encode(block_scaling.multiply(matrix, encoding_scale(decoding, choice.scale), block))
        for decoding in (six, four)
    )
    error_six = _error(matrix, codes_six, six, block, choice)
    error_four = _error(matrix, codes_four, four, block, choice)
    takes_four = error_four < error_six
    per_element = block_scaling.expand(takes_four, block, matrix.shape)
    return torch.where(per_element, codes_four, codes_six), torch.where(takes_four, four, six)


def _error(matrix: Tensor, codes: Tensor, decoding: Tensor, block: block_scaling.Block, choice: Choice) -> Tensor:
    """The summed error of each block, FP32, in the kernel's order: along a row one by one, then rows as a tree."""
    decoded = block_scaling.multiply(float4.decode(float4.pack(codes)), float8.decode(decoding, E4M3), block)
    difference = decoded.mul_(choice.amax).div_(float4.LIMIT * choice.limit).sub_(matrix)
    summand = difference.square_() if choice.error == "MSE" else difference.abs_()
    total = functools.reduce(torch.add, summand.unflatten(1, (-1, block[1])).unbind(-1))
    rows = total.unflatten(0, (-1, block[0]))
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]
