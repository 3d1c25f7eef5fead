"""Attention written out: scores, mask, softmax, context."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from parity.golden import blocked_attention
from parity.golden.band import Band
from parity.reference.rope import RotaryEmbedding


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
        """Attend.

        Args:
            query: ``[batch, seq_q, heads, head_dim]``.
            key: ``[batch, seq_kv, groups, head_dim]``; heads are shared out to the groups in order.
            value: as key.
            key_is_padding: ``[batch, seq_kv]``, True where a key is to be ignored.

        Returns:
            ``[batch, seq_q, heads * head_dim]``.
        """
        batch, seq_q, heads, head_dim = query.shape
        if blocked_attention.are_too_many_scores(query.transpose(1, 2), key.transpose(1, 2)):
            return self._in_blocks(query, key, value, key_is_padding)
        key, value = (x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2) for x in (key, value))
        scores = query.transpose(1, 2) @ key.transpose(-1, -2) / math.sqrt(head_dim)
        hidden = self._hidden(seq_q, key.shape[2], query.device)
        if key_is_padding is not None:
            hidden = hidden | key_is_padding[:, None, None, :]
        probabilities = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        return (probabilities @ value).transpose(1, 2).reshape(batch, seq_q, heads * head_dim)

    def _in_blocks(self, query: Tensor, key: Tensor, value: Tensor, key_is_padding: Tensor | None) -> Tensor:
        """The same, where the scores would not fit into memory."""
        band = Band(math.inf if self.window is None else self.window, 0 if self.causal else math.inf)
        mask = None if key_is_padding is None else ~key_is_padding[:, None, None, :]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return blocked_attention.attention(query, key, value, mask, band).transpose(1, 2).flatten(2)

    def _hidden(self, seq_q: int, seq_kv: int, device: torch.device) -> Tensor:
        """``[seq_q, seq_kv]``, True where a query must not see a key."""
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
        bias: of all projections.
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
        """``[batch, seq, hidden]`` to the same."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.core(self.rope(query), self.rope(key), value))
