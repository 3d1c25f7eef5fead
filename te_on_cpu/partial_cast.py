"""Casts of a part of a weight with the scales of the whole weight: the steps of ``quantize_master_weights``.

A distributed optimizer keeps FP32 masters of consecutive elements of a quantized weight. It computes the amaxes of
their blocks, reduces them over the ranks, derives scales and casts its own elements. With one rank the part is the
whole.

Follows TransformerEngine 2.20.2: ``csrc/extensions/fp8_partial_cast.cpp``, ``nvfp4_2d_partial_cast.cpp``,
``transpose.cpp`` and ``multi_tensor/compute_scale.cpp``, and ``common/recipe`` of NVIDIA's repository
(``fp8_block_scaling.cu``, ``mxfp8_scaling.cu``, ``nvfp4.cu``). In every kernel ``h`` and ``w`` (``rows`` and ``cols``)
are the sizes of the whole weight, and ``start_offset`` is the index of the part's first element in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_on_cpu import block_scaling, cast, float8, mxfp8, nvfp4
from te_on_cpu.enums import TORCH_DTYPE
from te_on_cpu.nvfp4 import E4M3, decoding_scale, encoding_scale, global_scale

__all__ = [
    "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast",
    "multi_tensor_compute_scale_inv_e8m0",
    "mxfp8_scaling_compute_partial_amax",
    "mxfp8_scaling_partial_cast",
    "nvfp4_2d_multi_tensor_transpose",
    "nvfp4_compute_global_scale",
    "nvfp4_multi_tensor_2d_partial_cast",
    "nvfp4_multi_tensor_compute_partial_amax",
    "nvfp4_multi_tensor_fused_scale",
]

_FP8_BLOCK, _NVFP4_BLOCK = (128, 128), (16, 16)
_MXFP8_ROW, _MXFP8_COLUMN = (1, 32), (32, 1)
_NVFP4_E4M3_LIMIT = 448.0


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the amaxes of blocks of 128 x 128 into ``amax``, FP32 ``[ceil(h/128), ceil(w/128) up to 4]``."""
    _write(amax, block_scaling.amax(_embedded(tensor, h, w, start_offset), _FP8_BLOCK))


def fp8_block_scaling_partial_cast(
    inp: Tensor, out: Tensor, scale: Tensor, h: int, w: int, start_offset: int, block_len: int, out_dtype: int
) -> None:
    """Cast ``inp`` with one scale per block of 128 x 128, and write the codes into ``out``, uint8 of the same size."""
    matrix = _embedded(inp, h, w, start_offset)
    scaled = block_scaling.multiply(matrix, scale[: -(-h // 128), : -(-w // 128)], _FP8_BLOCK)
    _store(out, float8.cast(scaled, TORCH_DTYPE[int(out_dtype)]), start_offset)


def mxfp8_scaling_compute_partial_amax(
    input: Tensor, amax_rowwise: Tensor, amax_colwise: Tensor, rows: int, cols: int, start_offset: int
) -> None:
    """Write the amaxes of 1 x 32 and 32 x 1 blocks, in the input's dtype, into buffers in the shapes of scale_inv."""
    matrix = _embedded(input, rows, cols, start_offset)
    _write(amax_rowwise, block_scaling.amax(matrix, _MXFP8_ROW))
    _write(amax_colwise, block_scaling.amax(matrix, _MXFP8_COLUMN))


def mxfp8_scaling_partial_cast(
    input: Tensor,
    output_rowwise: Tensor,
    output_colwise: Tensor,
    scale_inv_rowwise: Tensor,
    scale_inv_colwise: Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Write the E4M3 codes of ``input`` in both directions, scaled by the E8M0 bytes of their blocks."""
    matrix = _embedded(input, rows, cols, start_offset)
    for output, scale_inv, block in (
        (output_rowwise, scale_inv_rowwise, _MXFP8_ROW),
        (output_colwise, scale_inv_colwise, _MXFP8_COLUMN),
    ):
        scales = mxfp8.encoding_scale(scale_inv[: rows // block[0], : cols // block[1]])
        _store(output, float8.cast(block_scaling.multiply(matrix, scales, block), E4M3), start_offset)


def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: Sequence[Sequence[Tensor]]
) -> None:
    """Fill the E8M0 bytes of the second list from the amaxes of the first, for E4M3.

    Raises:
        RuntimeError: for amaxes that are not BF16, which TE's kernel refuses.
    """
    for amax, scale_inv in zip(*tensor_lists, strict=True):
        if amax.dtype != torch.bfloat16:
            raise RuntimeError(f"multi_tensor_compute_scale_inv_e8m0 takes BF16 amaxes, but got {amax.dtype}")
        scale_inv.copy_(mxfp8.to_e8m0(amax.float() * mxfp8.reciprocal_limit(E4M3)))


def nvfp4_multi_tensor_compute_partial_amax(
    master_weight_list: Sequence[Tensor],
    partial_amax_list: Sequence[Tensor],
    global_amax_list: Sequence[Tensor],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: int = 16,
) -> None:
    """Write the amaxes of blocks of 16 x 16, FP32 ``[ceil(h/16), ceil(w/16)]``, and of each part, FP32 ``[1]``."""
    lists = (master_weight_list, partial_amax_list, global_amax_list, h_list, w_list, start_offset_list)
    for values, partial_amax, global_amax, h, w, start_offset in zip(*lists, strict=True):
        _write(partial_amax, block_scaling.amax(_embedded(values, h, w, start_offset), _NVFP4_BLOCK))
        global_amax.fill_(float8.amax_of(values))


def nvfp4_compute_global_scale(global_amax: Tensor, global_scale_out: Tensor) -> None:
    """Write the global encoding scale of each amax, both FP32."""
    global_scale_out.copy_(_global_scale(global_amax))


def nvfp4_multi_tensor_fused_scale(
    block_amax_list: Sequence[Tensor],
    global_amax_list: Sequence[Tensor],
    per_block_scale_list: Sequence[Tensor],
    target_scale_list: Sequence[Tensor],
    target_amax_list: Sequence[Tensor],
    tile_rows_list: Sequence[int],
    tile_cols_list: Sequence[int],
    rows_padded_list: Sequence[int],
    block_len: int,
) -> None:
    """Fill the scales of weights from the amaxes of their blocks and of the whole weights.

    These are the FP32 decoding scales of blocks, a weight's scale_inv (E4M3 bytes, each repeated over ``block_len``
    rows), and its amax.
    """
    lists = (block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list)
    for block_amax, global_amax, per_block_scale, target_scale, target_amax in zip(*lists, strict=True):
        decoding = decoding_scale(block_amax, _global_scale(global_amax))
        per_block_scale.copy_(decoding)
        _write(target_scale, float8.cast(decoding, E4M3).repeat_interleave(block_len, 0))
        target_amax.copy_(global_amax)


def nvfp4_multi_tensor_2d_partial_cast(
    inp_list: Sequence[Tensor],
    out_list: Sequence[Tensor],
    scale_list: Sequence[Tensor],
    global_scale_list: Sequence[Tensor],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: int = 16,
) -> None:
    """Write the packed codes of each part into its bytes; the other half of a shared byte is kept."""
    lists = (inp_list, out_list, scale_list, global_scale_list, h_list, w_list, start_offset_list)
    for values, out, scale, global_encoding, h, w, start_offset in zip(*lists, strict=True):
        encoding = encoding_scale(float8.cast(scale.clone(), E4M3), global_encoding)
        scaled = block_scaling.multiply(_embedded(values, h, w, start_offset), encoding, _NVFP4_BLOCK)
        codes = nvfp4.unpack(out.view(1, -1)).flatten()
        first = start_offset % 2
        codes[first : first + values.numel()] = nvfp4.codes_of(scaled).view(-1)[start_offset:][: values.numel()]
        out.view(-1).copy_(nvfp4.pack(codes))


def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: Sequence[Tensor],
    columnwise_data_list: Sequence[Tensor],
    rowwise_scale_inv_list: Sequence[Tensor],
    columnwise_scale_inv_list: Sequence[Tensor],
    M_list: Sequence[int],
    K_list: Sequence[int],
) -> None:
    """Fill the columnwise data and scales of weights with 16 x 16 blocks from the rowwise ones."""
    lists = (rowwise_data_list, columnwise_data_list, rowwise_scale_inv_list, columnwise_scale_inv_list)
    for rows, columns, row_scales, column_scales, m, k in zip(*lists, M_list, K_list, strict=True):
        columns.copy_(nvfp4.transpose(rows.view(m, k // 2)).view(columns.shape))
        column_scales.zero_()
        cast.nvfp4_2d_scale_transpose(row_scales, column_scales, -(-m // 16), -(-k // 16))


def _embedded(part: Tensor, h: int, w: int, start_offset: int) -> Tensor:
    """Return the part in its place in a matrix ``[h, w]`` of zeros, which do not affect an amax."""
    if part.numel() == h * w:
        return part.reshape(h, w)
    whole = part.new_zeros(h * w)
    whole[start_offset : start_offset + part.numel()] = part.view(-1)
    return whole.view(h, w)


def _write(buffer: Tensor, numbers: Tensor) -> None:
    """Write the numbers into the upper left corner of a padded buffer, and zeros elsewhere."""
    buffer.zero_()
    buffer[: numbers.shape[0], : numbers.shape[1]] = numbers


def _store(out: Tensor, codes: Tensor, start_offset: int) -> None:
    """Copy the part's codes from the matrix to ``out``."""
    out.view(-1).copy_(codes.view(-1)[start_offset : start_offset + out.numel()])


def _global_scale(amax: Tensor) -> Tensor:
    """Return a tensor's global scale; subnormal amaxes count as the smallest normal number, and NaN as 0."""
    smallest = torch.finfo(torch.float32).smallest_normal
    return torch.where(amax > 0, global_scale(amax.clamp(min=smallest), _NVFP4_E4M3_LIMIT), 1.0)
