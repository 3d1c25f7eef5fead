"""A norm followed by a linear layer."""

from __future__ import annotations

from torch import Tensor, nn


class NormLinear(nn.Module):
    """``linear(norm(x))``.

    Args:
        norm: over the last dimension.
        in_features: the norm's width.
        out_features: the linear layer's width.
        bias: of the linear layer.
    """

    def __init__(self, norm: nn.Module, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return self.linear(self.norm(x))
