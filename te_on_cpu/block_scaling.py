"""FP8 with one FP32 scale per block of 128.

The formats of ``Float8BlockScaling``, and how matrices are cut into blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_on_cpu import cuda, float8

# Matrices that are cut into blocks: the amax of each block, and multiplication by one factor per block.
#
# A block is ``(rows, columns)``, and a matrix ``[m, n]`` has ``ceil(m / rows) * ceil(n / columns)`` of them; those at
# the end may be smaller. Numbers of which there is one per block form a matrix ``[blocks down, blocks across]``.


Block = tuple[int, int]
_BITS = {2: torch.int16, 4: torch.int32}


def directions(quantizer: Any) -> list[str]:
    """Return the directions that a TE quantizer is to make data for: ``rowwise``, ``columnwise``."""
    return [name for name in ("rowwise", "columnwise") if getattr(quantizer, f"{name}_usage")]


def as_matrix(values: Tensor) -> Tensor:
    """Reshape ``[*leading, last]`` to ``[rows, last]``, and a scalar to ``[1, 1]``."""
    return values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns that ``as_matrix`` makes of a tensor of this shape."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1] if len(shape) else 1


def amax(values: Tensor, block: Block) -> Tensor:
    """Return the largest magnitude in each block of ``[m, n]``, FP32; NaNs do not count, as in CUDA's ``fmaxf``."""
    magnitudes = _tiles(values, block).abs()
    # Without signs, the bits of floating-point numbers are in the numbers' order, with NaNs last. PyTorch's maximum of
    # integers is several times faster over short rows, and over one dimension at a time.
    bits = magnitudes.view(_BITS[magnitudes.itemsize])
    largest = bits.amax(1).amax(2).view(magnitudes.dtype).float()
    if largest.isnan().any():
        infinity = float("inf")
        largest = amax(values.nan_to_num(nan=0.0, posinf=infinity, neginf=-infinity), block)
    return largest


def in_parts(compute: Callable[[Tensor], tuple[Tensor, Tensor]], matrix: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Apply ``compute`` to a matrix in parts that stay in a core's cache, and return the joined results.

    Args:
        compute: returns codes and scales, whose rows are both in the order of the matrix's.
        rows: each part but the last has a multiple of this number of rows.
    """
    step = max(1, float8.AT_ONCE // max(1, matrix.shape[1] * rows)) * rows
    if matrix.shape[0] <= step:
        return compute(matrix)
    codes, scales = zip(*map(compute, matrix.split(step)), strict=True)
    return torch.cat(codes), torch.cat(scales)


def multiply(values: Tensor, factors: Tensor, block: Block) -> Tensor:
    """Return a new tensor, ``[m, n]`` times the factor of each block, in FP32 if the factors are."""
    rows, columns = values.shape
    product = _tiles(values, block) * factors[:, None, :, None]
    return product.flatten(2).flatten(0, 1)[:rows, :columns]


def expand(numbers: Tensor, block: Block, shape: Sequence[int]) -> Tensor:
    """Repeat the number of each block for all its elements, in a matrix of this shape."""
    spread = numbers.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread[: shape[0], : shape[1]]


def fill_up(numbers: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``numbers`` as a contiguous matrix of this shape, padded with zeros at the bottom and the right."""
    missing = (0, shape[1] - numbers.shape[1], 0, shape[0] - numbers.shape[0])
    return pad(numbers, missing).contiguous() if any(missing) else numbers.contiguous()


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _tiles(values: Tensor, block: Block) -> Tensor:
    """Reshape ``[m, n]`` to ``[blocks down, block rows, blocks across, block columns]``, padded with zeros."""
    rows, columns = (round_up(size, length) for size, length in zip(values.shape, block, strict=True))
    values = fill_up(values, (rows, columns))
    return values.view(rows // block[0], block[0], columns // block[1], block[1])


# FP8 with one FP32 scale per block of 128: the formats of ``Float8BlockScaling``.
#
# Follows TransformerEngine 2.20.2: ``Float8BlockQuantizer`` in ``csrc/quantizer.cpp`` for layouts,
# ``common/recipe/recipe_common.cuh`` and ``common/cast/fp8_blockwise/group_quantize_fp8_blockwise.cuh`` for arithmetic.
# For values ``[*leading, k]``, m of them in a column:
#
# =====================  ==========  =========  ==================  ======================================
# ``block_scaling_dim``  direction   a block    codes               scale_inv, FP32, padded with zeros
# =====================  ==========  =========  ==================  ======================================
# 1                      rowwise     1 x 128    ``[*leading, k]``   ``[ceil(k/128), m up to 4]``
# 1                      columnwise  128 x 1    ``[k, *leading]``   ``[ceil(m/128), k up to 4]``
# 2                      rowwise     128 x 128  ``[*leading, k]``   ``[ceil(m/128), ceil(k/128) up to 4]``
# 2                      columnwise  128 x 128  ``[k, *leading]``   ``[ceil(k/128), ceil(m/128) up to 4]``
# =====================  ==========  =========  ==================  ======================================
#
# "m up to 4" is m rounded up to a multiple of 4.


_LENGTH = 128
_VECTOR = {"rowwise": (1, _LENGTH), "columnwise": (_LENGTH, 1)}


def settings(quantizer: Any) -> dict[str, Any]:
    """Return the arguments of ``Float8BlockwiseQTensor`` besides its buffers."""
    return {"fp8_dtype": quantizer.dtype, "is_2D_scaled": quantizer.block_scaling_dim == 2}


def encode(values: Tensor, quantizer: Any, amaxes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return codes and scale_inv in the directions that the quantizer asks for.

    Args:
        values: FP32, FP16 or BF16, ``[*leading, k]``.
        quantizer: TE's ``Float8BlockQuantizer``.
        amaxes: not used, because each block takes its own.
    """
    flat = as_matrix(values)
    both = _cast(flat, (_LENGTH, _LENGTH), quantizer) if quantizer.block_scaling_dim == 2 else None
    buffers = {}
    for name in directions(quantizer):
        codes, scale_inv = both or _cast(flat, _VECTOR[name], quantizer)
        codes = codes.view(values.shape)
        buffers[f"{name}_data"] = codes if name == "rowwise" else float8.transpose(codes)
        buffers[f"{name}_scale_inv"] = _stored(scale_inv, quantizer.block_scaling_dim, name == "columnwise")
    return buffers


def buffer_shapes(quantizer: Any, shape: torch.Size) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and the dtype of each buffer of a tensor of this shape."""
    rows, columns = rows_and_columns(shape)
    buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in directions(quantizer):
        columnwise = name == "columnwise"
        scale_shape = _scale_shape(rows, columns, quantizer.block_scaling_dim, columnwise)
        buffers[f"{name}_data"] = (*shape[-1:], *shape[:-1]) if columnwise else tuple(shape), torch.uint8
        buffers[f"{name}_scale_inv"] = scale_shape, torch.float32
    return buffers


def decode(tensor: Any) -> Tensor:
    """Return the FP32 values, ``[*leading, k]``, decoded from the rowwise codes if there are any."""
    columnwise = tensor._rowwise_data is None
    codes, scale_inv, block = _codes_and_scales(tensor, columnwise)
    matrix = multiply(float8.decode(codes, float8.fp8_dtype(tensor)), scale_inv, block)
    return (matrix.t() if columnwise else matrix).reshape(logical_shape(tensor))


def operand(tensor: Any, columnwise: bool) -> tuple[Tensor, float]:
    """Return the values that a GEMM multiplies, ``[outer, inner]``, and 1, because no factor is left to apply.

    If all scales are powers of two, the values are BF16, which holds them exactly; otherwise they are FP32.
    """
    codes, scale_inv, block = _codes_and_gemm_scales(tensor, columnwise)
    exact = not (scale_inv.contiguous().view(torch.int32) & 0x7FFFFF).any()
    dtype = torch.bfloat16 if exact else torch.float32
    values = float8.decode(codes, float8.fp8_dtype(tensor), dtype)
    return multiply(values, scale_inv.to(dtype), block), 1.0


def unscaled_operand(tensor: Any, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Return the values of the codes that a GEMM reads, ``[outer, inner]`` in BF16, and their blocks' FP32 scales.

    The scales are ``[outer, ceil(inner / 128)]``.
    """
    codes, scale_inv, block = _codes_and_gemm_scales(tensor, columnwise)
    scales = scale_inv.repeat_interleave(block[0], 0)[: codes.shape[0]]
    return float8.decode(codes, float8.fp8_dtype(tensor), torch.bfloat16), scales


def logical_shape(tensor: Any) -> torch.Size:
    """Return the shape of the values that a TE tensor holds."""
    if tensor._rowwise_data is not None:
        return tensor._rowwise_data.shape
    columnwise = tensor._columnwise_data.shape
    return torch.Size((*columnwise[1:], *columnwise[:1]))


def _codes_and_gemm_scales(tensor: Any, columnwise: bool) -> tuple[Tensor, Tensor, Block]:
    """Return ``_codes_and_scales`` as a GEMM reads them.

    From Blackwell on, TE multiplies them as MXFP8, whose scales have the exponents of these and no other bits
    (``common/swizzle/swizzle_block_scaling.cu`` of TE 2.20). So scales that are not powers of two are cut to one.
    """
    codes, scale_inv, block = _codes_and_scales(tensor, columnwise)
    if cuda.get_device_capability() >= (10, 0):
        exponent = scale_inv.contiguous().view(torch.int32) & 0x7F800000
        scale_inv = exponent.masked_fill_(exponent == 0, 0x400000).view(torch.float32)  # 2**-127 is E8M0's smallest
    return codes, scale_inv, block


def _codes_and_scales(tensor: Any, columnwise: bool) -> tuple[Tensor, Tensor, Block]:
    """Return codes ``[outer, inner]``, one scale_inv per block, and the block's size."""
    codes = tensor._columnwise_data if columnwise else tensor._rowwise_data
    stored = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    codes = codes.flatten(1) if columnwise and codes.dim() else as_matrix(codes)
    if tensor._is_2D_scaled:
        return codes, stored[:, : -(-codes.shape[1] // _LENGTH)], (_LENGTH, _LENGTH)
    return codes, stored[:, : codes.shape[0]].t(), (1, _LENGTH)


def _cast(flat: Tensor, block: Block, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Return codes in the order of the values, and scale_inv, one number per block."""
    dtype, largest = float8.fp8_dtype(quantizer), torch.finfo(flat.dtype).max

    def cast(part: Tensor) -> tuple[Tensor, Tensor]:
        scale = float8.scale_from_amax(
            amax(part, block),
            torch.finfo(dtype).max,
            quantizer.amax_epsilon,
            quantizer.force_pow_2_scales,
            largest,
        )
        return float8.cast(multiply(part, scale, block), dtype), scale.reciprocal()

    return in_parts(cast, flat, _LENGTH)


def _scale_shape(rows: int, columns: int, dimensions: int, columnwise: bool) -> tuple[int, int]:
    down, across = (-(-size // _LENGTH) for size in (rows, columns))
    if dimensions == 2:
        return (across, round_up(down, 4)) if columnwise else (down, round_up(across, 4))
    return (down, round_up(columns, 4)) if columnwise else (across, round_up(rows, 4))


def _stored(scale_inv: Tensor, dimensions: int, columnwise: bool) -> Tensor:
    """Lay out one number per block as TE's buffer does: transposed for rowwise vectors and for columnwise squares."""
    ordered = scale_inv.t() if columnwise == (dimensions == 2) else scale_inv
    return fill_up(ordered, (ordered.shape[0], round_up(ordered.shape[1], 4)))
