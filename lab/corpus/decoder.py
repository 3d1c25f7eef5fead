"""A small decoder that returns logits or a loss, and its options, some of which a port gets wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small import Host

VOCABULARY, HIDDEN, HEADS, HEAD_DIM, FFN, BATCH = 96, 64, 4, 16, 128, 2


def frequencies(base: float = 10_000.0) -> Tensor:
    return base ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)


@dataclass(frozen=True)
class Options:
    """Hold what a reference or its port computes.

    ``roped``: the layers that rotate, or None for all. ``bases``: each layer's RoPE base, instead of ``frequency``.
    ``scales``: a factor of each layer's softmax scale.
    ``branch``: a factor of the results of attention and MLP. ``from_norm``: attention's result is added to its normed
    input. ``mlp_sum``: the MLP's result is added. ``normed``: the last norm is also applied after this many layers.
    ``softcap``, ``logits_cap``: infinite for no cap.
    """

    layers: int = 1
    loss: bool = True
    reduction: str = "mean"
    embedding: float = 1.0
    branch: float = 1.0
    roped: tuple[int, ...] | None = None
    frequency: Callable[[], Tensor] = frequencies
    bases: tuple[float, ...] | None = None
    scales: tuple[float, ...] | None = None
    from_norm: bool = False
    mlp_sum: bool = True
    final_norm: bool = True
    normed: int = 0
    skipped: tuple[int, ...] = ()
    shift: int = 0
    softcap: float = math.inf
    logits_cap: float = math.inf


def capped(x: Tensor, cap: float) -> Tensor:
    return x if math.isinf(cap) else cap * torch.tanh(x / cap)


def turned(x: Tensor, frequency: Tensor, positions: Tensor) -> Tensor:
    """Return ``[batch, heads, seq, head_dim]`` rotated by halves; positions are ``[seq]`` or ``[batch, seq]``."""
    angles = positions.double()[..., None] * frequency
    angles = angles[:, None] if positions.dim() > 1 else angles
    cos, sin = (torch.cat((table, table), -1).to(x.dtype) for table in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    def __init__(self, linear: Any, norm: Any, options: Options, number: int) -> None:
        super().__init__()
        self.options, self.number = options, number
        self.norm1, self.norm2 = norm(HIDDEN), norm(HIDDEN)
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = linear(HIDDEN, FFN, bias=False), linear(FFN, HIDDEN, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        options, seq = self.options, x.shape[1]
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if options.roped is None or self.number in options.roped:
            frequency = frequencies(options.bases[self.number]) if options.bases else options.frequency()
            q, k = (turned(one, frequency, torch.arange(seq)) for one in (q, k))
        k, v = k.roll(options.shift, 2), v.roll(options.shift, 2)
        scale = options.scales[self.number] if options.scales else 1.0
        scores = q @ k.transpose(-1, -2) * (scale / math.sqrt(HEAD_DIM))
        scores = capped(scores, options.softcap)
        scores = scores.masked_fill(torch.ones(seq, seq, dtype=torch.bool).triu(1), -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        options = self.options
        if self.number in options.skipped:
            return x
        normed = self.norm1(x)
        attended = self.attention(normed)
        x = (normed if options.from_norm else x) + (attended if options.branch == 1.0 else options.branch * attended)
        y = self.down(F.silu(self.up(self.norm2(x))))
        y = y if options.branch == 1.0 else options.branch * y
        return x + y if options.mlp_sum else y


class LanguageModel(nn.Module):
    def __init__(self, linear: Any, norm: Any, options: Options) -> None:
        super().__init__()
        self.options = options
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(linear, norm, options, number) for number in range(options.layers))
        self.norm = norm(HIDDEN)
        self.head = linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        options, x = self.options, self.tokens(ids)
        x = x if options.embedding == 1.0 else x * options.embedding
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = self.norm(x) if number < options.normed else x
        logits = capped(self.head(self.norm(x) if options.final_norm else x), options.logits_cap)
        if not options.loss:
            return logits
        logits = logits.float() if logits.dtype is not torch.float64 else logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction=options.reduction)


def decoder(name: str, seq: int = 16, weights: Callable[[str], Any] | None = None, **options: Any) -> Host:
    """Return the host of a decoder with some options of ``Options``, which ``Host.wrong`` changes in its port.

    Args:
        name: the host's name.
        seq: the number of tokens in each of its two sequences.
        weights: makes the left side of the weight map's entry for a name.
        options: the reference's options.
    """
    return Host(
        name,
        lambda **given: LanguageModel(nn.Linear, lambda width: nn.RMSNorm(width, eps=1e-5), Options(**given)),
        lambda te, **given: LanguageModel(te.Linear, te.RMSNorm, Options(**given)),
        lambda rng: rng.integers(BATCH, seq, high=VOCABULARY),
        options,
        weights,
    )
