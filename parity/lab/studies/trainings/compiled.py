"""A port whose PyTorch code between TE's modules is compiled, and what ``torch.compile`` may keep of it."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Glued(nn.Module):
    """An MLP whose activation is plain PyTorch, between two modules of TE.

    Attributes:
        scale: by what the activations are multiplied, and divided again; a power of two.
    """

    def __init__(self, te: ModuleType, width: int, ffn: int) -> None:
        super().__init__()
        self.first, self.second, self.scale = te.LayerNormLinear(width, ffn), te.Linear(ffn, width), 1.0

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
    def known(self) -> float:
        """Return the scale, which is told to be the same at all times."""
        return self.scale

    @torch.compiler.disable
    def unscaled(self, x: Tensor) -> Tensor:
        """Divide by the scale, without being compiled."""
        return x / self.scale

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP."""
        return self.second(self.unscaled(self.known() * F.gelu(self.first(x), approximate="tanh")))
