"""Activations and their gradients: plain, gated, fused with a bias gradient, or multiplied by a factor per row.

Follows ``csrc/extensions/activation.cpp`` and ``bias.cpp`` of TransformerEngine 2.20.2. The functions themselves follow
``common/util/math.h`` and ``common/util/vectorized_pointwise.h``. All arithmetic is FP32; a result is rounded once,
when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_on_cpu.cast import is_mxfp8, store
from te_on_cpu.float8 import is_delayed

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
    "scaled_clamped_dswiglu",
    "scaled_clamped_swiglu",
    "scaled_dsituglu",
    "scaled_dsrelu",
    "scaled_dswiglu",
    "scaled_situglu",
    "scaled_srelu",
    "scaled_swiglu",
    "silu",
    "situglu",
    "sreglu",
    "srelu",
    "swiglu",
]

QUICK = 1.702


@dataclass(frozen=True)
class Pointwise:
    """An elementwise function of FP32 tensors.

    Attributes:
        value: ``x -> f(x)``.
        gradient: ``(g, x) -> g f'(x)``.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Gated:
    """``activation(gate) * linear(up)``."""

    activation: Pointwise
    linear: Pointwise


def _qgelu_gradient(grad: Tensor, x: Tensor, alpha: float = QUICK) -> Tensor:
    sigmoid = (alpha * x).sigmoid()
    return grad * (sigmoid + alpha * x * sigmoid * (1 - sigmoid))


def _relu(x: Tensor) -> Tensor:
    """Apply ReLU as CUDA's ``fmaxf`` does, which takes the 0 where x is NaN."""
    return torch.fmax(x, x.new_zeros(()))


IDENTITY = Pointwise(lambda x: x, lambda grad, x: grad)
SIGMOID = Pointwise(torch.sigmoid, lambda grad, x: torch.ops.aten.sigmoid_backward(grad, x.sigmoid()))
GELU = Pointwise(partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh"))
QGELU = Pointwise(lambda x: x * (QUICK * x).sigmoid(), _qgelu_gradient)
RELU = Pointwise(_relu, lambda grad, x: grad * (x > 0))
SRELU = Pointwise(lambda x: _relu(x).square(), lambda grad, x: grad * _relu(2 * x))
SILU = Pointwise(F.silu, torch.ops.aten.silu_backward)


GLU = Gated(SIGMOID, IDENTITY)
GEGLU = Gated(GELU, IDENTITY)
QGEGLU = Gated(QGELU, IDENTITY)
REGLU = Gated(RELU, IDENTITY)
SREGLU = Gated(SRELU, IDENTITY)
SWIGLU = Gated(SILU, IDENTITY)


def clamped_swiglu_function(limit: float, alpha: float, glu_linear_offset: float) -> Gated:
    """Return GPT-OSS's SwiGLU, which clamps the gate from above only, and up from both sides before adding the offset.

    With ``c = min(gate, limit)``: ``c sigmoid(alpha c) * (clamp(up, -limit, limit) + glu_linear_offset)``. The gradient
    is 0 where a clamp changes the value; a value equal to the limit keeps its gradient.
    """

    def gate_gradient(grad: Tensor, x: Tensor) -> Tensor:
        return _qgelu_gradient(grad, x.clamp(max=limit), alpha) * (x <= limit)

    def gate_value(x: Tensor) -> Tensor:
        clamped = x.clamp(max=limit)
        return clamped * (alpha * clamped).sigmoid()

    linear = Pointwise(lambda x: x.clamp(-limit, limit) + glu_linear_offset, lambda grad, x: grad * (x.abs() <= limit))
    return Gated(Pointwise(gate_value, gate_gradient), linear)


def situglu_function(beta1: float, beta2: float) -> Gated:
    """Return SwiGLU with both branches soft-capped.

    That is ``beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(up / beta2)``.
    """

    def gate_gradient(grad: Tensor, x: Tensor) -> Tensor:
        tanh, sigmoid = (x / beta1).tanh(), x.sigmoid()
        return grad * ((1 - tanh * tanh) * sigmoid + beta1 * tanh * sigmoid * (1 - sigmoid))

    gate = Pointwise(lambda x: beta1 * (x / beta1).tanh() * x.sigmoid(), gate_gradient)
    linear = Pointwise(
        lambda x: beta2 * (x / beta2).tanh(), lambda grad, x: torch.ops.aten.tanh_backward(grad, (x / beta2).tanh())
    )
    return Gated(gate, linear)


def _halves(tensor: Tensor, interleave: int = 0) -> tuple[Tensor, Tensor]:
    """Split ``[..., 2 n]`` into gate and up, ``[..., blocks, size]``.

    They alternate in blocks of ``interleave`` columns; 0 means that gate is the first half and up the second.

    Raises:
        ValueError: if the blocks do not fill the last dimension.
    """
    columns = tensor.shape[-1]
    size = interleave or max(columns // 2, 1)
    if columns % (2 * size):
        raise ValueError(f"{columns} columns do not hold pairs of gate and up blocks of {size} columns")
    gate, up = tensor.unflatten(-1, (columns // (2 * size), 2, size)).unbind(-2)
    return gate, up


def value(function: Pointwise | Gated, x: Tensor, interleave: int = 0) -> Tensor:
    """Apply the function to FP32 ``x`` and return a new tensor."""
    if isinstance(function, Pointwise):
        return function.value(x)
    gate, up = _halves(x, interleave)
    return function.activation.value(gate).mul_(function.linear.value(up)).flatten(-2)


def gradient(function: Pointwise | Gated, grad: Tensor, x: Tensor, interleave: int = 0) -> Tensor:
    """Return the gradient of ``x``, a new FP32 tensor, given the gradient ``grad`` of the function's value."""
    if isinstance(function, Pointwise):
        return function.gradient(grad, x)
    gate, up = _halves(x, interleave)
    grad = grad.reshape(gate.shape)
    of_gate = function.activation.gradient(grad * function.linear.value(up), gate)
    of_up = function.linear.gradient(grad * function.activation.value(gate), up)
    return torch.stack([of_gate, of_up], dim=-2).view(x.shape)


# Activations and their gradients: plain, gated, and fused with a bias gradient.
#
# ====================  ==============================================================================================
# plain kernel          ``f(input)``, ``[..., n]``
# gated kernel          ``f(gate) * u(up)``, ``[..., n]``: ``input``, ``[..., 2 n]``, holds the gate in its first half,
#                       up in its second; ``u`` is the identity except where its function says otherwise
# their ``d`` kernels   the gradient of ``fwd_input``, the forward's input, given the gradient ``grad`` of the result
# ``dbias_d`` kernels   that gradient's sum over rows, ``[n]``, and the gradient
# ====================  ==============================================================================================
#
# Tensors are FP32, FP16 or BF16. A result has the dtype of ``input`` or ``fwd_input``, unless ``quantizer`` (TE's, or
# None) casts it. A gated kernel raises ``ValueError`` if the last dimension cannot be split into two halves.


def _forward(function: Pointwise | Gated, input: Tensor, quantizer: Any) -> Any:
    """Return a result in the input's dtype, or quantized."""
    values = value(function, input.float())
    return store(values, quantizer, input.dtype, amax_before_rounding=True, kernel="activation")


def _backward(function: Pointwise | Gated, grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
    """Return a gradient in the dtype of the forward's input, or quantized."""
    values = gradient(function, grad.float(), fwd_input.float())
    return store(values, quantizer, fwd_input.dtype, amax_before_rounding=True, kernel="activation gradient")


def _backward_with_bias(function: Pointwise, grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
    """Return ``[bias gradient, gradient]`` in ``grad``'s dtype; the bias gradient is ``[columns]``.

    With delayed scaling and MXFP8, TE's fused kernels sum the FP32 gradient before it is rounded. With other
    quantizers, the gradient is first rounded to ``grad``'s dtype.
    """
    values = gradient(function, grad.float(), fwd_input.float())
    summands = values if is_delayed(quantizer) or is_mxfp8(quantizer) else values.to(grad.dtype)
    bias_gradient = summands.reshape(-1, summands.shape[-1]).sum(0, dtype=torch.float32).to(grad.dtype)
    stored = store(values, quantizer, grad.dtype, amax_before_rounding=True, kernel="activation and bias gradient")
    return [bias_gradient, stored]


def _kernels(name: str, function: Pointwise | Gated) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the kernels ``name`` and ``dname``."""

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
    """Apply ``clamped_swiglu_function``."""
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
    """Apply ``situglu_function``."""
    return _forward(situglu_function(beta1, beta2), input, quantizer)


def dsituglu(grad: Tensor, fwd_input: Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
    return _backward(situglu_function(beta1, beta2), grad, fwd_input, quantizer)


# Activations multiplied by one factor per row, which a mixture of experts takes from its router, and their gradients.
#
# Follows ``common/activation/scaled_activation.cu`` of NVIDIA's TransformerEngine repository and
# ``csrc/extensions/activation.cpp`` of 2.20.2. Arguments and dtypes are as above; ``act_scales`` has one factor per
# row. A ``d`` kernel returns the gradient of ``fwd_input`` and, unless ``compute_scale_grad`` is off, that of
# ``act_scales``. Gate and up alternate in blocks of ``glu_interleave_size`` columns; 0 means two halves.


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
    """Return a result in the input's dtype; if there is a quantizer, it casts the rounded result."""
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
    """Return the input's gradient, and that of ``act_scales`` in its own shape and dtype, or None."""
    x, grad = fwd_input.float(), grad.float()
    scale_gradient = None
    if compute_scale_grad:
        per_row = (grad * value(function, x, interleave)).sum(-1)
        scale_gradient = per_row.reshape(act_scales.shape).to(act_scales.dtype)
    values = gradient(function, grad * _row_factors(act_scales, fwd_input), x, interleave)
    return _store_unfused(values, quantizer, fwd_input.dtype), scale_gradient


def _row_factors(act_scales: Tensor, input: Tensor) -> Tensor:
    """Return the scales in FP32, to be broadcast over columns.

    Raises:
        ValueError: unless there is one scale for each row of ``input``.
    """
    rows = input.shape[:-1]
    if act_scales.numel() != rows.numel():
        raise ValueError(
            f"a scaled activation takes one scale per row, but got {rows.numel()} rows and {act_scales.numel()} scales"
        )
    return act_scales.reshape(rows).unsqueeze(-1).float()


def _store_unfused(values: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    rounded = values.to(dtype)
    return rounded if quantizer is None else store(rounded.float(), quantizer, dtype, kernel="scaled activation")
