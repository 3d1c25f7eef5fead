"""Dropout with a mask of one bit for each entry.

Follows ``csrc/extensions/dropout.cpp`` of TransformerEngine 2.20.2 and ``common/dropout/dropout.cu``: an entry is
dropped if its random byte is below ``floor(256 p)``. If 256 p is not a whole number, entries are therefore dropped
slightly less often than with probability p; kept entries are multiplied by ``1 / (1 - p)`` all the same. The random
bytes come from PyTorch's CPU generator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from te_on_cpu import float8

__all__ = ["dropout_bwd", "dropout_fwd"]

_DTYPES = (torch.float16, torch.bfloat16)


def dropout_fwd(input: Any, dropout_probability: float, out: Tensor | None = None) -> list[Tensor]:
    """Drop entries at random.

    Args:
        input: FP16, BF16 or TE's ``Float8Tensor``, any shape, with a multiple of 16 entries.
        dropout_probability: at least 0 and below 1.
        out: receives the result. Default: a new tensor.

    Returns:
        The result, FP16 or BF16; the mask, uint8 ``[entries / 8]``: bit i of byte j is 1 if entry 8 j + i was kept.

    Raises:
        ValueError: for any other dtype, number of entries or probability.
    """
    values, dtype = _values(input)
    _check(values.numel(), dtype, dropout_probability)
    threshold = math.floor(256 * dropout_probability)
    keep = torch.randint(256, (values.numel(),), dtype=torch.uint8) >= threshold
    result = _apply(values, keep, dropout_probability).to(dtype)
    return [result if out is None else out.copy_(result), _pack(keep)]


def dropout_bwd(
    grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """Return the gradient of the input: ``1 / (1 - p)`` times the gradient of kept entries, and 0 for dropped ones.

    Arguments are as ``dropout_fwd`` takes and returns them.

    Raises:
        ValueError: for any other dtype, number of entries, probability or length of the mask.
    """
    _check(grad_output.numel(), grad_output.dtype, dropout_probability)
    if 8 * mask.numel() != grad_output.numel():
        raise ValueError(f"dropout: a mask of {mask.numel()} bytes does not fit {grad_output.numel()} entries")
    result = _apply(grad_output.float(), _unpack(mask), dropout_probability).to(grad_output.dtype)
    return result if grad_input is None else grad_input.copy_(result)


def _values(input: Any) -> tuple[Tensor, torch.dtype]:
    """Return the values in FP32, and the dtype of the result."""
    if float8.is_float8_tensor(input):
        return float8.dequantize(input), input.dtype if isinstance(input, Tensor) else input._dtype
    return input.detach().float(), input.dtype


def _apply(values: Tensor, keep: Tensor, dropout_probability: float) -> Tensor:
    scale = torch.tensor(1.0) / (1 - torch.tensor(dropout_probability))
    return torch.where(keep.view(values.shape), values * scale, 0.0)


def _pack(keep: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8)
    return (keep.view(-1, 8).to(torch.uint8) << places).sum(1, dtype=torch.uint8)


def _unpack(mask: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8)
    return ((mask.view(-1, 1) >> places) & 1).bool()


def _check(entries: int, dtype: torch.dtype, dropout_probability: float) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dropout takes FP16, BF16, or FP8 tensors of one of these dtypes, not {dtype}")
    if entries % 16:
        raise ValueError(f"dropout needs a multiple of 16 entries, but there are {entries}")
    if not 0 <= dropout_probability < 1:
        raise ValueError(f"dropout needs a probability of at least 0 and below 1, but got {dropout_probability}")
