"""The block-scaled formats with their TE quantizers and tensors, and one interface for kernels that take them all."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from te_on_cpu import block_scaling, mxfp8, nvfp4, swizzle

_BUFFERS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_rowwise",
    "amax_columnwise",
)


@dataclass(frozen=True)
class Format:
    """Describe a format to the kernels.

    Attributes:
        quantizer: the name of TE's quantizer class.
        module: the name of the tensor class's module in ``transformer_engine.pytorch.tensor``; the storage class is in
            ``.storage``, in a module of this name plus ``_storage``.
        tensor: the name of the tensor class; the storage class has this name plus ``Storage``.
        buffers: the names of its buffers.
        kernels: the module of its CPU kernels: ``settings``, ``encode``, ``buffer_shapes``, ``decode``, ``operand`` and
            ``logical_shape``, all documented in ``block_scaling.py``.
    """

    quantizer: str
    module: str
    tensor: str
    buffers: tuple[str, ...]
    kernels: ModuleType


FORMATS = (
    Format("Float8BlockQuantizer", "float8_blockwise_tensor", "Float8BlockwiseQTensor", _BUFFERS[:4], block_scaling),
    Format("MXFP8Quantizer", "mxfp8_tensor", "MXFP8Tensor", _BUFFERS[:4], mxfp8),
    Format("NVFP4Quantizer", "nvfp4_tensor", "NVFP4Tensor", _BUFFERS, nvfp4),
)


def of_quantizer(quantizer: Any) -> Format | None:
    """Return the format that a TE quantizer makes, or None if it is not block-scaled."""
    name = type(quantizer).__name__
    return next((entry for entry in FORMATS if entry.quantizer == name), None)


def of_tensor(tensor: Any) -> Format | None:
    """Return the format of a TE quantized tensor or storage, or None if it is not block-scaled."""
    names = {base.__name__ for base in type(tensor).__mro__}
    return next((entry for entry in FORMATS if f"{entry.tensor}Storage" in names), None)


def empty(entry: Format, quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return a TE tensor with the buffers that the quantizer's usages ask for, filled with zeros.

    Raises:
        RuntimeError: for shapes that the format does not support.
    """
    shape = torch.Size(shape)
    specifications = entry.kernels.buffer_shapes(quantizer, shape)
    buffers = {name: torch.zeros(size, dtype=kind) for name, (size, kind) in specifications.items()}
    tensor = _te_tensor(entry, quantizer, shape, dtype, buffers)
    if entry.kernels is nvfp4:  # a separate kernel swizzles scales that the cast leaves plain
        setattr(tensor, f"_{swizzle.FLAG}", nvfp4.is_cast_swizzled(quantizer, shape))
    return tensor


def quantize(
    entry: Format, values: Tensor, quantizer: Any, dtype: torch.dtype, output: Any, amaxes: Mapping[str, Tensor]
) -> Any:
    """Return a new TE tensor of ``dtype`` that holds the values, or ``output`` filled with them.

    Args:
        values: FP32, FP16 or BF16, any shape that the format supports.
        amaxes: amaxes by direction that replace those of the values, FP32, one element each.

    Raises:
        TypeError: if ``output`` is a tensor of another format.
        RuntimeError: for shapes and options that the format does not support.
    """
    if output is not None and of_tensor(output) is not entry:
        raise TypeError(f"{entry.quantizer} writes into a {entry.tensor}, but was given {type(output).__name__}")
    if values.numel() == 0:
        return empty(entry, quantizer, values.shape, dtype) if output is None else output
    buffers = entry.kernels.encode(values.contiguous(), quantizer, amaxes)
    if output is None:
        return _te_tensor(entry, quantizer, values.shape, dtype, buffers)
    _write(entry, output, buffers, entry.kernels.settings(quantizer))
    return output


def operand(entry: Format, tensor: Any, columnwise: bool, name: str) -> tuple[Tensor, float]:
    """Return the values that a GEMM multiplies, ``[outer, inner]``, FP32 or BF16, and the factor left to apply.

    Raises:
        RuntimeError: if the tensor does not hold that direction.
    """
    direction = "columnwise" if columnwise else "rowwise"
    if getattr(tensor, f"_{direction}_data") is None:
        raise RuntimeError(
            f"operand {name} of a GEMM is a {type(tensor).__name__} without {direction} data; quantize it with "
            f"{direction}_usage"
        )
    return entry.kernels.operand(tensor, columnwise)


def swizzle_scales(tensor: Any, directions: Sequence[str]) -> bool:
    """Swizzle those scales of an MXFP8 or NVFP4 tensor that it holds in these directions.

    Returns:
        Whether the tensor's format has swizzled scales, and its scales were not swizzled before.
    """
    entry = of_tensor(tensor)
    if entry is None or entry.kernels is block_scaling or swizzle.is_swizzled(tensor):
        return False
    for direction in directions:
        scales = getattr(tensor, f"_{direction}_scale_inv")
        if scales is not None:
            transposed = entry.kernels is mxfp8 and direction == "columnwise"
            setattr(tensor, f"_{direction}_scale_inv", swizzle.swizzle(scales, transposed))
    return True


def _te_tensor(entry: Format, quantizer: Any, shape: torch.Size, dtype: torch.dtype, buffers: dict[str, Tensor]) -> Any:
    arguments: dict[str, Any] = {name: buffers.get(name) for name in entry.buffers}
    arguments.update(entry.kernels.settings(quantizer), quantizer=quantizer)
    package = "transformer_engine.pytorch.tensor"
    if quantizer.internal:
        module = importlib.import_module(f"{package}.storage.{entry.module}_storage")
        return getattr(module, f"{entry.tensor}Storage")(fake_dtype=dtype, **arguments)
    module = importlib.import_module(f"{package}.{entry.module}")
    return getattr(module, entry.tensor)(shape=shape, dtype=dtype, device=torch.device("cpu"), **arguments)


@torch.inference_mode()  # like float8.write
def _write(entry: Format, output: Any, buffers: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Fill a TE tensor's existing buffers in place, so that other references see it; add and drop other buffers."""
    for name in entry.buffers:
        held, new = getattr(output, f"_{name}"), buffers.get(name)
        if held is None or new is None:
            setattr(output, f"_{name}", new)
        else:
            held.copy_(new.view(held.shape))
    for name, value in settings.items():
        setattr(output, f"_{name}", value)
