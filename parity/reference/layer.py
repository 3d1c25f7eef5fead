"""Pre-norm transformer layers."""

from __future__ import annotations

from torch import Tensor, nn

from parity.reference.attention import Attention
from parity.reference.mlp import MLP, SwiGLUMLP


class GPTLayer(nn.Module):
    """LayerNorm, multi-head attention, GELU, biases everywhere, no position embedding inside, as in GPT-2.

    Args:
        hidden: width of the residual stream.
        ffn: width inside the MLP.
        heads: number of heads.
    """

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, groups=heads, bias=True, rope=False)
        self.mlp = MLP(hidden, ffn, "gelu")

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)


class LlamaLayer(nn.Module):
    """RMSNorm, grouped-query attention with RoPE, SwiGLU, no biases, as in Llama.

    Args:
        hidden: width of the residual stream.
        ffn: width inside the MLP.
        heads: number of query heads.
        groups: number of key and value heads.
        eps: of both norms.
    """

    def __init__(self, hidden: int, ffn: int, heads: int, groups: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=eps)
        self.attention = Attention(hidden, heads, groups)
        self.mlp = SwiGLUMLP(hidden, ffn, eps)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)
