"""Casts to and from FP8 with one scale a tensor: delayed and current scaling.

Follows TransformerEngine 2.20.2: ``csrc/extensions/cast.cpp``, ``csrc/quantizer.cpp``, ``csrc/extensions/bias.cpp``,
``csrc/extensions/transpose.cpp`` and ``common/recipe/recipe_common.cuh``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parity.cpu import float8, versions
from parity.cpu.enums import TORCH_DTYPE

__all__ = [
    "bgrad_quantize",
    "compute_amax",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "quantize",
    "split_quantize",
    "swap_first_dims",
]

_LARGEST_FP32 = torch.finfo(torch.float32).max


def is_delayed(quantizer: Any) -> bool:
    """Whether the quantizer takes a scale from earlier steps: then kernels cast to FP8 from their FP32 results."""
    return type(quantizer).__name__ == "Float8Quantizer"


def is_current(quantizer: Any) -> bool:
    """Whether the quantizer computes its scale from the very values it casts."""
    return type(quantizer).__name__ == "Float8CurrentScalingQuantizer"


def check_quantizer(quantizer: Any, kernel: str) -> None:
    """Raise ``NotImplementedError`` for a quantizer that ``kernel`` does not serve."""
    if not is_delayed(quantizer) and not is_current(quantizer):
        raise NotImplementedError(
            f"the CPU kernel {kernel} serves FP8 with delayed and current scaling, and no {type(quantizer).__name__}, "
            f"which TransformerEngine {versions.installed_version()} asked for"
        )


@torch.no_grad()
def store(
    values: Tensor,
    quantizer: Any,
    dtype: torch.dtype,
    output: Any = None,
    *,
    amax_before_rounding: bool = False,
    kernel: str = "store",
) -> Any:
    """What a TE kernel does with its FP32 results.

    ========================  ======================================================================================
    no quantizer              rounded once, to ``dtype``
    delayed scaling           amax and FP8 codes straight from the FP32 values (a fused kernel)
    current scaling           rounded to ``dtype``, the rounded values cast to FP8 with a scale from their amax
    ========================  ======================================================================================

    As in ``csrc/extensions/activation.cpp`` and ``normalization.cpp`` of TE 2.20.2.

    Args:
        values: FP32, any shape.
        quantizer: TE's, or None.
        dtype: FP32, FP16 or BF16: what the result is, or seems to be if it is quantized.
        output: where the result goes: a tensor, or a TE quantized tensor if there is a quantizer. Default: a new one.
        amax_before_rounding: with current scaling, take the amax of the FP32 values, as TE's activation kernels do
            (``unary_kernel`` in ``common/util/vectorized_pointwise.h``); its norms take that of the rounded ones.
        kernel: who calls, for the error.

    Returns:
        ``output``, or a new tensor of ``dtype``, or a new TE quantized tensor.

    Raises:
        NotImplementedError: for quantizers other than delayed and current scaling.
    """
    if quantizer is None:
        return values.to(dtype) if output is None else output.copy_(values)
    check_quantizer(quantizer, kernel)
    if is_delayed(quantizer):
        return _quantize(values, quantizer, dtype, output)
    amax = float8.amax_of(values) if amax_before_rounding else None
    return _quantize(values.to(dtype), quantizer, dtype, output, amax)


@torch.no_grad()
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Cast a tensor to FP8 (``csrc/extensions/cast.cpp``, TE 2.20.2).

    Args:
        tensor: FP32, FP16 or BF16, any shape.
        quantizer: delayed or current scaling; its usages say which buffers the result has.
        output: a TE FP8 tensor to fill. Default: a new one.
        noop: FP32 flag of one element; 1 leaves ``output``, its scale and the amax as they are.

    Raises:
        NotImplementedError: for other quantizers, and for columnwise data alone, which TE's kernels lack too.
    """
    check_quantizer(quantizer, "quantize")
    tensor = tensor.detach()
    if noop is not None and noop.item() == 1:
        output = float8.empty(quantizer, tensor.shape, tensor.dtype) if output is None else output
        float8.prepare(quantizer, output)
        return output
    return _quantize(tensor, quantizer, tensor.dtype, output)


def _quantize(values: Tensor, quantizer: Any, dtype: torch.dtype, output: Any, amax: Tensor | None = None) -> Any:
    if output is not None:
        float8.prepare(quantizer, output)
    if values.numel() == 0:
        return float8.empty(quantizer, values.shape, dtype) if output is None else output
    if not quantizer.rowwise_usage:
        raise NotImplementedError(
            f"{type(quantizer).__name__} with columnwise usage only: TransformerEngine's cast needs the rowwise buffer"
        )
    codes = float8.encode(values, _scale(values, quantizer, amax), float8.fp8_dtype(quantizer))
    if output is None:
        return float8.new(quantizer, dtype, codes)
    float8.write(output, codes)
    return output


def _scale(values: Tensor, quantizer: Any, amax: Tensor | None) -> Tensor:
    """The scale to cast with; delayed scaling also raises the amax that it keeps for later steps."""
    amax = float8.amax_of(values) if amax is None else amax
    if is_delayed(quantizer):
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        return quantizer.scale
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group)
    limit = torch.finfo(float8.fp8_dtype(quantizer)).max
    return current_scale(amax, limit, quantizer.amax_epsilon, quantizer.force_pow_2_scales)


def current_scale(amax: Tensor, limit: float, epsilon: float = 0.0, power_of_two: bool = False) -> Tensor:
    """The scale that takes ``amax`` to ``limit`` (``compute_scale_from_amax`` in ``recipe_common.cuh``, TE 2.20.2).

    Args:
        amax: FP32, any shape.
        limit: the largest finite value of the FP8 type.
        epsilon: smaller amaxes count as this.
        power_of_two: round the scale down to a power of two.

    Returns:
        FP32 in the shape of ``amax``: ``limit / amax``, at most the largest FP32; 1 where amax is 0, infinite or NaN.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    scale = torch.full_like(amax, limit).div(amax).clamp(max=_LARGEST_FP32)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(amax.isfinite() & (amax != 0), scale, 1.0)


@torch.no_grad()
def dequantize(input: Any, otype: int) -> Tensor:
    """FP8 values times scale_inv, in FP32, rounded once to ``otype`` (``csrc/extensions/cast.cpp``, TE 2.20.2)."""
    if not float8.is_float8_tensor(input):
        raise NotImplementedError(
            f"the CPU kernel dequantize reads Float8Tensor, and no {type(input).__name__}, "
            f"which TransformerEngine {versions.installed_version()} asked for"
        )
    return float8.decode(input._data, float8.fp8_dtype(input)).mul_(input._scale_inv).to(TORCH_DTYPE[int(otype)])


@torch.no_grad()
def bgrad_quantize(input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The bias gradient of an output gradient, and that gradient cast to FP8 (``csrc/extensions/bias.cpp``).

    Args:
        input: the output gradient ``[*leading, features]``.
        quantizer: delayed or current scaling, or None to leave the gradient as it is.

    Returns:
        The sum over the leading dimensions of the gradient before the cast, summed in FP32 and rounded to the input's
        dtype, ``[features]``; and the gradient.
    """
    bias_grad = input.reshape(-1, input.shape[-1]).sum(0, dtype=torch.float32).to(input.dtype)
    return bias_grad, input if quantizer is None else quantize(input, quantizer)


@torch.no_grad()
def split_quantize(
    tensor: Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split a tensor along its first dimension and cast each part with its own quantizer.

    Raises:
        ValueError: if there are not as many quantizers as sections, or the sections exceed the tensor.
    """
    if len(quantizer_list) != len(split_sections):
        raise ValueError(f"split_quantize got {len(split_sections)} sections but {len(quantizer_list)} quantizers")
    if sum(split_sections) > tensor.shape[0]:
        raise ValueError(f"split_quantize cannot split {tensor.shape[0]} rows into {list(split_sections)}")
    parts = tensor[: sum(split_sections)].split(list(split_sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pin_memory: bool = False,
) -> Any:
    """A TE FP8 tensor whose buffers hold nothing yet, with the buffers that the quantizer's usages ask for."""
    check_quantizer(quantizer, "create_empty_quantized_tensor")
    return float8.empty(quantizer, shape, dtype)


@torch.no_grad()
def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Write the largest magnitude of ``input`` into ``amax`` (FP32, one element); NaNs do not count."""
    amax.fill_(float8.amax_of(input))


@torch.no_grad()
def fp8_transpose(input: Tensor, dtype: int, *, out: Tensor | None = None) -> Tensor:
    """Codes ``[*leading, last]`` as ``[last, *leading]``, in ``out`` if it is given (``transpose.cpp``, TE 2.20.2)."""
    if out is None:
        return float8.transpose(input)
    out.view(input.movedim(-1, 0).shape).copy_(input.movedim(-1, 0))
    return out


@torch.no_grad()
def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """A contiguous copy with the first two dimensions swapped, in ``out`` if it is given."""
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)
