"""Rotary embeddings: which layers have them, the channels they pair, and their positions, bases and tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, decoders, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

import parity
from lab.corpus.decoder import HEAD_DIM, HEADS, HIDDEN, Options, frequencies

LOGITS = Options(layers=3, loss=False)


# Decoder layers that rotate and layers that do not, as in SmolLM3, Cohere 2 and Llama 4.


@pytest.mark.parametrize(("layers", "roped", "precision"), [(3, (0, 2), "fp32"), (2, (1,), "bf16")])
def test_rope_that_some_layers_lack_is_told_with_these_layers(layers, roped, precision):
    result = decoders(replace(LOGITS, layers=layers), precision, roped=roped)
    tells(result, "rope-missing")
    for number in range(layers):
        assert (f"layers.{number}" in result.findings[0].message) == (number not in roped)


@in_turn(
    ("right", "port", "phrase"),
    [
        ((1,), None, "the port rotates query and key in layers.0, layers.2"),
        ((0, 1), (1, 2), "in layers.2; each layer is rotated, or not, as the one before it"),
    ],
)
def test_rope_in_layers_that_have_none_is_told_with_these_layers(right, port, phrase, precision):
    tells(decoders(replace(LOGITS, roped=right), precision, roped=port), "rope-unwanted", phrase)


@in_turn(
    ("port", "phrase"),
    [
        ((1e4, 1e4), "rotary_base=1000000; it rotates with base 10000 in layers.1"),
        ((1e6, 1e6), "rotary_base=10000; it rotates with base 1000000 in layers.0"),
        ((1e4, 5e5), "rotary_base=1000000; it rotates with base 500000 in layers.1"),
        ((1e6, 1e4), "the rotary_pos_emb that the reference has there; each has that of the one before it"),
    ],
)
def test_a_base_of_layers_that_have_their_own_is_told_with_these_layers(port, phrase, precision):
    """In Gemma 3, for example, local layers have another base than global ones."""
    right = Options(layers=2, loss=False, bases=(1e4, 1e6))
    tells(decoders(right, precision, seq=48, bases=port), "rope-base", phrase)


@pytest.mark.parametrize("loss", [False, True])
def test_queries_and_keys_that_are_permuted_in_one_layer_are_told_with_it(loss):
    def mapped(name: str) -> Any:
        permuted = name in ("layers.1.q.weight", "layers.1.k.weight")
        return parity.rope_halves(name, head_dim=HEAD_DIM) if permuted else name

    result = decoders(Options(layers=2, loss=loss), "fp32", mapped=mapped)
    tells(result, "rope-layout", 'map "layers.1.q.weight" to "layers.1.q.weight"')


# One attention whose port rotates in another way.

SEQ, BATCH = 24, 3

Positions = Callable[[Tensor], Tensor]  # maps [batch, seq] to the same shape
Rotated = Callable[[Tensor, Tensor], Tensor]  # maps heads [batch, heads, seq, head_dim] and positions to rotated heads


def turned(x: Tensor, positions: Tensor) -> Tensor:
    return turned(x, frequencies(), positions)


def twice(x: Tensor, positions: Tensor) -> Tensor:
    return turned(turned(x, positions), positions)


def backwards(x: Tensor, positions: Tensor) -> Tensor:
    return turned(x, -positions)


def in_half(x: Tensor, positions: Tensor, divisor: int = 8) -> Tensor:
    """Rotate only the first half of the channels, as with ``rotary_percent=0.5``."""
    angles = (positions.double()[..., None] * 10_000.0 ** (-torch.arange(0, 8, 2).double() / divisor))[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second, rest = x[..., :4], x[..., 4:8], x[..., 8:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def in_last_half(x: Tensor, positions: Tensor) -> Tensor:
    return in_half(x.roll(8, -1), positions).roll(-8, -1)


def by_frequencies_of_the_head(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate half of the channels, with the first frequencies of a rotation of all channels."""
    return in_half(x, positions, divisor=HEAD_DIM)


def interleaved(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate all channels, in pairs of neighbours."""
    angles = (positions.double()[..., None] * 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM))[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


class Attention(nn.Module):
    def __init__(
        self,
        linear: Any,
        positions: Positions = torch.clone,
        causal: bool = True,
        rotated: Rotated = turned,
        scales: tuple[float, float] = (1.0, HEAD_DIM**-0.5),  # of queries before the rotation, and of scores
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


def attentions(precision: str, causal: bool = True, **wrong: Any) -> parity.Result:
    """Compare the attention with a port that gets its positions or its rotation wrong."""
    inputs = lambda rng: 2.0 * rng.normal(BATCH, SEQ, HIDDEN)  # noqa: E731
    return twins(Attention, wrong, inputs, precision, right=dict(causal=causal))


def from_starts(*starts: int) -> Positions:
    first = torch.tensor(starts)
    return lambda positions: positions - first[torch.bucketize(positions, first, right=True) - 1]


def in_row(row: int, other: Positions) -> Positions:
    return lambda positions: torch.where(torch.arange(BATCH)[:, None] == row, other(positions), positions)


@in_turn(
    ("positions", "causal", "phrase"),
    [
        (lambda positions: positions % 12, True, "the port's begin again after each 12."),
        (lambda positions: positions.clamp(max=11), True, "the port clamps those beyond 11 to it."),
        (from_starts(0, 7, 17), True, "the port's begin again at [7, 17]."),
        (in_row(1, from_starts(0, 9)), False, "the port's begin again at [9] in row 1 of the batch."),
        (from_starts(0, 3), False, "the port's begin again at [3]."),
    ],
)
def test_positions_that_begin_again_or_end_are_told_with_the_place(positions, causal, phrase, precision):
    tells(attentions(precision, causal, positions=positions), "rope-position", phrase)


def test_positions_that_all_begin_later_change_nothing():
    assert attentions("bf16", positions=lambda positions: positions + 5).passed


@in_turn(
    ("rotated", "title"),
    [(twice, "rope-twice"), (backwards, "rope-direction"), (in_half, "rope-partial")],
)
def test_channels_that_are_turned_twice_backwards_or_in_part_are_told(rotated, title, precision):
    tells(attentions(precision, rotated=rotated), title)


@in_turn(
    ("right", "wrong", "title", "phrase"),
    [
        (in_half, interleaved, "rope-partial", "all of a head's channels, in pairs of the interleaved form"),
        (in_half, in_last_half, "rope-partial", "rotate the first 8 channels of a head; the port rotates its last 8"),
        (
            in_last_half,
            in_half,
            "rope-partial",
            "rotate 8 channels from the 9th on of a head; the port rotates its first 8",
        ),
        (in_half, by_frequencies_of_the_head, "rope-base", "divides by the 16 of a whole head"),
    ],
)
def test_a_port_of_a_partial_rotation_that_rotates_otherwise_is_told_so_alone(right, wrong, title, phrase, precision):
    inputs = lambda rng: 2.0 * rng.normal(BATCH, SEQ, HIDDEN)  # noqa: E731
    tells_only(twins(Attention, dict(rotated=wrong), inputs, precision, right=dict(rotated=right)), title, phrase)


def test_a_scale_of_queries_before_their_rotation_is_a_part_of_the_reference_s_softmax_scale():
    """ESM-2, for example, does this."""
    inputs = lambda rng: 2.0 * rng.normal(BATCH, SEQ, HIDDEN)  # noqa: E731
    result = twins(Attention, dict(scales=(0.25, 0.25)), inputs, "fp32", right=dict(scales=(0.25, 1.0)))
    tells(result, "softmax-scale", "softmax_scale=0.25, as the reference has; the port's is 1/head_dim")


# Keys that a port does not rotate. The gradient of their bias, which all keys share, is then only rounding.

WIDTH, HEAD = 64, 32


class WithBiases(nn.Module):
    """Attention with biases of queries, keys and values."""

    def __init__(self, linear: Any, of_keys: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.of_keys = *(linear(WIDTH, WIDTH) for _ in range(3)), of_keys
        frequencies = 10_000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        self.angles = torch.outer(torch.arange(32), frequencies).repeat(1, 2)

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * self.angles.sin().to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k = self.rotated(k) if self.of_keys else k
        return F.scaled_dot_product_attention(self.rotated(q), k, v).transpose(1, 2).flatten(2)


def test_that_queries_alone_are_rotated_is_told_though_it_leaves_a_bias_no_gradient():
    tells_only(twins(WithBiases, dict(of_keys=False), normal((2, 32, WIDTH))), "rope-one-side")


# Tables as in Meta's Llama: a complex buffer of a fixed length, which multiplies pairs of channels.

LENGTH = 20
IN_TE = {"query.weight": "qkv.query_weight", "key.weight": "qkv.key_weight", "value.weight": "qkv.value_weight"}


class Llama(nn.Module):
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


@in_turn(
    ("base", "qkv_format", "title", "phrase"),
    [
        (10_000.0, "bshd", "passed", ""),
        (500_000.0, "bshd", "rope-base", "rotary_base=500000; it rotates with base 10000"),
        (10_000.0, "sbhd", "sequence-first", ""),  # although the tables have the sequence's length
    ],
)
def test_a_base_or_a_layout_that_is_another_than_a_complex_tables_is_told(base, qkv_format, title, phrase, precision):
    options = dict(attention_dropout=0.0, bias=False, attn_mask_type="causal", rotary_pos_interleaved=True)
    angles = []

    def port(te: Any) -> nn.Module:
        angles.append(te.RotaryPositionEmbedding(HEAD_DIM, interleaved=True)(LENGTH))
        return te.MultiheadAttention(HIDDEN, HEADS, qkv_format=qkv_format, **options)

    result = compared(
        lambda: Llama(nn.Linear, base),
        port,
        normal((BATCH, LENGTH, HIDDEN)),
        precision,
        IN_TE | {"out.weight": "proj.weight"},
        call_candidate=lambda module, x: module(x, rotary_pos_emb=angles[-1]),
    )
    tells_only(result, title, phrase)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_port_keeps_a_complex_table_in_every_precision(precision):
    assert twins(Llama, {}, normal((BATCH, LENGTH, HIDDEN)), precision).passed


# Patches that are rotated by their row and their column, as in EVA-02 and Flux.

HEIGHT, ACROSS, TEXT = 4, 8, 5


def table(rows: Tensor, columns: Tensor, base: float = 10_000.0) -> Tensor:
    """Return the angles ``[tokens, head_dim / 2]`` of patches that follow an unrotated text."""
    frequencies = base ** (-torch.arange(0, HEAD // 2, 2).double() / (HEAD // 2))
    of_patches = torch.cat([places.double()[:, None] * frequencies for places in (rows, columns)], -1)
    return torch.cat((torch.zeros(TEXT, HEAD // 2), of_patches))


PATCHES = torch.arange(HEIGHT * ACROSS)
ROWS, COLUMNS = PATCHES // ACROSS, PATCHES % ACROSS


class OfPatches(nn.Module):
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


@in_turn(
    ("angles", "title", "phrase"),
    [
        (table(ROWS, COLUMNS), "passed", ""),
        (table(COLUMNS, ROWS), "rope-position", "rows and columns are exchanged"),
        (table(PATCHES % HEIGHT, PATCHES // HEIGHT), "rope-position", "patches are counted column by column"),
        (table(PATCHES, PATCHES), "rope-position", "both are the number of the patch"),
        (table(ROWS, COLUMNS, base=100.0), "rope-base", "the base 10000; the port's is 100"),
    ],
)
def test_what_stands_for_rows_and_columns_is_told(angles, title, phrase, precision):
    inputs = normal((2, TEXT + HEIGHT * ACROSS, WIDTH))
    right = dict(angles=table(ROWS, COLUMNS))
    tells(twins(OfPatches, dict(angles=angles), inputs, precision, right=right), title, phrase)


# Tokens of texts and images that are rotated by time, row and column, each in one section of the channels.


def by_sections(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate as Qwen2-VL does, with images of two by two patches that follow one another in time."""
    axes = torch.stack((positions // 4, positions // 2 % 2, positions % 2)).double()
    angles = axes[..., None] * frequencies()
    parts = angles.split((2, 3, HEAD_DIM // 2 - 5), -1)
    angles = torch.cat([part[axis] for axis, part in enumerate(parts)], -1)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@in_turn(("rotated", "title"), [(by_sections, "passed"), (turned, "rope-position")])
def test_tokens_that_are_rotated_by_their_number_alone_are_told(rotated, title, precision):
    inputs = lambda rng: 2.0 * rng.normal(BATCH, SEQ, HIDDEN)  # noqa: E731
    result = twins(Attention, dict(rotated=rotated), inputs, precision, right=dict(rotated=by_sections))
    tells(result, title, "the port rotates all of them by the token's number")
