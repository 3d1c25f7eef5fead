"""Rotary frequencies that are scaled for longer sequences: how is recognised, and what ports make of them is told."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.mistakes.rope_scaling import scaling_of

HIDDEN, HEADS, SEQ, HEAD_DIM = 64, 2, 40, 32


def plain(base: float = 10_000.0) -> Tensor:
    return base ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)


def llama3(factor: float = 8.0, length: float = 64.0) -> Tensor:
    """As Meta's ``apply_scaling`` writes it."""
    scaled = []
    for frequency in plain().tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < length / 4:
            scaled.append(frequency)
        elif wavelength > length:
            scaled.append(frequency / factor)
        else:
            smooth = (length / wavelength - 1) / 3
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return torch.tensor(scaled, dtype=torch.float64)


def yarn(factor: float = 4.0) -> Tensor:
    kept = (1 - (torch.arange(HEAD_DIM // 2, dtype=torch.float64) - 2) / 5).clamp(0, 1)
    return plain() * (kept + (1 - kept) / factor)


@pytest.mark.parametrize(("frequencies", "factor"), [(plain() / 3, 3.0), (llama3(), 8.0), (yarn(), 4.0)])
def test_how_frequencies_are_scaled_is_recognised(frequencies, factor):
    scaling = scaling_of(frequencies)
    assert scaling is not None
    assert scaling.base == 10_000.0
    assert scaling.factor == pytest.approx(factor)
    torch.testing.assert_close(scaling.frequencies, frequencies, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("frequencies", [plain(), plain(500_000.0), torch.rand(16, dtype=torch.float64) + 0.1])
def test_frequencies_of_a_base_and_any_others_are_not_scaled(frequencies):
    assert scaling_of(frequencies) is None


class Attention(nn.Module):
    """Causal attention that rotates with these frequencies, and multiplies cosines and sines by ``mscale``."""

    def __init__(self, frequencies: Tensor, mscale: float, positions: Tensor) -> None:
        super().__init__()
        self.frequencies, self.mscale, self.positions = frequencies, mscale, positions
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.q.weight.data *= 4

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angles = (self.positions[:, None] * self.frequencies).repeat(1, 2)
        cos, sin = ((table * self.mscale).to(x.dtype) for table in (angles.cos(), angles.sin()))
        query, key = (y * cos + torch.cat((-y[..., 16:], y[..., :16]), -1) * sin for y in (query, key))
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o(context.transpose(1, 2).flatten(2))


def found(right: Tensor, ports: Tensor, mscale: float = 1.0, positions: Tensor | None = None):
    """Titles and messages of the findings where TE rotates with ``ports``."""

    def factory(te, **_):
        angles = (torch.arange(SEQ)[:, None] * ports).repeat(1, 2).float()[:, None, None]
        module = te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, qkv_format="bshd", bias=False)
        names = {"q": "qkv.query_weight", "k": "qkv.key_weight", "v": "qkv.value_weight", "o": "proj.weight"}
        return parity.Pair(
            reference=Attention(right, mscale, torch.arange(SEQ) if positions is None else positions),
            candidate=module,
            inputs=lambda rng, batch: rng.normal(batch, SEQ, HIDDEN),
            weights={f"{a}.weight": b for a, b in names.items()},
            call_candidate=lambda module, x: module(x, rotary_pos_emb=angles),
        )

    (result,) = parity.compare(parity.Case("rope", factory, sizes=(dict(batch=2),)), ["bf16"])
    return [(finding.title, finding.message) for finding in result.findings] or result.status


def test_the_same_frequencies_are_right():
    assert found(llama3(), llama3()) == "passed"


@pytest.mark.parametrize(("right", "mscale"), [(plain() / 4, 1.0), (llama3(), 1.0), (yarn(), 1.14)])
def test_scaling_that_is_missing_is_found(right, mscale):
    ((title, message),) = found(right, plain(), mscale)
    assert title == "rope-scaling"
    assert "it rotates with the plain frequencies" in message


def test_linear_interpolation_is_an_argument_of_te():
    ((_, message),) = found(plain() / 4, plain())
    assert "seq_len_interpolation_factor=4" in message


def test_another_factor_is_found():
    ((title, message),) = found(llama3(), llama3(factor=32.0))
    assert title == "rope-scaling"
    assert "low ones of which are divided by 8" in message


def test_another_original_length_is_found():
    ((title, message),) = found(llama3(), llama3(length=200.0))
    assert title == "rope-scaling"
    assert "it takes 200 for the length" in message


def test_plain_frequencies_that_are_interpolated_are_found():
    ((title, message),) = found(plain(), plain() / 3)
    assert title == "rope-position"
    assert "seq_len_interpolation_factor=3" in message


def test_positions_that_begin_again_and_are_counted_through_are_found():
    ((title, message),) = found(plain(), plain(), positions=torch.arange(SEQ) % 16)
    assert title == "rope-position"
    assert "counted from the first token on" in message
