"""Activations and their gradients: plain, gated, and fused with a bias gradient.

Follows ``csrc/extensions/activation.cpp`` and ``bias.cpp`` of TransformerEngine 2.20.2. All arithmetic is FP32
(``functions.py``); a result is rounded once, when it is stored.

====================  ==============================================================================================
plain kernel          ``f(input)``, ``[..., n]``
gated kernel          ``f(gate) * u(up)``, ``[..., n]``: ``input``, ``[..., 2 n]``, holds the gate in its first half, up
                      in its second; ``u`` is the identity except where its function says otherwise
their ``d`` kernels   the gradient of ``fwd_input``, the forward's input, for the gradient ``grad`` of the result
``dbias_d`` kernels   that gradient's sum over rows, ``[n]``, and the gradient
====================  ==============================================================================================

Tensors are FP32, FP16 or BF16. A result has the dtype of ``input`` or ``fwd_input``, unless there is a ``quantizer``
(TE's, or None) to cast it. A gated kernel raises ``ValueError`` for a last dimension that has no two halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.cpu.activations.functions import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    QUICK,
    REGLU,
    RELU,
    SILU,
    SREGLU,
    SRELU,
    SWIGLU,
    Gated,
    Pointwise,
    clamped_swiglu_function,
    gradient,
    situglu_function,
    value,
)
from parity.cpu.quantized.quantize import is_delayed, is_mxfp8, store

__all__ = [
    "clamped_dswiglu",
    "clamped_swiglu",
    "dbias_dgelu",
    "dbias_dqgelu",
    "dbias_drelu",
    "dbias_dsilu",
    "dbias_dsrelu",
    "dgeglu",
    "dgelu",
    "dglu",
    "dqgeglu",
    "dqgelu",
    "dreglu",
    "drelu",
    "dsilu",
    "dsituglu",
    "dsreglu",
    "dsrelu",
    "dswiglu",
    "geglu",
    "gelu",
    "glu",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "silu",
    "situglu",
    "sreglu",
    "srelu",
    "swiglu",
]


def _forward(function: Pointwise | Gated, input: Tensor, quantizer: Any) -> Any:
    """A result in the input's dtype, or quantized."""
    values = value(function, input.float())
    return store(values, quantizer, input.dtype, amax_before_rounding=True, kernel="activation")


def _backward(function: Pointwise | Gated, grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
    """A gradient in the dtype of the forward's input, or quantized."""
    values = gradient(function, grad.float(), fwd_input.float())
    return store(values, quantizer, fwd_input.dtype, amax_before_rounding=True, kernel="activation gradient")


def _backward_with_bias(function: Pointwise, grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
    """``[bias gradient, gradient]``, of ``grad``'s dtype; the bias gradient is ``[columns]``.

    The fused kernels of delayed scaling and MXFP8 sum what they have in FP32; the others sum the gradient that they
    have stored.
    """
    values = gradient(function, grad.float(), fwd_input.float())
    summands = values if is_delayed(quantizer) or is_mxfp8(quantizer) else values.to(grad.dtype)
    bias_gradient = summands.reshape(-1, summands.shape[-1]).sum(0, dtype=torch.float32).to(grad.dtype)
    stored = store(values, quantizer, grad.dtype, amax_before_rounding=True, kernel="activation and bias gradient")
    return [bias_gradient, stored]


def _kernels(name: str, function: Pointwise | Gated) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The kernels ``name`` and ``dname``."""

    def forward(input: Tensor, quantizer: Any) -> Any:
        return _forward(function, input, quantizer)

    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        return _backward(function, grad, fwd_input, quantizer)

    forward.__name__, backward.__name__ = name, f"d{name}"
    return forward, backward


def _bias_kernel(name: str, function: Pointwise) -> Callable[..., Any]:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        return _backward_with_bias(function, grad, fwd_input, quantizer)

    backward.__name__ = name
    return backward


gelu, dgelu = _kernels("gelu", GELU)
qgelu, dqgelu = _kernels("qgelu", QGELU)
relu, drelu = _kernels("relu", RELU)
srelu, dsrelu = _kernels("srelu", SRELU)
silu, dsilu = _kernels("silu", SILU)

glu, dglu = _kernels("glu", GLU)
geglu, dgeglu = _kernels("geglu", GEGLU)
qgeglu, dqgeglu = _kernels("qgeglu", QGEGLU)
reglu, dreglu = _kernels("reglu", REGLU)
sreglu, dsreglu = _kernels("sreglu", SREGLU)
swiglu, dswiglu = _kernels("swiglu", SWIGLU)

dbias_dgelu = _bias_kernel("dbias_dgelu", GELU)
dbias_dqgelu = _bias_kernel("dbias_dqgelu", QGELU)
dbias_drelu = _bias_kernel("dbias_drelu", RELU)
dbias_dsilu = _bias_kernel("dbias_dsilu", SILU)
dbias_dsrelu = _bias_kernel("dbias_dsrelu", SRELU)


def clamped_swiglu(
    input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = QUICK, glu_linear_offset: float = 1.0
) -> Any:
    """See ``clamped_swiglu_function``."""
    return _forward(clamped_swiglu_function(limit, alpha, glu_linear_offset), input, quantizer)


def clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = QUICK,
    glu_linear_offset: float = 1.0,
) -> Any:
    return _backward(clamped_swiglu_function(limit, alpha, glu_linear_offset), grad, fwd_input, quantizer)


def situglu(input: Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
    """See ``situglu_function``."""
    return _forward(situglu_function(beta1, beta2), input, quantizer)


def dsituglu(grad: Tensor, fwd_input: Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
    return _backward(situglu_function(beta1, beta2), grad, fwd_input, quantizer)
