"""Plain PyTorch modules as a model's author writes them; each runs in FP64 after ``.double()``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.numerics import blocked_attention
from parity.numerics.blocked_attention import Band

__all__ = [
    "GATES",
    "MLP",
    "POINTWISE",
    "Attention",
    "CoreAttention",
    "GPTLayer",
    "GatedMLP",
    "LlamaLayer",
    "NormLinear",
    "RotaryEmbedding",
    "SwiGLUMLP",
    "rotate_halves",
    "rotate_interleaved",
]

# Rotary position embedding (Su et al., arXiv 2104.09864).


class RotaryEmbedding(nn.Module):
    """Rotate queries or keys by their positions, in the halves form of Hugging Face's models.

    Args:
        head_dim: width of a head, even.
        base: the wavelengths grow from 2 pi to 2 pi times this.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inv_freq", 1.0 / base**exponents, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate ``[batch, seq, heads, head_dim]``, with positions counted from 0."""
        positions = torch.arange(x.shape[1], device=x.device, dtype=self.inv_freq.dtype)
        return rotate_halves(x, positions[:, None] * self.inv_freq)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate element i together with element i + head_dim/2.

    Args:
        x: ``[batch, seq, heads, head_dim]``.
        angles: ``[seq, head_dim / 2]``, in radians.
    """
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def rotate_interleaved(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate element 2i together with element 2i + 1, the form of Meta's Llama; arguments as for ``rotate_halves``."""
    angles = angles.repeat_interleave(2, dim=-1)[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return x * angles.cos() + torch.stack((-odd, even), dim=-1).flatten(-2) * angles.sin()


# Activations by TE's names: one argument for a plain MLP, gate and up for a gated one.


def gelu(x: Tensor) -> Tensor:
    """Compute GELU's tanh approximation, which is what TE means by GELU (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Compute GELU's sigmoid approximation (ibid., section 2)."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    """Compute the squared ReLU (So et al., "Primer", arXiv 2109.08668)."""
    return F.relu(x).square()


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """Return the SwiGLU of OpenAI's gpt-oss: both halves clamped, a sharper sigmoid, and up + 1."""
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


# A norm followed by a linear layer.


class NormLinear(nn.Module):
    """``linear(norm(x))``.

    Args:
        norm: the norm over the last dimension.
        in_features: the norm's width.
        out_features: the linear layer's width.
        bias: whether the linear layer has a bias.
    """

    def __init__(self, norm: nn.Module, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return self.linear(self.norm(x))


# Attention written out: scores, mask, softmax, context.


class CoreAttention(nn.Module):
    """``softmax(q k^T / sqrt(head_dim) + mask) v`` with grouped key-value heads.

    Args:
        causal: query i sees keys up to i.
        window: query i sees keys from i - window; None for all.
    """

    def __init__(self, causal: bool = False, window: int | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_is_padding: Tensor | None = None) -> Tensor:
        """Compute the attention.

        Args:
            query: ``[batch, seq_q, heads, head_dim]``.
            key: ``[batch, seq_kv, groups, head_dim]``; consecutive heads share a group.
            value: the same shape as ``key``.
            key_is_padding: ``[batch, seq_kv]``, True where a key is to be ignored.

        Returns:
            ``[batch, seq_q, heads * head_dim]``.
        """
        batch, seq_q, heads, head_dim = query.shape
        if blocked_attention.are_too_many_scores(query.transpose(1, 2), key.transpose(1, 2)):
            return self._in_blocks(query, key, value, key_is_padding)
        key, value = (x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2) for x in (key, value))
        scores = query.transpose(1, 2) @ key.transpose(-1, -2) / math.sqrt(head_dim)
        hidden = self._find_hidden_keys(seq_q, key.shape[2], query.device)
        if key_is_padding is not None:
            hidden = hidden | key_is_padding[:, None, None, :]
        probabilities = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        return (probabilities @ value).transpose(1, 2).reshape(batch, seq_q, heads * head_dim)

    def _in_blocks(self, query: Tensor, key: Tensor, value: Tensor, key_is_padding: Tensor | None) -> Tensor:
        """Compute the same in blocks, for scores that would not fit into memory."""
        band = Band(math.inf if self.window is None else self.window, 0 if self.causal else math.inf)
        mask = None if key_is_padding is None else ~key_is_padding[:, None, None, :]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return blocked_attention.attention(query, key, value, mask, band).transpose(1, 2).flatten(2)

    def _find_hidden_keys(self, seq_q: int, seq_kv: int, device: torch.device) -> Tensor:
        """Return ``[seq_q, seq_kv]``, True where a query must not see a key."""
        distance = torch.arange(seq_q, device=device)[:, None] - torch.arange(seq_kv, device=device)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.causal:
            hidden |= distance < 0
        if self.window is not None:
            hidden |= distance > self.window
        return hidden


class Attention(nn.Module):
    """Causal self-attention with separate projections.

    Args:
        hidden: width of the input and output.
        heads: number of query heads.
        groups: number of key and value heads.
        bias: whether the projections have biases.
        rope: whether queries and keys are rotated by their positions.
    """

    def __init__(self, hidden: int, heads: int, groups: int, bias: bool = False, rope: bool = True) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, groups * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, groups * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=bias)
        self.rope = RotaryEmbedding(self.head_dim) if rope else nn.Identity()
        self.core = CoreAttention(causal=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.core(self.rope(query), self.rope(key), value))


# MLPs with their norm in front, plain and gated.


class MLP(nn.Module):
    """``down(activation(up(layer_norm(x))))``, as in GPT-2.

    Args:
        hidden: width of the input and output.
        ffn: width between the two linear layers.
        activation: a key of ``POINTWISE``.
        bias: whether both linear layers have biases.
        eps: the norm's eps.
    """

    def __init__(self, hidden: int, ffn: int, activation: str = "gelu", bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.up_proj = nn.Linear(hidden, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)
        self.activation = POINTWISE[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to the same shape."""
        return self.down_proj(self.activation(self.up_proj(self.norm(x))))


class GatedMLP(nn.Module):
    """``down(gated(gate(h), up(h)))`` with ``h = rms_norm(x)``, without biases, as in Llama.

    Args:
        hidden: width of the input and output.
        ffn: width of the gate and of up.
        activation: a key of ``GATES``.
        eps: the norm's eps.
    """

    def __init__(self, hidden: int, ffn: int, activation: str, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)
        self.gated = GATES[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to the same shape."""
        h = self.norm(x)
        return self.down_proj(self.gated(self.gate_proj(h), self.up_proj(h)))


class SwiGLUMLP(GatedMLP):
    """The MLP of Llama: SiLU on the gate."""

    def __init__(self, hidden: int, ffn: int, eps: float = 1e-5) -> None:
        super().__init__(hidden, ffn, "swiglu", eps)


# Pre-norm transformer layers.


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
        """Map ``[batch, seq, hidden]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)


class LlamaLayer(nn.Module):
    """RMSNorm, grouped-query attention with RoPE, SwiGLU, no biases, as in Llama.

    Args:
        hidden: width of the residual stream.
        ffn: width inside the MLP.
        heads: number of query heads.
        groups: number of key and value heads.
        eps: the eps of both norms.
    """

    def __init__(self, hidden: int, ffn: int, heads: int, groups: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=eps)
        self.attention = Attention(hidden, heads, groups)
        self.mlp = SwiGLUMLP(hidden, ffn, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)
