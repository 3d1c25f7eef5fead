"""Activations times a factor for each row, which a mixture of experts takes from its router, and their gradients.

Follows ``common/activation/scaled_activation.cu`` of NVIDIA's TransformerEngine repository and
``csrc/extensions/activation.cpp`` of 2.20.2. Arguments and dtypes are as in ``activation.py``; ``act_scales`` has one
factor a row. A ``d`` kernel returns the gradient of ``fwd_input`` and, unless ``compute_scale_grad`` is off, that of
``act_scales``. ``glu_interleave_size``: gate and up alternate in blocks of that many columns; 0 for halves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.cpu.activations.functions import (
    QUICK,
    SRELU,
    SWIGLU,
    Gated,
    Pointwise,
    clamped_swiglu_function,
    gradient,
    situglu_function,
    value,
)
from parity.cpu.quantized.quantize import store

__all__ = [
    "scaled_clamped_dswiglu",
    "scaled_clamped_swiglu",
    "scaled_dsituglu",
    "scaled_dsrelu",
    "scaled_dswiglu",
    "scaled_situglu",
    "scaled_srelu",
    "scaled_swiglu",
]


def scaled_srelu(input: Tensor, act_scales: Tensor, quantizer: Any) -> Any:
    return _scaled_forward(SRELU, input, act_scales, quantizer)


def scaled_dsrelu(
    grad: Tensor, fwd_input: Tensor, act_scales: Tensor, quantizer: Any, compute_scale_grad: bool = True
) -> tuple[Any, Tensor | None]:
    return _scaled_backward(SRELU, grad, fwd_input, act_scales, quantizer, 0, compute_scale_grad)


def scaled_swiglu(input: Tensor, act_scales: Tensor, quantizer: Any, glu_interleave_size: int = 0) -> Any:
    return _scaled_forward(SWIGLU, input, act_scales, quantizer, glu_interleave_size)


def scaled_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, Tensor | None]:
    return _scaled_backward(SWIGLU, grad, fwd_input, act_scales, quantizer, glu_interleave_size, compute_scale_grad)


def scaled_situglu(
    input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
) -> Any:
    return _scaled_forward(situglu_function(beta1, beta2), input, act_scales, quantizer, glu_interleave_size)


def scaled_dsituglu(
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, Tensor | None]:
    function = situglu_function(beta1, beta2)
    return _scaled_backward(function, grad, fwd_input, act_scales, quantizer, glu_interleave_size, compute_scale_grad)


def scaled_clamped_swiglu(
    input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = QUICK,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int = 0,
) -> Any:
    function = clamped_swiglu_function(limit, alpha, glu_linear_offset)
    return _scaled_forward(function, input, act_scales, quantizer, glu_interleave_size)


def scaled_clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = QUICK,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, Tensor | None]:
    function = clamped_swiglu_function(limit, alpha, glu_linear_offset)
    return _scaled_backward(function, grad, fwd_input, act_scales, quantizer, glu_interleave_size, compute_scale_grad)


def _scaled_forward(
    function: Pointwise | Gated, input: Tensor, act_scales: Tensor, quantizer: Any, interleave: int = 0
) -> Any:
    """A result in the input's dtype; if there is a quantizer, it casts the rounded result."""
    values = value(function, input.float(), interleave).mul_(_row_factors(act_scales, input))
    return _store_unfused(values, quantizer, input.dtype)


def _scaled_backward(
    function: Pointwise | Gated,
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    interleave: int,
    compute_scale_grad: bool,
) -> tuple[Any, Tensor | None]:
    """The input's gradient, and that of ``act_scales`` in its own shape and dtype, or None."""
    x, grad = fwd_input.float(), grad.float()
    scale_gradient = None
    if compute_scale_grad:
        per_row = (grad * value(function, x, interleave)).sum(-1)
        scale_gradient = per_row.reshape(act_scales.shape).to(act_scales.dtype)
    values = gradient(function, grad * _row_factors(act_scales, fwd_input), x, interleave)
    return _store_unfused(values, quantizer, fwd_input.dtype), scale_gradient


def _row_factors(act_scales: Tensor, input: Tensor) -> Tensor:
    """The scales in FP32, to be broadcast over columns.

    Raises:
        ValueError: unless there is one scale for each row of ``input``.
    """
    rows = input.shape[:-1]
    if act_scales.numel() != rows.numel():
        raise ValueError(f"a scaled activation takes one scale a row: {rows.numel()} rows, {act_scales.numel()} scales")
    return act_scales.reshape(rows).unsqueeze(-1).float()


def _store_unfused(values: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    rounded = values.to(dtype)
    return rounded if quantizer is None else store(rounded.float(), quantizer, dtype, kernel="scaled activation")
