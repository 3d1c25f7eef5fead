"""MXFP8: FP8 with a power of two per block of 32, the format of ``MXFP8BlockScaling``.

Follows TransformerEngine 2.20.2: ``MXFP8Quantizer`` in ``csrc/quantizer.cpp`` for layouts,
``common/cast/mxfp8/quantize_mxfp8.cuh`` and ``common/util/ptx.cuh`` for arithmetic; the format is that of the OCP
Microscaling Formats specification 1.0. For values ``[*leading, k]``, m of them in a column:

==========  =======  ==================  ===================================
direction   a block  codes               scale_inv, uint8, padded with zeros
==========  =======  ==================  ===================================
rowwise     1 x 32   ``[*leading, k]``   ``[m up to 128, k / 32 up to 4]``
columnwise  32 x 1   ``[*leading, k]``   ``[m / 32 up to 4, k up to 128]``
==========  =======  ==================  ===================================

"m up to 128" is m rounded up to a multiple of 128. A scale_inv byte ``e`` means ``2**(e - 127)``, and 255 means NaN
(E8M0). With 2D quantization a block is 32 x 32, and each byte is repeated 32 times. ``swizzle.py`` describes the order
of scales if the quantizer optimizes them for a GEMM.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from te_on_cpu import block_scaling, float8, swizzle

_LENGTH = 32
_VECTOR = {"rowwise": (1, _LENGTH), "columnwise": (_LENGTH, 1)}
_MANTISSA_BITS = 23
_NAN_CODE, _LARGEST_CODE = 255, 254
# 2**-127, the smallest E8M0 number, has no exponent bits in FP32.
_SMALLEST_BITS = 0x400000


def is_mxfp8_tensor(value: Any) -> bool:
    """Return whether ``value`` is TE's ``MXFP8Tensor`` or ``MXFP8TensorStorage``."""
    return any(base.__name__ == "MXFP8TensorStorage" for base in type(value).__mro__)


def settings(quantizer: Any) -> dict[str, Any]:
    """Return the arguments of ``MXFP8Tensor`` besides its buffers."""
    return {"fp8_dtype": quantizer.dtype, swizzle.FLAG: swizzle.is_wanted(quantizer)}


def encode(values: Tensor, quantizer: Any, amaxes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return codes and scale_inv in the directions that the quantizer asks for.

    Args:
        values: FP32, FP16 or BF16, ``[*leading, k]``.
        quantizer: TE's ``MXFP8Quantizer``.
        amaxes: not used, because each block takes its own.

    Raises:
        RuntimeError: for sizes that are not multiples of 32.
    """
    shapes = buffer_shapes(quantizer, values.shape)
    flat = block_scaling.as_matrix(values)
    # TE up to 2.18 has no square blocks.
    square = getattr(quantizer, "with_2d_quantization", False)
    dtype, buffers = float8.fp8_dtype(quantizer), {}
    for name in block_scaling.directions(quantizer):
        block = (_LENGTH, _LENGTH) if square else _VECTOR[name]
        codes, exponents = block_scaling.in_parts(functools.partial(_cast, block=block, dtype=dtype), flat, _LENGTH)
        if square:
            exponents = exponents.repeat_interleave(_LENGTH, 0 if name == "rowwise" else 1)
        buffers[f"{name}_data"] = codes.view(values.shape)
        scales = block_scaling.fill_up(exponents, shapes[f"{name}_scale_inv"][0])
        buffers[f"{name}_scale_inv"] = swizzle.ordered(scales, quantizer, name == "columnwise")
    return buffers


def buffer_shapes(quantizer: Any, shape: torch.Size) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and the dtype of each buffer of a tensor of this shape.

    Raises:
        RuntimeError: for sizes that are not multiples of 32.
    """
    rows, columns = block_scaling.rows_and_columns(shape)
    if rows % _LENGTH or columns % _LENGTH:
        raise RuntimeError(
            f"MXFP8 needs tensors whose last dimension, and whose product of the others, are divisible by {_LENGTH}, "
            f"but got {tuple(shape)}"
        )
    scales = {
        "rowwise": (block_scaling.round_up(rows, 128), block_scaling.round_up(columns // _LENGTH, 4)),
        "columnwise": (block_scaling.round_up(rows // _LENGTH, 4), block_scaling.round_up(columns, 128)),
    }
    buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in block_scaling.directions(quantizer):
        buffers[f"{name}_data"] = tuple(shape), torch.uint8
        buffers[f"{name}_scale_inv"] = scales[name], torch.uint8
    return buffers


def decode(tensor: Any) -> Tensor:
    """Return the FP32 values, ``[*leading, k]``, decoded from the rowwise codes if there are any."""
    return _values(tensor, tensor._rowwise_data is None, torch.float32).view(logical_shape(tensor))


def operand(tensor: Any, columnwise: bool) -> tuple[Tensor, float]:
    """Return the values that a GEMM multiplies, ``[outer, inner]``, exact in BF16, and 1, as no factor is left."""
    values = _values(tensor, columnwise, torch.bfloat16)
    return values.t() if columnwise else values, 1.0


def unscaled_operand(tensor: Any, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Return the values of the codes that a GEMM reads, ``[outer, inner]`` in BF16, and their blocks' FP32 scales.

    The scales are ``[outer, inner / 32]``.
    """
    codes, scales = _codes_and_scales(tensor, columnwise)
    values = float8.decode(codes, float8.fp8_dtype(tensor), torch.bfloat16)
    return (values.t(), scales.t()) if columnwise else (values, scales)


def of_attention(tensor: Any, columnwise: bool, data_format: str) -> Tensor:
    """Return the values of Q, K, V or dO, exact in BF16, in the format of the tensor.

    Blocks lie along the features, or, columnwise, along the sequence. TE's Python reorders the scales (in
    ``mxfp8_transpose_swizzle``) as if the tensor were ``bhsd``, whatever the format of the codes is.

    Args:
        data_format: ``bshd``, ``sbhd`` or ``bhsd``; sequences are multiples of 128.
    """
    codes = tensor._columnwise_data if columnwise else tensor._rowwise_data
    by_head = codes.permute([data_format.index(axis) for axis in "bhsd"])
    block = _VECTOR["columnwise" if columnwise else "rowwise"]
    scales = from_e8m0(swizzle.scales_of(tensor, columnwise, transposed=columnwise)[:, : codes.shape[-1] // block[1]])
    unscaled = float8.decode(by_head.flatten(0, 2), float8.fp8_dtype(tensor), torch.bfloat16)
    values = block_scaling.multiply(unscaled, scales.bfloat16(), block).view(by_head.shape)
    return values.permute(["bhsd".index(axis) for axis in data_format])


def logical_shape(tensor: Any) -> torch.Size:
    """Return the shape of the values that a TE tensor holds."""
    return (tensor._columnwise_data if tensor._rowwise_data is None else tensor._rowwise_data).shape


def to_e8m0(values: Tensor) -> Tensor:
    """Round FP32 numbers that are not negative up to E8M0 bytes, and infinity to the largest number.

    This is PTX's ``cvt.rp.satfinite.ue8m0x2``.
    """
    bits = values.view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & ((1 << _MANTISSA_BITS) - 1)
    rounds_up = torch.where(exponent == 0, bits > _SMALLEST_BITS, mantissa > 0)
    rounded = (exponent + rounds_up).clamp_(max=_LARGEST_CODE)
    return rounded.masked_fill_(values.isnan(), _NAN_CODE).to(torch.uint8)


def from_e8m0(codes: Tensor) -> Tensor:
    """Return the FP32 numbers of E8M0 bytes."""
    bits = codes.int() << _MANTISSA_BITS
    bits.masked_fill_(codes == 0, _SMALLEST_BITS)
    return bits.view(torch.float32).masked_fill(codes == _NAN_CODE, float("nan"))


def encoding_scale(exponents: Tensor) -> Tensor:
    """Return the exact reciprocals of E8M0 bytes, 2**127 down to 2**-127."""
    return from_e8m0(_LARGEST_CODE - exponents.int()).masked_fill(exponents == _NAN_CODE, float("nan"))


def reciprocal_limit(dtype: torch.dtype) -> Tensor:
    """Return 1 / limit in FP32, by which CUDA multiplies an amax; a division would round differently."""
    return torch.tensor(1.0 / torch.finfo(dtype).max)


def _cast(values: Tensor, block: block_scaling.Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes in the order of the values, and the E8M0 byte of each block."""
    exponents = to_e8m0(block_scaling.amax(values, block) * reciprocal_limit(dtype))
    return float8.cast(block_scaling.multiply(values, encoding_scale(exponents), block), dtype), exponents


def _values(tensor: Any, columnwise: bool, dtype: torch.dtype) -> Tensor:
    """Return the decoded values in the order of the tensor, ``[m, k]``."""
    codes, scales = _codes_and_scales(tensor, columnwise)
    block = _VECTOR["columnwise" if columnwise else "rowwise"]
    return block_scaling.multiply(float8.decode(codes, float8.fp8_dtype(tensor), dtype), scales.to(dtype), block)


def _codes_and_scales(tensor: Any, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Return codes ``[m, k]``, and the FP32 scale of each block."""
    codes = block_scaling.as_matrix(tensor._columnwise_data if columnwise else tensor._rowwise_data)
    stored = swizzle.scales_of(tensor, columnwise, transposed=columnwise)
    block = _VECTOR["columnwise" if columnwise else "rowwise"]
    return codes, from_e8m0(stored[: codes.shape[0] // block[0], : codes.shape[1] // block[1]])
