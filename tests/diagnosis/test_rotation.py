"""Rotary embeddings, and the scaling of their frequencies, are recognised however they are written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small_ports.rope_scaling import llama3, plain, ramp
from parity.mistakes.rope_scaling import scaling_of
from parity.mistakes.rotation import rotations
from parity.trace.calls import tracing

BATCH, HEADS, SEQ, HEAD_DIM = 2, 3, 12, 24
BASE = 10_000.0


def angles(rotary: int) -> Tensor:
    frequencies = BASE ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    return torch.arange(SEQ)[:, None] * frequencies


def turned(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs of channels by their position."""
    by = angles(2 * first.shape[-1]).to(first.dtype)
    return first * by.cos() - second * by.sin(), second * by.cos() + first * by.sin()


def halves(x: Tensor) -> Tensor:
    return torch.cat(turned(*x.chunk(2, -1)), -1)


def interleaved(x: Tensor) -> Tensor:
    return torch.stack(turned(x[..., 0::2], x[..., 1::2]), -1).flatten(-2)


def taken_apart(x: Tensor) -> Tensor:
    """Rotate interleaved pairs and return them as halves, as DeepSeek's attention does."""
    return torch.cat(turned(x[..., 0::2], x[..., 1::2]), -1)


class Attention(nn.Module):
    """Attention that rotates a part of the channels of queries and keys."""

    def __init__(self, rotate, start: int, end: int, key_in_place: bool = False) -> None:
        super().__init__()
        self.rotate, self.channels, self.key_in_place = rotate, slice(start, end), key_in_place

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key = self._written(key) if self.key_in_place else self._joined(key)
        return F.scaled_dot_product_attention(self._joined(query), key, value)

    def _joined(self, x: Tensor) -> Tensor:
        before, after = x[..., : self.channels.start], x[..., self.channels.stop :]
        return torch.cat((before, self.rotate(x[..., self.channels]), after), -1)

    def _written(self, x: Tensor) -> Tensor:
        made = x.new_empty(x.shape)
        made[..., : self.channels.start].copy_(x[..., : self.channels.start])
        made[..., self.channels].copy_(self.rotate(x[..., self.channels]))
        made[..., self.channels.stop :] = x[..., self.channels.stop :]
        return made


def found(module: nn.Module):
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(BATCH, HEADS, SEQ, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(3)]
    with tracing(module) as trace:
        module(*heads)
    return trace, rotations(trace)


@pytest.mark.parametrize(("start", "end"), [(0, 24), (0, 8), (16, 24), (4, 14)], ids=["all", "first", "last", "middle"])
@pytest.mark.parametrize(
    ("rotate", "form", "result_form"),
    [(halves, "halves", "halves"), (interleaved,) + ("interleaved",) * 2, (taken_apart, "interleaved", "halves")],
)
def test_the_rotated_channels_their_pairs_and_their_base_are_recognised(rotate, form, result_form, start, end):
    trace, both = found(Attention(rotate, start, end))
    assert [one.role for one in both] == ["query", "key"]
    for one in both:
        assert (one.form, one.result_form, one.base) == (form, result_form, BASE)
        assert one.rotary == end - start
        torch.testing.assert_close(one.compute(trace.tensor(one.x)), trace.tensor(one.call.outputs[0]))


def test_a_key_that_is_written_part_by_part_is_followed_back_to_its_rotation():
    _, both = found(Attention(halves, 16, 24, key_in_place=True))
    assert [one.role for one in both] == ["query", "key"]


def test_what_turns_no_pairs_is_no_rotation():
    _, none = found(Attention(lambda x: x.flip(-1), 0, 24))
    assert none == []


class SharedKey(nn.Module):
    """Attention with one rotated key for all heads and some unrotated channels, as in DeepSeek's latent attention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        apart = [torch.cat((x[..., 0::2], x[..., 1::2]), -1) for x in (query[..., 16:], key[:1, :1, :, 16:])]
        rotated = [halves(x) for x in apart]
        query = torch.cat((query[..., :16], rotated[0]), -1)[:1]
        key = torch.cat((key[:1, ..., :16], rotated[1].expand(-1, HEADS, -1, -1)), -1)
        return F.scaled_dot_product_attention(query, key, value[:1])


def test_one_key_for_all_heads_is_recognised_and_how_its_pairs_were_laid_out():
    _, both = found(SharedKey())
    assert [(one.role, one.form, one.result_form, one.base) for one in both] == [
        ("query", "interleaved", "halves", BASE),
        ("key", "interleaved", "halves", BASE),
    ]


def turned_by(by: Tensor, scale: float = 1.0):
    """Return a function that rotates halves by these angles, with cosines and sines multiplied by ``scale``."""

    def turned(x: Tensor) -> Tensor:
        cos, sin = scale * by.cos(), scale * by.sin()
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return turned


def test_a_rotation_that_scales_besides_is_recognised():
    trace, both = found(Attention(turned_by(angles(24), scale=1.25), 0, 24))
    assert [one.amplitude for one in both] == [pytest.approx(1.25)] * 2
    for one in both:
        torch.testing.assert_close(one.compute(trace.tensor(one.x)), trace.tensor(one.call.outputs[0]))


def test_frequencies_that_nothing_holds_are_read_off_the_angles():
    _, both = found(Attention(turned_by(0.3 * angles(24)), 0, 24))
    for one in both:
        positions, frequencies = one.phases
        torch.testing.assert_close(positions[:, None] * frequencies, 0.3 * angles(24))


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
