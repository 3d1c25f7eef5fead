"""How the tensor cores of a Blackwell add MXFP8 and NVFP4 products: an option of the CPU kernel ``generic_gemm``.

Both shift what they add to the largest exponent among it and the running sum, cut off what lies below so many fraction
bits there, add exactly, and cut the result to FP32, toward zero. MMA-Sim (arXiv 2511.10909), whose models of
``tcgen05.mma`` these are:

======  =============  =========================================================  =============
format  products each  what is added                                              fraction bits
======  =============  =========================================================  =============
MXFP8   32, one block  each product times its scales, exponents added             25
NVFP4   64             the exact sum of 16 products times its scales, at the      35
                       exponent of these scales
======  =============  =========================================================  =============

All of it is exact in FP64.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

_MXFP8_FRACTION, _NVFP4_FRACTION = 25, 35
_NVFP4_GROUPS = 4
_FP32_FRACTION = 23
# A product of two FP8 numbers has at most three fraction bits of each.
_PRODUCT_FRACTION = 6
_SMALLEST_E4M3 = 2.0**-6
_EXPONENT_FIELD = 0x7FF << 52


@dataclass(frozen=True)
class BlockFactor:
    """One factor of a product of matrices with a scale a block.

    Attributes:
        values: ``[outer, inner]``, unscaled, FP32 or BF16.
        scales: FP32 ``[outer, inner / block]``.
        dtype: the FP8 dtype of MXFP8 values, whose subnormals all have the exponent of its smallest normal number; None
            for NVFP4.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype | None

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def part(self, inner: slice) -> BlockFactor:
        """Return a range of the inner dimension, of whole blocks."""
        scales = self.scales[:, inner.start // self.block : inner.stop // self.block]
        return dataclasses.replace(self, values=self.values[:, inner], scales=scales)


def product(left: BlockFactor, right: BlockFactor) -> Tensor:
    """``right left^T``, ``[n, m]`` in FP32, added as a Blackwell's tensor cores do.

    Args:
        left: ``[m, k]``.
        right: ``[n, k]``, of the same format.
    """
    running = torch.zeros(right.values.shape[0], left.values.shape[0], dtype=torch.float64)
    step = left.block if left.dtype else _NVFP4_GROUPS * left.block
    add = _add_mxfp8 if left.dtype else _add_nvfp4
    inner = left.values.shape[1]
    for start in range(0, inner, step):
        part = slice(start, min(start + step, inner))
        running = _to_fp32(add(running, left.part(part), right.part(part)))
    result = running.float()
    if not all(tensor.isfinite().all() for side in (left, right) for tensor in (side.values, side.scales)):
        plain = _scaled(right) @ _scaled(left).t()
        result = torch.where(plain.isfinite(), result, plain)
    return result


def _scaled(factor: BlockFactor) -> Tensor:
    return factor.values.float() * factor.scales.repeat_interleave(factor.block, 1)


def _add_mxfp8(running: Tensor, left: BlockFactor, right: BlockFactor) -> Tensor:
    """Return the running sum after one instruction, before it is cut to FP32."""
    assert left.dtype is not None
    assert right.dtype is not None
    a, b = left.values.double(), right.values.double()
    a_powers, b_powers = _powers(a, left.dtype), _powers(b, right.dtype)
    scale = right.scales.double() * left.scales.double().t()
    total = (b @ a.t()).mul_(scale).add_(running)
    # Where not even the smallest possible term has a bit below the largest possible unit, nothing is cut.
    unit = torch.maximum(_largest(b_powers, a_powers) * scale, power_of_two(running)) * 2.0**-_MXFP8_FRACTION
    lowest = _smallest(b_powers, a_powers) * scale * 2.0**-_PRODUCT_FRACTION
    own_lowest = torch.where(running == 0, torch.inf, power_of_two(running) * 2.0**-_FP32_FRACTION)
    row, column = (torch.minimum(lowest, own_lowest) < unit).nonzero(as_tuple=True)
    if len(row):
        terms, before, scale = b[row] * a[column], running[row, column], scale[row, column]
        powers = (b_powers[row] * a_powers[column]).amax(1) * scale
        unit = torch.maximum(powers, power_of_two(before)) * 2.0**-_MXFP8_FRACTION
        unit = torch.where(unit > 0, unit, 1.0)
        cut = (terms * (scale / unit)[:, None]).trunc_().sum(1) + (before / unit).trunc_()
        total[row, column] = cut * unit
    return total


def _add_nvfp4(running: Tensor, left: BlockFactor, right: BlockFactor) -> Tensor:
    """Return the running sum after one instruction, before it is cut to FP32."""
    terms, powers = [], []
    for index in range(left.scales.shape[1]):
        part = slice(index * left.block, (index + 1) * left.block)
        a_scale, b_scale = left.scales[:, index].double(), right.scales[:, index].double()
        term = (right.values[:, part].float() @ left.values[:, part].float().t()).double()
        term.mul_(b_scale[:, None] * a_scale)
        a_power, b_power = (power_of_two(scale).clamp_(min=_SMALLEST_E4M3) for scale in (a_scale, b_scale))
        powers.append(torch.where(term == 0, 0.0, b_power[:, None] * a_power))
        terms.append(term)
    largest = torch.stack([*powers, power_of_two(running)]).amax(0)
    unit = torch.where(largest > 0, largest, 1.0) * 2.0**-_NVFP4_FRACTION
    return sum(((term / unit).trunc_() for term in terms), (running / unit).trunc_()) * unit


def _powers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the power of two that each FP8 value's exponent stands for, 0 for 0."""
    return torch.where(values == 0, 0.0, power_of_two(values).clamp_(min=torch.finfo(dtype).smallest_normal))


def _largest(b_powers: Tensor, a_powers: Tensor) -> Tensor:
    """Return a bound on the powers of each element's products, from above."""
    return b_powers.amax(1)[:, None] * a_powers.amax(1)


def _smallest(b_powers: Tensor, a_powers: Tensor) -> Tensor:
    """Return a bound on the powers of each element's products that are not 0, from below."""
    b_least, a_least = (torch.where(powers == 0, torch.inf, powers).amin(1) for powers in (b_powers, a_powers))
    return b_least[:, None] * a_least


def power_of_two(values: Tensor) -> Tensor:
    """Return the largest power of two up to ``|values|``, FP64 normal numbers; 0 for 0."""
    return (values.view(torch.int64) & _EXPONENT_FIELD).view(torch.float64)


def _to_fp32(values: Tensor) -> Tensor:
    """FP64 values cut to what FP32 holds, toward zero."""
    nearest = values.float()
    toward_zero = torch.nextafter(nearest, torch.zeros(()))
    return torch.where(nearest.double().abs() > values.abs(), toward_zero, nearest).double()
