"""Number formats of intermediate results: each rounds a tensor's values and leaves its dtype.

A computation in a format is carried out in a wider dtype and rounded after each operation, which is what hardware does
that computes in FP32 registers. FP32 carries every format but FP64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NumberFormat:
    """A floating-point format.

    Attributes:
        name: as options and reports write it.
        mantissa_bits: stored ones, without the leading 1.
        round: FP32 or FP64 values to the nearest of the format, ties to even, in the dtype that they came in.
    """

    name: str
    mantissa_bits: int
    round: Callable[[Tensor], Tensor]


def carrier(names: Iterable[str]) -> torch.dtype:
    """The dtype to compute in where results are rounded to these formats."""
    return torch.float64 if "fp64" in names else torch.float32


@contextmanager
def full_fp32_products() -> Iterator[None]:
    """Within the context, a GPU multiplies FP32 matrices in FP32, whatever it has been told about TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _stored_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def _saturating(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """As NVIDIA GPUs cast to FP8 (``__NV_SATFINITE``): what is too large becomes the largest number."""
    largest = torch.finfo(dtype).max
    return lambda x: x.clamp(-largest, largest).to(dtype).to(x.dtype)


def _mantissa(bits: int) -> Callable[[Tensor], Tensor]:
    """So many stored mantissa bits with the range of FP32."""
    dropped = 23 - bits

    def round_mantissa(x: Tensor) -> Tensor:
        encoded = x.float().view(torch.int32)
        is_odd = (encoded >> dropped) & 1
        rounded = (encoded + ((1 << (dropped - 1)) - 1) + is_odd) & -(1 << dropped)
        return rounded.view(torch.float32).to(x.dtype)

    return round_mantissa


FORMATS = {
    number_format.name: number_format
    for number_format in (
        NumberFormat("fp64", 52, lambda x: x),
        NumberFormat("fp32", 23, lambda x: x.float().to(x.dtype)),
        NumberFormat("tf32", 10, _mantissa(10)),
        NumberFormat("fp16", 10, _stored_as(torch.float16)),
        NumberFormat("bf16", 7, _stored_as(torch.bfloat16)),
        NumberFormat("e4m3", 3, _saturating(torch.float8_e4m3fn)),
        NumberFormat("e5m2", 2, _saturating(torch.float8_e5m2)),
        NumberFormat("e8m3", 3, _mantissa(3)),
        NumberFormat("e8m2", 2, _mantissa(2)),
    )
}
# Formats of a small range, each with one of the same mantissa and FP32's range, which no GPU has: what differs between
# the two is what the range costs.
UNLIMITED = {"e4m3": "e8m3", "e5m2": "e8m2"}
HARDWARE = tuple(name for name in FORMATS if name not in UNLIMITED.values())
