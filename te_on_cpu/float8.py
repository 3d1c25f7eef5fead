"""Per-tensor FP8: conversions between numbers and codes, and TransformerEngine's tensors that hold codes.

FP8 GEMMs of an Ada or a Hopper read both operands along the inner dimension. There, TE's columnwise data is a
transposed copy, ``[last, *leading]``. A Blackwell reads one copy either way, so it always has the codes and never a
transpose (``csrc/quantizer.cpp`` of TE 2.20.2).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_on_cpu import cuda
from te_on_cpu.enums import TORCH_DTYPE

_CANONICAL_NAN = 0x7F
_LARGEST_FP32 = torch.finfo(torch.float32).max
# Elements that are cast at once, so that intermediate results stay in a core's cache.
AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Codes:
    """Hold the result of a per-tensor quantization.

    Attributes:
        data: uint8 codes in the shape of the values.
        scale_inv: FP32 of shape [1], the factor of the codes' FP8 values.
    """

    data: Tensor
    scale_inv: Tensor


def is_delayed(quantizer: Any) -> bool:
    """Return whether the scale comes from earlier steps, so that kernels can cast their FP32 results directly."""
    return type(quantizer).__name__ == "Float8Quantizer"


def is_current(quantizer: Any) -> bool:
    """Return whether the quantizer computes its scale from the values that it casts."""
    return type(quantizer).__name__ == "Float8CurrentScalingQuantizer"


def fp8_dtype(of: Any) -> torch.dtype:
    """Return the FP8 dtype of a TE quantizer (``dtype``) or tensor (``_fp8_dtype``)."""
    dtype = of.dtype if hasattr(of, "rowwise_usage") else of._fp8_dtype
    return TORCH_DTYPE[int(dtype)]


def is_float8_tensor(value: Any) -> bool:
    """Return whether ``value`` is TE's ``Float8Tensor`` or ``Float8TensorStorage``."""
    return any(base.__name__ == "Float8TensorStorage" for base in type(value).__mro__)


def amax_of(values: Tensor) -> Tensor:
    """Return the largest magnitude, an FP32 scalar. NaNs do not count, as in CUDA's ``fmaxf``; no values give 0."""
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float32)
    low, high = torch.aminmax(values)
    amax = torch.maximum(low.neg(), high).float()
    if amax.isnan():
        infinity = float("inf")
        amax = values.nan_to_num(nan=0.0, posinf=infinity, neginf=-infinity).abs().amax().float()
    return amax


def encode(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Codes:
    """Cast the FP32 product ``values * scale`` to FP8, with the reciprocal of the scale as scale_inv.

    Args:
        values: FP32, FP16 or BF16, any shape.
        scale: FP32, one element.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
    """
    scale = scale.detach().reshape(1)
    flat, data = values.reshape(-1), torch.empty(values.shape, dtype=torch.uint8)
    for part, codes in zip(flat.split(AT_ONCE), data.view(-1).split(AT_ONCE), strict=True):
        codes.copy_(cast(torch.mul(part, scale), dtype))
    return Codes(data, scale.reciprocal())


def cast(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 values, which are overwritten, to uint8 codes: to nearest even, saturating; NaN becomes 0x7F.

    The conversion is CUDA's ``__nv_cvt_float_to_fp8(..., __NV_SATFINITE, ...)``, which TE's ``cast_transpose`` and
    ``unary_kernel`` (``common/util/vectorized_pointwise.h``, 2.20.2) use.
    """
    limit = torch.finfo(dtype).max
    data = scaled.clamp_(-limit, limit).to(dtype).view(torch.uint8)
    if data.numel() and scaled.sum().isnan():
        data.masked_fill_(scaled.isnan(), _CANONICAL_NAN)
    return data


def rounded(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 values, which are overwritten, to the values of ``cast``'s codes; NaN stays NaN.

    Adding and subtracting 1.5 times a large enough power of two rounds to the format's last bit. This is several times
    faster than PyTorch's conversions.
    """
    format_ = torch.finfo(dtype)
    scaled.clamp_(-format_.max, format_.max)
    exponent = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=format_.smallest_normal)
    round_off = exponent.mul_(1.5 * 2.0**23 * format_.eps)
    return scaled.add_(round_off).sub_(round_off)


def scale_from_amax(
    amax: Tensor, limit: float, epsilon: float = 0.0, power_of_two: bool = False, largest: float = _LARGEST_FP32
) -> Tensor:
    """Return the scale that maps ``amax`` to ``limit``.

    Follows ``compute_scale_from_amax`` in ``recipe_common.cuh``, TE 2.20.2.

    Args:
        amax: FP32, any shape.
        limit: the largest finite value of the FP8 type.
        epsilon: the least amax; smaller ones are replaced by it.
        power_of_two: round the scale down to a power of two.
        largest: replaces a scale that exceeds FP32.

    Returns:
        FP32 in the shape of ``amax``: ``limit / amax``; 1 where amax is 0, infinite or NaN.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    scale = torch.full_like(amax, limit).div(amax)
    scale = torch.where(scale.isinf(), largest, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(amax.isfinite() & (amax != 0), scale, 1.0)


def decode(codes: Tensor, dtype: torch.dtype, to: torch.dtype = torch.float32) -> Tensor:
    """Return the unscaled FP8 values of uint8 codes, which FP32 and BF16 hold exactly."""
    values = torch.empty(codes.shape, dtype=to)
    for part, decoded in zip(codes.reshape(-1).split(AT_ONCE), values.view(-1).split(AT_ONCE), strict=True):
        torch.index_select(_values(dtype, to), 0, part.int(), out=decoded)
    return values


def dequantize(tensor: Any) -> Tensor:
    """Return the FP32 values of a TE per-tensor FP8 tensor's rowwise codes."""
    return decode(tensor._data, fp8_dtype(tensor)).mul_(tensor._scale_inv)


@functools.cache
def _values(dtype: torch.dtype, to: torch.dtype) -> Tensor:
    """Return a table of the values of all 256 codes, because PyTorch's own conversion is several times slower."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(to)


def transpose(codes: Tensor) -> Tensor:
    """Transpose codes ``[*leading, last]`` to contiguous ``[last, *leading]``."""
    if codes.dim() == 0:
        return codes.clone()
    return codes.movedim(-1, 0).contiguous()


def empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return a TE tensor with the buffers that the quantizer's usages ask for; its scale_inv is 1."""
    shape = torch.Size(shape)
    data = torch.empty(shape, dtype=torch.uint8) if needs_codes(quantizer) else None
    columnwise = torch.empty((*shape[-1:], *shape[:-1]), dtype=torch.uint8) if _needs_transpose(quantizer) else None
    return _te_tensor(quantizer, shape, dtype, data, columnwise, torch.ones(1))


def new(quantizer: Any, dtype: torch.dtype, codes: Codes) -> Any:
    """Return a TE tensor that holds ``codes``, and their transpose if the quantizer asks for it."""
    columnwise = transpose(codes.data) if _needs_transpose(quantizer) else None
    return _te_tensor(quantizer, codes.data.shape, dtype, codes.data, columnwise, codes.scale_inv)


def _te_tensor(
    quantizer: Any, shape: torch.Size, dtype: torch.dtype, data: Tensor | None, columnwise: Tensor | None, inv: Tensor
) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    buffers = {
        "data": data,
        "data_transpose": columnwise,
        "fp8_scale_inv": inv,
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=dtype, **buffers)
    return Float8Tensor(shape=shape, dtype=dtype, device=inv.device, **buffers)


def needs_codes(quantizer: Any) -> bool:
    """Return whether a tensor of this quantizer holds codes in the order of its values."""
    return quantizer.rowwise_usage or cuda.has_gemm_without_transposes()


def _needs_transpose(quantizer: Any) -> bool:
    return quantizer.columnwise_usage and not cuda.has_gemm_without_transposes()


def prepare(quantizer: Any, output: Any) -> None:
    """Give a TE tensor the buffers that the quantizer's usages ask for, and no others.

    Existing buffers are kept, so that other references to them see the result.

    Raises:
        TypeError: if ``output`` is not a per-tensor FP8 tensor.
    """
    if not is_float8_tensor(output):
        raise TypeError(f"{type(quantizer).__name__} writes into a Float8Tensor, but was given {type(output).__name__}")
    shape = rowwise_shape(output)
    if not needs_codes(quantizer):
        output._data = None
    elif output._data is None:
        output._data = torch.empty(shape, dtype=torch.uint8)
    if not _needs_transpose(quantizer):
        output._transpose = None
    elif output._transpose is None:
        output._transpose = torch.empty((*shape[-1:], *shape[:-1]), dtype=torch.uint8)
    output._transpose_invalid = not _needs_transpose(quantizer)
    output._fp8_dtype = quantizer.dtype


# Tensors that last from step to step may have been made in inference mode, and PyTorch refuses to write to them outside
# it. A GPU's kernels know no such mode.


@torch.inference_mode()
def keep_amax(quantizer: Any, amax: Tensor) -> None:
    """Update the amax that delayed scaling keeps for later steps, if this one is larger."""
    quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))


@torch.inference_mode()
def write(output: Any, codes: Codes) -> None:
    """Fill the buffers of a prepared TE tensor."""
    if output._data is not None:
        output._data.copy_(codes.data)
    if output._transpose is not None:
        output._transpose.copy_(codes.data.movedim(-1, 0))
    output._scale_inv.copy_(codes.scale_inv.reshape(output._scale_inv.shape))  # which may be zero-dimensional


def rowwise_shape(tensor: Any) -> torch.Size:
    """Return the shape of a TE tensor in the order of its high-precision values."""
    if tensor._data is not None:
        return tensor._data.shape
    columnwise = tensor._transpose.shape
    return torch.Size((*columnwise[1:], *columnwise[:1]))


def operand(tensor: Any, columnwise: bool, name: str) -> Tensor:
    """Return the codes that a GEMM reads, as a matrix ``[outer, inner]``.

    Raises:
        RuntimeError: if the tensor does not hold that direction (``CanonicalizeGemmInput`` in TE's
            ``common/gemm/cublaslt_gemm.cu``).
    """
    if cuda.has_gemm_without_transposes():
        if columnwise and tensor._data is not None:
            return tensor._data.flatten(0, -2).t()
        if not columnwise and tensor._data is None and tensor._transpose is not None:
            return tensor._transpose.flatten(1).t()
    codes = tensor._transpose if columnwise else tensor._data
    if codes is None or (columnwise and tensor._transpose_invalid):
        direction = "columnwise" if columnwise else "rowwise"
        raise RuntimeError(
            f"operand {name} of an FP8 GEMM holds no {direction} data; quantize it with {direction}_usage or call "
            f"update_usage({direction}_usage=True)"
        )
    return codes.flatten(1) if columnwise else codes.flatten(0, -2)
