"""Rotary frequencies that are scaled for longer sequences: kinds are recognised, and ports' mistakes are reported."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, decoders, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

import parity
from lab.corpus.decoder import Options
from parity.mistakes.rope_scaling import scaling_of

SEQ, BASE = 40, 10_000.0

# Kinds of scaling; each gives the frequencies for a decoder's heads of 16 channels, or for TE's attention with 32.


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


def of_yarn(factor: float) -> float:
    """Return YaRN's mscale."""
    return 0.1 * math.log(factor) + 1.0


def ramp(factor: float = 4.0) -> Tensor:
    """Return YaRN's frequencies, unscaled up to the third and fully scaled from the eighth on."""
    kept = (1 - (torch.arange(16, dtype=torch.float64) - 2) / 5).clamp(0, 1)
    return plain() * (kept + (1 - kept) / factor)


@pytest.mark.parametrize(("frequencies", "factor"), [(plain() / 3, 3.0), (llama3(), 8.0), (ramp(), 4.0)])
def test_how_frequencies_are_scaled_is_recognised(frequencies, factor):
    scaling = scaling_of(frequencies)
    assert scaling is not None
    assert scaling.base == BASE
    assert scaling.factor == pytest.approx(factor)
    torch.testing.assert_close(scaling.frequencies, frequencies, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("frequencies", [plain(), plain(500_000.0), torch.rand(16, dtype=torch.float64) + 0.1])
def test_frequencies_of_a_base_and_any_others_are_not_scaled(frequencies):
    assert scaling_of(frequencies) is None


# One kind of scaling in place of another, with the same factor and original length, in a decoder.


@in_turn(
    ("right", "port", "phrase"),
    [
        (yarn, llama3, "Llama 3's scaling by 8"),
        (llama3, yarn, "YaRN's scaling by 8"),
        (ntk, linear, "base 10000 that are all divided by 8"),
        (linear, ntk, "enlarged for longer sequences by 8 (NTK)"),
        (llama3, linear, "divides all by 8"),
        (linear, partial(linear, 2.0), "divides all by 2"),
    ],
)
def test_another_kind_is_told_by_its_name(right, port, phrase, precision):
    reference = Options(loss=False, frequency=partial(right, dim=16))
    tells(decoders(reference, precision, seq=48, frequency=partial(port, dim=16)), "rope-scaling", phrase)


# TE's attention, which is given the angles.


class Attention(nn.Module):
    """Causal attention that rotates by these frequencies, and multiplies cosines and sines by ``mscale``."""

    def __init__(self, linear: Any, frequencies: Tensor, mscale: float, positions: Tensor | None = None) -> None:
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


def with_angles(right: Tensor, ports: Tensor, mscale: float = 1.0, positions: Tensor | None = None) -> parity.Result:
    """Compare attention with these frequencies with TE's, which rotates with the port's."""
    angles = (torch.arange(SEQ)[:, None] * ports).repeat(1, 2).float()[:, None, None]
    options: dict[str, Any] = dict(attention_dropout=0.0, qkv_format="bshd", bias=False)
    names = {"q": "qkv.query_weight", "k": "qkv.key_weight", "v": "qkv.value_weight", "o": "proj.weight"}
    return compared(
        lambda: Attention(nn.Linear, right, mscale, positions),
        lambda te: te.MultiheadAttention(64, 2, **options),
        normal((2, SEQ, 64)),
        weights={f"{left}.weight": name for left, name in names.items()},
        call_candidate=lambda module, x: module(x, rotary_pos_emb=angles),
    )


@pytest.mark.parametrize(
    ("right", "ports", "mscale", "title", "phrase"),
    [
        (llama3(), llama3(), 1.0, "passed", ""),
        (llama3(), plain(), 1.0, "rope-scaling", "it rotates with the plain frequencies"),
        (ramp(), plain(), 1.14, "rope-scaling", "it rotates with the plain frequencies"),
        (llama3(), llama3(factor=32.0), 1.0, "rope-scaling", "low ones of which are divided by 8"),
        (llama3(), llama3(length=200.0), 1.0, "rope-scaling", "it takes 200 for the length"),
        (plain(), plain() / 3, 1.0, "rope-position", "seq_len_interpolation_factor=3"),
    ],
)
def test_scaling_that_is_missing_unwanted_or_another_is_told(right, ports, mscale, title, phrase):
    tells_only(with_angles(right, ports, mscale), title, phrase)


@in_turn(
    ("ports", "mscale", "title", "phrase"),
    [
        (yarn(), of_yarn(8.0), "passed", ""),
        (yarn(16.0), of_yarn(16.0), "rope-scaling", "it divides them by 16"),
        (yarn(5.0), of_yarn(5.0), "rope-scaling", "it divides them by 5"),
        (yarn(4.0), of_yarn(4.0), "rope-scaling", "it divides them by 4"),
        (yarn(4.0), of_yarn(8.0), "rope-scaling", "it divides them by 4"),
        (linear(), 1.0, "rope-scaling", "it divides all by 8"),
        (yarn(), 1.0, "rope-scaling", "mscale"),
    ],
)
def test_yarn_of_another_factor_is_told_with_its_mscale(ports, mscale, title, phrase, precision):
    right, port = (dict(frequencies=made, mscale=by) for made, by in ((yarn(), of_yarn(8.0)), (ports, mscale)))
    tells_only(twins(Attention, port, normal((2, SEQ, 64)), precision, right=right), title, phrase)


def test_linear_interpolation_is_an_argument_of_te():
    result = with_angles(plain() / 4, plain())
    tells_only(result, "rope-scaling", "it rotates with the plain frequencies")
    assert "seq_len_interpolation_factor=4" in result.findings[0].message


def test_positions_that_begin_again_and_are_counted_through_are_told():
    result = with_angles(plain(), plain(), positions=torch.arange(SEQ) % 16)
    tells_only(result, "rope-position", "counts them from the first token on")
