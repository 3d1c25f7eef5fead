"""Mistakes that a port makes in only a part of a call: some heads, rows, positions, channels or layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small import normal, twins

BATCH, SEQ, HEADS, GROUPS, HEAD_DIM = 3, 24, 8, 4, 16
HIDDEN = HEADS * HEAD_DIM


def rotated(x: Tensor, base: float = 10_000.0) -> Tensor:
    frequency = base ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = (torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequency).to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def attended(query: Tensor, key: Tensor, value: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True)


def mixed(right: Tensor, wrong: Tensor, dim: int, indices: tuple[int, ...]) -> Tensor:
    """Return the right tensor with wrong values at some indices of a dimension."""
    inside = torch.zeros(right.shape[dim], dtype=torch.bool)
    inside[list(indices)] = True
    return torch.where(inside.view(-1, *[1] * (right.dim() - dim - 1)), wrong, right)


class Attention(nn.Module):
    """Grouped attention with rotated queries and keys, wrong in some groups of heads, sequences or positions."""

    def __init__(self, linear: Any, wrong: str = "", dim: int = 1, indices: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.query = linear(HIDDEN, HIDDEN, bias=False)
        self.key = linear(HIDDEN, GROUPS * HEAD_DIM, bias=False)
        self.value = linear(HIDDEN, GROUPS * HEAD_DIM, bias=False)
        self.out = linear(HIDDEN, HIDDEN, bias=False)
        self.wrong, self.dim, self.indices = wrong, dim, indices

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in parts)
        query, key = self._turned(query, HEADS // GROUPS), self._turned(key, 1)
        context = attended(query, key, value)
        others: Any = {"mask": dict(causal=False), "scale": dict(scale=0.5)}
        if self.wrong in others:
            context = mixed(context, attended(query, key, value, **others[self.wrong]), self.dim, self.indices)
        return self.out(context.transpose(1, 2).flatten(2))

    def _turned(self, x: Tensor, each: int) -> Tensor:
        """Return the rotated heads; each group has ``each`` of them."""
        if self.wrong in ("late query", "query's base") and each > 1:
            late = {"late query": rotated(F.pad(x, (0, 0, 5, 0)))[:, :, 5:], "query's base": rotated(x, 40_000.0)}
            return mixed(rotated(x), late[self.wrong], self.dim, self.indices)
        others = {"unrotated": x, "base": rotated(x, 40_000.0)}
        heads = tuple(group * each + head for group in self.indices for head in range(each))
        return mixed(rotated(x), others[self.wrong], 1, heads) if self.wrong in others else rotated(x)


class Layers(nn.Module):
    """A norm and parallel layers, in which some channels lack a bias or a gain, or one layer has a factor."""

    def __init__(self, linear: Any, wrong: str = "", channels: slice = slice(0), factor: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64))
        self.layers: Any = nn.ModuleList(linear(64, 64) for _ in range(3))
        self.down = nn.ModuleList(linear(64, 64, bias=False) for _ in range(3))
        self.wrong, self.channels, self.factor = wrong, channels, factor

    def forward(self, x: Tensor) -> Tensor:
        gain, normed = self._but_for("gain", self.gain), F.rms_norm(x, (64,))
        inner = [F.gelu(layer(normed * gain) + self._missing(layer.bias)) for layer in self.layers]
        outer = [down(y) for down, y in zip(self.down, inner, strict=True)]
        outer[2] = outer[2] if self.factor == 1.0 else self.factor * outer[2]
        return x + outer[0] + outer[1] + outer[2]

    def _but_for(self, what: str, x: Tensor) -> Tensor:
        channels = torch.zeros(64, dtype=torch.bool)
        channels[self.channels] = self.wrong == what
        return torch.where(channels, 1.0, x).to(x.dtype)

    def _missing(self, bias: Tensor) -> Tensor:
        """Return the tensor that cancels a bias in the channels that lack it."""
        channels = torch.zeros(64, dtype=torch.bool)
        channels[self.channels] = self.wrong == "bias"
        return torch.where(channels, -bias, 0.0).to(bias.dtype)


class Norms(nn.Module):
    """A stack of norms and linear layers, in which the norms of some layers have another eps."""

    def __init__(self, linear: Any, eps: float = 1e-6, layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(64, 64, bias=False) for _ in range(12))
        self.eps = [eps if layer in layers else 1e-6 for layer in range(12)]

    def forward(self, x: Tensor) -> Tensor:
        for layer, eps in zip(self.layers, self.eps, strict=True):
            x = x + layer(F.rms_norm(0.05 * x, (64,), eps=eps))
        return x


IN_PARTS = twins(Attention, normal((BATCH, SEQ, HIDDEN)), "attention_in_parts")
PARALLEL_LAYERS = twins(Layers, normal((4, 16, 64)), "parallel_layers")
NORMS_OF_LAYERS = twins(Norms, normal((4, 16, 64)), "norms_of_layers")

PORTS = (
    IN_PARTS.right(),
    PARALLEL_LAYERS.right(),
    IN_PARTS.wrong("rope-missing", "nothing is rotated, in heads 4 to 7 of 8.", wrong="unrotated", indices=(2, 3)),
    IN_PARTS.wrong("softmax-scale", "the port's is 0.5, in head 5.", wrong="scale", indices=(5,)),
    IN_PARTS.wrong(
        "softmax-scale", "the port's is 0.5, in all heads but 3.", wrong="scale", indices=(0, 1, 2, 4, 5, 6, 7)
    ),
    IN_PARTS.wrong(
        "softmax-scale", "the port's is 0.5, in every second head from 1 on.", wrong="scale", indices=(1, 3, 5, 7)
    ),
    IN_PARTS.wrong("rope-position", "or the query's by +5, in position 17.", wrong="late query", dim=2, indices=(17,)),
    IN_PARTS.wrong("rope-base", "base 40000, in the query, in head 2.", wrong="query's base", indices=(2,)),
    IN_PARTS.wrong("mask", "the port attends to later keys, in sequence 1.", wrong="mask", dim=0, indices=(1,)),
    IN_PARTS.wrong("mask", "the port attends to later keys, in position 4.", wrong="mask", dim=2, indices=(4,)),
    PARALLEL_LAYERS.wrong(
        "bias-dropped", "in every second channel from 1 on.", wrong="bias", channels=slice(1, None, 2)
    ),
    PARALLEL_LAYERS.wrong("bias-dropped", "in channels 40 to 63 of 64.", wrong="bias", channels=slice(40, None)),
    PARALLEL_LAYERS.wrong("weight-not-copied", "in channels 0 to 19 of 64.", wrong="gain", channels=slice(0, 20)),
    PARALLEL_LAYERS.wrong("factor", "down.2 as the reference does; the port's is 3 times that.", factor=3.0),
    NORMS_OF_LAYERS.wrong("norm-eps", "0.001", eps=1e-3, layers=(0,)),
    NORMS_OF_LAYERS.wrong("norm-eps", "0.003", eps=3e-3, layers=(1, 9)),
)
