"""The functions behind TransformerEngine's activation kernels, plain and gated, with their gradients, in FP32.

Follows ``common/util/math.h`` and ``common/util/vectorized_pointwise.h`` of TransformerEngine 2.20.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

QUICK = 1.702


@dataclass(frozen=True)
class Pointwise:
    """A function of FP32 tensors, element by element.

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


def _sigmoid_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.sigmoid_backward(grad, x.sigmoid())


def _qgelu_gradient(grad: Tensor, x: Tensor, alpha: float = QUICK) -> Tensor:
    sigmoid = (alpha * x).sigmoid()
    return grad * (sigmoid + alpha * x * sigmoid * (1 - sigmoid))


def _relu(x: Tensor) -> Tensor:
    """CUDA's ``fmaxf``, which takes the 0 where x is NaN."""
    return torch.fmax(x, x.new_zeros(()))


IDENTITY = Pointwise(lambda x: x, lambda grad, x: grad)
SIGMOID = Pointwise(torch.sigmoid, _sigmoid_gradient)
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
    """GPT-OSS's SwiGLU: the gate is clamped from above only, up from both sides before it gets the offset.

    With ``c = min(gate, limit)``: ``c sigmoid(alpha c) * (clamp(up, -limit, limit) + glu_linear_offset)``. Where a
    clamp holds a value, its gradient is 0; on the limit itself it is not held.
    """

    def gate_gradient(grad: Tensor, x: Tensor) -> Tensor:
        return _qgelu_gradient(grad, x.clamp(max=limit), alpha) * (x <= limit)

    def gate_value(x: Tensor) -> Tensor:
        clamped = x.clamp(max=limit)
        return clamped * (alpha * clamped).sigmoid()

    linear = Pointwise(lambda x: x.clamp(-limit, limit) + glu_linear_offset, lambda grad, x: grad * (x.abs() <= limit))
    return Gated(Pointwise(gate_value, gate_gradient), linear)


def situglu_function(beta1: float, beta2: float) -> Gated:
    """``beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(up / beta2)``: SwiGLU with both branches soft-capped."""

    def gate_gradient(grad: Tensor, x: Tensor) -> Tensor:
        tanh, sigmoid = (x / beta1).tanh(), x.sigmoid()
        return grad * ((1 - tanh * tanh) * sigmoid + beta1 * tanh * sigmoid * (1 - sigmoid))

    gate = Pointwise(lambda x: beta1 * (x / beta1).tanh() * x.sigmoid(), gate_gradient)
    linear = Pointwise(
        lambda x: beta2 * (x / beta2).tanh(), lambda grad, x: torch.ops.aten.tanh_backward(grad, (x / beta2).tanh())
    )
    return Gated(gate, linear)


def _halves(tensor: Tensor, interleave: int = 0) -> tuple[Tensor, Tensor]:
    """Gate and up, ``[..., blocks, size]``, of ``[..., 2 n]``: in one block, or in blocks of ``interleave`` columns.

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
    """The function of FP32 ``x``, a new tensor."""
    if isinstance(function, Pointwise):
        return function.value(x)
    gate, up = _halves(x, interleave)
    return function.activation.value(gate).mul_(function.linear.value(up)).flatten(-2)


def gradient(function: Pointwise | Gated, grad: Tensor, x: Tensor, interleave: int = 0) -> Tensor:
    """The gradient of ``x`` for the gradient ``grad`` of the function, all FP32; a new tensor."""
    if isinstance(function, Pointwise):
        return function.gradient(grad, x)
    gate, up = _halves(x, interleave)
    grad = grad.reshape(gate.shape)
    of_gate = function.activation.gradient(grad * function.linear.value(up), gate)
    of_up = function.linear.gradient(grad * function.activation.value(gate), up)
    return torch.stack([of_gate, of_up], dim=-2).view(x.shape)
