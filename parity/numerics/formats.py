"""Round operands of GEMMs to their formats, and define which operands and results a precision rounds.

Each format is a function that rounds a matrix to the format. It takes FP32 values ``[rows, columns]`` and the dimension
that the GEMM sums over, along which blocks share a scale; it returns FP32 values of the same shape. A scale for the
whole tensor comes from its largest magnitude, or from an amax that a kernel took earlier, before it rounded the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

# Number formats of GEMM operands. Exact ties may round either way, because the rounding model predicts the size of an
# error and not its bits.


class Format(Protocol):
    """The signature of every format. Formats without a scale for the whole tensor ignore ``amax``."""

    def __call__(self, x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor: ...


# The masks of the exponents of FP32 and FP64 numbers. These bits are the power of two at or below the magnitude.
_FP32_EXPONENT = 0xFF << 23
_FP64_EXPONENT = 0x7FF << 52
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tf32(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Round FP32 values, |x| < 2^114, to nearest with 10 mantissa bits, by Veltkamp's splitting.

    Source: T. J. Dekker, "A floating-point technique for extending the available precision", 1971, section 5. A tensor
    core itself drops the low bits. That cuBLAS rounds follows from the error that PyTorch's documentation gives for an
    A100 ("TensorFloat-32 on Ampere (and later) devices"): at most 0.1747 in a product of Gaussian matrices of 10240,
    where rounding to nearest predicts 0.16, and truncation more than 0.4.
    """
    scaled = x * (2.0**13 + 1.0)
    return scaled.sub_(scaled - x)


def tf32_truncated(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Truncate FP32 values to 10 mantissa bits, like a tensor core that reads the upper bits of a word."""
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def e4m3(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Round to float8_e4m3fn with one scale for the tensor, which maps its largest magnitude to 448."""
    return _cast_to_fp8(x, largest(x) if amax is None else amax, torch.float8_e4m3fn)


def e5m2(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Round to float8_e5m2 with one scale for the tensor, which maps its largest magnitude to 57344."""
    return _cast_to_fp8(x, largest(x) if amax is None else amax, torch.float8_e5m2)


def e4m3_blocks(length: int) -> Format:
    """Return float8_e4m3fn with a power-of-two scale for each ``length`` elements along the summed dimension.

    The scale is the largest with which no element overflows. TE's block scaling (length 128) rounds ``448 / amax`` down
    to a power of two. MXFP8 (length 32, OCP Microscaling Formats v1.0) rounds ``amax / 448`` up, which is equivalent.
    """

    def blocks(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
        return _in_blocks(x, dim, length, _cast_power_of_two)

    return blocks


def e4m3_squares(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Round weights to float8_e4m3fn with a power-of-two scale for each square of 128 by 128."""
    return _in_squares(x, 128, lambda block: _cast_power_of_two(block, (1, 3)))


def nvfp4_blocks(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Round to E2M1 with an E4M3 scale for each 16 elements along the summed dimension, and an FP32 tensor scale.

    Source: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, section 2.
    """
    tensor_amax = largest(x) if amax is None else amax
    return _in_blocks(x, dim, 16, lambda block, dims: _cast_nvfp4(block, dims, tensor_amax, _nearest_e2m1))


def nvfp4_stochastic(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Round gradients as ``nvfp4_blocks`` does, but up or down at random, without bias (ibid., section 4.3)."""
    tensor_amax = largest(x) if amax is None else amax
    return _in_blocks(x, dim, 16, lambda block, dims: _cast_nvfp4(block, dims, tensor_amax, _stochastic_e2m1))


def nvfp4_squares(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Round weights as ``nvfp4_blocks`` does, but with a scale for each square of 16 by 16 (ibid., section 4.4)."""
    tensor_amax = largest(x) if amax is None else amax
    return _in_squares(x, 16, lambda block: _cast_nvfp4(block, (1, 3), tensor_amax, _nearest_e2m1))


def is_alike_both_ways(to_format: Format | None) -> bool:
    """Return whether a rounded matrix is the same whichever dimension a GEMM sums over; False for unknown formats.

    Args:
        to_format: None for a matrix that is not rounded.
    """
    return to_format in (None, tf32, tf32_truncated, e4m3, e5m2, e4m3_squares, nvfp4_squares)


def hadamard(x: Tensor, dim: int) -> Tensor:
    """Rotate each 16 elements along a dimension by the orthogonal 16 by 16 Hadamard matrix.

    A matrix whose dimension is not a multiple of 16 is returned unchanged.
    """
    rotated = x.movedim(dim, -1)
    if rotated.shape[-1] % 16:
        return x
    matrix = x.new_ones(1, 1)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    blocks = rotated.unflatten(-1, (-1, 16)) @ (matrix / 4)
    return blocks.flatten(-2).movedim(-1, dim)


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbouring numbers of ``dtype`` at each element; near zero, of subnormals.

    Args:
        x: FP32 or FP64. An infinity counts as the largest finite number of this dtype.
    """
    info = torch.finfo(dtype)
    magnitude = x.abs().clamp_(info.smallest_normal, torch.finfo(x.dtype).max)
    is_fp64 = x.dtype is torch.float64
    bits = magnitude.view(torch.int64 if is_fp64 else torch.int32)
    return bits.bitwise_and_(_FP64_EXPONENT if is_fp64 else _FP32_EXPONENT).view(x.dtype).mul_(info.eps)


def is_exact(x: Tensor) -> Tensor:
    """Return which numbers are whole or have at most 16 significant bits, as 1 in 256 has that was rounded to FP32.

    Positions, counts, masks and their simple fractions are such numbers, which no rounding changes.
    """
    return (x == x.round()) | (x.float().view(torch.int32) & 0xFF == 0)


def largest(x: Tensor) -> Tensor:
    """Return the largest magnitude as a scalar tensor, or 0 if there are no elements."""
    return torch.maximum(x.amax(), -x.amin()) if x.numel() else x.new_zeros(())


def nearest_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 values to the nearest FP8 values, ties to even; values that are not finite become NaN.

    Adding and subtracting a number whose last place in FP32 is the dtype's last place gives the same result as casting
    to the dtype and back, in an eighth of the time (E4M3, torch 2.13 on a CPU).

    Args:
        x: FP32, of any shape, with no value beyond the dtype's largest.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    info, fp32 = torch.finfo(dtype), torch.finfo(torch.float32)
    exponent = (x.view(torch.int32) & _FP32_EXPONENT).view(torch.float32)
    last_place = exponent.clamp_(min=info.smallest_normal).mul_(1.5 * info.eps / fp32.eps)
    return (x + last_place).sub_(last_place)


def _cast_to_fp8(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    scale = torch.where(amax > 0, torch.finfo(dtype).max / amax, torch.ones_like(amax))
    return nearest_fp8(x * scale, dtype).div_(scale)


def _cast_power_of_two(block: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Round to E4M3 with the largest power-of-two scale with which nothing overflows."""
    amax = block.abs().amax(dims, keepdim=True)
    exponent = torch.where(amax > 0, (448.0 / amax).log2().floor(), 0.0).clamp(max=127)
    one = torch.ones_like(amax)
    return nearest_fp8(block * torch.ldexp(one, exponent), torch.float8_e4m3fn).mul_(torch.ldexp(one, -exponent))


def _cast_nvfp4(block: Tensor, dims: tuple[int, ...], amax: Tensor, to_e2m1: Callable[[Tensor], Tensor]) -> Tensor:
    global_scale = torch.where(amax > 0, 448.0 * 6.0 / amax, torch.ones_like(amax))
    block_scale = block.abs().amax(dims, keepdim=True) / 6.0 * global_scale
    block_scale = block_scale.to(torch.float8_e4m3fn).to(block.dtype)
    to_block = torch.where(block_scale > 0, global_scale / block_scale, 0.0)
    return to_e2m1((block * to_block).clamp(-6.0, 6.0)) * block_scale / global_scale


def _nearest_e2m1(x: Tensor) -> Tensor:
    values = x.new_tensor(_E2M1_VALUES)
    midpoints = (values[1:] + values[:-1]) / 2
    return values[torch.bucketize(x.abs().contiguous(), midpoints)].copysign(x)


def _stochastic_e2m1(x: Tensor) -> Tensor:
    values = x.new_tensor(_E2M1_VALUES)
    below = (torch.bucketize(x.abs().contiguous(), values, right=True) - 1).clamp(max=len(values) - 2)
    low, high = values[below], values[below + 1]
    chance = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x.device)
    return torch.where(chance < (x.abs() - low) / (high - low), high, low).copysign(x)


def _in_blocks(x: Tensor, dim: int, length: int, cast: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Tensor:
    """Cast a matrix in blocks along a dimension, with the last block padded with zeros if necessary.

    ``cast`` gets a view in which the dimension is split in two, the blocks and the elements of a block, and the index
    of the second.
    """
    dim %= 2
    size = x.shape[dim]
    missing = -size % length
    padded = F.pad(x, (0, missing) if dim else (0, 0, 0, missing)) if missing else x
    blocks = padded.unflatten(dim, (math.ceil(size / length), length))
    return cast(blocks, (dim + 1,)).flatten(dim, dim + 1).narrow(dim, 0, size)


def _in_squares(x: Tensor, length: int, cast: Callable[[Tensor], Tensor]) -> Tensor:
    """Cast a matrix, padded with zeros, through a view of the shape ``[row blocks, length, column blocks, length]``."""
    rows, columns = x.shape
    missing = (0, -columns % length, 0, -rows % length)
    padded = F.pad(x, missing) if any(missing) else x
    blocks = padded.unflatten(1, (-1, length)).unflatten(0, (-1, length))
    return cast(blocks).flatten(2).flatten(0, 1)[:rows, :columns]


# The roundings of a precision: operands to formats, stored results to a dtype, and which of these are applied.


OperandPart = Literal["weights", "inputs", "gradients"]
Part = Literal["weights", "inputs", "gradients", "storage", "attention"]
PARTS: frozenset[Part] = frozenset(get_args(Part))


@dataclass(frozen=True)
class Rounding:
    """The roundings of a precision.

    Attributes:
        storage: dtype of stored activations, gradients and GEMM results.
        inputs: format of a linear layer's inputs in its GEMMs; None for ``storage``.
        weights: format of its weights; None for ``storage``.
        gradients: format of the gradients with respect to its outputs; None for ``storage``.
        rotate_wgrad: whether the two operands of a weight gradient's GEMM are first rotated by Hadamard matrices, which
            cancel in the product.
        parts: which roundings are applied. ``weights``, ``inputs`` and ``gradients`` are those of a linear layer's
            operands. ``attention`` stands for those of the operands of attention's batched GEMMs and of its scores, and
            ``storage`` for other stored results: of linear layers, of attention, of sums, and of the module.
    """

    storage: torch.dtype
    inputs: Format | None = None
    weights: Format | None = None
    gradients: Format | None = None
    rotate_wgrad: bool = False
    parts: frozenset[Part] = PARTS

    def store(self, x: Tensor) -> Tensor:
        """Return ``x`` rounded to the precision's dtype, in its own dtype. Integers and complex numbers stay."""
        return x if x.dtype == self.storage or not x.is_floating_point() else x.to(self.storage).to(x.dtype)

    def store_part(self, x: Tensor, part: Part = "storage") -> Tensor:
        """Return ``x`` as ``store`` does if this part's roundings are applied, or unchanged."""
        return self.store(x) if part in self.parts else x

    def operand_format(self, part: OperandPart) -> Format | None:
        """Return the format of a linear layer's operand, or None if the GEMM reads it as it is stored."""
        if part not in self.parts:
            return None
        return {"weights": self.weights, "inputs": self.inputs, "gradients": self.gradients}[part]
