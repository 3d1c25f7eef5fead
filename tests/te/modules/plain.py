"""Write TransformerEngine's modules, options included, as plain PyTorch modules; the batch comes first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity import reference

Rotate = Callable[[Tensor, Tensor], Tensor]


def norm(kind: str, width: int, eps: float = 1e-5) -> nn.Module:
    """Return a ``LayerNorm`` or ``RMSNorm`` over the last dimension."""
    return getattr(nn, kind)(width, eps=eps)


class L2Norm(nn.Module):
    """``x / sqrt(sum(x^2) + eps)``, which TE calls L2Normalization."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)


class Normed(nn.Module):
    """A module behind a norm of its first argument.

    Args:
        norm: of the first argument.
        body: the module that takes the normed argument, and all others as they are.
        returns_norm: whether the norm's output is returned after the body's.
    """

    def __init__(self, norm: nn.Module, body: nn.Module, returns_norm: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.body = body
        self.returns_norm = returns_norm

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        normed = self.norm(x)
        result = self.body(normed, *others, **named)
        if not self.returns_norm:
            return result
        return (*result, normed) if isinstance(result, tuple) else (result, normed)


class BiasApart(nn.Module):
    """A linear layer that returns its bias instead of adding it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(in_features, out_features).weight.detach())
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.weight), self.bias


def linear(in_features: int, out_features: int, bias: bool = True, bias_apart: bool = False) -> nn.Module:
    """Return a linear layer that adds its bias, has none, or returns it."""
    return BiasApart(in_features, out_features) if bias_apart else nn.Linear(in_features, out_features, bias=bias)


class MLP(nn.Module):
    """Two linear layers with an activation between them. With a gated one, the first layer stacks gate over up.

    Args:
        hidden: width of the input and output.
        ffn: width of the activation's output.
        activation: a name of ``reference.POINTWISE`` or ``reference.GATES``, or a function like theirs.
        bias: of both layers.
        bias_apart: whether the second layer's bias is returned instead of added.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        activation: str | Callable[[Tensor, Tensor], Tensor],
        bias: bool = True,
        bias_apart: bool = False,
    ) -> None:
        super().__init__()
        self.pointwise = reference.POINTWISE.get(activation) if isinstance(activation, str) else None
        self.gate = reference.GATES.get(activation) if isinstance(activation, str) else activation
        self.first = nn.Linear(hidden, ffn if self.pointwise else 2 * ffn, bias=bias)
        self.second = linear(ffn, hidden, bias, bias_apart)

    def forward(self, x: Tensor) -> Any:
        first = self.first(x)
        return self.second(self.pointwise(first) if self.pointwise else self.gate(*first.chunk(2, dim=-1)))


def causal(seq_q: int, seq_kv: int, before: int | None = None, after: int = 0, bottom_right: bool = False) -> Tensor:
    """Return ``[seq_q, seq_kv]``, True where a key is more than ``before`` keys before a query or ``after`` behind it.

    Args:
        before: None for any number.
        bottom_right: whether the last query is aligned with the last key; otherwise the first is with the first.
    """
    offset = seq_kv - seq_q if bottom_right else 0
    distance = torch.arange(seq_q)[:, None] + offset - torch.arange(seq_kv)
    return (distance < -after) | (distance > (seq_q + seq_kv if before is None else before))


class Attention(nn.Module):
    """Self-attention, or cross-attention where ``forward`` gets a memory.

    Args:
        hidden: width of the input, the memory and the output.
        heads: number of query heads.
        groups: number of key and value heads; None for as many.
        head_dim: None for ``hidden / heads``.
        bias: of all projections.
        bias_apart: whether the output projection's bias is returned instead of added.
        rotate: ``reference.rotate_halves`` or ``rotate_interleaved``, applied to queries and keys.
        head_norm: builds the norm of each head's query and key from its width.
        norm_before_rotation: whether heads are normed before they are rotated.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
        score_bias: added to the scores, broadcast to ``[batch, heads, seq_q, seq_kv]``.
        sink: each head's score of a key without a value: "zero" or "learnt"; None for no such key.
    """

    sink: Tensor | None
    score_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        heads: int,
        groups: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        bias_apart: bool = False,
        rotate: Rotate | None = None,
        head_norm: Callable[[int], nn.Module] | None = None,
        norm_before_rotation: bool = False,
        softcap: float = 0.0,
        sink: str | None = None,
        score_bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim or hidden // heads
        groups = groups or heads
        self.query = nn.Linear(hidden, heads * self.head_dim, bias=bias)
        self.key = nn.Linear(hidden, groups * self.head_dim, bias=bias)
        self.value = nn.Linear(hidden, groups * self.head_dim, bias=bias)
        self.out = linear(heads * self.head_dim, hidden, bias, bias_apart)
        self.query_norm = head_norm(self.head_dim) if head_norm else nn.Identity()
        self.key_norm = head_norm(self.head_dim) if head_norm else nn.Identity()
        self.rotate = rotate
        self.norm_before_rotation = norm_before_rotation
        self.softcap = softcap
        self.register_buffer("score_bias", score_bias, persistent=False)
        if sink == "learnt":
            self.sink = nn.Parameter(torch.randn(heads))
        else:
            self.register_buffer("sink", torch.zeros(heads) if sink else None)

    def forward(self, x: Tensor, memory: Tensor | None = None, masked: Tensor | None = None) -> Any:
        """Return the output, followed by the output projection's bias if ``bias_apart``.

        Args:
            x: ``[batch, seq_q, hidden]``.
            memory: ``[batch, seq_kv, hidden]``; None for x itself.
            masked: broadcast to ``[batch, heads, seq_q, seq_kv]``, True where a query must not see a key.
        """
        source = x if memory is None else memory
        query, key, value = (
            projection(tokens).unflatten(-1, (-1, self.head_dim))
            for projection, tokens in ((self.query, x), (self.key, source), (self.value, source))
        )
        query, key = self._placed(query, self.query_norm), self._placed(key, self.key_norm)
        key, value = (tensor.repeat_interleave(query.shape[2] // tensor.shape[2], dim=2) for tensor in (key, value))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(self.head_dim)
        context = torch.einsum("bhqk,bkhd->bqhd", self._probabilities(scores, masked), value)
        return self.out(context.flatten(2))

    def _placed(self, heads: Tensor, norm: nn.Module) -> Tensor:
        """Return heads that are normed and rotated, in either order."""
        if self.norm_before_rotation:
            heads = norm(heads)
        if self.rotate is not None:
            heads = self.rotate(heads, rotary_angles(heads.shape[1], self.head_dim).to(heads))
        return heads if self.norm_before_rotation else norm(heads)

    def _probabilities(self, scores: Tensor, masked: Tensor | None) -> Tensor:
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.score_bias is not None:
            scores = scores + self.score_bias
        if masked is not None:
            scores = scores.masked_fill(masked, -math.inf)
        if self.sink is None:
            return scores.softmax(dim=-1)
        sink = self.sink[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def rotary_angles(seq: int, head_dim: int) -> Tensor:
    """Return ``[seq, head_dim / 2]`` in radians, in FP32, in which every implementation computes them."""
    return torch.arange(seq, dtype=torch.float32)[:, None] * reference.RotaryEmbedding(head_dim).inv_freq


class Layer(nn.Module):
    """A transformer layer of norms, attention and MLP in a chosen arrangement; None leaves a part out.

    Args:
        attention: of the input with itself.
        mlp: the feed-forward part.
        norms: in front of attention, cross-attention and MLP, in this order; None for no norm.
        cross: attention to a memory.
        output_norm: of the layer's output.
        parallel: attention and MLP both read the input, each through its norm, and both are added to it.
        residual_is_normed: each part is added to its norm's output instead of to its input.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        norms: tuple[nn.Module | None, nn.Module | None, nn.Module | None],
        cross: nn.Module | None = None,
        output_norm: nn.Module | None = None,
        parallel: bool = False,
        residual_is_normed: bool = False,
    ) -> None:
        super().__init__()
        self.attention, self.cross, self.mlp = attention, cross, mlp
        self.attention_norm, self.cross_norm, self.mlp_norm = (part or nn.Identity() for part in norms)
        self.output_norm = output_norm or nn.Identity()
        self.parallel = parallel
        self.residual_is_normed = residual_is_normed

    def forward(self, x: Tensor, memory: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape; ``masked`` is the mask of self-attention."""
        if self.parallel:
            return x + self.attention(self.attention_norm(x), masked=masked) + self.mlp(self.mlp_norm(x))
        normed = self.attention_norm(x)
        x = self._residual(x, normed) + self.attention(normed, masked=masked)
        if self.cross is not None:
            normed = self.cross_norm(x)
            x = self._residual(x, normed) + self.cross(normed, memory)
        normed = self.mlp_norm(x)
        return self.output_norm(self._residual(x, normed) + self.mlp(normed))

    def _residual(self, x: Tensor, normed: Tensor) -> Tensor:
        return normed if self.residual_is_normed else x
