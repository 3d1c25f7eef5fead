"""Activations by TE's names: one argument for a plain MLP, gate and up for a gated one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """GELU's tanh approximation, which is what TE means by GELU (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """GELU's sigmoid approximation (ibid., section 2)."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    """So et al., "Primer", arXiv 2109.08668."""
    return F.relu(x).square()


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """The SwiGLU of OpenAI's gpt-oss: both halves clamped, a sharper sigmoid, and up + 1."""
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "qgelu": quick_gelu,
    "relu": F.relu,
    "srelu": squared_relu,
    "silu": F.silu,
}

GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "glu": lambda gate, up: torch.sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "qgeglu": lambda gate, up: quick_gelu(gate) * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "sreglu": lambda gate, up: squared_relu(gate) * up,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "clamped_swiglu": clamped_swiglu,
}
