"""Casts to and from FP8 and FP4, of one tensor or of a group of them such as the experts of a mixture.

Follows TransformerEngine 2.20.2: ``csrc/extensions/cast.cpp``, ``csrc/quantizer.cpp``, ``csrc/extensions/bias.cpp``,
``csrc/extensions/transpose.cpp`` and ``common/recipe/recipe_common.cuh``. Codes with one scale per tensor (delayed
and current scaling) are computed here, those with one scale per block by ``formats.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_on_cpu import cuda, float8, formats, nvfp4, swizzle, versions
from te_on_cpu.enums import TORCH_DTYPE

__all__ = [
    "bgrad_group_quantize",
    "bgrad_quantize",
    "compute_amax",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "group_dequantize",
    "group_quantize",
    "group_requantize_inplace",
    "nvfp4_2d_scale_transpose",
    "nvfp4_data_transpose",
    "nvfp4_group_quantize_with_amax",
    "nvfp4_quantize_with_amax",
    "quantize",
    "split_quantize",
    "swap_first_dims",
]


def is_mxfp8(quantizer: Any) -> bool:
    """Return whether the quantizer makes MXFP8, where the kernel that casts also sums the bias gradient."""
    return type(quantizer).__name__ == "MXFP8Quantizer"


def check_quantizer(quantizer: Any, kernel: str) -> None:
    """Raise ``NotImplementedError`` for a quantizer that ``kernel`` does not serve, and neither does TE's own.

    Follows ``convert_quantizer`` in ``csrc/common.cpp`` of TE 2.20.2. ``HybridQuantizer`` and ``IdentityQuantizer`` are
    for TE's modules, whose Python takes them apart; operations (``te.ops``) pass them on.
    """
    if not (float8.is_delayed(quantizer) or float8.is_current(quantizer) or formats.of_quantizer(quantizer)):
        served = ", ".join(entry.quantizer for entry in formats.FORMATS)
        raise NotImplementedError(
            f"Unexpected type for quantizer: {kernel} takes those of delayed and current scaling, {served}, as on a "
            f"GPU, but TransformerEngine {versions.installed_version()} passed a {type(quantizer).__name__}"
        )


def store(
    values: Tensor,
    quantizer: Any,
    dtype: torch.dtype,
    output: Any = None,
    *,
    amax_before_rounding: bool = False,
    kernel: str = "store",
) -> Any:
    """Return the FP32 results of a TE kernel as it stores them.

    ========================  ======================================================================================
    no quantizer              rounded once, to ``dtype``
    delayed scaling           amax and FP8 codes straight from the FP32 values (a fused kernel)
    current scaling           rounded to ``dtype``, the rounded values cast to FP8 with a scale from their amax
    block-scaled formats      rounded to ``dtype``, the rounded values cast with scales from the amaxes of their blocks
    ========================  ======================================================================================

    This follows ``csrc/extensions/activation.cpp`` and ``normalization.cpp`` of TE 2.20.2.

    Args:
        values: FP32, any shape.
        quantizer: TE's, or None.
        dtype: FP32, FP16 or BF16, the dtype of the result; the nominal dtype if it is quantized.
        output: a tensor to write, or a TE quantized tensor if there is a quantizer. Default: a new one.
        amax_before_rounding: with current scaling and NVFP4, take the amax of the FP32 values, as TE's activation
            kernels do (``unary_kernel`` in ``common/util/vectorized_pointwise.h``); its norms take that of the
            rounded values.
        kernel: name of the calling kernel, for the error.

    Returns:
        ``output``, or a new tensor of ``dtype``, or a new TE quantized tensor.

    Raises:
        NotImplementedError: for quantizers that are not TE's own.
    """
    if quantizer is None:
        return values.to(dtype) if output is None else output.copy_(values)
    check_quantizer(quantizer, kernel)
    if float8.is_delayed(quantizer):
        return _quantize(values, quantizer, dtype, output)
    amax = float8.amax_of(values) if amax_before_rounding else None
    return _quantize(values.to(dtype), quantizer, dtype, output, amax)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Cast a tensor to FP8 or FP4 (``csrc/extensions/cast.cpp``, TE 2.20.2).

    Args:
        tensor: FP32, FP16 or BF16, any shape.
        quantizer: TE's; its usages determine the buffers of the result.
        output: a TE quantized tensor to fill. Default: a new one.
        noop: FP32 flag of one element; 1 leaves ``output``, its scale and the amax as they are.

    Raises:
        NotImplementedError: for quantizers that are not TE's own.
        RuntimeError: for only columnwise data with one scale per tensor (but on a Blackwell, whose GEMMs read no
            transposes), and for shapes that a block-scaled format does not support.
    """
    check_quantizer(quantizer, "quantize")
    tensor = tensor.detach()
    if noop is not None and noop.item() == 1:
        if output is None:
            return _empty(quantizer, tensor.shape, tensor.dtype)
        if formats.of_quantizer(quantizer) is None:
            float8.prepare(quantizer, output)
        return output
    return _quantize(tensor, quantizer, tensor.dtype, output)


def _quantize(values: Tensor, quantizer: Any, dtype: torch.dtype, output: Any, amax: Tensor | None = None) -> Any:
    entry = formats.of_quantizer(quantizer)
    if entry is not None:
        # A random Hadamard transform changes the amax of the columns.
        known = {} if amax is None or getattr(quantizer, "with_rht", False) else {"rowwise": amax, "columnwise": amax}
        return formats.quantize(entry, values, quantizer, dtype, output, known)
    if output is not None:
        float8.prepare(quantizer, output)
    if values.numel() == 0:
        return float8.empty(quantizer, values.shape, dtype) if output is None else output
    if not float8.needs_codes(quantizer):
        asked = (  # ``common/cast/dispatch/quantize.cuh``
            "asks only for columnwise data, which needs a transpose on this GPU: Quantizing in only the columnwise "
            "direction not supported yet!"
            if quantizer.columnwise_usage
            else "asks for no data: Either rowwise or columnwise output data need to be allocated."
        )
        raise RuntimeError(f"a {type(quantizer).__name__} {asked}")
    codes = float8.encode(values, _scale(values, quantizer, amax), float8.fp8_dtype(quantizer))
    if output is None:
        return float8.new(quantizer, dtype, codes)
    float8.write(output, codes)
    return output


def _empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    entry = formats.of_quantizer(quantizer)
    if entry is not None:
        return formats.empty(entry, quantizer, shape, dtype)
    return float8.empty(quantizer, shape, dtype)


def _scale(values: Tensor, quantizer: Any, amax: Tensor | None) -> Tensor:
    """Return the scale for a cast; with delayed scaling, also update the amax that is kept for later steps."""
    amax = float8.amax_of(values) if amax is None else amax
    if not float8.is_delayed(quantizer):
        return current_scale(amax, quantizer)
    float8.keep_amax(quantizer, amax)
    return quantizer.scale


def current_scale(amax: Tensor, quantizer: Any) -> Tensor:
    """Return current scaling's FP32 scale for an amax, which is first reduced in place over the quantizer's ranks."""
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group)
    limit = torch.finfo(float8.fp8_dtype(quantizer)).max
    return float8.scale_from_amax(amax, limit, quantizer.amax_epsilon, quantizer.force_pow_2_scales)


def dequantize(input: Any, otype: int) -> Tensor:
    """Multiply codes by their scales in FP32, and round once to ``otype`` (``csrc/extensions/cast.cpp``, TE 2.20.2)."""
    entry = formats.of_tensor(input)
    if entry is not None:
        return entry.kernels.decode(input).to(TORCH_DTYPE[int(otype)])
    if not float8.is_float8_tensor(input):
        raise NotImplementedError(
            f"the CPU kernel dequantize reads TE's FP8 and FP4 tensors, but TransformerEngine "
            f"{versions.installed_version()} passed a {type(input).__name__}"
        )
    return float8.dequantize(input).to(TORCH_DTYPE[int(otype)])


def bgrad_quantize(input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the bias gradient of an output gradient, and that gradient quantized (``csrc/extensions/bias.cpp``).

    Args:
        input: the output gradient ``[*leading, features]``.
        quantizer: TE's, or None to leave the gradient as it is.

    Returns:
        The FP32 sum of the gradient before the cast over its leading dimensions, rounded to the input's dtype,
        ``[features]``; and the gradient.
    """
    bias_grad = input.reshape(-1, input.shape[-1]).sum(0, dtype=torch.float32).to(input.dtype)
    return bias_grad, input if quantizer is None else quantize(input, quantizer)


def split_quantize(
    tensor: Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split a tensor along its first dimension and cast each part with its own quantizer.

    Raises:
        ValueError: if there are not as many quantizers as sections, or the sections exceed the tensor.
        RuntimeError: for sections and options that TE's kernel for several NVFP4 tensors refuses.
    """
    if len(quantizer_list) != len(split_sections):
        raise ValueError(f"split_quantize got {len(split_sections)} sections but {len(quantizer_list)} quantizers")
    if sum(split_sections) > tensor.shape[0]:
        raise ValueError(f"split_quantize cannot split {tensor.shape[0]} rows into {list(split_sections)}")
    is_nvfp4 = [type(quantizer).__name__ == "NVFP4Quantizer" for quantizer in quantizer_list]
    if tensor.numel() and all(is_nvfp4) and not disable_bulk_allocation:
        _check_nvfp4_split(tensor.shape[-1], split_sections, quantizer_list)
    parts = tensor[: sum(split_sections)].split(list(split_sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


def _check_nvfp4_split(columns: int, split_sections: Sequence[int], quantizers: Sequence[Any]) -> None:
    """Raise ``RuntimeError`` for what TE's kernel for several NVFP4 tensors refuses.

    Follows ``split_quantize_nvfp4_impl`` in ``csrc/extensions/cast.cpp`` of TE 2.20.2, and
    ``common/hadamard_transform/group_hadamard_transform.cu``. Tensors whose rows are not multiples of 128 elements, and
    row-scaled ones, are cast one by one.
    """
    if columns % 128 or any(getattr(quantizer, "row_scaled_nvfp4", False) for quantizer in quantizers):
        return
    first = quantizers[0]
    for option, name in (("with_2d_quantization", "2D quantization"), ("with_amax_reduction", "amax reduction")):
        if getattr(first, option):
            raise RuntimeError(f"NVFP4 split-quantize does not support {name}")
    if first.with_rht and (10, 0) <= cuda.get_device_capability() <= (11, 0):
        for index, rows in enumerate(split_sections):
            if rows % 64:
                raise RuntimeError(
                    f"component {index} of split_sections should be 64 multiple, but it is {rows}; pad the groups "
                    "(Fp8Padding), or disable the random Hadamard transform"
                )


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pin_memory: bool = False,
) -> Any:
    """Return a TE quantized tensor with the buffers that the quantizer's usages ask for, not yet filled."""
    check_quantizer(quantizer, "create_empty_quantized_tensor")
    return _empty(quantizer, shape, dtype)


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Write the largest magnitude of ``input`` into ``amax`` (FP32, one element); NaNs do not count."""
    amax.fill_(float8.amax_of(input))


def fp8_transpose(input: Tensor, dtype: int, *, out: Tensor | None = None) -> Tensor:
    """Transpose codes ``[*leading, last]`` to ``[last, *leading]``, into ``out`` if it is given (``transpose.cpp``)."""
    if out is None:
        return float8.transpose(input)
    out.view(input.movedim(-1, 0).shape).copy_(input.movedim(-1, 0))
    return out


def nvfp4_data_transpose(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Transpose packed FP4 ``[m, k / 2]`` to ``[k, m / 2]``, into ``out`` if it is given (``transpose.cpp``)."""
    transposed = nvfp4.transpose(input)
    return transposed if out is None else out.copy_(transposed)


def nvfp4_2d_scale_transpose(input: Tensor, output: Tensor, M_tiles: int, K_tiles: int) -> None:
    """Transpose the rowwise scales of 16 x 16 blocks, which are repeated over 16 rows, into columnwise ``output``.

    Args:
        input: E4M3 bytes, ``[m up to 128, k / 16 up to 4]``.
        output: E4M3 bytes, ``[k up to 128, m / 16 up to 4]``.
        M_tiles, K_tiles: blocks down and across.
    """
    one_each = input[: 16 * M_tiles : 16, :K_tiles]
    output[: 16 * K_tiles, :M_tiles] = one_each.t().repeat_interleave(16, 0)


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a contiguous copy with the first two dimensions swapped, in ``out`` if it is given."""
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


# Casts of several matrices that lie one after the other in one tensor, such as the experts of a mixture.
#
# Follows ``csrc/extensions/cast.cpp`` and ``csrc/quantizer.cpp`` (``create_grouped_tensor``) of TransformerEngine
# 2.20.2. The result is a ``GroupedTensor``, or a ``GroupedTensorStorage`` if the quantizer is internal. Its buffers
# hold those of the groups end to end, and each group is cast as if it were alone. TE's own Python computes where each
# begins.
#
# Block-scaled formats need groups whose numbers of rows are multiples of 128. A GPU only checks their sum, because the
# host never reads the individual numbers; if they are not multiples, its groups overwrite each other's scales. Here
# that is an error.


_TILE_ROWS = 128


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
    """Cast each group of matrices with one quantizer.

    Args:
        tensor: FP32, FP16 or BF16, a matrix with one group after another in memory: ``[sum of rows, columns]``,
            ``[rows, sum of columns]``, or ``[1, elements]`` if both differ. Elements after the last group are ignored.
        quantizer: TE's, with current scaling or a block-scaled format.
        num_tensors: number of groups.
        first_dims: int64, rows of each group. Default: all the same.
        last_dims: int64, columns of each group. Default: all the same.
        tensor_offsets: int64, the start of each group, and the end; the output keeps it. Default: computed.
        noop_flag: FP32, one element; 1 leaves ``output`` as it is.
        output: a grouped tensor of the same quantizer and shape, which is filled. Default: a new one.

    Raises:
        RuntimeError: for quantizers, options and shapes that TE's kernels do not group.
    """
    _check_groups(quantizer, first_dims, last_dims)
    if output is None:
        output = _empty_groups(tensor, quantizer, num_tensors, first_dims, last_dims)
        if tensor_offsets is not None:
            output.tensor_offsets = tensor_offsets
    elif output.quantizer is not quantizer or tuple(output.logical_shape) != tuple(tensor.shape):
        raise RuntimeError("group_quantize: output was made by another quantizer, or has another shape")
    if noop_flag is None or noop_flag.item() != 1:
        _fill(output, tensor, quantizer, {})
    return output


def bgrad_group_quantize(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
) -> tuple[Any, Tensor]:
    """Return ``group_quantize`` of an output gradient, and the bias gradients, ``[groups, columns]`` in its dtype.

    A bias gradient is the FP32 sum over a group's rows before the cast, rounded once.

    Raises:
        RuntimeError: for quantizers other than MXFP8's and block scaling's, and for groups of several widths.
    """
    if last_dims is not None:
        raise RuntimeError(
            "bgrad_group_quantize takes no groups of different widths, because their bias gradients differ in size"
        )
    if type(quantizer).__name__ not in ("MXFP8Quantizer", "Float8BlockQuantizer"):
        raise RuntimeError(f"bgrad_group_quantize supports MXFP8 and block scaling, not {type(quantizer).__name__}")
    grouped = group_quantize(tensor, quantizer, num_tensors, first_dims, tensor_offsets=tensor_offsets)
    sums = [part.sum(0, dtype=torch.float32) for part in _groups_of(tensor, grouped)]
    return grouped, torch.stack(sums).to(tensor.dtype)


def nvfp4_quantize_with_amax(tensor: Tensor, quantizer: Any, rowwise_amax: Tensor, columnwise_amax: Tensor) -> Any:
    """Cast to NVFP4 with amaxes that are known already (FP32, one element each)."""
    entry = _nvfp4(quantizer)
    known = {"rowwise": rowwise_amax, "columnwise": columnwise_amax}
    return formats.quantize(entry, tensor.detach(), quantizer, tensor.dtype, None, known)


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
    """Cast each group to NVFP4 as ``group_quantize`` does, with known amaxes (FP32, ``[groups]`` each)."""
    _nvfp4(quantizer)
    _check_groups(quantizer, first_dims, last_dims)
    output = _empty_groups(tensor, quantizer, num_tensors, first_dims)
    _fill(output, tensor, quantizer, {"rowwise": rowwise_amax, "columnwise": columnwise_amax})
    return output


def group_dequantize(input: Any, otype: int) -> Any:
    """Decode a grouped tensor into one of high precision, whose values are rounded once to ``otype``."""
    dtype = TORCH_DTYPE[int(otype)]
    values = torch.cat([dequantize(member, otype).reshape(-1) for member in members(input)])
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


def group_requantize_inplace(
    grouped_x: Any,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    otype: int,
    tensor_offsets: Tensor | None = None,
    return_dequantized: bool = False,
) -> Tensor | None:
    """Add the columnwise data that the quantizer asks for to a grouped tensor with rowwise MXFP8 data, for a GEMM.

    It is cast from the rowwise data, decoded and rounded to ``otype``. All scales are swizzled afterwards.

    Returns:
        The decoded values, ``[rows, columns]``, if they are asked for.

    Raises:
        RuntimeError: for other formats, for a tensor without rowwise data, and for one that already has columnwise data
            or swizzled scales. A tensor with swizzled scales and all the data asked for is left as it is.
    """
    if type(quantizer).__name__ != "MXFP8Quantizer" or type(grouped_x.quantizer) is not type(quantizer):
        raise RuntimeError("group_requantize_inplace supports only MXFP8 tensors")
    if grouped_x.quantizer.dtype != quantizer.dtype:
        raise RuntimeError(
            f"group_requantize_inplace keeps the FP8 dtype of its tensor, {grouped_x.quantizer.dtype}, but got a "
            f"quantizer that makes {quantizer.dtype}"
        )
    if grouped_x.rowwise_data is None:
        raise RuntimeError("group_requantize_inplace takes a grouped tensor with rowwise data")
    if swizzle.is_swizzled(grouped_x):
        if return_dequantized or (quantizer.columnwise_usage and grouped_x.columnwise_data is None):
            raise RuntimeError(
                "group_requantize_inplace got a tensor whose scales are swizzled: it cannot be decoded, and columnwise "
                "data cannot be rebuilt from it"
            )
        return None
    if grouped_x.columnwise_data is not None:
        raise RuntimeError("group_requantize_inplace takes a grouped tensor with only rowwise data")
    values = group_dequantize(grouped_x, otype).rowwise_data.view(grouped_x.logical_shape)
    swizzle_groups(grouped_x, rowwise=True, columnwise=False)
    if quantizer.columnwise_usage:
        quantizer.set_usage(rowwise=False, columnwise=True)
        columnwise = group_quantize(values, quantizer, num_tensors, first_dims)
        swizzle_groups(columnwise, rowwise=False, columnwise=True)
        grouped_x.columnwise_data = columnwise.columnwise_data
        grouped_x.columnwise_scale_inv = columnwise.columnwise_scale_inv
    return values if return_dequantized else None


def members(grouped: Any) -> list[Any]:
    """Return each group as a TE tensor or a plain one, with views of the grouped tensor's buffers."""
    found: list[Any] = grouped.split_into_quantized_tensors()
    for member in found:  # TE's Python marks them as their quantizer would, even if the group's scales differ
        if hasattr(member, f"_{swizzle.FLAG}"):
            setattr(member, f"_{swizzle.FLAG}", swizzle.is_swizzled(grouped))
    return found


def swizzle_groups(grouped: Any, rowwise: bool, columnwise: bool) -> None:
    """Swizzle a grouped MXFP8 tensor's scales, and drop those of directions that are not asked for."""
    if type(grouped.quantizer).__name__ != "MXFP8Quantizer" or swizzle.is_swizzled(grouped):
        return
    swizzled: dict[str, Tensor] = {}
    for name, direction, asked in (
        ("scale_inv", "rowwise", rowwise),
        ("columnwise_scale_inv", "columnwise", columnwise),
    ):
        held = getattr(grouped, name)
        if asked and held is not None:
            parts = [getattr(member, f"_{direction}_scale_inv") for member in members(grouped)]
            ordered = torch.cat([swizzle.swizzle(part, direction == "columnwise").flatten() for part in parts])
            swizzled[name] = torch.zeros_like(held.flatten())
            swizzled[name][: ordered.numel()] = ordered
    if swizzled:
        grouped.scale_inv, grouped.columnwise_scale_inv = map(swizzled.get, ("scale_inv", "columnwise_scale_inv"))
        setattr(grouped, f"_{swizzle.FLAG}", True)


def _check_groups(quantizer: Any, first_dims: Tensor | None, last_dims: Tensor | None) -> None:
    """Raise ``RuntimeError`` for quantizers and groups that TE's grouped kernels do not serve.

    Only MXFP8 takes groups of several widths, and current scaling if they all have the same number of rows. See
    ``group_quantize`` in ``csrc/extensions/cast.cpp``, and ``group_quantize_fp8.cuh`` and
    ``group_quantize_fp8_blockwise.cuh`` in ``common/cast``, of TE 2.20.
    """
    entry = formats.of_quantizer(quantizer)
    if entry is None and not float8.is_current(quantizer):
        raise RuntimeError(f"group_quantize does not support {type(quantizer).__name__}")
    if last_dims is not None and entry is not None and entry.quantizer != "MXFP8Quantizer":
        raise RuntimeError(f"a {entry.quantizer} cannot cast groups of different widths (last_dims)")
    if last_dims is not None and first_dims is not None and entry is None:
        raise RuntimeError("current scaling casts groups that differ in rows or in columns, but not in both")
    if entry is not None and entry.quantizer == "NVFP4Quantizer":
        four_over_six = getattr(quantizer, "nvfp4_use_4over6", False)
        if quantizer.with_2d_quantization or four_over_six or not quantizer.with_rht:
            raise RuntimeError("grouped NVFP4 quantization needs a random Hadamard transform, and 1D blocks")


def _nvfp4(quantizer: Any) -> formats.Format:
    entry = formats.of_quantizer(quantizer)
    if entry is None or entry.quantizer != "NVFP4Quantizer":
        raise RuntimeError(f"NVFP4 is cast by an NVFP4Quantizer, not by a {type(quantizer).__name__}")
    return entry


def _empty_groups(
    tensor: Tensor, quantizer: Any, num_tensors: int, first_dims: Tensor | None, last_dims: Tensor | None = None
) -> Any:
    """Return a grouped tensor with the buffers that the quantizer's usages ask for.

    Raises:
        RuntimeError: if a block-scaled format gets a group whose number of rows is not a multiple of 128.
    """
    rows, columns = tensor.shape
    same = rows if last_dims is not None else rows // num_tensors
    each = [same] * num_tensors if first_dims is None else first_dims.tolist()
    if formats.of_quantizer(quantizer) is not None and any(size % _TILE_ROWS for size in each):
        raise RuntimeError(
            f"{type(quantizer).__name__} needs groups whose numbers of rows are multiples of {_TILE_ROWS}, but got "
            f"{each}; pad them (Fp8Padding with align_size={_TILE_ROWS})"
        )
    output = _te_class("GroupedTensorStorage").make_grouped_tensor(
        num_tensors, first_dims, last_dims, rows, columns, quantizer, tensor.device, tensor.dtype
    )
    output.quantized_tensors = None
    return output


def _te_class(name: str) -> Any:
    from transformer_engine.pytorch.tensor import grouped_tensor

    return getattr(grouped_tensor, name)


def _groups_of(tensor: Tensor, grouped: Any) -> list[Tensor]:
    """Return the groups of ``tensor``, which follow each other in memory."""
    shapes = grouped.tensor_shapes
    sizes = [rows * columns for rows, columns in shapes]
    parts = tensor.detach().reshape(-1)[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _fill(output: Any, tensor: Tensor, quantizer: Any, amaxes: Mapping[str, Tensor]) -> None:
    """Cast each group into its part of the buffers; ``amaxes`` holds known amaxes of all groups by direction."""
    entry = formats.of_quantizer(quantizer)
    is_swizzled = entry is not None and entry.kernels.settings(quantizer).get(swizzle.FLAG, False)
    setattr(output, f"_{swizzle.FLAG}", is_swizzled)
    for index, (part, member) in enumerate(zip(_groups_of(tensor, output), members(output), strict=True)):
        if entry is not None:
            known = {name: amax[index : index + 1] for name, amax in amaxes.items()}
            formats.quantize(entry, part, quantizer, tensor.dtype, member, known)
        else:
            amax = float8.amax_of(part)
            scale = current_scale(amax, quantizer)
            float8.write(member, float8.encode(part, scale, float8.fp8_dtype(quantizer)))
            output.amax[index], output.scale[index] = amax, scale
