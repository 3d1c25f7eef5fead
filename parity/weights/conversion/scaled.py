"""Read checkpoints whose weights are FP8 codes with scales beside them, as the numbers that these stand for.

DeepSeek-V3 writes ``weight_scale_inv``, an FP32 scale for each block of 128x128; compressed-tensors writes
``weight_scale``, for a whole weight, for each row or for such blocks. Both multiply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from parity.case.map_check import Problem, lines
from parity.weights.conversion.plan import ConversionError
from parity.weights.conversion.unread import UnreadTensor

SCALES = "scales of FP8 codes, which stand for BF16 numbers now; no codes are made on the way back"

_CODES = torch.float8_e4m3fn, torch.float8_e5m2
_SUFFIXES = "_scale_inv", "_scale"
_BLOCK = 128


def dequantize(old: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Mapping[str, Tensor], list[str]]:
    """Return a checkpoint whose FP8 codes are multiplied by their scales when they are read, and the scales' keys.

    Args:
        old: the checkpoint.
        dtype: what each product, in FP32, is rounded to.

    Raises:
        ConversionError: if codes have no scale, or one of a shape that is not known.
    """
    codes = [key for key, x in old.items() if getattr(x, "dtype", None) in _CODES]
    if not codes:
        return old, []
    found, scales, problems = dict(old), dict[str, str](), list[Problem]()
    for key in codes:
        name = next((key + suffix for suffix in _SUFFIXES if key + suffix in old), None)
        if name is None:
            advice = "was the checkpoint downloaded whole? Codes without scales have to be converted to BF16 first"
            problems.append(
                Problem(f'"{key}" holds {old[key].dtype}, and no "{key}_scale_inv" or "{key}_scale"', advice)
            )
            continue
        shape, of_scale = tuple(old[key].shape), tuple(old[name].shape)
        if not _are_known(shape, of_scale):
            rows, columns = _count_blocks(shape)
            problems.append(
                Problem(
                    f'"{name}" is {of_scale}, and "{key}" {shape}',
                    f"scales for blocks of {_BLOCK}x{_BLOCK} would be {(*shape[:-2], rows, columns)}; one number, and "
                    "one for each row, are known as well",
                )
            )
            continue
        scales[key] = name
        read = partial(_multiply_by_scales, key, old[key], name, old[name], dtype)
        found[key] = UnreadTensor(read, shape, dtype, old[key].device)
    if problems:
        raise ConversionError("\n".join(lines(problems)))
    for name in scales.values():
        found.pop(name, None)
    return found, list(scales.values())


def _count_blocks(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = (1, *shape)[-2:]
    return math.ceil(rows / _BLOCK), math.ceil(columns / _BLOCK)


def _are_known(shape: tuple[int, ...], of_scale: tuple[int, ...]) -> bool:
    """Return whether scales of a shape are one number, one for each row, or one for each block."""
    by_row = (*shape[:-1], 1)
    return math.prod(of_scale) == 1 or of_scale in (by_row, shape[:-1], (*shape[:-2], *_count_blocks(shape)))


def _multiply_by_scales(key: str, codes: Tensor, name: str, scales: Tensor, dtype: torch.dtype) -> Tensor:
    factors = scales.float()
    if not bool(((factors > 0.0) & factors.isfinite()).all()):
        raise ConversionError(f'"{name}" holds scales that are not positive numbers, so "{key}" stands for none')
    if factors.numel() == 1:
        factors = factors.reshape(())
    elif factors.dim() < codes.dim():
        factors = factors.unsqueeze(-1)
    elif factors.shape[-2:] == _count_blocks(codes.shape) and factors.shape != (*codes.shape[:-1], 1):
        rows, columns = codes.shape[-2:]
        factors = factors.repeat_interleave(_BLOCK, -2)[..., :rows, :].repeat_interleave(_BLOCK, -1)[..., :columns]
    return (codes.float() * factors).to(dtype)
