"""Model what GEMM kernels of real GPUs may do beyond rounding operands and results once (``parity.kernel_choices``).

Some of it leans: cutting TF32 operands shrinks every product, and a tensor core that keeps 14 bits of a sum loses the
low bits of terms of one sign. What leans is granted along the change that it makes, and nowhere else
(``parity.judging.granted``). The rest is noise: partial sums that are rounded to 16 bits make errors larger
everywhere. This is the rounding model's own account: it shares no code with the CPU kernels' emulation in
``parity.cpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from parity.cpu.kernel_choices import (
    ATTENTION_16_BIT_SUMS,
    FP8_14_BIT,
    FP8_BLOCK_14_BIT,
    SPLIT_K_IN_OUTPUT_TYPE,
    TF32_TRUNCATED,
)
from parity.formats import e4m3, e4m3_squares, tf32, tf32_truncated
from parity.rounding.parts import Rounding

# Parts of K whose sums are rounded: errors of 4 parts are 1.8 times those of one rounding, of 16 parts 3.1 times,
# which is within a limit of 1.7 times those of 4.
SPLITS = 4
_SMALLEST_PART = 32  # terms, which one instruction sums
# One instruction of a Hopper adds 32 products to a sum of 14 bits (arXiv 2511.10909); FP32 takes over every 128.
_PRODUCTS = 32
_SUM_BITS = 14
_PROMOTE_EVERY = 128
_TILE = 1 << 20  # products that are held at once
_SAMPLED = 64  # rows and columns
# What E4M3 costs a product of normal numbers, relative to it: two errors, each uniform within 2^-4 of a mantissa.
_FORMAT_ERROR = 0.037
_NEXT_TO_NOTHING = 0.05  # of the format's error
_LARGEST_MANTISSA = 1.75  # of E4M3's and of E5M2's largest number, to which a tensor's scale maps its largest magnitude


def leaning(rounding: Rounding) -> tuple[str, ...]:
    """Name what kernels of this rounding may do that leans."""
    if rounding.inputs is tf32:
        return (TF32_TRUNCATED,)
    if rounding.weights is e4m3:
        return (FP8_14_BIT,)
    return (FP8_BLOCK_14_BIT,) if rounding.weights is e4m3_squares else ()


def as_kernels_lean(rounding: Rounding) -> str:
    """Say what is granted to kernels that lean, for a note."""
    return "along the change that kernels make with " + " or ".join(leaning(rounding))


def noisy_sums(rounding: Rounding) -> tuple[str, ...]:
    """Name what kernels of this rounding may do that is noise."""
    return () if rounding.storage is torch.float32 else (SPLIT_K_IN_OUTPUT_TYPE, ATTENTION_16_BIT_SUMS)


def as_read(rounding: Rounding, kernels: tuple[str, ...]) -> Rounding:
    """Return the rounding with the operands' formats as the kernels read them."""
    if TF32_TRUNCATED not in kernels:
        return rounding
    formats = (rounding.inputs, rounding.weights, rounding.gradients)
    inputs, weights, gradients = (tf32_truncated if one is tf32 else one for one in formats)
    return replace(rounding, inputs=inputs, weights=weights, gradients=gradients)


def in_stored_parts(left: Tensor, right: Tensor, store: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return a product whose partial sums over K are stored before they are added; None where K has no two parts.

    Args:
        left: ``[..., m, k]``, FP32.
        right: ``[..., k, n]``, FP32.
        store: rounds to the output's type.
    """
    parts = min(SPLITS, left.shape[-1] // _SMALLEST_PART)
    if parts < 2:
        return None
    pairs = zip(left.tensor_split(parts, -1), right.tensor_split(parts, -2), strict=True)
    first, *others = (store(one @ other) for one, other in pairs)
    for other in others:
        first = store(first + other)
    return first


def lost_in_sums(left: Tensor, right: Tensor, kernels: tuple[str, ...], backward: bool) -> Tensor | None:
    """Compute what a Hopper's FP8 tensor cores leave out of a product.

    One instruction shifts its products and the running sum to the largest exponent among them, and cuts what lies
    below 13 fraction bits there. Terms of both signs lose little by that, terms of one sign more the longer the sum
    is. A sample of the product tells whether that is of any account; where it is not, the rest is not computed.

    Args:
        left: ``[m, k]``, dequantized, FP32.
        right: ``[k, n]``, dequantized, FP32.
        kernels: names of what they do.
        backward: whether sums are promoted to FP32 every 128 products, as TE asks for in the backward pass alone
            (``use_split_accumulator``, ``pytorch/module/base.py`` of 2.20.2); with block scales they always are.

    Returns:
        ``[m, n]``, FP32: the exact product minus the one that such kernels compute. None where they keep FP32 sums, or
        lose next to nothing.
    """
    has_blocks = FP8_BLOCK_14_BIT in kernels
    if not (has_blocks or FP8_14_BIT in kernels) or not left.numel() or not right.numel():
        return None
    interval = _PROMOTE_EVERY if has_blocks or backward else left.shape[-1]
    # Exponents are those of codes; the scales of blocks are powers of two, which move all of them alike.
    a, b = (left, right) if has_blocks else (_codes(left), _codes(right))
    some, others = _sample(a), _sample(b.t()).t()
    rounding = _FORMAT_ERROR * (some.square() @ others.square()).sum().sqrt()
    if torch.linalg.vector_norm(some @ others - _summed(some, others, interval)) < _NEXT_TO_NOTHING * rounding:
        return None
    rows = max(1, _TILE // (b.shape[1] * _PRODUCTS))
    computed = torch.cat([_summed(part, b, interval) for part in a.split(rows)])
    scale = 1.0 if has_blocks else (_scale(left) * _scale(right)).item()
    return (a @ b).sub_(computed).mul_(scale)


def _scale(x: Tensor) -> Tensor:
    """Return what codes are multiplied by, but for powers of two."""
    return (x.abs().amax() / _LARGEST_MANTISSA).clamp(min=torch.finfo(torch.float32).tiny)


def _codes(x: Tensor) -> Tensor:
    """Return the FP8 numbers, of few bits, whose multiples the matrix holds; but for a power of two."""
    return tf32(x / _scale(x))


def _sample(x: Tensor) -> Tensor:
    """Return rows from all over a matrix."""
    return x[:: max(1, len(x) // _SAMPLED)][:_SAMPLED]


def _summed(a: Tensor, b: Tensor, interval: int) -> Tensor:
    """Multiply ``[m, k]`` by ``[k, n]``, promoting the running sum every ``interval`` products."""
    promoted = running = a.new_zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], _PRODUCTS):
        if start % interval == 0:
            promoted, running = promoted + running, torch.zeros_like(running)
        left, right = a[:, start : start + _PRODUCTS, None], b[start : start + _PRODUCTS]
        largest = torch.maximum((_power_of_two(left) * _power_of_two(right)).amax(1), _power_of_two(running))
        unit = torch.where(largest > 0, largest, 1.0).mul_(2.0 ** (1 - _SUM_BITS))
        total = (left * right).div_(unit[:, None]).trunc_().sum(1).add_((running / unit).trunc_())
        running = _cut(total.mul_(unit))
    return promoted + running


def _power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two up to each magnitude; 0 for 0."""
    return (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)


def _cut(x: Tensor) -> Tensor:
    """Cut to the bits of a sum, toward zero."""
    return (x.view(torch.int32) & -(1 << (24 - _SUM_BITS))).view(torch.float32)
