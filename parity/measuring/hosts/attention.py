"""Attention without projections, with projections and RoPE, and with RoPE over long distances."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parity.case.case import Pair, Rng
from parity.case.weight_map import Side, WeightMap, interleaved_qkv, rope_halves, stack
from parity.measuring.hosts.host import UNQUANTIZED, construct, host
from parity.reference import Attention, CoreAttention, RotaryEmbedding, rotate_halves, rotate_interleaved

# Attention without projections, with the masks that people get wrong.


SMALL = dict(batch=2, seq=32, heads=4, groups=2, head_dim=16)
LARGE = dict(batch=2, seq=128, heads=8, groups=2, head_dim=64)
CROSS = (SMALL | dict(seq_kv=48), LARGE | dict(seq_kv=160))
WINDOW = 8
SOFTCAP = 2.0
LARGEST_SLOPE = 0.5  # of ALiBi's first head; each further head has half the slope of the one before


class BottomRightAttention(nn.Module):
    """Causal attention in which the last query is aligned with the last key, as with a key-value cache."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Take and return what ``CoreAttention`` does."""
        seq_q, seq_kv = query.shape[1], key.shape[1]
        positions = torch.arange(seq_q, device=query.device) + seq_kv - seq_q
        hidden = torch.arange(seq_kv, device=query.device) > positions[:, None]
        return _attend_with_scores(_compute_scores(query, key).masked_fill(hidden, -math.inf), value)


class SoftcapAttention(nn.Module):
    """Causal attention whose scores are ``cap * tanh(score / cap)``, as in Gemma 2."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Take and return what ``CoreAttention`` does."""
        return _attend_with_scores(_mask_future(SOFTCAP * torch.tanh(_compute_scores(query, key) / SOFTCAP)), value)


class SinkAttention(nn.Module):
    """Causal attention whose softmax has an additional learned score for each head, without a key, as in gpt-oss."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(heads).normal_())

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Take and return what ``CoreAttention`` does."""
        scores = _mask_future(_compute_scores(query, key))
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        return _weight_values(torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1], value)


class AlibiAttention(nn.Module):
    """Causal attention whose scores fall with the distance, as in Bloom and MPT."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", slopes(heads))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Take and return what ``CoreAttention`` does."""
        positions = torch.arange(query.shape[1], device=query.device)
        bias = self.slopes[:, None, None] * (positions - positions[:, None])
        return _attend_with_scores(_mask_future(_compute_scores(query, key) + bias.to(query.dtype)), value)


def slopes(heads: int) -> Tensor:
    """Return ALiBi's slopes, by which scores fall with each position: ``[heads]``, FP32."""
    return LARGEST_SLOPE ** torch.arange(1.0, heads + 1.0)


def query_key_value(
    rng: Rng, batch: int, seq: int, heads: int, groups: int, head_dim: int, seq_kv: int = 0
) -> tuple[Tensor, ...]:
    """Draw queries ``[batch, seq, heads, head_dim]``, keys and values ``[batch, seq_kv or seq, groups, head_dim]``."""
    return (
        rng.normal(batch, seq, heads, head_dim),
        rng.normal(batch, seq_kv or seq, groups, head_dim),
        rng.normal(batch, seq_kv or seq, groups, head_dim),
    )


@host("causal_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def causal_attention(te: ModuleType, **size: int) -> Pair:
    return _core_pair(te, CoreAttention(causal=True), size, attn_mask_type="causal")


@host("window_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def window_attention(te: ModuleType, **size: int) -> Pair:
    reference = CoreAttention(causal=True, window=WINDOW)
    return _core_pair(te, reference, size, attn_mask_type="causal", window_size=(WINDOW, 0))


@host("softcap_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def softcap_attention(te: ModuleType, **size: int) -> Pair:
    return _core_pair(te, SoftcapAttention(), size, attn_mask_type="causal", softcap=SOFTCAP)


@host("sink_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def sink_attention(te: ModuleType, **size: int) -> Pair:
    pair = _core_pair(te, SinkAttention(size["heads"]), size, attn_mask_type="causal", softmax_type="learnable")
    return dataclasses.replace(pair, weights={"sinks": "softmax_offset"})


@host("alibi_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def alibi_attention(te: ModuleType, **size: int) -> Pair:
    def call_candidate(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        alibi = dict(core_attention_bias_type="alibi", alibi_slopes=slopes(query.shape[2]).to(query.device))
        return module(query, key, value, **alibi)

    pair = _core_pair(te, AlibiAttention(size["heads"]), size, attn_mask_type="causal")
    return dataclasses.replace(pair, call_candidate=call_candidate)


@host("cached_attention", *CROSS, precisions=UNQUANTIZED)
def cached_attention(te: ModuleType, **size: int) -> Pair:
    """Attend to more keys than there are queries."""
    return _core_pair(te, BottomRightAttention(), size, attn_mask_type="causal_bottom_right")


@host("padded_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def padded_attention(te: ModuleType, **size: int) -> Pair:
    """Attend in sequences of unequal lengths. A padded query's result means nothing, so both modules return 0 there."""

    def inputs(rng: Rng, batch: int, seq: int, heads: int, groups: int, head_dim: int) -> tuple[Tensor, ...]:
        lengths = rng.integers(batch, low=seq // 2, high=seq)
        is_padding = torch.arange(seq) >= lengths[:, None]
        return (*query_key_value(rng, batch, seq, heads, groups, head_dim), is_padding)

    def call_reference(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, is_padding: Tensor) -> Tensor:
        return module(query, key, value, is_padding).masked_fill(is_padding[..., None], 0.0)

    def call_candidate(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, is_padding: Tensor) -> Tensor:
        context = module(query, key, value, attention_mask=is_padding[:, None, None, :])
        return context.masked_fill(is_padding[..., None], 0.0)

    pair = _core_pair(te, CoreAttention(), size, attn_mask_type="padding")
    return dataclasses.replace(pair, inputs=inputs, call_reference=call_reference, call_candidate=call_candidate)


def _core_pair(te: ModuleType, reference: nn.Module, size: dict[str, int], **te_arguments: Any) -> Pair:
    return Pair(
        reference=reference,
        candidate=construct(
            te.DotProductAttention,
            size["heads"],
            size["head_dim"],
            num_gqa_groups=size["groups"],
            qkv_format="bshd",
            attention_dropout=0.0,
            **te_arguments,
        ),
        inputs=query_key_value,
    )


def _compute_scores(query: Tensor, key: Tensor) -> Tensor:
    """Return scaled scores ``[batch, heads, seq_q, seq_kv]``. Consecutive heads share a group."""
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    return query.transpose(1, 2) @ key.permute(0, 2, 3, 1) / math.sqrt(query.shape[-1])


def _mask_future(scores: Tensor) -> Tensor:
    positions = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(positions > positions[:, None], -math.inf)


def _attend_with_scores(scores: Tensor, value: Tensor) -> Tensor:
    return _weight_values(scores.softmax(dim=-1), value)


def _weight_values(probabilities: Tensor, value: Tensor) -> Tensor:
    """Return ``[batch, seq_q, heads * head_dim]``."""
    value = value.repeat_interleave(probabilities.shape[1] // value.shape[2], dim=2).transpose(1, 2)
    return (probabilities @ value).transpose(1, 2).flatten(2)


# Attention with its projections and RoPE, in every layout of the QKV weight.


SMALL_PROJECTED = dict(batch=2, seq=32, hidden=64, heads=4, groups=2)
LARGE_PROJECTED = dict(batch=2, seq=128, hidden=256, heads=8, groups=2)
QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
SEPARATE: dict[Side, Side] = dict(zip(QKV, ("qkv.query_weight", "qkv.key_weight", "qkv.value_weight"), strict=True))
OUT: WeightMap = {"o_proj.weight": "proj.weight"}


class InterleavedRotaryEmbedding(RotaryEmbedding):
    """RoPE as in Meta's Llama, which rotates elements 2i and 2i + 1 together."""

    def forward(self, x: Tensor) -> Tensor:
        """Take and return what ``RotaryEmbedding`` does."""
        positions = self.inv_freq.new_ones(x.shape[1]).cumsum(0) - 1
        return rotate_interleaved(x, positions[:, None] * self.inv_freq)


class PartialRotaryEmbedding(nn.Module):
    """RoPE of the first half of each head's channels, as in Phi and GPT-NeoX."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.rotated = head_dim // 2
        self.rope = RotaryEmbedding(self.rotated)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return what ``RotaryEmbedding`` does."""
        return torch.cat((self.rope(x[..., : self.rotated]), x[..., self.rotated :]), dim=-1)


@host("attention", SMALL_PROJECTED, LARGE_PROJECTED)
def attention(te: ModuleType, hidden: int, heads: int, groups: int, **_: Any) -> Pair:
    return _projected_pair(te, SEPARATE, hidden, heads, groups)


@host("interleaved_qkv_attention", SMALL_PROJECTED, LARGE_PROJECTED)
def interleaved_qkv_attention(te: ModuleType, hidden: int, heads: int, groups: int, **_: Any) -> Pair:
    weights: WeightMap = {interleaved_qkv(*QKV, groups=groups, head_dim=hidden // heads): "qkv.weight"}
    return _projected_pair(te, weights, hidden, heads, groups, fuse_qkv_params=True)


@host("stacked_qkv_attention", SMALL_PROJECTED, LARGE_PROJECTED)
def stacked_qkv_attention(te: ModuleType, hidden: int, heads: int, groups: int, **_: Any) -> Pair:
    weights: WeightMap = {stack(*QKV): "qkv.weight"}
    return _projected_pair(te, weights, hidden, heads, groups, fuse_qkv_params=True, qkv_weight_interleaved=False)


@host("meta_rope_attention", SMALL_PROJECTED, LARGE_PROJECTED)
def meta_rope_attention(te: ModuleType, hidden: int, heads: int, groups: int, **_: Any) -> Pair:
    """Pair Meta's form of RoPE in the reference with the halves form and permuted weights in TE."""
    halves: dict[Side, Side] = {rope_halves(name, head_dim=hidden // heads): SEPARATE[name] for name in QKV[:2]}
    pair = _projected_pair(te, halves | {QKV[2]: SEPARATE[QKV[2]]}, hidden, heads, groups)
    pair.reference.rope = InterleavedRotaryEmbedding(hidden // heads)
    return pair


@host("partial_rope_attention", SMALL_PROJECTED, LARGE_PROJECTED)
def partial_rope_attention(te: ModuleType, hidden: int, heads: int, groups: int, **_: Any) -> Pair:
    pair = _projected_pair(te, SEPARATE, hidden, heads, groups, rotary_percent=0.5)
    pair.reference.rope = PartialRotaryEmbedding(hidden // heads)
    return pair


def _projected_pair(
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


# Rotated queries that look far back, as in a long context, since mistakes in RoPE's phases grow with the distance.


SMALL_ROPE = dict(batch=2, seq=16, seq_kv=32, heads=2, groups=1, head_dim=32)
LARGE_ROPE = dict(batch=2, seq=64, seq_kv=128, heads=4, groups=2, head_dim=64)
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
        """Take ``CoreAttention``'s tensors, and positions ``[seq_q]`` and ``[seq_kv]``, int64."""
        return self.core(self._apply_rope(query, query_positions), self._apply_rope(key, key_positions), value)

    def _apply_rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate_halves(x, positions.to(self.rope.inv_freq.dtype)[:, None] * self.rope.inv_freq)


class TELongAttention(nn.Module):
    """``LongAttention`` with TE's RoPE kernel and attention.

    Attributes:
        phases: maps positions ``[seq]`` to angles ``[seq, head_dim / 2]``, FP32.
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
        """Return the frequencies ``[head_dim / 2]``, FP32, in radians per position."""
        return 1.0 / BASE ** (torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim)

    def right_phases(self, positions: Tensor) -> Tensor:
        """Multiply positions by frequencies, in FP32."""
        return positions.float()[:, None] * self.frequencies(positions.device)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor:
        """Take what ``LongAttention`` does."""
        return self.core(self._apply_rope(query, query_positions), self._apply_rope(key, key_positions), value)

    def _apply_rope(self, x: Tensor, positions: Tensor) -> Tensor:
        phases = self.phases(positions)
        return self.rotate(x, torch.cat((phases, phases), dim=-1)[:, None, None, :], tensor_format="bshd")


@host("long_context_attention", SMALL_ROPE, LARGE_ROPE, precisions=UNQUANTIZED)
def long_context_attention(te: ModuleType, heads: int, groups: int, head_dim: int, **_: Any) -> Pair:
    def inputs(rng: Rng, seq: int, seq_kv: int, **size: int) -> tuple[Tensor, ...]:
        tensors = query_key_value(rng, seq=seq, seq_kv=seq_kv, **size)
        return (*tensors, CONTEXT - seq + torch.arange(seq), rng.permutation(CONTEXT - seq)[:seq_kv])

    return Pair(
        reference=LongAttention(head_dim), candidate=TELongAttention(te, heads, groups, head_dim), inputs=inputs
    )


HOSTS = (
    causal_attention,
    window_attention,
    softcap_attention,
    sink_attention,
    alibi_attention,
    cached_attention,
    padded_attention,
    attention,
    interleaved_qkv_attention,
    stacked_qkv_attention,
    meta_rope_attention,
    partial_rope_attention,
    long_context_attention,
)
