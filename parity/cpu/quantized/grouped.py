"""Casts of several matrices that lie one after the other in one tensor: the experts of a mixture.

Follows ``csrc/extensions/cast.cpp`` and ``csrc/quantizer.cpp`` (``create_grouped_tensor``) of TransformerEngine 2.20.2.
The result is a ``GroupedTensor``, or a ``GroupedTensorStorage`` if the quantizer is internal. Its buffers hold those of
the groups end to end, each group cast as if it were alone; TE's own Python tells where each begins.

Block-scaled formats need groups whose numbers of rows are multiples of 128. A GPU checks their sum alone, as it never
reads the single numbers on the host; where they are no multiples, its groups write over each other's scales. Here that
is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parity.cpu.enums import TORCH_DTYPE
from parity.cpu.quantized import float8, formats, quantize

__all__ = [
    "bgrad_group_quantize",
    "group_dequantize",
    "group_quantize",
    "group_requantize_inplace",
    "nvfp4_group_quantize_with_amax",
    "nvfp4_quantize_with_amax",
]

_TILE_ROWS = 128


@torch.no_grad()
def group_quantize(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
    noop_flag: Tensor | None = None,
    output: Any = None,
) -> Any:
    """Cast each group of a matrix with one quantizer.

    Args:
        tensor: FP32, FP16 or BF16, ``[rows, columns]``; rows beyond the last group are left out.
        quantizer: TE's, with current scaling or a block-scaled format.
        num_tensors: how many groups there are.
        first_dims: int64, rows of each group. Default: all the same.
        tensor_offsets: of no use: where groups begin follows from their rows.
        noop_flag: FP32, one element; 1 leaves ``output`` as it is.
        output: a grouped tensor of the same quantizer and shape, to be filled. Default: a new one.

    Raises:
        RuntimeError: for quantizers, options and numbers of rows that TE's kernels do not group.
        NotImplementedError: for ``last_dims``, groups of several widths, which no module of TE asks for.
    """
    _check(quantizer, last_dims)
    if output is None:
        output = _empty(tensor, quantizer, num_tensors, first_dims)
    elif output.quantizer is not quantizer or tuple(output.logical_shape) != tuple(tensor.shape):
        raise RuntimeError("group_quantize: output was made by another quantizer, or has another shape")
    if noop_flag is None or noop_flag.item() != 1:
        _fill(output, tensor, quantizer, {})
    return output


@torch.no_grad()
def bgrad_group_quantize(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
) -> tuple[Any, Tensor]:
    """``group_quantize`` of an output gradient, and the bias gradients, ``[groups, columns]`` in its dtype.

    A bias gradient is the sum over a group's rows before the cast, in FP32 and rounded once.

    Raises:
        RuntimeError: for quantizers other than MXFP8's and block scaling's.
    """
    if type(quantizer).__name__ not in ("MXFP8Quantizer", "Float8BlockQuantizer"):
        raise RuntimeError(f"bgrad_group_quantize serves MXFP8 and block scaling, not {type(quantizer).__name__}")
    grouped = group_quantize(tensor, quantizer, num_tensors, first_dims, last_dims)
    sums = [part.sum(0, dtype=torch.float32) for part in _parts(tensor, grouped)]
    return grouped, torch.stack(sums).to(tensor.dtype)


@torch.no_grad()
def nvfp4_quantize_with_amax(tensor: Tensor, quantizer: Any, rowwise_amax: Tensor, columnwise_amax: Tensor) -> Any:
    """Cast to NVFP4 with amaxes that are known already (FP32, one element each)."""
    entry = _nvfp4(quantizer)
    known = {"rowwise": rowwise_amax, "columnwise": columnwise_amax}
    return formats.quantize(entry, tensor.detach(), quantizer, tensor.dtype, None, known)


@torch.no_grad()
def nvfp4_group_quantize_with_amax(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    last_dims: Tensor | None = None,
    *,
    rowwise_amax: Tensor,
    columnwise_amax: Tensor,
    tensor_offsets: Tensor | None = None,
) -> Any:
    """``group_quantize`` to NVFP4 with amaxes that are known already (FP32, ``[groups]`` each)."""
    _nvfp4(quantizer)
    _check(quantizer, last_dims)
    output = _empty(tensor, quantizer, num_tensors, first_dims)
    _fill(output, tensor, quantizer, {"rowwise": rowwise_amax, "columnwise": columnwise_amax})
    return output


@torch.no_grad()
def group_dequantize(input: Any, otype: int) -> Any:
    """Return the values of a grouped tensor, as one of high precision: each group's, rounded once to ``otype``."""
    dtype = TORCH_DTYPE[int(otype)]
    values = torch.cat([quantize.dequantize(member, otype).view(-1) for member in members(input)])
    data = values.new_zeros(input.logical_shape[0] * input.logical_shape[1])
    data[: values.numel()] = values
    return _te_class("GroupedTensor")(
        shape=input.logical_shape,
        dtype=dtype,
        num_tensors=input.num_tensors,
        shapes=input.tensor_shapes,
        data=data,
        first_dims=input.first_dims,
        last_dims=input.last_dims,
        tensor_offsets=input.tensor_offsets,
    )


@torch.no_grad()
def group_requantize_inplace(
    grouped_x: Any,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    otype: int,
    tensor_offsets: Tensor | None = None,
    return_dequantized: bool = False,
) -> Tensor | None:
    """Give a grouped tensor with rowwise MXFP8 data the columnwise data that its quantizer asks for.

    They are cast from the rowwise data, decoded and rounded to ``otype``.

    Returns:
        The decoded values, ``[rows, columns]``, if they are asked for.

    Raises:
        RuntimeError: for other formats, and for a tensor without rowwise data or with columnwise data already.
    """
    if type(quantizer).__name__ != "MXFP8Quantizer" or type(grouped_x.quantizer) is not type(quantizer):
        raise RuntimeError("group_requantize_inplace serves MXFP8 tensors alone")
    if grouped_x.rowwise_data is None or grouped_x.columnwise_data is not None:
        raise RuntimeError("group_requantize_inplace takes a grouped tensor with rowwise data alone")
    values = group_dequantize(grouped_x, otype).rowwise_data.view(grouped_x.logical_shape)
    if quantizer.columnwise_usage:
        quantizer.set_usage(rowwise=False, columnwise=True)
        columnwise = group_quantize(values, quantizer, num_tensors, first_dims)
        grouped_x.columnwise_data = columnwise.columnwise_data
        grouped_x.columnwise_scale_inv = columnwise.columnwise_scale_inv
    return values if return_dequantized else None


def members(grouped: Any) -> list[Any]:
    """Return each group as a TE tensor, or a plain one; views of the grouped tensor's buffers."""
    return grouped.split_into_quantized_tensors()


def _check(quantizer: Any, last_dims: Tensor | None) -> None:
    """Raise for what TE's grouped kernels do not serve."""
    if last_dims is not None:
        raise NotImplementedError("the CPU kernel group_quantize has no groups of several widths")
    entry = formats.of_quantizer(quantizer)
    if entry is None and not quantize.is_current(quantizer):
        raise RuntimeError(f"group_quantize serves no {type(quantizer).__name__}")
    if entry is not None and entry.quantizer == "NVFP4Quantizer":
        four_over_six = getattr(quantizer, "nvfp4_use_4over6", False)
        if quantizer.with_2d_quantization or four_over_six or not quantizer.with_rht:
            raise RuntimeError("grouped NVFP4 quantization needs a random Hadamard transform, and 1D blocks")


def _nvfp4(quantizer: Any) -> formats.Format:
    entry = formats.of_quantizer(quantizer)
    if entry is None or entry.quantizer != "NVFP4Quantizer":
        raise RuntimeError(f"NVFP4 is cast by an NVFP4Quantizer, not by a {type(quantizer).__name__}")
    return entry


def _empty(tensor: Tensor, quantizer: Any, num_tensors: int, first_dims: Tensor | None) -> Any:
    """Return a grouped tensor with the buffers that the quantizer's usages ask for.

    Raises:
        RuntimeError: for numbers of rows that block scales do not fit.
    """
    rows, columns = tensor.shape
    each = [rows // num_tensors] * num_tensors if first_dims is None else first_dims.tolist()
    if formats.of_quantizer(quantizer) is not None and any(size % _TILE_ROWS for size in each):
        raise RuntimeError(
            f"{type(quantizer).__name__} groups matrices whose numbers of rows are multiples of {_TILE_ROWS}, but got "
            f"{each}; pad them (Fp8Padding with align_size={_TILE_ROWS})"
        )
    output = _te_class("GroupedTensorStorage").make_grouped_tensor(
        num_tensors, first_dims, None, rows, columns, quantizer, tensor.device, tensor.dtype
    )
    output.quantized_tensors, output._with_gemm_swizzled_scales = None, False
    return output


def _te_class(name: str) -> Any:
    from transformer_engine.pytorch.tensor import grouped_tensor

    return getattr(grouped_tensor, name)


def _parts(tensor: Tensor, grouped: Any) -> list[Tensor]:
    """Return the rows of each group."""
    sizes = [shape[0] for shape in grouped.tensor_shapes]
    return list(tensor.detach()[: sum(sizes)].split(sizes))


def _fill(output: Any, tensor: Tensor, quantizer: Any, amaxes: Mapping[str, Tensor]) -> None:
    """Cast each group into its part of the buffers; ``amaxes``, of each group by direction, where they are known."""
    entry = formats.of_quantizer(quantizer)
    for index, (part, member) in enumerate(zip(_parts(tensor, output), members(output), strict=True)):
        if entry is not None:
            known = {name: amax[index : index + 1] for name, amax in amaxes.items()}
            formats.quantize(entry, part, quantizer, tensor.dtype, member, known)
        else:
            amax = float8.amax_of(part)
            scale = quantize.current_scale(amax, quantizer)
            float8.write(member, float8.encode(part, scale, float8.fp8_dtype(quantizer)))
            output.amax[index], output.scale[index] = amax, scale
