"""``generic_gemm`` with the arguments that TE's ``general_gemm`` gives it by default, and sums in exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from te_on_cpu import gemm
from te_on_cpu.enums import DType
from te_on_cpu.tensor_cores import TensorCore

TE_DTYPE = {
    torch.float32: DType.kFloat32,
    torch.bfloat16: DType.kBFloat16,
    torch.float16: DType.kFloat16,
}


def run(a: Any, b: Any, layout: str = "TN", dtype: torch.dtype | None = None, **options: Any) -> list[Any]:
    """Return everything that ``generic_gemm`` returns, the product first."""
    arguments: dict[str, Any] = dict(
        D=None,
        quantizer=None,
        bias=None,
        bias_type=DType.kBFloat16,
        gelu=False,
        gelu_in=None,
        grad=False,
        workspace=torch.empty(0),
        workspace_size=0,
        accumulate=False,
        use_split_accumulator=any(hasattr(factor, "_is_2D_scaled") for factor in (a, b)),
    )
    transposed = dict(transA=layout[0] == "T", transB=layout[1] == "T")
    output_dtype = None if dtype is None else TE_DTYPE[dtype]
    return gemm.generic_gemm(A=a, B=b, output_dtype=output_dtype, **transposed, **(arguments | options))


def product(a: Any, b: Any, layout: str = "TN", dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Return only the product: by default ``b a^T``, ``[n, m]`` from ``[m, k]`` and ``[n, k]``."""
    return run(a, b, layout, dtype, **options)[0]


def in_fp64(a: Tensor, b: Tensor, layout: str = "TN") -> Tensor:
    return (b.t() if layout[1] == "T" else b).double() @ (a.t() if layout[0] == "T" else a).double()


def operands(layout: str, n: int, m: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return two seeded matrices whose product has the shape ``[n, m]``."""
    torch.manual_seed(0)
    a = torch.randn((m, k) if layout[0] == "T" else (k, m)).to(dtype)
    b = torch.randn((k, n) if layout[1] == "T" else (n, k)).to(dtype)
    return a, b


def exponent(value: Fraction, lowest: int = -1000) -> int:
    """Return the exponent of a number's leading bit, at least ``lowest``, or far below that for 0."""
    if value == 0:
        return -10_000
    size = abs(value)
    found = size.numerator.bit_length() - size.denominator.bit_length()
    return max(found if size >= Fraction(2) ** found else found - 1, lowest)


def cut(value: Fraction, unit: Fraction) -> Fraction:
    """Return the multiple of ``unit`` next to ``value``, toward zero."""
    return int(value / unit) * unit


def added_one_by_one(core: TensorCore, a: Tensor, b: Tensor, lowest: Sequence[int], interval: int) -> Tensor:
    """Return ``b a^T`` of FP8 numbers, with each product cut and added by itself, which is exact in FP64.

    Args:
        lowest: the exponent of the subnormal numbers of each operand.
        interval: the number of products after which FP32 takes over.
    """

    def exponents(values: Tensor, lowest: int) -> Tensor:
        return torch.where(values == 0, -10_000, torch.frexp(values).exponent.clamp(min=lowest + 1) - 1)

    promoted = torch.zeros(len(b), len(a))
    for begin in range(0, a.shape[1], interval):
        running = torch.zeros(len(b), len(a), dtype=torch.float64)
        for start in range(begin, min(begin + interval, a.shape[1]), core.products):
            part = slice(start, min(start + core.products, begin + interval))
            x, y = a[:, part].double(), b[:, part].double()
            tops = (exponents(y, lowest[1])[:, None] + exponents(x, lowest[0])[None]).amax(2)
            tops = torch.maximum(tops, torch.where(running == 0, -10_000, torch.frexp(running).exponent - 1))
            unit = torch.where(tops < -1000, 1.0, torch.ldexp(torch.ones_like(running), tops - core.bits + 1))
            total = (running / unit).trunc()
            for product in (y[:, None] * x[None] / unit[..., None]).unbind(2):
                total += product.trunc()
            bits_above = (torch.frexp(total).exponent - core.bits).clamp(min=0)
            kept = torch.ldexp(torch.ones_like(total), bits_above)
            running = (total / kept).trunc() * kept * unit
        promoted += running.float()
    return promoted
