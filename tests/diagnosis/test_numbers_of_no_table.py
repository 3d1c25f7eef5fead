"""Numbers that stand in no table of usual ones are found all the same, where only they are wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.mistakes.constants import numbers
from parity.mistakes.hypothesis import Mistake
from parity.mistakes.norms import Norm

WIDTH, HEADS, SEQ = 64, 4, 32
RIGHT = dict(base=10_000.0, window=8, eps=1e-5, softcap=50.0, scale=0.25)


class Attention(nn.Module):
    """Pre-norm attention with a window, a cap of its scores and rotary embeddings, written out."""

    def __init__(self, base: float, window: int, eps: float, softcap: float, scale: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=eps)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.base, self.window, self.softcap, self.scale = base, window, softcap, scale

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.base ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32, device=x.device), frequencies)
        cos, sin = (torch.cat((table, table), -1).to(x.dtype) for table in (angles.cos(), angles.sin()))
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def turned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q), self.rotated(k), v

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = self.turned(*heads.unbind(0))
        scores = self.softcap * torch.tanh(q @ k.mT * self.scale / self.softcap)
        position = torch.arange(x.shape[1], device=x.device)
        distance = position[:, None] - position
        scores = scores.masked_fill((distance < 0) | (distance > self.window), -1e9)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class WithRotatedValues(Attention):
    """The same, whose values are rotated with queries and keys."""

    def turned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q), self.rotated(k), self.rotated(v)


def compared(candidate: nn.Module, size: float = 1.0, precision: str = "fp32") -> parity.Result:
    """Compare the right attention with another one; ``size`` is the inputs' standard deviation."""
    reference = Attention(**RIGHT)
    pair = parity.Pair(
        reference,
        candidate,
        lambda rng: rng.normal(2, SEQ, WIDTH) * size,
        {name: name for name, _ in reference.named_parameters()},
        fill=True,
    )
    return parity.compare(pair, precisions=[precision])[0]


@pytest.mark.parametrize(
    ("number", "value", "title", "told", "size"),
    [
        ("eps", 5e-6, "norm-eps", "it computes with eps=5e-06", 0.01),
        ("eps", 2e-5, "norm-eps", "it computes with eps=2e-05", 0.01),
        ("base", 5_000.0, "rope-base", "it rotates with base 5000", 1.0),
        ("base", 20_000.0, "rope-base", "it rotates with base 2e+04", 1.0),
        ("window", 10, "window", "it sees 10", 1.0),
        ("window", 5, "window", "it sees 5", 1.0),
        ("softcap", 20.0, "softcap", "it has 20", 1.0),
        ("scale", 0.2, "softmax-scale", "it is 0.2", 1.0),
    ],
)
def test_a_number_that_nobody_uses_is_named(number: str, value: float, title: str, told: str, size: float) -> None:
    result = compared(Attention(**RIGHT | {number: value}), size)
    assert (result.findings[0].title, told in result.findings[0].message) == (title, True), result.findings


def test_rotated_values_are_named() -> None:
    (first, *_) = compared(WithRotatedValues(**RIGHT)).findings
    assert first.title == "rope-unwanted"
    assert "values are rotated as well" in first.message


def test_the_search_begins_at_usual_numbers_and_on_both_sides_of_the_references_own() -> None:
    found = [one.value for one in numbers(some_mistake, own=[2.0, math.inf, 0.0], usual=(8.0, 2.0, math.inf))]
    assert found == [8.0, 2.0, pytest.approx(1.8), pytest.approx(2.2)]


def test_each_number_leads_to_any_other() -> None:
    first = next(numbers(some_mistake, own=[1.0]))
    assert first.tuned is not None
    other = first.tuned(7.0)
    assert (other.name, other.value) == ("number 7", 7.0)
    assert other.tuned is not None


def some_mistake(value: float) -> Mistake[Norm]:
    """Return some mistake about a number."""
    return Mistake[Norm]("norm-eps", f"number {value:g}", "", lambda norm: ())
