"""Rotary frequencies that are scaled for longer sequences."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.decoder import decoder
from lab.corpus.small import Host, normal, twins

SEQ, BASE = 40, 10_000.0

# Kinds of scaling; each gives the frequencies of heads of 32 channels, or for a decoder with 16.


def plain(base: float = BASE, dim: int = 32) -> Tensor:
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def linear(factor: float = 8.0, dim: int = 32) -> Tensor:
    return plain(dim=dim) / factor


def ntk(factor: float = 8.0, dim: int = 32) -> Tensor:
    return plain(BASE * factor ** (dim / (dim - 2)), dim)


def llama3(factor: float = 8.0, length: float = 64.0, dim: int = 32) -> Tensor:
    """Return the frequencies of Meta's ``apply_scaling``."""
    scaled = []
    for frequency in plain(dim=dim).tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < length / 4:
            scaled.append(frequency)
        elif wavelength > length:
            scaled.append(frequency / factor)
        else:
            smooth = (length / wavelength - 1) / 3
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return torch.tensor(scaled, dtype=torch.float64)


def yarn(factor: float = 8.0, length: float = 64.0, dim: int = 32) -> Tensor:
    count = dim // 2
    fast, slow = (count * math.log(length / (beta * 2 * math.pi)) / math.log(BASE) for beta in (32.0, 1.0))
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), 2 * count - 1)
    kept = 1.0 - ((torch.arange(count, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return plain(dim=dim) * (kept + (1 - kept) / factor)


def mscale_of(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0


def ramp(factor: float = 4.0) -> Tensor:
    """Return YaRN's frequencies, unscaled up to the third and fully scaled from the eighth on."""
    kept = (1 - (torch.arange(16, dtype=torch.float64) - 2) / 5).clamp(0, 1)
    return plain() * (kept + (1 - kept) / factor)


# One kind of scaling in place of another, with the same factor and original length, in a decoder.

# The reference's kind, the port's, what the message says, and the port's factor.
FOR_ANOTHER: tuple[tuple[Any, Any, str, float], ...] = (
    (yarn, llama3, "Llama 3's scaling by 8", 8.0),
    (llama3, yarn, "YaRN's scaling by 8", 8.0),
    (ntk, linear, "base 10000 that are all divided by 8", 8.0),
    (linear, ntk, "enlarged for longer sequences by 8 (NTK)", 8.0),
    (llama3, linear, "divides all by 8", 8.0),
    (linear, linear, "divides all by 2", 2.0),
)
IN_A_DECODER = tuple(
    decoder(f"decoder_with_{right.__name__}", seq=48, loss=False, frequency=partial(right, dim=16)).wrong(
        "rope-scaling", phrase, name=f"{port.__name__} for {right.__name__}", frequency=partial(port, factor, dim=16)
    )
    for right, port, phrase, factor in FOR_ANOTHER
)

# YaRN written out on both sides, and TE's attention, which is given the angles.


class ScaledRotation(nn.Module):
    """Causal attention that rotates by these frequencies, and multiplies cosines and sines by ``mscale``."""

    def __init__(self, linear: Any, frequencies: Tensor, mscale: float = 1.0, positions: Tensor | None = None) -> None:
        super().__init__()
        self.frequencies, self.mscale = frequencies, mscale
        self.positions = torch.arange(SEQ) if positions is None else positions
        self.q, self.k, self.v, self.o = (linear(64, 64, bias=False) for _ in range(4))
        self.q.weight.data *= 4

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angles = (self.positions[:, None] * self.frequencies).repeat(1, 2)
        cos, sin = ((table * self.mscale).to(x.dtype) for table in (angles.cos(), angles.sin()))
        query, key = (y * cos + torch.cat((-y[..., 16:], y[..., :16]), -1) * sin for y in (query, key))
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o(context.transpose(1, 2).flatten(2))


def te_attention(te: Any, frequencies: Tensor, positions: Tensor | None = None) -> nn.Module:
    """Return TE's attention with the angles that it is called with."""
    module: nn.Module = te.MultiheadAttention(64, 2, attention_dropout=0.0, qkv_format="bshd", bias=False)
    positions = torch.arange(SEQ) if positions is None else positions
    module.angles = (positions[:, None] * frequencies).repeat(1, 2).float()[:, None, None]
    return module


def in_te(name: str, **settings: Any) -> Host:
    return Host(
        f"{name}_rotation_in_te",
        lambda **settings: ScaledRotation(nn.Linear, **settings),
        te_attention,
        normal((2, SEQ, 64)),
        settings,
        {
            "q.weight": "qkv.query_weight",
            "k.weight": "qkv.key_weight",
            "v.weight": "qkv.value_weight",
            "o.weight": "proj.weight",
        },
        dict(call_candidate=lambda module, x: module(x, rotary_pos_emb=module.angles)),
    )


YARN = twins(
    ScaledRotation, normal((2, SEQ, 64)), "yarn_rotation", settings=dict(frequencies=yarn(), mscale=mscale_of(8.0))
)
LLAMA3 = in_te("llama3", frequencies=llama3())
MISSING = "it rotates with the plain frequencies"

PORTS = (
    *IN_A_DECODER,
    YARN.right(),
    YARN.wrong("rope-scaling", "it divides them by 5", name="factor 5", frequencies=yarn(5.0), mscale=mscale_of(5.0)),
    YARN.wrong("rope-scaling", "it divides them by 4", name="factor 4 without its mscale", frequencies=yarn(4.0)),
    YARN.wrong("rope-scaling", "it divides all by 8", name="linear for YaRN", frequencies=linear(), mscale=1.0),
    YARN.wrong("rope-scaling", MISSING, name="no scaling", frequencies=plain(), mscale=1.0),
    YARN.wrong("rope-scaling", "mscale", mscale=1.0),
    LLAMA3.right(),
    LLAMA3.wrong(
        "rope-scaling", "low ones of which are divided by 8", name="factor 32", frequencies=llama3(factor=32.0)
    ),
    LLAMA3.wrong("rope-scaling", "it takes 200 for the length", name="length 200", frequencies=llama3(length=200.0)),
    in_te("yarn", frequencies=ramp()).wrong("rope-scaling", MISSING, name="no scaling", frequencies=plain()),
    in_te("linear", frequencies=plain() / 4).wrong(
        "rope-scaling", "seq_len_interpolation_factor=4", name="no scaling", frequencies=plain()
    ),
    in_te("plain", frequencies=plain()).wrong(
        "rope-position", "seq_len_interpolation_factor=3", name="unwanted scaling", frequencies=plain() / 3
    ),
    in_te("packed", frequencies=plain(), positions=torch.arange(SEQ) % 16).wrong(
        "rope-position", "counts them from the first token on", positions=None
    ),
)
