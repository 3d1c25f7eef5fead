"""Rotated queries that look far back, as in a long context: mistakes in RoPE's phases grow with the distance."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parity.case.case import Pair, Rng
from parity.lab.zoo.hosts.case import UNQUANTIZED, host
from parity.lab.zoo.hosts.core_attention import query_key_value
from parity.reference import CoreAttention, RotaryEmbedding, rotate_halves

SMALL = dict(batch=2, seq=16, seq_kv=32, heads=2, groups=1, head_dim=32)
LARGE = dict(batch=2, seq=64, seq_kv=128, heads=4, groups=2, head_dim=64)
BASE = 500_000.0
CONTEXT = 4096


class LongAttention(nn.Module):
    """Queries at the end of a long context attend to some of its keys."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.rope = RotaryEmbedding(head_dim, base=BASE)
        self.core = CoreAttention()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor:
        """Tensors as ``CoreAttention``'s; positions ``[seq_q]`` and ``[seq_kv]``, int64."""
        return self.core(self._rotated(query, query_positions), self._rotated(key, key_positions), value)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate_halves(x, positions.to(self.rope.inv_freq.dtype)[:, None] * self.rope.inv_freq)


class TELongAttention(nn.Module):
    """The same with TE's RoPE kernel and attention.

    Attributes:
        phases: from positions ``[seq]`` to angles ``[seq, head_dim / 2]``, FP32.
    """

    def __init__(self, te: ModuleType, heads: int, groups: int, head_dim: int) -> None:
        super().__init__()
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        self.rotate = apply_rotary_pos_emb
        self.core = te.DotProductAttention(
            heads, head_dim, num_gqa_groups=groups, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.0
        )
        self.head_dim = head_dim
        self.phases = self.right_phases

    def frequencies(self, device: torch.device) -> Tensor:
        """``[head_dim / 2]``, FP32, in radians a position."""
        return 1.0 / BASE ** (torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim)

    def right_phases(self, positions: Tensor) -> Tensor:
        """Positions times frequencies, in FP32."""
        return positions.float()[:, None] * self.frequencies(positions.device)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor:
        """Arguments as ``LongAttention``'s."""
        return self.core(self._rotated(query, query_positions), self._rotated(key, key_positions), value)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        phases = self.phases(positions)
        return self.rotate(x, torch.cat((phases, phases), dim=-1)[:, None, None, :], tensor_format="bshd")


@host("long_context_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def long_context_attention(te: ModuleType, heads: int, groups: int, head_dim: int, **_: Any) -> Pair:
    def inputs(rng: Rng, seq: int, seq_kv: int, **size: int) -> tuple[Tensor, ...]:
        tensors = query_key_value(rng, seq=seq, seq_kv=seq_kv, **size)
        return (*tensors, CONTEXT - seq + torch.arange(seq), rng.permutation(CONTEXT - seq)[:seq_kv])

    return Pair(
        reference=LongAttention(head_dim), candidate=TELongAttention(te, heads, groups, head_dim), inputs=inputs
    )


HOSTS = (long_context_attention,)
