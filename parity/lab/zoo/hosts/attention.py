"""Attention with its projections and RoPE, in every layout of the QKV weight."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parity.case.case import Pair
from parity.case.weight_map import Side, WeightMap, interleaved_qkv, rope_halves, stack
from parity.lab.zoo.hosts.case import host
from parity.lab.zoo.planting import construct
from parity.reference import Attention, RotaryEmbedding, rotate_interleaved

SMALL = dict(batch=2, seq=32, hidden=64, heads=4, groups=2)
LARGE = dict(batch=2, seq=128, hidden=256, heads=8, groups=2)
QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
SEPARATE: dict[Side, Side] = dict(zip(QKV, ("qkv.query_weight", "qkv.key_weight", "qkv.value_weight"), strict=True))
OUT: WeightMap = {"o_proj.weight": "proj.weight"}


class InterleavedRotaryEmbedding(RotaryEmbedding):
    """RoPE as in Meta's Llama, which rotates elements 2i and 2i + 1 together."""

    def forward(self, x: Tensor) -> Tensor:
        """Shapes as ``RotaryEmbedding``'s."""
        positions = self.inv_freq.new_ones(x.shape[1]).cumsum(0) - 1
        return rotate_interleaved(x, positions[:, None] * self.inv_freq)


class PartialRotaryEmbedding(nn.Module):
    """RoPE of the first half of each head's channels, as in Phi and GPT-NeoX."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.rotated = head_dim // 2
        self.rope = RotaryEmbedding(self.rotated)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes as ``RotaryEmbedding``'s."""
        return torch.cat((self.rope(x[..., : self.rotated]), x[..., self.rotated :]), dim=-1)


@host("attention", SMALL, LARGE)
def attention(te: ModuleType, hidden: int, heads: int, groups: int, **_: Any) -> Pair:
    return _pair(te, SEPARATE, hidden, heads, groups)


@host("interleaved_qkv_attention", SMALL, LARGE)
def interleaved_qkv_attention(te: ModuleType, hidden: int, heads: int, groups: int, **_: Any) -> Pair:
    weights: WeightMap = {interleaved_qkv(*QKV, groups=groups, head_dim=hidden // heads): "qkv.weight"}
    return _pair(te, weights, hidden, heads, groups, fuse_qkv_params=True)


@host("stacked_qkv_attention", SMALL, LARGE)
def stacked_qkv_attention(te: ModuleType, hidden: int, heads: int, groups: int, **_: Any) -> Pair:
    weights: WeightMap = {stack(*QKV): "qkv.weight"}
    return _pair(te, weights, hidden, heads, groups, fuse_qkv_params=True, qkv_weight_interleaved=False)


@host("meta_rope_attention", SMALL, LARGE)
def meta_rope_attention(te: ModuleType, hidden: int, heads: int, groups: int, **_: Any) -> Pair:
    """Meta's form of RoPE in the reference, the halves form with permuted weights in TE."""
    halves: dict[Side, Side] = {rope_halves(name, head_dim=hidden // heads): SEPARATE[name] for name in QKV[:2]}
    pair = _pair(te, halves | {QKV[2]: SEPARATE[QKV[2]]}, hidden, heads, groups)
    pair.reference.rope = InterleavedRotaryEmbedding(hidden // heads)
    return pair


@host("partial_rope_attention", SMALL, LARGE)
def partial_rope_attention(te: ModuleType, hidden: int, heads: int, groups: int, **_: Any) -> Pair:
    pair = _pair(te, SEPARATE, hidden, heads, groups, rotary_percent=0.5)
    pair.reference.rope = PartialRotaryEmbedding(hidden // heads)
    return pair


def _pair(
    te: ModuleType,
    weights: WeightMap,
    hidden: int,
    heads: int,
    groups: int,
    rotary_percent: float = 1.0,
    **te_arguments: Any,
) -> Pair:
    rope = te.RotaryPositionEmbedding(hidden // heads, rotary_percent=rotary_percent)

    def call_candidate(module: nn.Module, x: Tensor) -> Tensor:
        return module(x, rotary_pos_emb=rope(x.shape[1]))

    return Pair(
        reference=Attention(hidden, heads, groups),
        candidate=construct(
            te.MultiheadAttention,
            hidden,
            heads,
            num_gqa_groups=groups,
            attention_dropout=0.0,
            attn_mask_type="causal",
            qkv_format="bshd",
            bias=False,
            **te_arguments,
        ),
        weights={**weights, **OUT},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
        call_candidate=call_candidate,
    )


HOSTS = (
    attention,
    interleaved_qkv_attention,
    stacked_qkv_attention,
    meta_rope_attention,
    partial_rope_attention,
)
