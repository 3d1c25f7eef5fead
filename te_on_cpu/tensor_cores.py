"""Read operands and add products as tensor cores do.

This covers TF32 operands, the low-precision sums of FP8 on a Hopper, sums that are truncated to FP32 as they grow, and
sums over K in parts. Most of these are options of the CPU kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from te_on_cpu import cuda, kernel_choices

# Sums over K in parts with 16-bit results: each part is rounded, and the parts are added in that dtype.
#
# cuBLASLt adds like this with ``CUBLASLT_REDUCTION_SCHEME_INPLACE`` and ``_OUTPUT_TYPE``. Its number of parts is not
# documented. Here there are four parts of at least 32 elements each, or fewer if K is short.


PARTS = 4
SHORTEST = 32
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def parts(inner: int, step: int = SHORTEST) -> list[slice]:
    """Split ``inner`` elements into ranges as equal as multiples of ``step`` allow; the last has the remainder."""
    steps = inner // step
    count = max(1, min(PARTS, steps))
    borders = [step * (steps * index // count) for index in range(count)]
    return [slice(begin, end) for begin, end in zip(borders, [*borders[1:], inner], strict=True)]


def added(partial: Callable[[slice], Tensor], inner: int, dtype: torch.dtype, step: int = SHORTEST) -> Tensor:
    """Return the sum of the parts in ``dtype``.

    Args:
        partial: returns the FP32 result of one part.
        inner: K.
        dtype: the dtype in which parts are rounded and added one after the other.
        step: the lengths of parts are multiples of this.
    """
    first, *others = parts(inner, step)
    total = partial(first).to(dtype)
    for part in others:
        total = total + partial(part).to(dtype)
    return total


# FP32 operands of emulated GEMMs, which are rounded to TF32, to nearest even, unless another kernel choice is set.
#
# TE asks for TF32 (``CUBLAS_COMPUTE_32F_FAST_TF32``) without saying how operands are converted. ``left_out`` turns TF32
# off, because it hides small effects.


_DROPPED_BITS = 13


@contextmanager
def left_out() -> Iterator[None]:
    """Compute this thread's FP32 GEMMs in full FP32 within the context, also in backward passes started in it."""
    others = kernel_choices.current() - kernel_choices.FP32_OPERANDS
    with kernel_choices.kernel_choices(*others, kernel_choices.FP32_EXACT):
        yield


def operand(values: Tensor) -> Tensor:
    """Return FP32 values as a GEMM of this thread reads them; infinities and NaNs stay."""
    choices = kernel_choices.current()
    if kernel_choices.FP32_EXACT in choices:
        return values
    if kernel_choices.TF32_TRUNCATED in choices:
        return truncate_to_tf32(values)
    if kernel_choices.TF32_TIES_AWAY in choices:
        return _kept(values, values.view(torch.int32) + (1 << (_DROPPED_BITS - 1)))
    return round_to_tf32(values)


def round_to_tf32(values: Tensor) -> Tensor:
    """Round FP32 to TF32's 10 mantissa bits, to nearest even; infinities and NaNs stay.

    TE computes every GEMM with FP32 operands and an FP32 result in ``CUBLAS_COMPUTE_32F_FAST_TF32``, whatever PyTorch's
    ``allow_tf32`` says.
    """
    bits = values.view(torch.int32)
    rounded = bits >> _DROPPED_BITS
    rounded &= 1
    rounded += bits
    rounded += (1 << (_DROPPED_BITS - 1)) - 1
    return _kept(values, rounded)


def truncate_to_tf32(values: Tensor) -> Tensor:
    """Truncate FP32 to TF32's 10 mantissa bits; infinities and NaNs stay."""
    return _kept(values, values.view(torch.int32).clone())


def _kept(values: Tensor, bits: Tensor) -> Tensor:
    """Return the numbers of the upper bits, with the NaNs of ``values``; ``bits`` is overwritten."""
    bits &= -1 << _DROPPED_BITS
    result = bits.view(torch.float32)
    # A carry or the dropped bits may destroy a NaN. A sum finds out with one reading whether there is any.
    return torch.where(values.isnan(), values, result) if values.sum().isnan() else result


# FP8 products as a Hopper's tensor cores add them: an option of the CPU kernel ``generic_gemm``, off by default.
#
# The kernel choices ``fp8-14-bit`` and ``fp8-block-14-bit`` turn it on, and so does ``emulated``, for other cores, too.
#
# One instruction adds 32 products to a running sum. It aligns all 33 terms to the largest exponent among them (a
# product's is the sum of its factors' exponents), truncates them to 13 fraction bits there, adds exactly, and truncates
# the result to 13 fraction bits again. This was measured on H800 and H100: DeepSeek-V3 technical report (arXiv
# 2412.19437, section 3.5.2: "14 bits", with the leading one), SageAttention2 (arXiv 2411.10958: a sum keeps 13 mantissa
# bits), and bit by bit MMA-Sim (arXiv 2511.10909), whose model of ``wgmma`` this is.
#
# ``use_split_accumulator`` decides the length of such a sum. Without it (cuBLAS's ``CUBLASLT_MATMUL_DESC_FAST_ACCUM``,
# which TE asks for in the forward pass), the sum runs over all of K. With it, the sum is regularly added to one in FP32
# and restarts. cuBLAS does not document the interval; CUTLASS (four instructions) and DeepSeek-V3 (section 3.3.2) use
# 128 products.
#
# With a scale per block of 128 (``Float8BlockScaling``), the interval is always a block: its sum is multiplied by its
# two scales and added in FP32. DeepSeek-V3's GEMM (section 3.3.2) and CUTLASS's for Hopper (its example 67) do the
# same; cuBLAS's method is not documented. An Ada adds 16 products at a time (MMA-Sim). A Blackwell keeps more bits (its
# MXFP8 and NVFP4 are below).


_FP32_BITS = 24
_EXPONENT_FIELD = 0x7F800000
_SCALED_BLOCK = 128
# The elements of a tile of the result, and the products that are computed at once. They fit into a core's cache, and
# each step has little overhead (none of 2^14 to 2^17 and 2^16 to 2^21 was faster by a tenth).
_TILE_ELEMENTS = 1 << 16
_PRODUCTS_AT_ONCE = 1 << 19
# The exponent of 0. A product with 0 stays below the lowest product of two FP8 numbers (E5M2's 2^-14, squared).
_NO_EXPONENT, _LOWEST_EXPONENT = -60, -28
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


@dataclass(frozen=True)
class TensorCore:
    """Describe how a tensor core adds FP8 products.

    Attributes:
        bits: significand bits that terms and sums keep, including the leading one; 2 to 24.
        products: number of products that one instruction adds.
        promote_every: number of products after which a sum with ``use_split_accumulator`` is added to the one in FP32;
            a multiple of ``products``.

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
ADA = TensorCore(products=16)

_current: ContextVar[TensorCore | None] = ContextVar("accumulation", default=None)


@contextmanager
def emulated(core: TensorCore = HOPPER) -> Iterator[None]:
    """Make this thread's FP8 GEMMs add as ``core`` does within the context, also in backward passes started in it.

    This applies to scales per tensor and per block, and takes precedence over the kernel choices.
    """
    token = _current.set(core)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> TensorCore | None:
    """Return the core of ``emulated`` in this thread; None outside of it."""
    return _current.get()


def core(block_scaled: bool) -> TensorCore | None:
    """Return the core that FP8 GEMMs of this thread emulate, or None for FP32 sums.

    Args:
        block_scaled: whether there is a scale for each block of 128, rather than for each tensor.
    """
    name = kernel_choices.FP8_BLOCK_14_BIT if block_scaled else kernel_choices.FP8_14_BIT
    if _current.get() is not None or name not in kernel_choices.current():
        return _current.get()
    return ADA if cuda.emulated_gpu() == cuda.ADA else HOPPER


@dataclass(frozen=True)
class Factor:
    """One factor of a product of FP8 matrices.

    Attributes:
        values: ``[outer, inner]``, unscaled, FP32 or BF16.
        dtype: the FP8 dtype that they come from; its subnormals all have the exponent of its smallest normal number.
        scales: FP32 ``[outer, ceil(inner / 128)]``, of blocks of 128; None for values with one scale per tensor, which
            the caller applies.
    """

    values: Tensor
    dtype: torch.dtype
    scales: Tensor | None = None

    def part(self, inner: slice) -> Factor:
        """Return a range of the inner dimension, which has to begin at a block."""
        blocks = slice(inner.start // _SCALED_BLOCK, -(-inner.stop // _SCALED_BLOCK))
        scales = None if self.scales is None else self.scales[:, blocks]
        return dataclasses.replace(self, values=self.values[:, inner], scales=scales)


def product(core: TensorCore, left: Factor, right: Factor, split: bool) -> Tensor:
    """Return ``right left^T``, ``[n, m]`` in FP32, added as ``core`` does.

    Args:
        left: ``[m, k]``.
        right: ``[n, k]``.
        split: whether ``use_split_accumulator`` is on. Without it no sum is promoted, unless there are block scales.

    Raises:
        ValueError: if one factor has block scales and the other has none, or if instructions do not fill a block.
    """
    if (left.scales is None) != (right.scales is None):
        raise ValueError("one factor has block scales and the other has none")
    if left.scales is not None and _SCALED_BLOCK % core.products:
        raise ValueError(f"instructions of {core.products} products do not fill blocks of {_SCALED_BLOCK}")
    rows = max(1, _TILE_ELEMENTS // max(1, left.values.shape[0]))
    a, b = _terms(left), _terms(right)
    inner, outer = b.values.shape
    interval = _SCALED_BLOCK if left.scales is not None else core.promote_every if split else max(1, inner)
    result = torch.cat([_tile(core, a, b.columns(start, rows), interval) for start in range(0, outer, rows)])
    if not (a.values.isfinite().all() and b.values.isfinite().all()):
        plain = b.values.t() @ a.values
        result = torch.where(plain.isfinite(), result, plain)
    return result


@dataclass(frozen=True)
class _Terms:
    """A factor as instructions read it, one product after the other.

    Attributes:
        values: ``[inner, outer]``, FP32.
        exponents: binary exponents of the values, int8; ``_NO_EXPONENT`` for 0.
        scales: those of ``Factor``, ``[outer, blocks]``.
    """

    values: Tensor
    exponents: Tensor
    scales: Tensor | None

    def columns(self, start: int, count: int) -> _Terms:
        part = slice(start, start + count)
        return _Terms(self.values[:, part], self.exponents[:, part], None if self.scales is None else self.scales[part])


def _terms(factor: Factor) -> _Terms:
    values = factor.values.t().float().contiguous()
    powers = power_of_two(values).clamp_(min=torch.finfo(factor.dtype).smallest_normal)
    exponents = (powers.view(torch.int32) >> _MANTISSA_BITS) - _EXPONENT_BIAS
    return _Terms(values, exponents.masked_fill_(values == 0, _NO_EXPONENT).to(torch.int8), factor.scales)


def power_of_two(values: Tensor) -> Tensor:
    """Return the largest power of two up to ``|values|``, FP32 normal numbers; 0 for 0."""
    return (values.view(torch.int32) & _EXPONENT_FIELD).view(torch.float32)


def truncated(values: Tensor, bits: int) -> Tensor:
    """Truncate FP32 values to a significand of ``bits`` bits."""
    return (values.view(torch.int32) & -(1 << (_FP32_BITS - bits))).view(torch.float32)


def _tile(core: TensorCore, a: _Terms, b: _Terms, interval: int) -> Tensor:
    """Return ``b a^T``; a running sum, times its block's scales, is added in FP32 after each ``interval`` products."""
    inner = a.values.shape[0]
    promoted = torch.zeros(b.values.shape[1], a.values.shape[1])
    at_once = max(1, min(core.products, _PRODUCTS_AT_ONCE // max(1, promoted.numel())))
    room = promoted.new_empty(at_once, *promoted.shape)
    for block, begin in enumerate(range(0, inner, interval)):
        running = torch.zeros_like(promoted)
        end = min(begin + interval, inner)
        for start in range(begin, end, core.products):
            running = _instruction(core, running, a, b, slice(start, min(start + core.products, end)), room)
        if a.scales is not None and b.scales is not None:
            running *= b.scales[:, block, None] * a.scales[:, block]
        promoted += running
    return promoted


def _instruction(core: TensorCore, running: Tensor, a: _Terms, b: _Terms, products: slice, room: Tensor) -> Tensor:
    """Return the running sum ``[n, m]`` after one instruction.

    Args:
        products: the range of products that it adds.
        room: ``[products at once, n, m]``, overwritten.
    """
    unit = torch.maximum(_largest_power(a, b, products, len(room)), power_of_two(running)).mul_(2.0 ** (1 - core.bits))
    # A product is below 4 times the largest power, so the sum of the integers below is exact in FP32 up to 2^24.
    fits_fp32 = (core.products + 1) << (core.bits + 1) <= 1 << _FP32_BITS
    exact = torch.float32 if fits_fp32 else torch.float64
    # Division by a power of two is exact and truncates in the same step; ``trunc_`` alone takes ten times as long.
    total = torch.div(running, unit, rounding_mode="trunc").to(exact)
    for part in _split(products, len(room)):
        terms = torch.mul(b.values[part, :, None], a.values[part, None], out=room[: part.stop - part.start])
        total += terms.div_(unit, rounding_mode="trunc").sum(0, dtype=exact)
    return truncated(_toward_zero(total.mul_(unit)), core.bits)


def _largest_power(a: _Terms, b: _Terms, products: slice, at_once: int) -> Tensor:
    """Return the largest power of two among the exponents of these products, ``[n, m]``.

    If all products are 0, it is the lowest power of any product; the running sum is a multiple of its unit.
    """
    tops = [(b.exponents[part, :, None] + a.exponents[part, None]).amax(0) for part in _split(products, at_once)]
    largest = functools.reduce(torch.maximum, tops).clamp_(min=_LOWEST_EXPONENT)
    return ((largest.int() + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)


def _split(products: slice, count: int) -> Iterator[slice]:
    """Split a range into ranges of at most ``count``."""
    return (slice(start, min(start + count, products.stop)) for start in range(products.start, products.stop, count))


def _toward_zero(values: Tensor) -> Tensor:
    """Truncate FP64 values to FP32, because rounding up could survive the next truncation; FP32 values stay."""
    if values.dtype == torch.float32:
        return values
    nearest = values.float()
    return torch.where(nearest.double().abs() > values.abs(), torch.nextafter(nearest, torch.zeros(())), nearest)


# TF32, BF16 and FP16 products as tensor cores add them: the option ``sums-25-bit`` of the CPU kernel ``generic_gemm``.
#
# One instruction adds 8 products of TF32, or 16 of 16-bit numbers, to a running sum. It aligns all terms to the largest
# exponent among them, truncates them to 25 fraction bits there, adds exactly, and truncates the result to FP32. MMA-Sim
# (arXiv 2511.10909) found this for ``wgmma``, and an H200 with cuBLAS 13.1 gives the same results
# (``parity.measuring.gpu_report.facts``).


_FRACTION = 25
_TF32_PRODUCTS, _SIXTEEN_BIT_PRODUCTS = 8, 16
_FP64_BIAS, _FP64_MANTISSA_BITS = 1023, 52
# Below the exponent of any product, and of any sum.
_LOWEST_TOP = -300


def cut_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``right left^T``, ``[n, m]``, with each instruction's sum, exact in FP64, truncated to FP32.

    Args:
        left: ``[m, k]``, BF16, FP16, or FP32 that holds TF32 numbers.
        right: ``[n, k]``, of the same dtype.
    """
    products = _SIXTEEN_BIT_PRODUCTS if left.dtype in SIXTEEN_BIT else _TF32_PRODUCTS
    a, b = (side.t().double().contiguous() for side in (left, right))
    a_exponents, b_exponents = (_exponents(x, torch.finfo(left.dtype).smallest_normal) for x in (a, b))
    room = a.new_empty(products, max(1, _PRODUCTS_AT_ONCE // (products * max(1, len(left)))), len(left))
    tiles = []
    for columns in _split(slice(0, len(right)), room.shape[1]):
        running = a.new_zeros(columns.stop - columns.start, len(left))
        for part in _split(slice(0, len(a)), products):
            tops = (b_exponents[part, columns, None] + a_exponents[part, None]).amax(0).clamp_(min=_LOWEST_TOP)
            tops = (tops.long() + _FP64_BIAS) << _FP64_MANTISSA_BITS
            unit = torch.maximum(tops.view(torch.float64), power_of_two_fp64(running)).mul_(2.0**-_FRACTION)
            terms = room[: part.stop - part.start, : len(running)]
            torch.mul(b[part, columns, None], a[part, None], out=terms)
            total = terms.div_(unit, rounding_mode="trunc").sum(0).add_(running.div_(unit, rounding_mode="trunc"))
            running = _to_fp32(total.mul_(unit))
        tiles.append(running.float())
    result = torch.cat(tiles)
    if not (left.isfinite().all() and right.isfinite().all()):
        plain = right.float() @ left.float().t()
        result = torch.where(plain.isfinite(), result, plain)
    return result


def _exponents(values: Tensor, smallest_normal: float) -> Tensor:
    """Return the int16 exponents of FP64 values, at least that of ``smallest_normal``; 0 gets a far lower one."""
    powers = power_of_two_fp64(values).clamp_(min=smallest_normal)
    exponents = (powers.view(torch.int64) >> _FP64_MANTISSA_BITS) - _FP64_BIAS
    return exponents.masked_fill_(values == 0, 2 * _LOWEST_TOP).to(torch.int16)


# MXFP8 and NVFP4 products as a Blackwell's tensor cores add them: an option of the CPU kernel ``generic_gemm``.
#
# Both align their terms to the largest exponent among these and the running sum, truncate them to a number of fraction
# bits there, add exactly, and truncate the result to FP32. These are MMA-Sim's models of ``tcgen05.mma`` (arXiv
# 2511.10909):
#
# ======  =============  =========================================================  =============
# format  products each  what is added                                              fraction bits
# ======  =============  =========================================================  =============
# MXFP8   32, one block  each product times its scales, exponents added             25
# NVFP4   64             the exact sum of 16 products times its scales, at the      35
#                        exponent of these scales
# ======  =============  =========================================================  =============
#
# All of this is exact in FP64.


_MXFP8_FRACTION, _NVFP4_FRACTION = 25, 35
_NVFP4_GROUPS = 4
_FP32_FRACTION = 23
# A product of two FP8 numbers has at most three fraction bits from each factor.
_PRODUCT_FRACTION = 6
_SMALLEST_E4M3 = 2.0**-6
_FP64_EXPONENT_FIELD = 0x7FF << 52


@dataclass(frozen=True)
class BlockFactor:
    """One factor of a product of matrices with a scale per block.

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
        """Return the number of elements that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def part(self, inner: slice) -> BlockFactor:
        """Return a range of the inner dimension, which has to consist of whole blocks."""
        scales = self.scales[:, inner.start // self.block : inner.stop // self.block]
        return dataclasses.replace(self, values=self.values[:, inner], scales=scales)


def block_product(left: BlockFactor, right: BlockFactor) -> Tensor:
    """Return ``right left^T``, ``[n, m]`` in FP32, added as a Blackwell's tensor cores do.

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
    """Return the running sum after one instruction, before it is truncated to FP32."""
    assert left.dtype is not None
    assert right.dtype is not None
    a, b = left.values.double(), right.values.double()
    a_powers, b_powers = _powers(a, left.dtype), _powers(b, right.dtype)
    scale = right.scales.double() * left.scales.double().t()
    total = (b @ a.t()).mul_(scale).add_(running)
    # Nothing is truncated if even the smallest possible term has no bit below the largest possible unit.
    unit = torch.maximum(_largest(b_powers, a_powers) * scale, power_of_two_fp64(running)) * 2.0**-_MXFP8_FRACTION
    lowest = _smallest(b_powers, a_powers) * scale * 2.0**-_PRODUCT_FRACTION
    own_lowest = torch.where(running == 0, torch.inf, power_of_two_fp64(running) * 2.0**-_FP32_FRACTION)
    row, column = (torch.minimum(lowest, own_lowest) < unit).nonzero(as_tuple=True)
    if len(row):
        terms, before, scale = b[row] * a[column], running[row, column], scale[row, column]
        powers = (b_powers[row] * a_powers[column]).amax(1) * scale
        unit = torch.maximum(powers, power_of_two_fp64(before)) * 2.0**-_MXFP8_FRACTION
        unit = torch.where(unit > 0, unit, 1.0)
        cut = (terms * (scale / unit)[:, None]).trunc_().sum(1) + (before / unit).trunc_()
        total[row, column] = cut * unit
    return total


def _add_nvfp4(running: Tensor, left: BlockFactor, right: BlockFactor) -> Tensor:
    """Return the running sum after one instruction, before it is truncated to FP32."""
    terms, powers = [], []
    for index in range(left.scales.shape[1]):
        part = slice(index * left.block, (index + 1) * left.block)
        a_scale, b_scale = left.scales[:, index].double(), right.scales[:, index].double()
        term = (right.values[:, part].float() @ left.values[:, part].float().t()).double()
        term.mul_(b_scale[:, None] * a_scale)
        a_power, b_power = (power_of_two_fp64(scale).clamp_(min=_SMALLEST_E4M3) for scale in (a_scale, b_scale))
        powers.append(torch.where(term == 0, 0.0, b_power[:, None] * a_power))
        terms.append(term)
    largest = torch.stack([*powers, power_of_two_fp64(running)]).amax(0)
    unit = torch.where(largest > 0, largest, 1.0) * 2.0**-_NVFP4_FRACTION
    return sum(((term / unit).trunc_() for term in terms), (running / unit).trunc_()) * unit


def _powers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the power of two of each FP8 value's exponent; 0 for 0."""
    return torch.where(values == 0, 0.0, power_of_two_fp64(values).clamp_(min=torch.finfo(dtype).smallest_normal))


def _largest(b_powers: Tensor, a_powers: Tensor) -> Tensor:
    """Return an upper bound on the powers of each element's products."""
    return b_powers.amax(1)[:, None] * a_powers.amax(1)


def _smallest(b_powers: Tensor, a_powers: Tensor) -> Tensor:
    """Return a lower bound on the powers of each element's products that are not 0."""
    b_least, a_least = (torch.where(powers == 0, torch.inf, powers).amin(1) for powers in (b_powers, a_powers))
    return b_least[:, None] * a_least


def power_of_two_fp64(values: Tensor) -> Tensor:
    """Return the largest power of two up to ``|values|``, FP64 normal numbers; 0 for 0."""
    return (values.view(torch.int64) & _FP64_EXPONENT_FIELD).view(torch.float64)


def _to_fp32(values: Tensor) -> Tensor:
    """Truncate FP64 values to numbers of FP32."""
    nearest = values.float()
    toward_zero = torch.nextafter(nearest, torch.zeros(()))
    return torch.where(nearest.double().abs() > values.abs(), toward_zero, nearest).double()
