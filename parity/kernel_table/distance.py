"""How far two tensors of one dtype are apart: elements that differ in a bit, numbers in between, and in norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.errors import relative_l2

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Distance:
    """
    Attributes:
        elements: of either tensor.
        different: how many of them differ in a bit.
        max_ulps: the largest distance of two elements, counted in representable numbers: neighbours are 1 apart, both
            zeros are one number, and so are all NaNs. Infinite where one element is NaN and the other is not.
        relative: the Euclidean norm of the difference over that of the first tensor, where both are finite; 0 for equal
            tensors, infinite if only the first is all zero, NaN for integers, which may be names and not amounts.
    """

    elements: int
    different: int
    max_ulps: float
    relative: float


def measure(x: Tensor, y: Tensor) -> Distance:
    """The distance of two tensors of the same shape and dtype: floating-point, FP8 and E8M0 included, or integers.

    Raises:
        ValueError: if shapes or dtypes differ.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"{x.dtype} {list(x.shape)} cannot be compared with {y.dtype} {list(y.shape)}")
    different = int((_bits(x) != _bits(y)).sum())
    relative = _relative(x, y)
    x_nan, y_nan = _is_nan(x), _is_nan(y)
    steps = (ordinal(x) - ordinal(y)).abs().masked_fill(x_nan & y_nan, 0)
    if bool((x_nan != y_nan).any()):
        return Distance(x.numel(), different, math.inf, relative)
    return Distance(x.numel(), different, float(steps.max()) if x.numel() else 0.0, relative)


def _relative(x: Tensor, y: Tensor) -> float:
    if not x.dtype.is_floating_point:
        return math.nan
    exact, other = (values.float().double() if values.element_size() < 8 else values for values in (x, y))
    finite = exact.isfinite() & other.isfinite()
    return relative_l2(float((other - exact)[finite].norm()), float(exact[finite].norm()))


def ordinal(values: Tensor) -> Tensor:
    """INT64: the place of each number among those of its dtype; zeros have 0, the smallest positive number has 1."""
    bits = _bits(values).long()
    if values.dtype is torch.float8_e8m0fnu or not values.dtype.is_floating_point:
        return bits
    sign = 1 << (8 * values.element_size() - 1)
    return torch.where((bits & sign) != 0, -(bits & (sign - 1)), bits)


def _bits(values: Tensor) -> Tensor:
    return values.view(_BITS[values.element_size()]) if values.dtype.is_floating_point else values


def _is_nan(values: Tensor) -> Tensor:
    if not values.dtype.is_floating_point:
        return torch.zeros(values.shape, dtype=torch.bool)
    return values.float().isnan()
