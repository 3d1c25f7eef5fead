"""NVFP4: E2M1 with an E4M3 scale per block of 16 and an FP32 amax per tensor, the format of ``NVFP4BlockScaling``.

Follows TransformerEngine 2.20.2: ``NVFP4Quantizer`` in ``csrc/quantizer.cpp`` for layouts,
``common/cast/nvfp4/core_nvfp4.cuh`` and ``quantize_transpose_nvfp4.cuh`` for arithmetic; the recipe is that of
https://arxiv.org/abs/2509.25149. For values ``[*leading, k]``, m of them in a column:

==========  =======  ======================  ========================================
direction   a block  codes, two to a byte    scale_inv, E4M3 bytes, padded with zeros
==========  =======  ======================  ========================================
rowwise     1 x 16   ``[*leading, k / 2]``   ``[m up to 128, k / 16 up to 4]``
columnwise  16 x 1   ``[k, m / 2]``          ``[k up to 128, m / 16 up to 4]``
==========  =======  ======================  ========================================

"m up to 128" is m rounded up to a multiple of 128. The value of a code is ``E2M1 * scale_inv * amax / (6 * 448)``. With
2D quantization a block is 16 x 16, and its scale is repeated 16 times. With a random Hadamard transform, the columnwise
data and its amax are those of the transformed values. ``swizzle.py`` describes the order of scales if the quantizer
optimizes them for a GEMM.

``NVTE_USE_FAST_MATH`` causes a warning and changes nothing, because the approximations of its kernels (reciprocals,
scales in BF16, values that skip a rounding to BF16) are not documented to the bit.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_on_cpu import block_scaling, cuda, float8, swizzle, versions

# E2M1, a four-bit float. Its values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, and a byte holds two of them.
#
# Bits follow the OCP Microscaling Formats specification 1.0. Roundings are those of PTX's
# ``cvt.rn.satfinite.e2m1x2.f32`` and ``cvt.rs.satfinite.e2m1x4.f32``, which TransformerEngine 2.20.2 uses
# (``common/util/ptx.cuh``).


LIMIT = 6.0

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN_BIT = 8
_LARGEST_CODE = 7.0
# The upper 12 bits of a number, rounded to odd, determine its code, because no tie needs more than two mantissa bits.
_INDEX_SHIFT, _INDICES = 20, 1 << 12
_BELOW_INDEX = (1 << _INDEX_SHIFT) - 1


def codes_of(values: Tensor) -> Tensor:
    """Round FP32 values to the nearest uint8 codes, 0 to 15; ties to the even code, saturating, NaN to 6 as in PTX.

    Zeros keep their sign.
    """
    bits = values.contiguous().view(torch.int32)
    # Rounding to odd sets the last kept bit if any bit below it is set. In ties it is 0, so they stay ties.
    index = bits & _BELOW_INDEX
    index += _BELOW_INDEX
    index |= bits
    index >>= _INDEX_SHIFT
    index &= _INDICES - 1
    return _codes().index_select(0, index.view(-1)).view(values.shape)


def codes_at_random(values: Tensor) -> Tensor:
    """Round each value to a neighbouring code at random so that the mean is the value itself; saturating.

    The random numbers come from PyTorch's default generator. They have the distribution of the GPU's (Philox, seeded by
    PyTorch), but not the same bits. Each has 16 bits, so a probability is rounded down to a multiple of ``2**-16``.
    """
    absolute = values.abs()
    # The position of a value among the codes, k + 0.5 midway between codes k and k + 1; linear between 0, 2, 4 and 6.
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


def values_of(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values ``[..., n]`` of bytes ``[..., n / 2]``, exact in FP32 and in BF16."""
    pairs = _pairs(dtype).index_select(0, packed.reshape(-1).int())
    return pairs.view(*packed.shape[:-1], 2 * packed.shape[-1])


def transpose(packed: Tensor) -> Tensor:
    """Return the bytes of the transpose of a packed matrix ``[m, n]``."""
    return pack(unpack(packed).t().contiguous())


def _is_negative(values: Tensor) -> Tensor:
    """Return which values are negative; NaNs are not, because they lose their sign."""
    negative = values.signbit()
    return negative & ~values.isnan() if values.numel() and values.sum().isnan() else negative


@functools.cache
def _codes() -> Tensor:
    """Return a table of codes, indexed by the upper 12 bits of an FP32 number."""
    numbers = (torch.arange(_INDICES, dtype=torch.int32) << _INDEX_SHIFT).view(torch.float32)
    codes = torch.bucketize(numbers.abs(), _midpoints(), out_int32=True, right=True).to(torch.uint8)
    return codes.add_(_is_negative(numbers), alpha=_SIGN_BIT)


@functools.cache
def _midpoints() -> Tensor:
    """Return the smallest number of each code but the first; a tie belongs to the even one of its two codes."""
    middle = [(low + high) / 2 for low, high in itertools.pairwise(_MAGNITUDES)]
    upper = torch.tensor(math.inf)
    return torch.stack(
        [torch.tensor(point) if code % 2 else torch.nextafter(torch.tensor(point), upper) for code, point in
         enumerate(middle)]
    )  # fmt: skip


@functools.cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """Return a table of the two values of each of the 256 bytes."""
    magnitudes = torch.tensor(_MAGNITUDES, dtype=dtype)
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)


# The two levels of NVFP4's scales: one for the tensor, from its amax, and one for each block.
#
# Follows ``common/cast/nvfp4/core_nvfp4.cuh`` of TransformerEngine 2.20.2. Encoding scales multiply values before they
# are cast to E2M1. Decoding scales undo this; a block's decoding scale is stored, in E4M3.


E4M3 = torch.float8_e4m3fn
_LARGEST_FP32 = torch.finfo(torch.float32).max


def e4m3_limit(of: Any) -> float:
    """Return the largest block scale of a TE quantizer or tensor: 448, or 256 to leave room for 4over6."""
    return float(getattr(of, "nvfp4_e4m3_max", getattr(of, "_nvfp4_e4m3_max", 448)))


def global_scale(amax: Tensor, limit: float) -> Tensor:
    """Return the FP32 factor that maps an amax to the largest code times the largest block scale (``limit``).

    It is 1 if the amax is 0 or infinite, and at most the largest FP32 number.
    """
    scale = torch.full_like(amax, limit * LIMIT).div(amax).clamp(max=_LARGEST_FP32)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def decoding_scale(block_amax: Tensor, scale: Tensor) -> Tensor:
    """Return the FP32 factor that undoes the scaling of a block with this amax, not yet rounded to E4M3.

    Args:
        block_amax: FP32, one per block.
        scale: the result of ``global_scale``, broadcast to the blocks.
    """
    return (block_amax * (scale * (1.0 / LIMIT))).clamp_(max=_LARGEST_FP32)


def encoding_scale(decoding: Tensor, scale: Tensor) -> Tensor:
    """Return the factor of each block's values before they are cast, at most the largest FP32 number.

    Args:
        decoding: E4M3 bytes, one per block.
        scale: the result of ``global_scale``, broadcast to the blocks.
    """
    return (float8.decode(decoding, E4M3) * scale.reciprocal()).reciprocal_().clamp_(max=_LARGEST_FP32)


# 4over6: for each block the better of two scales, one that maps its amax to 6 and one that maps it to 4.
#
# Follows TransformerEngine 2.20.2: ``common/cast/nvfp4/quantize_4over6_nvfp4.cuh`` and TE's own reference,
# ``custom_recipes/reference_nvfp4.py``. E2M1 has nothing between 4 and 6, so a block whose values crowd there is better
# served by a scale 1.5 times as large.


@dataclass(frozen=True)
class _Choice:
    """Describe how the two scales are compared.

    Attributes:
        amax: FP32 amax of the tensor, ``[1, 1]``, or of each row, ``[rows, 1]``.
        scale: the global encoding scale for this amax, in the same shape.
        limit: the largest block scale, 448 or 256.
        error: ``MAE`` or ``MSE`` of the decoded values in a block.
        scaled: whether errors are those of values times ``scale``, as ``NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH`` asks.
    """

    amax: Tensor
    scale: Tensor
    limit: float
    error: str
    scaled: bool


def _encode_4over6(
    matrix: Tensor, block_amax: Tensor, block: block_scaling.Block, choice: _Choice
) -> tuple[Tensor, Tensor]:
    """Return codes ``[rows, columns]``, and the E4M3 byte of each block; in a tie, the scale for 6 is used.

    Args:
        matrix: FP32, FP16 or BF16, ``[rows, columns]``.
        block_amax: FP32, one per block.
        block: ``(1, 16)`` or ``(16, 16)``.
    """
    base = block_amax / LIMIT * choice.scale
    six, four = (float8.cast(base * factor, E4M3) for factor in (1.0, 1.5))
    codes_six, codes_four = (
        codes_of(block_scaling.multiply(matrix, encoding_scale(decoding, choice.scale), block))
        for decoding in (six, four)
    )
    error_six = _block_errors(matrix, codes_six, six, block, choice)
    error_four = _block_errors(matrix, codes_four, four, block, choice)
    takes_four = error_four < error_six
    per_element = block_scaling.expand(takes_four, block, matrix.shape)
    return torch.where(per_element, codes_four, codes_six), torch.where(takes_four, four, six)


def _block_errors(
    matrix: Tensor, codes: Tensor, decoding: Tensor, block: block_scaling.Block, choice: _Choice
) -> Tensor:
    """Sum each block's errors in FP32 and in the kernel's order: one by one along a row, then rows as a tree."""
    decoded = block_scaling.multiply(values_of(pack(codes)), float8.decode(decoding, E4M3), block)
    if choice.scaled:  # the kernel's product of code and scale is FP16, which holds its six bits exactly
        difference = decoded.sub_(matrix.float() * choice.scale)
    else:
        difference = decoded.mul_(choice.amax).div_(LIMIT * choice.limit).sub_(matrix)
    summand = difference.square_() if choice.error == "MSE" else difference.abs_()
    total = functools.reduce(torch.add, summand.unflatten(1, (-1, block[1])).unbind(-1))
    rows = total.unflatten(0, (-1, block[0]))
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


# The random Hadamard transform that NVFP4 applies before it quantizes columnwise.
#
# Follows ``NVFP4Quantizer`` of TransformerEngine 2.20.2 (``tensor/nvfp4_tensor.py`` for the matrix,
# ``csrc/quantizer.cpp`` for where it is applied). The transform is orthogonal: applied to both operands of a GEMM along
# the inner dimension, it leaves the product as it is and spreads outliers.


def transform(values: Tensor, matrix: Tensor) -> Tensor:
    """Multiply each group of 16 neighbours in a row of ``[rows, n]`` by the 16 x 16 ``matrix``; round once to BF16.

    Raises:
        RuntimeError: for values that are not BF16, which TE's kernels refuse, and rows that are not full groups.
    """
    size = len(matrix)
    if values.dtype != torch.bfloat16 or values.shape[-1] % size:
        raise RuntimeError(
            f"the random Hadamard transform takes bfloat16 in groups of {size}, but got {values.dtype} "
            f"{list(values.shape)}"
        )
    return (values.reshape(-1, size).float() @ matrix.float()).to(torch.bfloat16).view(values.shape)


_LENGTH = 16
# Options that older versions of TE lack: row scaling came with 2.16, 4over6 with 2.18.
_OPTIONS = ("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max")


def settings(quantizer: Any) -> dict[str, Any]:
    """Return the arguments of ``NVFP4Tensor`` besides its buffers."""
    options = {name: getattr(quantizer, name) for name in _OPTIONS if hasattr(quantizer, name)}
    return {"fp4_dtype": quantizer.dtype, swizzle.FLAG: swizzle.is_wanted(quantizer), **options}


def is_cast_swizzled(quantizer: Any, shape: Sequence[int]) -> bool:
    """Return whether TE's kernel that casts a tensor of this shape also swizzles its scales.

    Follows ``nvfp4_emits_gemm_swizzled_scales`` in ``csrc/quantizer.cpp`` of TE 2.20.2.
    """
    rows, columns = block_scaling.rows_and_columns(shape)
    if not swizzle.is_wanted(quantizer) or columns % 128 or not (10, 0) <= cuda.get_device_capability() <= (11, 0):
        return False
    if quantizer.with_rht:
        return rows % 64 == 0
    is_plain = not getattr(quantizer, "row_scaled_nvfp4", False) and not getattr(quantizer, "nvfp4_use_4over6", False)
    return quantizer.with_2d_quantization and is_plain and rows % 128 == 0


def encode(values: Tensor, quantizer: Any, amaxes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return codes, scale_inv and amax in the directions that the quantizer asks for.

    Args:
        values: FP32, FP16 or BF16, ``[*leading, k]``; BF16 for a random Hadamard transform.
        quantizer: TE's ``NVFP4Quantizer``.
        amaxes: known amaxes of the tensor by direction, FP32, one element each. Row scaling computes its own.

    Raises:
        RuntimeError: for sizes that are not multiples of 16, and options that TE does not combine.
    """
    shapes = buffer_shapes(quantizer, values.shape)
    _check_options(quantizer, values)
    if _is_set("NVTE_USE_FAST_MATH") and not getattr(quantizer, "nvfp4_use_4over6", False):
        _warn_of_fast_math()
    flat = block_scaling.as_matrix(values)
    one_amax = amaxes.get("rowwise") is amaxes.get("columnwise")
    both = _cast(flat, quantizer, amaxes.get("rowwise")) if _is_symmetric(quantizer) and one_amax else None
    buffers = {}
    for name in block_scaling.directions(quantizer):
        cast = both or _cast(_read(flat, name, quantizer), quantizer, amaxes.get(name))
        if both is not None and name == "columnwise":
            cast = _Cast(both.codes.t().contiguous(), both.scales.t(), both.amax)
        scales = cast.scales.repeat_interleave(_block(quantizer)[0], 0)
        buffers[f"{name}_data"] = pack(cast.codes).view(shapes[f"{name}_data"][0])
        filled = block_scaling.fill_up(scales, shapes[f"{name}_scale_inv"][0])
        buffers[f"{name}_scale_inv"] = swizzle.ordered(filled, quantizer)
        buffers[f"amax_{name}"] = cast.amax
    return buffers


def buffer_shapes(quantizer: Any, shape: torch.Size) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and the dtype of each buffer of a tensor of this shape.

    Raises:
        RuntimeError: for sizes that are not multiples of 16.
    """
    rows, columns = block_scaling.rows_and_columns(shape)
    if rows % _LENGTH or columns % _LENGTH:
        raise RuntimeError(
            f"NVFP4 needs tensors whose last dimension, and whose product of the others, are divisible by {_LENGTH}, "
            f"but got {tuple(shape)}"
        )
    packed = {"rowwise": (*shape[:-1], columns // 2), "columnwise": (columns, rows // 2)}
    buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in block_scaling.directions(quantizer):
        outer, inner = (rows, columns) if name == "rowwise" else (columns, rows)
        scale_shape = block_scaling.round_up(outer, 128), block_scaling.round_up(inner // _LENGTH, 4)
        buffers[f"{name}_data"] = packed[name], torch.uint8
        buffers[f"{name}_scale_inv"] = scale_shape, torch.uint8
        amaxes = outer if getattr(quantizer, "row_scaled_nvfp4", False) else 1
        buffers[f"amax_{name}"] = (amaxes,), torch.float32
    return buffers


def decode(tensor: Any) -> Tensor:
    """Return the FP32 values, ``[*leading, k]``, decoded from the rowwise data.

    Raises:
        RuntimeError: if there is no rowwise data, because TE cannot dequantize columnwise data.
    """
    if tensor._rowwise_data is None:
        raise RuntimeError(
            "an NVFP4 tensor without rowwise data cannot be dequantized, because TE's kernel reads only that"
        )
    packed = block_scaling.as_matrix(tensor._rowwise_data)
    scales = _block_scales(tensor, False, packed)
    factor = torch.tensor(1.0 / (LIMIT * e4m3_limit(tensor)))
    per_block = scales * tensor._amax_rowwise.view(-1, 1) * factor
    return block_scaling.multiply(values_of(packed), per_block, (1, _LENGTH)).view(logical_shape(tensor))


def operand(tensor: Any, columnwise: bool) -> tuple[Tensor, float]:
    """Return the values that a GEMM multiplies, ``[outer, inner]``, exact in BF16, and the factor left to apply.

    Raises:
        RuntimeError: for a row-scaled tensor. TE's Python applies the amaxes of rows itself, and passes an amax of 1.
    """
    packed = block_scaling.as_matrix(tensor._columnwise_data if columnwise else tensor._rowwise_data)
    amax = tensor._amax_columnwise if columnwise else tensor._amax_rowwise
    if amax.numel() != 1:
        raise RuntimeError(f"an NVFP4 GEMM takes one amax a tensor, but this one has {amax.numel()}")
    scales = _block_scales(tensor, columnwise, packed).bfloat16()
    values = block_scaling.multiply(values_of(packed, torch.bfloat16), scales, (1, _LENGTH))
    return values, amax.item() / (LIMIT * e4m3_limit(tensor))


def unscaled_operand(tensor: Any, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Return the values of the codes that a GEMM reads, ``[outer, inner]`` in BF16, and their blocks' FP32 scales.

    The scales are ``[outer, inner / 16]``, without the factor of the whole tensor.
    """
    packed = block_scaling.as_matrix(tensor._columnwise_data if columnwise else tensor._rowwise_data)
    return values_of(packed, torch.bfloat16), _block_scales(tensor, columnwise, packed)


def logical_shape(tensor: Any) -> torch.Size:
    """Return the shape of the values that a TE tensor holds, as a matrix if there is only columnwise data."""
    if tensor._rowwise_data is not None:
        packed = tensor._rowwise_data.shape
        return torch.Size((*packed[:-1], 2 * packed[-1]))
    columns, half_rows = tensor._columnwise_data.shape
    return torch.Size((2 * half_rows, columns))


@dataclass(frozen=True)
class _Cast:
    """A matrix ``[outer, inner]`` that was cast along its inner dimension.

    Attributes:
        codes: uint8, 0 to 15, ``[outer, inner]``.
        scales: E4M3 bytes, one per block.
        amax: FP32, ``[1]``, or ``[outer]`` if the tensor is row-scaled.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor


def _is_symmetric(quantizer: Any) -> bool:
    """Return whether columnwise codes and scales are the transposes of the rowwise ones.

    4over6 sums the errors of a block in a different order for each direction, and may choose differently.
    """
    each_its_own = quantizer.with_rht or quantizer.stochastic_rounding or getattr(quantizer, "nvfp4_use_4over6", False)
    return quantizer.with_2d_quantization and not each_its_own


def _read(flat: Tensor, direction: str, quantizer: Any) -> Tensor:
    """Return the matrix ``[outer, inner]`` that is cast for a direction of the values ``[m, k]``."""
    if direction == "rowwise":
        return flat
    columns = flat.t().contiguous()
    return transform(columns, quantizer.rht_matrix) if quantizer.with_rht else columns


def _block(quantizer: Any) -> block_scaling.Block:
    return (_LENGTH, _LENGTH) if quantizer.with_2d_quantization else (1, _LENGTH)


def _cast(matrix: Tensor, quantizer: Any, amax: Tensor | None) -> _Cast:
    block, amax = _block(quantizer), _tensor_amax(matrix, quantizer, amax)
    scale = global_scale(amax, e4m3_limit(quantizer)).view(-1, 1)
    if getattr(quantizer, "nvfp4_use_4over6", False):
        error, is_scaled = quantizer.nvfp4_4over6_err_mode, _is_set("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH")
        choice = _Choice(amax.view(-1, 1), scale, e4m3_limit(quantizer), error, is_scaled)
        codes, decoding = _encode_4over6(matrix, block_scaling.amax(matrix, block), block, choice)
        return _Cast(codes, decoding, amax)
    encode_codes = codes_at_random if quantizer.stochastic_rounding else codes_of

    def cast(part: Tensor) -> tuple[Tensor, Tensor]:
        decoding = float8.cast(decoding_scale(block_scaling.amax(part, block), scale), E4M3)
        return encode_codes(block_scaling.multiply(part, encoding_scale(decoding, scale), block)), decoding

    # With one scale per row, the matrix cannot be cast in parts.
    codes, decoding = block_scaling.in_parts(cast, matrix, _LENGTH) if scale.numel() == 1 else cast(matrix)
    return _Cast(codes, decoding, amax)


def _tensor_amax(matrix: Tensor, quantizer: Any, amax: Tensor | None) -> Tensor:
    """Return one FP32 amax, or, if the tensor is row-scaled, one for each row of ``matrix``."""
    if getattr(quantizer, "row_scaled_nvfp4", False):
        return block_scaling.amax(matrix, (1, matrix.shape[1])).flatten()
    amax = float8.amax_of(matrix) if amax is None else amax.clone()
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group)
    return amax.reshape(1)


def _block_scales(tensor: Any, columnwise: bool, packed: Tensor) -> Tensor:
    """Return the FP32 scales of the blocks of ``packed``, without padding."""
    stored = swizzle.scales_of(tensor, columnwise)
    return float8.decode(stored[: packed.shape[0], : packed.shape[1] * 2 // _LENGTH], E4M3)


def _check_options(quantizer: Any, values: Tensor) -> None:
    """Raise ``RuntimeError``, in TE's words, for options that TE's quantizer refuses to combine.

    Follows ``NVFP4Quantizer::quantize_impl`` in ``csrc/quantizer.cpp`` of TE 2.20.2, and
    ``common/cast/dispatch/quantize.cuh``.
    """
    on = {
        "RHT": quantizer.with_rht,
        "2D quantization": quantizer.with_2d_quantization,
        "stochastic rounding": quantizer.stochastic_rounding,
        "amax reduction": quantizer.with_amax_reduction,
    }
    has_two_scales, is_row_scaled = (
        getattr(quantizer, name, False) for name in ("nvfp4_use_4over6", "row_scaled_nvfp4")
    )
    refused = (
        ("NVFP4 4over6", has_two_scales, ("RHT", "stochastic rounding")),
        ("Row-scaled NVFP4", is_row_scaled, on),
    )
    for name, is_asked, others in refused:
        for other in others:
            if is_asked and on[other]:
                raise RuntimeError(f"{name} quantization does not support {other}.")
    if is_row_scaled and not quantizer.rowwise_usage:
        raise RuntimeError("Row-scaled NVFP4 quantization requires rowwise usage.")
    if is_row_scaled and quantizer.columnwise_usage:
        if has_two_scales:
            raise RuntimeError(
                "Row-scaled NVFP4 transpose quantization is not supported with 4over6 mode. The 4over6 kernel does not "
                "consume the per-row/per-column amaxes, so the columnwise output would be incorrect."
            )
        if values.dtype != torch.bfloat16 or any(size % 32 for size in block_scaling.rows_and_columns(values.shape)):
            raise RuntimeError(
                "Row-scaled NVFP4 transpose quantization requires BF16 input and dimensions that are multiples of 32, "
                f"but got {values.dtype} {list(values.shape)}."
            )
    if quantizer.stochastic_rounding and cuda.get_device_capability() >= (12, 0):
        version = versions.installed_version()
        if not versions.has_software_stochastic_rounding(version):
            raise RuntimeError(
                f"TransformerEngine {version} has no stochastic rounding to FP4 for compute capability 12.0 (2.20 has)."
            )
    if quantizer.with_rht and not quantizer.with_post_rht_amax:
        raise RuntimeError("Pre-RHT amax is not supported yet. Use with_post_rht_amax=true instead.")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


@functools.cache
def _warn_of_fast_math() -> None:
    warnings.warn(
        "NVTE_USE_FAST_MATH is set, and the CPU kernels quantize to NVFP4 as if it were not: a GPU's results will "
        "differ",
        stacklevel=2,
    )
