"""Wrong ports of whole models with the place of their mistake, and what the models of ``placed_ports`` share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.port import Port
from lab.corpus.small import Host
from parity.case.weight_map import under
from parity.trace.trace import Site


@dataclass(frozen=True)
class Placed:
    """A wrong port of a whole model, and where it is wrong.

    Attributes:
        port: the port.
        module: matches the whole path of the reference's submodules that make the calls which the port gets wrong; the
            model's own path is empty.
        calls: names of PyTorch functions, as a trace names them. A stage is located correctly if it contains a call of
            at least one of them in such a module.
        backward: whether only gradients are wrong.
    """

    port: Port
    module: str
    calls: frozenset[str]
    backward: bool = False

    def is_at(self, site: Site) -> bool:
        """Return whether a call of the reference is one that the port gets wrong."""
        return bool(re.fullmatch(self.module, site[0])) and site[2] in self.calls


def place(
    host: Host,
    name: str,
    titles: str | tuple[str, ...],
    module: str,
    calls: str,
    layer: int | None = None,
    backward: bool = False,
    weights: Any = None,
    **changes: Any,
) -> Placed:
    """Return a row: a host's port with a mistake.

    Args:
        host: the host, whose port takes the options of some layers as ``at``.
        name: what is wrong.
        titles: as in ``Port``.
        module: as in ``Placed``, with ``{i}`` for the layer's number.
        calls: the names of functions, with spaces between them.
        layer: the layer that is wrong; None if all are, or the model outside of its layers.
        backward: as in ``Placed``.
        weights: the weight map, if that is wrong.
        changes: the options that are wrong.
    """
    options = changes if layer is None or not changes else {"at": {layer: changes}}
    port = host.wrong(titles, name=name, others=True, weights=weights, **options)
    number = r"\d+" if layer is None else str(layer)
    return Placed(port, module.replace(".", r"\.").replace("{i}", number), frozenset(calls.split()), backward)


# Options of a port's layers.

At = Mapping[int, Mapping[str, Any]]
NOWHERE: At = MappingProxyType({})


def build_layers(count: int, build: Callable[..., nn.Module], at: At, options: Mapping[str, Any]) -> nn.ModuleList:
    """Build a port's layers with some options, and other options in the layers of ``at``."""
    return nn.ModuleList(build(**{**options, **at.get(number, {})}) for number in range(count))


# Weight maps.


OWN = {name: name for name in ("tokens.weight", "norm.weight", "head.weight")}
"""The map of a model's parameters outside of its layers."""


def map_layers(layer: Mapping[Any, Any], count: int, at: Mapping[int, Mapping[Any, Any]] = NOWHERE) -> dict[Any, Any]:
    """Return the map of a model's layers from that of one; ``at`` has the maps of wrong layers."""
    maps = ((number, at.get(number, layer)) for number in range(count))
    return {left: right for number, one in maps for left, right in under(one, f"layers.{number}.").items()}


def exchange(layer: Mapping[Any, Any], one: Any, other: Any) -> dict[Any, Any]:
    """Return a map that fills each of two parameters from the other's."""
    return {**layer, one: layer[other], other: layer[one]}


# What references share.


def scale_weights(model: nn.Module, gain: float = 1.0, embedding: float = 1.0) -> None:
    """Draw the matrices of linear layers with ``gain / sqrt(inputs)``, and the tables with ``embedding``."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=gain / math.sqrt(module.in_features))
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=embedding)


class RMSNorm(nn.Module):
    """The norm of Llama, written out; ``shift`` is added to its gain."""

    def __init__(self, width: int, eps: float, shift: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.shift = nn.Parameter(torch.full((width,), 1.0 - shift)), eps, shift

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * (self.shift + self.weight) if self.shift else self.weight * normed


class Rotary(nn.Module):
    """The tables of RoPE, ``[seq, dim]`` each."""

    inv_freq: Tensor

    def __init__(self, dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[1], device=x.device, dtype=self.inv_freq.dtype)
        angles = torch.outer(positions, self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[batch, heads, seq, dim]``."""
    return x * cos + rotate_half(x) * sin


def split_heads(x: Tensor, width: int) -> Tensor:
    """Return ``[batch, heads, seq, width]`` of ``[batch, seq, heads * width]``."""
    batch, seq, _ = x.shape
    return x.view(batch, seq, -1, width).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def causal_mask(x: Tensor, window: int | None = None) -> Tensor:
    """Return ``[seq, seq]``, true where a token may not look, for ``[batch, seq, ...]``."""
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    return hidden if window is None else hidden | torch.ones_like(hidden).tril(-window)


class LanguageModel(nn.Module):
    """Embeddings, layers, a norm and a projection to logits. Layers get the tables of ``rotary``, if there is one."""

    def __init__(
        self,
        vocabulary: int,
        layers: Iterable[nn.Module],
        norm: Any,
        linear: Callable[..., nn.Module] = nn.Linear,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        width = len(norm.weight)
        self.tokens, self.rotary, self.layers = nn.Embedding(vocabulary, width), rotary, nn.ModuleList(layers)
        self.norm, self.head = norm, linear(width, vocabulary, bias=False)
        scale_weights(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        tables = () if self.rotary is None else self.rotary(x)
        for layer in self.layers:
            x = layer(x, *tables)
        return self.head(self.norm(x))


class MLP(nn.Module):
    """An MLP with biases and the GELU that TE computes."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class GatedMLP(nn.Module):
    """The MLP of Llama."""

    def __init__(self, width: int, inner: int, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj, self.act = nn.Linear(inner, width, bias=False), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


# What ports share.


def rope_angles(x: Tensor, dim: int, base: float = 10_000.0, interleaved: bool = False, start: int = 0) -> Tensor:
    """Return TE's angles ``[seq, 1, 1, dim]`` in FP32 for ``[batch, seq, ...]``."""
    frequencies = base ** -(torch.arange(0, dim, 2, device=x.device) / dim)
    angles = torch.outer(torch.arange(start, start + x.shape[1], device=x.device, dtype=torch.float32), frequencies)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles[:, None, None]


def rotate_heads(te: Any, x: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate ``[batch, seq, heads, dim]`` with TE's function."""
    rotate = te.attention.rope.apply_rotary_pos_emb
    rotated: Tensor = rotate(x.contiguous(), angles, tensor_format="bshd", interleaved=interleaved)
    return rotated


class ScaleGradient(torch.autograd.Function):
    """Return the input, and its gradient times a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
