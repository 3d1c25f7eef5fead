"""E2M1, the four-bit float of NVFP4, and the two levels of its scales: one for the tensor, and one for each block.

E2M1 holds 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, two to a byte. Bits as in the OCP Microscaling Formats
specification 1.0; roundings as of PTX's ``cvt.rn.satfinite.e2m1x2.f32`` and ``cvt.rs.satfinite.e2m1x4.f32``, which
TransformerEngine 2.20.2 uses (``common/util/ptx.cuh``).
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from parity.cpu import float8

LIMIT = 6.0

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN_BIT = 8
_LARGEST_CODE = 7.0
# A code follows from the upper 12 bits of a number rounded to odd: no tie needs more than two mantissa bits.
_INDEX_SHIFT, _INDICES = 20, 1 << 12
_BELOW_INDEX = (1 << _INDEX_SHIFT) - 1


def encode(values: Tensor) -> Tensor:
    """Return uint8 codes 0 to 15 of FP32 values: nearest, ties to the even code, saturating; NaN is 6, as in PTX.

    Zeros keep their sign.
    """
    bits = values.contiguous().view(torch.int32)
    # Rounded to odd: the last bit kept says whether anything below it was set. Ties have it 0 and stay ties.
    index = bits & _BELOW_INDEX
    index += _BELOW_INDEX
    index |= bits
    index >>= _INDEX_SHIFT
    index &= _INDICES - 1
    return _codes().index_select(0, index.view(-1)).view(values.shape)


def encode_stochastically(values: Tensor) -> Tensor:
    """Round each value to a neighbouring code, up with a probability that makes it the mean; saturating.

    The random numbers are PyTorch's, of its default generator: like the GPU's (Philox, seeded by PyTorch) in
    distribution, not in bits. Each has 16 bits: a probability is rounded down to a multiple of ``2**-16``.
    """
    absolute = values.abs()
    # Where a value lies among the codes, k + 0.5 in the middle of k and k + 1: linear between 0, 2, 4 and 6.
    position = torch.minimum(2 * absolute, absolute + 2)
    position = torch.minimum(position, absolute.mul_(0.5).add_(4), out=position)
    words = torch.empty(-(-values.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    signed = words.view(torch.int16)[: values.numel()].view(values.shape)
    position.add_(signed, alpha=2.0**-16).add_(0.5)
    codes = torch.fmin(position, torch.tensor(_LARGEST_CODE), out=position).to(torch.uint8)
    return codes.add_(_is_negative(values), alpha=_SIGN_BIT)


def pack(codes: Tensor) -> Tensor:
    """Pack codes ``[..., n]`` into bytes ``[..., n / 2]``, the first of a pair in the low bits."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(packed: Tensor) -> Tensor:
    """Unpack bytes ``[..., n / 2]`` into codes ``[..., n]``."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def decode(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values ``[..., n]`` of bytes ``[..., n / 2]``, exact in FP32 and in BF16."""
    pairs = _pairs(dtype).index_select(0, packed.reshape(-1).int())
    return pairs.view(*packed.shape[:-1], 2 * packed.shape[-1])


def transpose(packed: Tensor) -> Tensor:
    """Return the bytes of the transpose of a packed matrix ``[m, n]``."""
    return pack(unpack(packed).t().contiguous())


def _is_negative(values: Tensor) -> Tensor:
    """Return which values have a sign to keep: all but NaNs, which lose theirs."""
    negative = values.signbit()
    return negative & ~values.isnan() if values.numel() and values.sum().isnan() else negative


@functools.cache
def _codes() -> Tensor:
    """Return the code of each number that the upper 12 bits of an FP32 number spell."""
    numbers = (torch.arange(_INDICES, dtype=torch.int32) << _INDEX_SHIFT).view(torch.float32)
    codes = torch.bucketize(numbers.abs(), _midpoints(), out_int32=True, right=True).to(torch.uint8)
    return codes.add_(_is_negative(numbers), alpha=_SIGN_BIT)


@functools.cache
def _midpoints() -> Tensor:
    """Return where each code but the first begins: a tie belongs to the even of its two codes."""
    middle = [(low + high) / 2 for low, high in itertools.pairwise(_MAGNITUDES)]
    upper = torch.tensor(math.inf)
    return torch.stack(
        [torch.tensor(point) if code % 2 else torch.nextafter(torch.tensor(point), upper) for code, point in
         enumerate(middle)]
    )  # fmt: skip


@functools.cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """Return the two values of each of the 256 bytes."""
    magnitudes = torch.tensor(_MAGNITUDES, dtype=dtype)
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)


# The two levels of NVFP4's scales: one for the tensor, from its amax, and one for each block.
#
# Follows ``common/cast/nvfp4/core_nvfp4.cuh`` of TransformerEngine 2.20.2. Encoding scales multiply values before they
# are cast to E2M1; decoding scales undo them, and a block's is what is stored, in E4M3.


E4M3 = torch.float8_e4m3fn
_LARGEST_FP32 = torch.finfo(torch.float32).max


def e4m3_limit(of: Any) -> float:
    """Return the largest block scale of a TE quantizer or tensor: 448, or 256 to leave room for 4over6."""
    return float(getattr(of, "nvfp4_e4m3_max", getattr(of, "_nvfp4_e4m3_max", 448)))


def global_scale(amax: Tensor, limit: float) -> Tensor:
    """Return what maps an amax to the largest code times the largest block scale (``limit``), FP32.

    1 where the amax is 0 or infinite, and at most the largest FP32.
    """
    scale = torch.full_like(amax, limit * LIMIT).div(amax).clamp(max=_LARGEST_FP32)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def decoding_scale(block_amax: Tensor, scale: Tensor) -> Tensor:
    """Return what undoes the scaling of a block with this amax, FP32; it is rounded to E4M3 before it is used.

    Args:
        block_amax: FP32, one a block.
        scale: as of ``global_scale``, broadcast to the blocks.
    """
    return (block_amax * (scale * (1.0 / LIMIT))).clamp_(max=_LARGEST_FP32)


def encoding_scale(decoding: Tensor, scale: Tensor) -> Tensor:
    """Return what multiplies the values of each block before they are cast, at most the largest FP32.

    Args:
        decoding: E4M3 bytes, one a block.
        scale: as of ``global_scale``, broadcast to the blocks.
    """
    return (float8.decode(decoding, E4M3) * scale.reciprocal()).reciprocal_().clamp_(max=_LARGEST_FP32)
