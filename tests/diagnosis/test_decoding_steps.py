"""A step of decoding with a cache of keys and values: another position, or another set of keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from language_model import HEAD_DIM, HEADS, HIDDEN, frequencies, turned
from torch import Tensor, nn

import parity

BATCH, CACHED = 4, 12


@dataclass(frozen=True)
class Step:
    """``position``: by how much positions are off. ``late``: the step's own keys are missing. ``lost``: oldest keys."""

    position: int = 0
    late: bool = False
    lost: int = 0


class Decoding(nn.Module):
    def __init__(self, linear: Any, step: Step) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.step = step

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        positions = torch.arange(CACHED, CACHED + tokens) + self.step.position
        q, k = (turned(one, frequencies(), positions) for one in (q, k))
        if not self.step.late:
            keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        keys, values = keys[:, :, self.step.lost :], values[:, :, self.step.lost :]
        scores = q @ keys.transpose(-1, -2) / math.sqrt(HEAD_DIM)
        if tokens > 1 and not self.step.late:
            later = torch.ones(tokens, keys.shape[2], dtype=torch.bool).triu(keys.shape[2] - tokens + 1)
            scores = scores.masked_fill(later, -math.inf)
        return self.out((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


def found(step: Step, tokens: int, precision: str) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        plain = Decoding(nn.Linear, Step())
        return parity.Pair(
            plain,
            Decoding(te.Linear, step),
            lambda rng, tokens: (
                rng.normal(BATCH, tokens, HIDDEN),
                *(rng.normal(BATCH, HEADS, CACHED, HEAD_DIM) for _ in range(2)),
            ),
            weights={name: name for name, _ in plain.named_parameters()},
        )

    (result,) = parity.compare(parity.Case("decoding", factory, sizes=(dict(tokens=tokens),)), [precision])
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    ("step", "title"),
    [
        (Step(position=1), "rope-position"),
        (Step(position=-1), "rope-position"),
        (Step(position=-CACHED), "rope-position"),
        (Step(late=True), "cache-step"),
        (Step(lost=1), "cache-step"),
    ],
)
def test_what_is_off_is_told(step, title, tokens, precision):
    assert found(step, tokens, precision).findings[0].title == title


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_right_step_passes(tokens):
    assert found(Step(), tokens, "bf16").passed
