"""TE's activations by their definitions, for tensors of any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * sigmoid(alpha * gate) * (up.clamp(-limit, limit) + offset)


def situglu(gate: Tensor, up: Tensor, beta1: float = 4.0, beta2: float = 25.0) -> Tensor:
    return beta1 * torch.tanh(gate / beta1) * sigmoid(gate) * beta2 * torch.tanh(up / beta2)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "qgelu": lambda x: x * sigmoid(1.702 * x),
    "relu": lambda x: x * (x > 0),
    "srelu": lambda x: x**2 * (x > 0),
    "silu": lambda x: x * sigmoid(x),
}
GATED: dict[str, Callable[..., Tensor]] = {
    "glu": lambda gate, up: sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "qgeglu": lambda gate, up: PLAIN["qgelu"](gate) * up,
    "reglu": lambda gate, up: PLAIN["relu"](gate) * up,
    "sreglu": lambda gate, up: PLAIN["srelu"](gate) * up,
    "swiglu": lambda gate, up: PLAIN["silu"](gate) * up,
    "clamped_swiglu": clamped_swiglu,
    "situglu": situglu,
}
"""Functions of the first and the second half of the features."""


def halves(function: Callable[..., Tensor], *parameters: float) -> Callable[[Tensor], Tensor]:
    """Return a gated activation as a function of all features."""
    return lambda x: function(*x.chunk(2, -1), *parameters)


DEFINITIONS = PLAIN | {name: halves(function) for name, function in GATED.items()}
