"""Rotary embeddings: which layers have them, the channels they pair, and their positions, bases and tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from lab.corpus.decoder import HEAD_DIM, HEADS, HIDDEN, decoder, frequencies
from lab.corpus.decoder import turned as turned_by
from lab.corpus.small import Host, normal, twins

# Decoder layers that rotate and layers that do not, as in SmolLM3, Cohere 2 and Llama 4, or that have their own bases,
# as in Gemma 3.

ALL_ROTATE = decoder("decoder_that_rotates", layers=2, loss=False)
ONE_ROTATES = decoder("decoder_whose_second_layer_rotates", layers=3, loss=False, roped=(1,))
TWO_ROTATE = decoder("decoder_whose_first_layers_rotate", layers=3, loss=False, roped=(0, 1))
TWO_BASES = decoder("decoder_of_two_bases", seq=48, layers=2, loss=False, bases=(1e4, 1e6))
OF_LOSS = decoder("decoder_that_rotates_before_a_loss", layers=2)


def permuted(name: str) -> Any:
    """Return the entry of a weight map that takes the second layer's heads for interleaved ones."""
    return parity.rope_halves(name, head_dim=HEAD_DIM) if name in ("layers.1.q.weight", "layers.1.k.weight") else name


OF_LAYERS = (
    ALL_ROTATE.wrong("rope-missing", "in layers.1", roped=(0,)),
    ONE_ROTATES.wrong("rope-unwanted", "the port rotates query and key in layers.0, layers.2", roped=None),
    TWO_ROTATE.wrong("rope-unwanted", "in layers.2; each layer is rotated, or not, as the one before it", roped=(1, 2)),
    TWO_BASES.wrong("rope-base", "rotary_base=1000000; it rotates with base 10000 in layers.1", bases=(1e4, 1e4)),
    TWO_BASES.wrong("rope-base", "rotary_base=1000000; it rotates with base 500000 in layers.1", bases=(1e4, 5e5)),
    TWO_BASES.wrong(
        "rope-base", "the rotary_pos_emb that the reference has there; each has that of the one before it",
        bases=(1e6, 1e4),
    ),
    *(
        replace(
            replace(host, weights=permuted).wrong(
                "rope-layout", 'map "layers.1.q.weight" to "layers.1.q.weight"', name="one layer's heads permuted"
            ),
            right=host.case(),
        )
        for host in (ALL_ROTATE, OF_LOSS)
    ),
)  # fmt: skip

# One attention whose port rotates in another way.

SEQ, BATCH = 24, 3

Positions = Callable[[Tensor], Tensor]  # maps [batch, seq] to the same shape
Rotated = Callable[[Tensor, Tensor], Tensor]  # maps heads [batch, heads, seq, head_dim] and positions to rotated heads


def turned(x: Tensor, positions: Tensor) -> Tensor:
    return turned_by(x, frequencies(), positions)


def in_half(x: Tensor, positions: Tensor, divisor: int = 8) -> Tensor:
    """Rotate only the first half of the channels, as with ``rotary_percent=0.5``."""
    frequency = 10_000.0 ** (-torch.arange(0, 8, 2).double() / divisor)
    return torch.cat((turned_by(x[..., :8], frequency, positions), x[..., 8:]), -1)


def in_last_half(x: Tensor, positions: Tensor) -> Tensor:
    return in_half(x.roll(8, -1), positions).roll(-8, -1)


def by_frequencies_of_the_head(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate half of the channels, with the first frequencies of a rotation of all channels."""
    return in_half(x, positions, divisor=HEAD_DIM)


def interleaved(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate all channels, in pairs of neighbours."""
    halves = turned(torch.cat((x[..., ::2], x[..., 1::2]), -1), positions)
    return torch.stack(halves.chunk(2, -1), -1).flatten(-2)


def by_sections(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate as Qwen2-VL does, with images of two by two patches that follow one another in time."""
    axes = torch.stack((positions // 4, positions // 2 % 2, positions % 2)).double()
    parts = (axes[..., None] * frequencies()).split((2, 3, HEAD_DIM // 2 - 5), -1)
    angles = torch.cat([part[axis] for axis, part in enumerate(parts)], -1)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class RotatedAttention(nn.Module):
    """Attention with a residual sum, and scales of queries before the rotation and of scores."""

    def __init__(
        self,
        linear: Any,
        positions: Positions = torch.clone,
        causal: bool = True,
        rotated: Rotated = turned,
        scales: tuple[float, float] = (1.0, HEAD_DIM**-0.5),
    ) -> None:
        super().__init__()
        self.scales = scales
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.positions, self.causal, self.rotated = positions, causal, rotated

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        positions = self.positions(torch.arange(x.shape[1]).repeat(len(x), 1))
        q, k = (self.rotated(one, positions) for one in (q * self.scales[0], k))
        scores = q @ k.transpose(-1, -2) * self.scales[1]
        if self.causal:
            scores = scores.masked_fill(torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1), -math.inf)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def attention(name: str, **settings: Any) -> Host:
    return twins(RotatedAttention, normal((BATCH, SEQ, HIDDEN), scale=2.0), name, settings=settings)


ROTATED = attention("rotated_attention")
OF_ALL_KEYS = attention("rotated_attention_to_all_keys", causal=False)
IN_HALF = attention("half_rotated_attention", rotated=in_half)
IN_LAST_HALF = attention("last_half_rotated_attention", rotated=in_last_half)
BY_SECTIONS = attention("attention_rotated_by_sections", rotated=by_sections)
# As in ESM-2: the scale of queries is a part of the reference's softmax scale.
SCALED_BEFORE = attention("attention_scaled_before_its_rotation", scales=(0.25, 1.0))


def from_starts(*starts: int) -> Positions:
    first = torch.tensor(starts)
    return lambda positions: positions - first[torch.bucketize(positions, first, right=True) - 1]


def in_second_row(other: Positions) -> Positions:
    return lambda positions: torch.where(torch.arange(BATCH)[:, None] == 1, other(positions), positions)


OF_ATTENTION = (
    ROTATED.right(positions=lambda positions: positions + 5, name="all positions later"),
    ROTATED.wrong(
        "rope-position", "the port's begin again after each 12.", name="short sequences",
        positions=lambda positions: positions % 12,
    ),
    ROTATED.wrong(
        "rope-position", "the port clamps those beyond 11 to it.", name="clamped positions",
        positions=lambda positions: positions.clamp(max=11),
    ),
    ROTATED.wrong(
        "rope-position", "the port's begin again at [7, 17].", positions=from_starts(0, 7, 17), name="packed sequences"
    ),
    OF_ALL_KEYS.wrong(
        "rope-position", "the port's begin again at [9] in row 1 of the batch.", name="a row of packed sequences",
        positions=in_second_row(from_starts(0, 9)),
    ),
    ROTATED.wrong("rope-partial", rotated=in_half),
    IN_HALF.wrong("rope-partial", "all of a head's channels, in pairs of the interleaved form", rotated=interleaved),
    IN_HALF.wrong(
        "rope-partial", "rotate the first 8 channels of a head; the port rotates its last 8", rotated=in_last_half
    ),
    IN_LAST_HALF.wrong(
        "rope-partial", "rotate 8 channels from the 9th on of a head; the port rotates its first 8", rotated=in_half
    ),
    IN_HALF.wrong("rope-base", "divides by the 16 of a whole head", rotated=by_frequencies_of_the_head),
    BY_SECTIONS.right(),
    BY_SECTIONS.wrong("rope-position", "the port rotates all of them by the token's number", rotated=turned),
    SCALED_BEFORE.wrong(
        "softmax-scale",
        "softmax_scale=0.25, 1/sqrt(16), as the reference has; the port's is 1/head_dim",
        scales=(0.25, 0.25),
    ),
)  # fmt: skip

# Keys that a port does not rotate. The gradient of their bias, which all keys share, is then only rounding.

WIDTH, HEAD = 64, 32


class RotatedWithBiases(nn.Module):
    def __init__(self, linear: Any, of_keys: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (linear(WIDTH, WIDTH) for _ in range(3))
        self.of_keys = of_keys
        frequencies = 10_000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        self.angles = torch.outer(torch.arange(32), frequencies).repeat(1, 2)

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * self.angles.sin().to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k = self.rotated(k) if self.of_keys else k
        return F.scaled_dot_product_attention(self.rotated(q), k, v).transpose(1, 2).flatten(2)


WITH_BIASES = twins(RotatedWithBiases, normal((2, 32, WIDTH)))

# Tables as in Meta's Llama: a complex buffer of a fixed length, which multiplies pairs of channels.

LENGTH = 20


class ComplexTable(nn.Module):
    """Causal attention behind a mask of a fixed length."""

    phases: Tensor
    mask: Tensor

    def __init__(self, linear: Any, base: float = 10_000.0) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        angles = torch.arange(LENGTH)[:, None] * base ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("phases", torch.polar(torch.ones_like(angles), angles)[:, None])
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (HEADS, HEAD_DIM)) for layer in (self.query, self.key, self.value))
        query, key = self.rotated(query), self.rotated(key)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(HEAD_DIM) + self.mask.to(x)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).flatten(2))

    def rotated(self, x: Tensor) -> Tensor:
        wide = x.double() if x.dtype is torch.float64 else x.float()
        turned = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * self.phases
        return torch.view_as_real(turned).flatten(-2).to(x)


def te_attention(te: Any, base: float = 10_000.0, qkv_format: str = "bshd") -> nn.Module:
    """Return TE's attention with the angles that it is called with."""
    module: nn.Module = te.MultiheadAttention(
        HIDDEN, HEADS, qkv_format=qkv_format, attention_dropout=0.0, bias=False, attn_mask_type="causal",
        rotary_pos_interleaved=True,
    )  # fmt: skip
    module.angles = te.RotaryPositionEmbedding(HEAD_DIM, rotary_base=base, interleaved=True)(LENGTH)
    return module


IN_TE = {"query.weight": "qkv.query_weight", "key.weight": "qkv.key_weight", "value.weight": "qkv.value_weight"}
TABLES = normal((BATCH, LENGTH, HIDDEN))
COMPLEX_TABLE = twins(ComplexTable, TABLES)
TABLE_IN_TE = Host(
    "complex_table_in_te",
    lambda base=10_000.0: ComplexTable(nn.Linear, base),
    te_attention,
    TABLES,
    weights=IN_TE | {"out.weight": "proj.weight"},
    options=dict(call_candidate=lambda module, x: module(x, rotary_pos_emb=module.angles)),
)
OTHER_BASE = replace(TABLE_IN_TE, name="complex_table_of_another_base_in_te", settings=dict(base=500_000.0))

# Patches that are rotated by their row and their column, as in EVA-02 and Flux.

HEIGHT, ACROSS, TEXT = 4, 8, 5


def table(rows: Tensor, columns: Tensor, base: float = 10_000.0) -> Tensor:
    """Return the angles ``[tokens, head_dim / 2]`` of patches that follow an unrotated text."""
    frequencies = base ** (-torch.arange(0, HEAD // 2, 2).double() / (HEAD // 2))
    of_patches = torch.cat([places.double()[:, None] * frequencies for places in (rows, columns)], -1)
    return torch.cat((torch.zeros(TEXT, HEAD // 2), of_patches))


PATCHES = torch.arange(HEIGHT * ACROSS)
ROWS, COLUMNS = PATCHES // ACROSS, PATCHES % ACROSS


class RotatedPatches(nn.Module):
    def __init__(self, linear: Any, angles: Tensor) -> None:
        super().__init__()
        self.qkv, self.angles = linear(WIDTH, 3 * WIDTH), angles

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin = (function(self.angles).to(x.dtype)[:, None] for function in (torch.cos, torch.sin))
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, HEAD)) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in (self.rotated(q), self.rotated(k), v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


OF_PATCHES = twins(
    RotatedPatches, normal((2, TEXT + HEIGHT * ACROSS, WIDTH)), settings=dict(angles=table(ROWS, COLUMNS))
)

PORTS = (
    *OF_LAYERS,
    *OF_ATTENTION,
    WITH_BIASES.wrong("rope-one-side", of_keys=False),
    COMPLEX_TABLE.right(precisions=("fp32", "bf16", "fp16")),
    TABLE_IN_TE.right(),
    OTHER_BASE.wrong("rope-base", "rotary_base=500000; it rotates with base 10000", base=10_000.0),
    TABLE_IN_TE.wrong("sequence-first", qkv_format="sbhd"),  # although the tables have the sequence's length
    OF_PATCHES.right(),
    OF_PATCHES.wrong(
        "rope-position", "rows and columns are exchanged", angles=table(COLUMNS, ROWS), name="rows exchanged"
    ),
    OF_PATCHES.wrong(
        "rope-position", "patches are counted column by column", name="patches counted by columns",
        angles=table(PATCHES % HEIGHT, PATCHES // HEIGHT),
    ),
    OF_PATCHES.wrong(
        "rope-position", "both are the number of the patch", angles=table(PATCHES, PATCHES), name="patches by number"
    ),
    OF_PATCHES.wrong(
        "rope-base", "the base 10000; the port's is 100", angles=table(ROWS, COLUMNS, base=100.0), name="another base"
    ),
)  # fmt: skip
