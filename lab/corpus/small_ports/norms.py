"""Norms: their eps, divisors, kinds and groups, however they are written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.port import Port
from lab.corpus.small import Host, normal, twins

WIDTH = 64

# LayerNorms that divide by n - 1 or add eps to the root, as ``x.std(-1) + eps`` does.

EPS = 1e-3


class LayerNorm(nn.Module):
    """LayerNorm as people write it out."""

    def __init__(self, unbiased: bool = False, eps_outside: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.unbiased, self.eps_outside = unbiased, eps_outside

    def forward(self, x: Tensor) -> Tensor:
        difference = x - x.mean(-1, keepdim=True)
        if self.eps_outside:
            y = difference / (x.std(-1, keepdim=True, unbiased=self.unbiased) + EPS)
        else:
            y = difference * torch.rsqrt(x.var(-1, keepdim=True, unbiased=self.unbiased) + EPS)
        return y * self.weight + self.bias


def layer_norm(name: str, unbiased: bool, eps_outside: bool) -> Host:
    """Return the host of a norm on inputs at which eps is a tenth of the variance."""
    return Host(
        name,
        LayerNorm,
        lambda te, of_te=False, **settings: te.LayerNorm(WIDTH, eps=EPS) if of_te else LayerNorm(**settings),
        normal((2, 32, WIDTH), scale=0.1),
        dict(unbiased=unbiased, eps_outside=eps_outside),
        precisions=("fp32",),
    )


USUAL = layer_norm("written_layer_norm", False, False)
UNBIASED = layer_norm("written_layer_norm_that_divides_by_one_less", True, False)
OUTSIDE = layer_norm("written_layer_norm_with_eps_outside", False, True)
OF_STD = layer_norm("written_layer_norm_that_divides_by_std", True, True)


# A norm that is applied twice, as with a fused TE module after a norm that the port has kept.


class Head(nn.Module):
    """A norm, which may be applied more than once, and a linear layer."""

    def __init__(self, linear: Any, norm: Callable[..., Any], times: int = 1) -> None:
        super().__init__()
        self.norm: Any = norm(WIDTH)
        self.head = linear(WIDTH, 96, bias=False)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.norm(x)
        return self.head(x)


RMS_HEAD, LAYER_HEAD = (
    twins(Head, normal((2, 24, WIDTH)), f"head_after_{norm.__name__}", settings=dict(norm=norm))
    for norm in (nn.RMSNorm, nn.LayerNorm)
)


# Another eps in the norms of all layers but the last.


class NormedStream(nn.Module):
    """A stream of branches with a norm each and a last norm, on inputs as small as embeddings."""

    def __init__(self, linear: Any, norm: Any, eps: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(norm(64, eps=eps), linear(64, 64)) for _ in range(3))
        self.norm = norm(64, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = 1e-3 * x
        for layer in self.layers:
            x = x + 1e-3 * layer(x)
        return self.norm(x)


STREAM = Host(
    "normed_stream",
    lambda eps: NormedStream(nn.Linear, nn.RMSNorm, eps),
    lambda te, eps: NormedStream(te.Linear, te.RMSNorm, eps),
    normal((2, 32, WIDTH)),
    dict(eps=1e-6),
    probe=False,
)


# Norms that give each row the length 1, which TE calls L2Normalization: left out, or mistaken for RMSNorm.

OUT, ROWS = 48, 40


class Projected(nn.Module):
    """A linear layer behind a function."""

    def __init__(self, function: Callable[[Tensor], Tensor], linear: nn.Module) -> None:
        super().__init__()
        self.function, self.linear = function, linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x))


def to_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def to_mean_square_one(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def normalized(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def projected(function: Callable[[Tensor], Tensor]) -> Host:
    """Return the host of a linear layer behind a norm, whose port has the same norm or an L2Normalization."""

    def port(te: Any, function: Callable[[Tensor], Tensor], eps: float | None = None) -> nn.Module:
        norm = function if eps is None else te.ops.L2Normalization(eps=eps)
        return Projected(norm, te.Linear(32, OUT))

    return Host(
        f"projected_{function.__name__}",
        lambda function: Projected(function, nn.Linear(32, OUT)),
        port,
        normal((ROWS, 32)),
        dict(function=function),
    )


TO_LENGTH_ONE, TO_MEAN_SQUARE_ONE, NORMALIZED = (
    projected(function) for function in (to_length_one, to_mean_square_one, normalized)
)


class NormedHeads(nn.Module):
    """Attention with two heads whose queries and keys are scaled to length 1 (``qk_norm_type="L2Normalization"``)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (2, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(to_length_one(query), to_length_one(key), value)
        return self.out(context.transpose(1, 2).flatten(2))


def port_normed_heads(te: Any, norm: str | None = "L2Normalization") -> nn.Module:
    options = dict(attention_dropout=0.0, attn_mask_type="no_mask", qkv_format="bshd", input_layernorm=False)
    return te.MultiheadAttention(32, 2, qk_norm_type=norm, **options)


HEAD_NAMES = {name: f"qkv.{name}_" for name in ("query", "key", "value")} | {"out": "proj."}
NORMED_HEADS = Host(
    "normed_heads",
    NormedHeads,
    port_normed_heads,
    normal((2, ROWS, 32)),
    weights={f"{left}.{kind}": f"{right}{kind}" for left, right in HEAD_NAMES.items() for kind in ("weight", "bias")},
)


# Norms over each head against norms over all heads, and norms over other groups of channels.

SEQ, HEADS, GROUPS, HEAD_DIM = 24, 4, 2, 16
HIDDEN = HEADS * HEAD_DIM


class Attention(nn.Module):
    """Grouped-query attention; queries and keys are normalised over each head, or over all heads at once.

    ``per_head`` says which channels the gains cover, ``taken_per_head`` which ones the sums of squares cover.
    """

    def __init__(self, linear: Any, norm: Any, per_head: bool, taken_per_head: bool) -> None:
        super().__init__()
        self.q, self.kv = linear(HIDDEN, HIDDEN), linear(HIDDEN, 2 * GROUPS * HEAD_DIM)
        self.q_norm, self.k_norm = (norm(HEAD_DIM if per_head else heads * HEAD_DIM) for heads in (HEADS, GROUPS))
        self.out = linear(HIDDEN, HIDDEN)
        self.taken_per_head = taken_per_head

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        q, k = self.normalized(q, self.q_norm), self.normalized(k, self.k_norm)
        q, k, v = (heads.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for heads in (q, k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(context.transpose(1, 2).flatten(-2))

    def normalized(self, x: Tensor, norm: Any) -> Tensor:
        """Return the input normalised over these channels, with the gain of ``norm``."""
        heads, gain = x.unflatten(-1, (-1, HEAD_DIM)), norm.weight
        if gain.numel() == HEAD_DIM and self.taken_per_head:
            return norm(heads).flatten(-2)
        if gain.numel() == HEAD_DIM:
            return (F.rms_norm(x, x.shape[-1:], eps=1e-5).unflatten(-1, (-1, HEAD_DIM)) * gain).flatten(-2)
        if self.taken_per_head:
            return F.rms_norm(heads, (HEAD_DIM,), eps=1e-5).flatten(-2) * gain
        return norm(x)


def attention(name: str, per_head: bool) -> Host:
    return Host(
        name,
        lambda **taken: Attention(nn.Linear, lambda width: nn.RMSNorm(width, eps=1e-5), per_head, **taken),
        lambda te, **taken: Attention(te.Linear, te.RMSNorm, per_head, **taken),
        normal((2, SEQ, HIDDEN)),
        dict(taken_per_head=per_head),
    )


PER_HEAD, OF_ALL_HEADS = attention("norms_per_head", True), attention("norms_of_all_heads", False)


class GroupNormed(nn.Module):
    """Mamba 2's gate, and its norm in groups of channels."""

    def __init__(self, linear: Any, groups: int) -> None:
        super().__init__()
        self.into, self.out, self.groups = linear(HIDDEN, 4 * HIDDEN), linear(2 * HIDDEN, HIDDEN), groups
        self.gain = nn.Parameter(torch.rand(2 * HIDDEN) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.into(x).chunk(2, -1)
        parts = (y * F.silu(gate)).unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-5)
        return x + self.out(parts.flatten(-2) * self.gain)


OF_FOUR, OF_ONE = (
    twins(GroupNormed, normal((2, SEQ, HIDDEN)), f"group_normed_by_{groups}", settings=dict(groups=groups))
    for groups in (4, 1)
)

WRITTEN = (USUAL, UNBIASED, OUTSIDE, OF_STD)
PORTS: tuple[Port, ...] = (
    *(host.right() for host in (*WRITTEN, RMS_HEAD, LAYER_HEAD, STREAM, NORMED_HEADS, PER_HEAD, OF_ALL_HEADS, OF_FOUR)),
    USUAL.wrong("norm-statistics", "(unbiased=False), as the reference does", unbiased=True),
    USUAL.wrong("norm-eps", "inside the root, as the reference and TE's norms do", eps_outside=True),
    USUAL.wrong("norm-statistics", unbiased=True, eps_outside=True, others=True),
    UNBIASED.wrong("norm-statistics", "multiply the weight of TE's LayerNorm by sqrt((n - 1) / n)", of_te=True),
    OUTSIDE.wrong("norm-statistics", unbiased=True),
    OUTSIDE.wrong("norm-eps", eps_outside=False),
    OF_STD.wrong("norm-statistics", unbiased=False),
    OF_STD.wrong("norm-eps", eps_outside=False),
    OF_STD.wrong("norm-statistics", "in plain PyTorch", of_te=True),
    RMS_HEAD.wrong("norm-twice", times=2),
    LAYER_HEAD.wrong("norm-twice", times=2),
    STREAM.wrong("norm-eps", "it computes with eps=1e-05 in norms of 64 channels in layers", eps=1e-5),
    TO_LENGTH_ONE.right(eps=1e-6),
    NORMALIZED.right(eps=1e-24),
    TO_LENGTH_ONE.wrong("norm-missing", function=nn.Identity()),
    TO_LENGTH_ONE.wrong("norm-kind", "give TE L2Normalization", function=to_mean_square_one),
    NORMALIZED.wrong("norm-kind", "give TE L2Normalization", function=to_mean_square_one),
    TO_MEAN_SQUARE_ONE.wrong("norm-kind", "give TE RMSNorm", eps=1e-6),
    NORMALIZED.wrong("norm-eps", "1e-24", eps=1e-6, precisions=("fp32",)),
    NORMED_HEADS.wrong("norm-missing", norm=None),
    PER_HEAD.wrong("norm-groups", "the port normalises all at once", taken_per_head=False),
    OF_ALL_HEADS.wrong("norm-groups", "16 at a time", taken_per_head=True),
    OF_FOUR.wrong("norm-groups", "the port normalises all at once", groups=1),
    OF_FOUR.wrong("norm-groups", "64 at a time", groups=2),
    OF_ONE.wrong("norm-groups", "16 at a time", groups=8),
)
