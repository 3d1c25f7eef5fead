"""Ports whose results depend on what they must not, though they are right on the inputs of an ordinary comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small import Host, normal, twins
from parity.case.case import Case, Rng
from parity.case.decoding import Decoding

WIDTH, HEADS, SEQ = 64, 2, 16


@dataclass(frozen=True)
class Wrong:
    """A wrong port.

    Attributes:
        name: its name, with its host's.
        case: the pair.
        axes: those of which at least one must show it.
    """

    name: str
    case: Case
    axes: tuple[str, ...]


def attend(qkv: Iterable[Tensor], bias: Tensor | float = 0.0) -> Tensor:
    """Return attention of three tensors ``[batch, positions, width]``, with a bias ``[..., queries, keys]``."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in qkv)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return ((scores.float() + bias).softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)


def causal(queries: int, keys: int) -> Tensor:
    """Return the bias that hides later keys."""
    return torch.full((queries, keys), -math.inf).triu(1)


# Padding: a mask that marks none of the usual inputs' tokens as padding.


class Encoder(nn.Module):
    """Two layers of attention with positions, and a pooled output beside all tokens."""

    def __init__(self, linear: Any, mask: str = "keys", where: str = "counted", pool: str = "mean") -> None:
        super().__init__()
        self.mask, self.where, self.pool = mask, where, pool
        self.table = nn.Parameter(torch.randn(4 * SEQ, WIDTH))
        self.layers = nn.ModuleList(linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        counted = (tokens.long().cumsum(1) - 1).clamp(min=0)
        place = torch.arange(x.shape[1]).expand(len(x), -1)
        x = x + self.table[counted if self.where == "counted" else place]
        for i, layer in enumerate(self.layers):
            x = x + attend(layer(x).chunk(3, -1), self._hide(tokens, place, i)[:, None, None])
        return x, self._pool(x, tokens)

    def _hide(self, tokens: Tensor, place: Tensor, layer: int) -> Tensor:
        hidden = torch.zeros(tokens.shape).masked_fill(~tokens, -math.inf)
        if self.mask == "lengths":
            return torch.zeros(tokens.shape).masked_fill(place >= tokens.sum(1, keepdim=True), -math.inf)
        if self.mask == "from the first":
            return torch.zeros(tokens.shape).masked_fill(place < tokens.long().argmax(1, keepdim=True), -math.inf)
        factor = {"none": 0.0, "first layer": 1.0 - layer, "second layer": layer}.get(self.mask, 1.0)
        if self.mask == "weak":
            return -2.0 * (~tokens).float()
        return hidden if factor else torch.zeros(tokens.shape)

    def _pool(self, x: Tensor, tokens: Tensor) -> Tensor:
        weight = tokens[..., None].to(x.dtype)
        last = tokens.long().cumsum(1).argmax(1)
        pools: dict[str, Callable[[], Tensor]] = {
            "mean": lambda: (x * weight).sum(1) / weight.sum(1),
            "mean, by a product": lambda: (tokens.to(x.dtype)[:, None] @ x)[:, 0] / weight.sum(1),
            "mean of all": lambda: x.mean(1),
            "sum over the length": lambda: (x * weight).sum(1) / x.shape[1],
            "last": lambda: x[torch.arange(len(x)), last],
            "last of all": lambda: x[:, -1],
            "first": lambda: x[torch.arange(len(x)), tokens.long().argmax(1)],
            "first of all": lambda: x[:, 0],
            "largest": lambda: x.masked_fill(~tokens[..., None], -math.inf).amax(1),
            "largest of all": lambda: x.amax(1),
        }
        return pools[self.pool]()


def unpadded(rng: Rng) -> tuple[Tensor, Tensor]:
    return rng.normal(4, SEQ, WIDTH), torch.ones(4, SEQ, dtype=torch.bool)


ENCODER, LAST, FIRST, LARGEST = (
    twins(Encoder, unpadded, f"encoder_{pool}", settings=dict(pool=pool))
    for pool in ("mean", "last", "first", "largest")
)
PADDING = ("padding-right", "padding-left", "padding-garbage")


class Standardized(nn.Module):
    """Features standardized over the time of a sequence."""

    def __init__(self, linear: Any, over: str = "tokens") -> None:
        super().__init__()
        self.over, self.linear = over, linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        y = self.linear(x)
        weight = tokens[..., None].to(y.dtype) if self.over == "tokens" else torch.ones_like(y[..., :1])
        mean = (y * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        variance = ((y - mean).square() * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        return (y - mean) * (variance + 1e-3).rsqrt()


STANDARDIZED = twins(Standardized, unpadded)


# Batches: the usual inputs are one sequence, so that nothing can mix several.


class Single(nn.Module):
    """A norm, causal attention with positions, and a gate."""

    def __init__(self, linear: Any, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.table = nn.Parameter(torch.randn(4 * SEQ, WIDTH))
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, change = *x.shape[:2], self.change
        place = torch.arange(batch * seq).view(batch, seq) if change == "positions of all" else torch.arange(seq)
        x = x + self.table[place % len(self.table)]
        dims = (0, 2) if change == "norm over the batch" else 2
        y = x * (x.float().square().mean(dims, keepdim=True) + 1e-6).rsqrt().to(x.dtype)
        q, k, v = self.qkv(y).chunk(3, -1)
        if change in ("first keys", "first values", "last values"):
            one = slice(0, 1) if "first" in change else slice(-1, None)
            k, v = (k[one].expand_as(k), v) if "keys" in change else (k, v[one].expand_as(v))
        if change in ("one sequence", "one sequence, by positions"):
            place = torch.arange(seq).repeat(batch)
            later = causal(batch * seq, batch * seq) if change == "one sequence" else None
            bias = torch.zeros(batch * seq, batch * seq).masked_fill(place[None] > place[:, None], -math.inf)
            y = attend((t.reshape(1, batch * seq, -1) for t in (q, k, v)), bias if later is None else later)
            y = y.view_as(x)
        elif change == "folded":  # batch and heads exchanged
            heads = [
                t.view(batch, seq, HEADS, -1).permute(0, 2, 1, 3).reshape(HEADS, batch, seq, -1) for t in (q, k, v)
            ]
            scores = heads[0] @ heads[1].mT / math.sqrt(WIDTH // HEADS)
            y = ((scores.float() + causal(seq, seq)).softmax(-1).to(v.dtype) @ heads[2]).permute(1, 2, 0, 3).flatten(2)
        else:
            y = attend((q, k, v), causal(seq, seq))
        gate = x.mean((0, 1) if change == "gate of the batch" else 1, keepdim=True)
        if change == "first gate":
            gate = gate[:1]
        y = self.out(y * gate.sigmoid())
        if change == "scaled by the batch":
            y = y / batch
        if change == "buffer of 32 tokens":
            y = torch.cat([y.flatten(0, 1)[: 2 * SEQ], y.flatten(0, 1)[2 * SEQ :] * 0.0]).view_as(y)
        if change == "shape misread":
            return x + y.reshape(seq, batch, -1).transpose(0, 1)
        return x + y


SINGLE = twins(Single, normal((1, 2 * SEQ, WIDTH)))
BATCHES = ("batch-size", "batch-place")


# A mixture of experts, of which no expert gets too many tokens.


class Mixture(nn.Module):
    """The most likely of four experts for each token."""

    def __init__(self, linear: Any, capacity: float = math.inf, factor: float = math.inf, keeps: bool = False) -> None:
        super().__init__()
        self.capacity, self.factor, self.keeps = capacity, factor, keeps
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(self.norm(x)).softmax(-1)
        best = weights.argmax(-1, keepdim=True)
        chosen = torch.zeros_like(weights).scatter(1, best, 1.0)
        room = min(self.capacity, self.factor * len(x) / 4)
        rank = chosen.float().cumsum(0) * chosen.float()
        held = (chosen * (rank <= room)).to(x.dtype)
        y = sum(expert(x) * (weights * held)[:, i, None] for i, expert in enumerate(self.experts))
        return y + x * (1 - held.sum(1, keepdim=True)) if self.keeps else y


MIXTURE = twins(Mixture, normal((64, WIDTH)), probe=False)  # whose rows would all choose one expert


# Packed documents: the usual inputs hold one or two.


class Packed(nn.Module):
    """Attention within each document of a packed row, with positions that begin again."""

    def __init__(self, linear: Any, reads: str = "all", restarts: bool = True, masked: bool = False) -> None:
        super().__init__()
        self.reads, self.restarts, self.masked = reads, restarts, masked
        self.table = nn.Parameter(torch.randn(16 * SEQ, WIDTH))
        self.qkv = linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, borders: Tensor) -> Tensor:
        ends = borders.tolist()
        place = torch.arange(len(x))
        starts = borders[torch.searchsorted(borders[1:], place, right=True)]
        x = x + self.table[place - starts if self.restarts else place]
        first = [0, ends[1], ends[-1]] if len(ends) > 2 else ends
        ends = {"none": [0, ends[-1]], "first": first, "last": [0, *ends[-2:]] if len(ends) > 2 else ends}.get(
            self.reads, ends
        )
        q, k, v = self.qkv(x)[None].chunk(3, -1)
        if self.masked:
            apart = torch.zeros(len(x), len(x)).masked_fill(starts[:, None] != starts, -math.inf)
            return attend((q, k, v), apart + causal(len(x), len(x)))[0]
        parts = zip(*(t.split([b - a for a, b in itertools.pairwise(ends)], 1) for t in (q, k, v)), strict=True)
        return torch.cat([attend(part, causal(part[0].shape[1], part[0].shape[1])) for part in parts], 1)[0]


def documents(*ends: int) -> Callable[[Rng], tuple[Tensor, Tensor]]:
    return lambda rng: (rng.normal(ends[-1], WIDTH), torch.tensor(ends, dtype=torch.int32))


ONE_DOCUMENT, TWO_DOCUMENTS = (
    twins(Packed, documents(*ends), f"packed_{len(ends) - 1}") for ends in ((0, 32), (0, 32, 80))
)
PACKED = ("batch-size", "batch-place", "packing")


# Prefixes: what depends on the length of the sequence.


class Prefix(nn.Module):
    """Causal attention with learnt positions."""

    def __init__(self, linear: Any, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.table = nn.Parameter(torch.randn(2 * SEQ, WIDTH))
        self.qkv = linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seq, change = x.shape[1], self.change
        x = x + (self.table[-seq:] if change == "positions from the end" else self.table[:seq])
        q, k, v = self.qkv(x).chunk(3, -1)
        hides = causal(2 * SEQ, 2 * SEQ)
        hides = hides[-seq:, :seq] if change == "mask from its last rows" else hides[:seq, :seq]
        if change == "scores by the length":
            q = q * (math.log(seq) / math.log(2 * SEQ))
        y = attend((q, k, v), hides)
        return x + (y * seq / (2 * SEQ) if change == "result by the length" else y)


PREFIX = twins(Prefix, normal((2, 2 * SEQ, WIDTH)))


# Decoding: the usual prompt is the whole sequence.


class Decoded(nn.Module):
    """Causal attention with positions, whose port keeps keys and values."""

    def __init__(self, linear: Any, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.table = nn.Parameter(torch.randn(SEQ, WIDTH))
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table[: x.shape[1]]
        return self.out(attend(self.qkv(x).chunk(3, -1), causal(x.shape[1], x.shape[1])))

    def step(self, part: Tensor, inference_params: Any) -> Tensor:
        """Return the outputs of new tokens; the cache is an attribute of TE's parameters of inference."""
        before = getattr(inference_params, "held", None)
        count = 0 if before is None else before.shape[1]
        new = part.shape[1]
        place = 0 if self.change == "positions begin again" else count
        q, k, v = self.qkv(part + self.table[place : place + new]).chunk(3, -1)
        if before is not None and self.change != "cache not read":
            k, v = (torch.cat(pair, 1) for pair in zip(before.chunk(2, -1), (k, v), strict=True))
        held = torch.cat([k, v], -1)
        inference_params.held = held[:, 1:] if self.change == "first key lost" and count else held
        y = attend((q, k, v), causal(k.shape[1], k.shape[1])[-new:])
        return y if self.change == "projection left out" and new == 1 else self.out(y)


DECODED = twins(
    Decoded,
    normal((8, SEQ, WIDTH)),
    options=dict(
        evaluation=True,
        call_candidate=Decoding(
            HEADS, WIDTH // HEADS, prompt=SEQ, step=lambda module, part, **more: module.step(part, **more)
        ),
    ),
)


# Gradients: what depends on the size of the batch, or on whether the backward pass computes a layer again.


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class Trained(nn.Module):
    """A norm and an MLP."""

    def __init__(self, linear: Any, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        again = self.change.startswith("again") and torch._C._current_graph_task_id() != -1
        gain = self.gain
        if self.change == "gain's gradient by the batch":
            gain = _Scaled.apply(gain, len(x) / 4)
        eps = 0.1 if again and "eps" in self.change else 1e-5
        normed = x if again and "norm" in self.change else F.layer_norm(x, (WIDTH,), gain, None, eps)
        inner = F.relu(self.up(normed)) if again and "relu" in self.change else F.gelu(self.up(normed))
        y = self.down(inner)
        if self.change == "gradient by the batch":
            y = _Scaled.apply(y, len(x) / 4)
        if self.change == "gradient by the tokens":
            y = _Scaled.apply(y, y[..., 0].numel() / (4 * SEQ))
        return x + y


TRAINED = twins(Trained, normal((4, SEQ, WIDTH)))

_HOSTS = (
    *(ENCODER, LAST, FIRST, LARGEST, STANDARDIZED, SINGLE, MIXTURE),
    *(ONE_DOCUMENT, TWO_DOCUMENTS, PREFIX, DECODED, TRAINED),
)
_OTHERWISE: tuple[tuple[Host, str, dict[str, Any]], ...] = (
    (ENCODER, "pooled by a product", dict(pool="mean, by a product")),
    (MIXTURE, "with room for all", dict(factor=4.0)),
    (MIXTURE, "with room for all, keeping the rest", dict(factor=4.0, keeps=True)),
    (ONE_DOCUMENT, "by a mask", dict(masked=True)),
    (TWO_DOCUMENTS, "by a mask", dict(masked=True)),
)
RIGHT: dict[str, Case] = {host.name: host.case() for host in _HOSTS} | {
    f"{host.name}, {label}": host.case(**changes) for host, label, changes in _OTHERWISE
}


def _list_wrong() -> Iterator[tuple[Host, tuple[str, ...], dict[str, Any]]]:
    for mask in ("none", "lengths", "from the first", "weak", "first layer", "second layer"):
        yield ENCODER, PADDING, dict(mask=mask)
    yield ENCODER, PADDING, dict(where="place")
    yield ENCODER, PADDING, dict(pool="mean of all")
    yield ENCODER, PADDING, dict(pool="sum over the length")
    yield LAST, PADDING, dict(pool="last of all")
    yield FIRST, PADDING, dict(pool="first of all")
    yield LARGEST, PADDING, dict(pool="largest of all")
    yield STANDARDIZED, PADDING, dict(over="all")
    changes = ("norm over the batch", "positions of all", "first keys", "first values", "last values", "one sequence")
    more = (
        "one sequence, by positions",
        "gate of the batch",
        "first gate",
        "scaled by the batch",
        "buffer of 32 tokens",
    )
    for change in (*changes, *more, "shape misread", "folded"):
        yield SINGLE, BATCHES, dict(change=change)
    yield MIXTURE, BATCHES, dict(capacity=26)
    yield MIXTURE, BATCHES, dict(capacity=26, keeps=True)
    yield ONE_DOCUMENT, PACKED, dict(reads="none")
    yield ONE_DOCUMENT, PACKED, dict(restarts=False)
    yield TWO_DOCUMENTS, PACKED, dict(reads="first")
    yield TWO_DOCUMENTS, PACKED, dict(reads="last")
    for change in ("positions from the end", "mask from its last rows", "scores by the length", "result by the length"):
        yield PREFIX, ("prefix",), dict(change=change)
    for change in ("positions begin again", "cache not read", "first key lost", "projection left out"):
        yield DECODED, ("decoding",), dict(change=change)
    for change in ("gradient by the batch", "gain's gradient by the batch", "gradient by the tokens"):
        yield TRAINED, ("micro-batches", "batch-size"), dict(change=change)
    for change in ("again without the norm", "again with relu", "again with another eps"):
        yield TRAINED, ("recompute",), dict(change=change)


WRONG = tuple(
    Wrong(f"{host.name}: {', '.join(f'{key}={value}' for key, value in changes.items())}", host.case(**changes), axes)
    for host, axes, changes in _list_wrong()
)
