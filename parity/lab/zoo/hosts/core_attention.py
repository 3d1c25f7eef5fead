"""Attention without projections, with every mask that people get wrong."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parity.case.case import Pair, Rng
from parity.lab.zoo.hosts.case import UNQUANTIZED, host
from parity.lab.zoo.planting import construct
from parity.reference import CoreAttention

SMALL = dict(batch=2, seq=32, heads=4, groups=2, head_dim=16)
LARGE = dict(batch=2, seq=128, heads=8, groups=2, head_dim=64)
CROSS = (SMALL | dict(seq_kv=48), LARGE | dict(seq_kv=160))
WINDOW = 8
SOFTCAP = 2.0
LARGEST_SLOPE = 0.5  # of ALiBi's first head; each head's is half of the one before


class BottomRightAttention(nn.Module):
    """Causal attention in which the last query stands at the last key, as with a key-value cache."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Arguments and result as ``CoreAttention``'s."""
        seq_q, seq_kv = query.shape[1], key.shape[1]
        positions = torch.arange(seq_q, device=query.device) + seq_kv - seq_q
        hidden = torch.arange(seq_kv, device=query.device) > positions[:, None]
        return _attend(_scores(query, key).masked_fill(hidden, -math.inf), value)


class SoftcapAttention(nn.Module):
    """Causal attention whose scores are ``cap * tanh(score / cap)``, as in Gemma 2."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Arguments and result as ``CoreAttention``'s."""
        return _attend(_causal(SOFTCAP * torch.tanh(_scores(query, key) / SOFTCAP)), value)


class SinkAttention(nn.Module):
    """Causal attention whose softmax has one more term, a score for each head that no key has, as in gpt-oss."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(heads).normal_())

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Arguments and result as ``CoreAttention``'s."""
        scores = _causal(_scores(query, key))
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        return _weighted(torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1], value)


class AlibiAttention(nn.Module):
    """Causal attention whose scores fall with the distance, as in Bloom and MPT."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", slopes(heads))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Arguments and result as ``CoreAttention``'s."""
        positions = torch.arange(query.shape[1], device=query.device)
        bias = self.slopes[:, None, None] * (positions - positions[:, None])
        return _attend(_causal(_scores(query, key) + bias.to(query.dtype)), value)


def slopes(heads: int) -> Tensor:
    """``[heads]``, FP32: ALiBi's, by which a score falls a position."""
    return LARGEST_SLOPE ** torch.arange(1.0, heads + 1.0)


def query_key_value(
    rng: Rng, batch: int, seq: int, heads: int, groups: int, head_dim: int, seq_kv: int = 0
) -> tuple[Tensor, ...]:
    """``[batch, seq, heads, head_dim]``, and twice ``[batch, seq_kv or seq, groups, head_dim]``."""
    return (
        rng.normal(batch, seq, heads, head_dim),
        rng.normal(batch, seq_kv or seq, groups, head_dim),
        rng.normal(batch, seq_kv or seq, groups, head_dim),
    )


@host("causal_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def causal_attention(te: ModuleType, **size: int) -> Pair:
    return _pair(te, CoreAttention(causal=True), size, attn_mask_type="causal")


@host("window_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def window_attention(te: ModuleType, **size: int) -> Pair:
    reference = CoreAttention(causal=True, window=WINDOW)
    return _pair(te, reference, size, attn_mask_type="causal", window_size=(WINDOW, 0))


@host("softcap_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def softcap_attention(te: ModuleType, **size: int) -> Pair:
    return _pair(te, SoftcapAttention(), size, attn_mask_type="causal", softcap=SOFTCAP)


@host("sink_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def sink_attention(te: ModuleType, **size: int) -> Pair:
    pair = _pair(te, SinkAttention(size["heads"]), size, attn_mask_type="causal", softmax_type="learnable")
    return dataclasses.replace(pair, weights={"sinks": "softmax_offset"})


@host("alibi_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def alibi_attention(te: ModuleType, **size: int) -> Pair:
    def call_candidate(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        alibi = dict(core_attention_bias_type="alibi", alibi_slopes=slopes(query.shape[2]).to(query.device))
        return module(query, key, value, **alibi)

    pair = _pair(te, AlibiAttention(size["heads"]), size, attn_mask_type="causal")
    return dataclasses.replace(pair, call_candidate=call_candidate)


@host("cached_attention", *CROSS, precisions=UNQUANTIZED)
def cached_attention(te: ModuleType, **size: int) -> Pair:
    """More keys than queries."""
    return _pair(te, BottomRightAttention(), size, attn_mask_type="causal_bottom_right")


@host("padded_attention", SMALL, LARGE, precisions=UNQUANTIZED)
def padded_attention(te: ModuleType, **size: int) -> Pair:
    """Sequences of unequal lengths; a padded query's result means nothing, so both return 0 there."""

    def inputs(rng: Rng, batch: int, seq: int, heads: int, groups: int, head_dim: int) -> tuple[Tensor, ...]:
        lengths = rng.integers(batch, low=seq // 2, high=seq)
        is_padding = torch.arange(seq) >= lengths[:, None]
        return (*query_key_value(rng, batch, seq, heads, groups, head_dim), is_padding)

    def call_reference(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, is_padding: Tensor) -> Tensor:
        return module(query, key, value, is_padding).masked_fill(is_padding[..., None], 0.0)

    def call_candidate(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, is_padding: Tensor) -> Tensor:
        context = module(query, key, value, attention_mask=is_padding[:, None, None, :])
        return context.masked_fill(is_padding[..., None], 0.0)

    pair = _pair(te, CoreAttention(), size, attn_mask_type="padding")
    return dataclasses.replace(pair, inputs=inputs, call_reference=call_reference, call_candidate=call_candidate)


def _pair(te: ModuleType, reference: nn.Module, size: dict[str, int], **te_arguments: Any) -> Pair:
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


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """``[batch, heads, seq_q, seq_kv]``, scaled; heads are shared out to the groups in order."""
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    return query.transpose(1, 2) @ key.permute(0, 2, 3, 1) / math.sqrt(query.shape[-1])


def _causal(scores: Tensor) -> Tensor:
    positions = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(positions > positions[:, None], -math.inf)


def _attend(scores: Tensor, value: Tensor) -> Tensor:
    return _weighted(scores.softmax(dim=-1), value)


def _weighted(probabilities: Tensor, value: Tensor) -> Tensor:
    """``[batch, seq_q, heads * head_dim]``."""
    value = value.repeat_interleave(probabilities.shape[1] // value.shape[2], dim=2).transpose(1, 2)
    return (probabilities @ value).transpose(1, 2).flatten(2)


HOSTS = (
    causal_attention,
    window_attention,
    softcap_attention,
    sink_attention,
    alibi_attention,
    cached_attention,
    padded_attention,
)
