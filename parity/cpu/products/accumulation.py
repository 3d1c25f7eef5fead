"""How the tensor cores of a Hopper add FP8 products: an option of the CPU kernel ``generic_gemm``, off by default.

One instruction adds 32 products to a running sum. It shifts all 33 terms to the largest exponent among them (a
product's is the sum of its factors' exponents), cuts off what lies below 13 fraction bits there, adds exactly, and cuts
the result to 13 fraction bits again. Measured on H800 and H100: DeepSeek-V3 technical report (arXiv 2412.19437, section
3.5.2: "14 bits", with the leading one), SageAttention2 (arXiv 2411.10958: a sum keeps 13 mantissa bits), and bit by bit
MMA-Sim (arXiv 2511.10909), whose model of ``wgmma`` this is.

``use_split_accumulator`` decides how long such a sum gets. Without it (cuBLAS's ``CUBLASLT_MATMUL_DESC_FAST_ACCUM``,
which TE asks for in the forward pass) it runs over all of K. With it, it is added to a sum in FP32 and starts anew
after so many products: cuBLAS does not say how many; CUTLASS (four instructions) and DeepSeek-V3 (section 3.3.2) take
128.

GEMMs of tensors with one FP8 scale are modelled. Those of block-scaled tensors are not: a Hopper adds their blocks of
128 in FP32, and a Blackwell keeps 25 bits. An Ada adds 16 products at a time (``products=16``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

_FP32_BITS = 24
_EXPONENT_FIELD = 0x7F800000
# Elements of the largest intermediate tensor; it passes through the cache several times.
_TILE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class TensorCore:
    """How FP8 products are added.

    Attributes:
        bits: of a term's and of a sum's significand that are kept, with the leading one; 2 to 24.
        products: how many one instruction adds.
        promote_every: products after which a sum with ``use_split_accumulator`` is added to the one in FP32; a multiple
            of ``products``.

    Raises:
        ValueError: for numbers out of these ranges.
    """

    bits: int = 14
    products: int = 32
    promote_every: int = 128

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= _FP32_BITS:
            raise ValueError(f"a tensor core's sum keeps 2 to {_FP32_BITS} bits, not {self.bits}")
        if self.products < 1 or self.promote_every < 1 or self.promote_every % self.products:
            raise ValueError(
                f"promote_every={self.promote_every} must be a positive multiple of products={self.products}, "
                "which one instruction adds"
            )


HOPPER = TensorCore()

_current: ContextVar[TensorCore | None] = ContextVar("accumulation", default=None)


@contextmanager
def emulated(core: TensorCore = HOPPER) -> Iterator[None]:
    """Within the context, FP8 GEMMs of this thread add as ``core`` does; backward passes that are started in it too."""
    token = _current.set(core)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> TensorCore | None:
    """How FP8 GEMMs of this thread add; None for FP32 sums."""
    return _current.get()


@dataclass(frozen=True)
class Factor:
    """One factor of a product of FP8 matrices.

    Attributes:
        values: ``[outer, inner]``, unscaled, FP32 or BF16.
        dtype: the FP8 dtype that they come from; its subnormals all have the exponent of its smallest normal number.
    """

    values: Tensor
    dtype: torch.dtype


def product(core: TensorCore, left: Factor, right: Factor, split: bool) -> Tensor:
    """``right left^T``, ``[n, m]`` in FP32, added as ``core`` does.

    Args:
        left: ``[m, k]``.
        right: ``[n, k]``.
        split: whether ``use_split_accumulator`` is on. Without it no sum is promoted.
    """
    rows = max(1, _TILE_ELEMENTS // max(1, left.values.shape[0] * core.products))
    a, a_powers = left.values.float(), _powers(left)
    b, b_powers = right.values.float(), _powers(right)
    tiles = zip(b.split(rows), b_powers.split(rows), strict=True)
    result = torch.cat([_tile(core, (a, a_powers), tile, split) for tile in tiles])
    if not (a.isfinite().all() and b.isfinite().all()):
        plain = b @ a.t()
        result = torch.where(plain.isfinite(), result, plain)
    return result


def _powers(factor: Factor) -> Tensor:
    """The power of two that each value's exponent stands for, 0 for 0."""
    values = factor.values.float()
    smallest = torch.finfo(factor.dtype).smallest_normal
    return torch.where(values == 0, 0.0, power_of_two(values).clamp_(min=smallest))


def power_of_two(values: Tensor) -> Tensor:
    """The largest power of two up to ``|values|``, FP32 normal numbers; 0 for 0."""
    return (values.view(torch.int32) & _EXPONENT_FIELD).view(torch.float32)


def truncated(values: Tensor, bits: int) -> Tensor:
    """FP32 values cut to a significand of so many bits, toward zero."""
    return (values.view(torch.int32) & -(1 << (_FP32_BITS - bits))).view(torch.float32)


def _tile(core: TensorCore, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], split: bool) -> Tensor:
    (a, _), (b, _) = left, right
    promoted = torch.zeros(b.shape[0], a.shape[0])
    running = torch.zeros_like(promoted)
    inner = a.shape[1]
    for start in range(0, inner, core.products):
        if split and start % core.promote_every == 0:
            promoted += running
            running.zero_()
        part = slice(start, start + core.products)
        running = _instruction(core, running, *(x[:, part] for x in (*left, *right)))
    return promoted.add_(running)


def _instruction(core: TensorCore, running: Tensor, a: Tensor, a_powers: Tensor, b: Tensor, b_powers: Tensor) -> Tensor:
    """The running sum ``[n, m]`` after one instruction."""
    largest = torch.mul(b_powers[:, None], a_powers).amax(-1)
    largest = torch.maximum(largest, power_of_two(running))
    unit = torch.where(largest > 0, largest, 1.0).mul_(2.0 ** (1 - core.bits))
    # A product is below 4 in units of the largest power: the sum of the integers below is exact up to 2^24 in FP32.
    fits_fp32 = (core.products + 1) << (core.bits + 1) <= 1 << _FP32_BITS
    terms = torch.mul(b[:, None], a).div_(unit[..., None]).trunc_()
    total = terms.sum(-1, dtype=torch.float32 if fits_fp32 else torch.float64).add_((running / unit).trunc_())
    return truncated(_toward_zero(total.mul_(unit)), core.bits)


def _toward_zero(values: Tensor) -> Tensor:
    """FP32 values as they are, FP64 values cut to FP32, lest a rounding up survive the next cut."""
    if values.dtype == torch.float32:
        return values
    nearest = values.float()
    return torch.where(nearest.double().abs() > values.abs(), torch.nextafter(nearest, torch.zeros(())), nearest)
