"""MLPs with their norm in front, plain and gated."""

from __future__ import annotations

from torch import Tensor, nn

from parity.reference.activation import GATES, POINTWISE


class MLP(nn.Module):
    """``down(activation(up(layer_norm(x))))``, as in GPT-2.

    Args:
        hidden: width of the input and output.
        ffn: width between the two linear layers.
        activation: a name of ``POINTWISE``.
        bias: of both linear layers.
        eps: of the norm.
    """

    def __init__(self, hidden: int, ffn: int, activation: str = "gelu", bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.up_proj = nn.Linear(hidden, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)
        self.activation = POINTWISE[activation]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same."""
        return self.down_proj(self.activation(self.up_proj(self.norm(x))))


class GatedMLP(nn.Module):
    """``down(gated(gate(h), up(h)))`` with ``h = rms_norm(x)``, without biases, as in Llama.

    Args:
        hidden: width of the input and output.
        ffn: width of the gate and of up.
        activation: a name of ``GATES``.
        eps: of the norm.
    """

    def __init__(self, hidden: int, ffn: int, activation: str, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)
        self.gated = GATES[activation]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same."""
        h = self.norm(x)
        return self.down_proj(self.gated(self.gate_proj(h), self.up_proj(h)))


class SwiGLUMLP(GatedMLP):
    """The MLP of Llama: SiLU on the gate."""

    def __init__(self, hidden: int, ffn: int, eps: float = 1e-5) -> None:
        super().__init__(hidden, ffn, "swiglu", eps)
