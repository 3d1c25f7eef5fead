"""Attention of FP8 queries, keys and values, quantized in the ways that FlashAttention-3 compares.

Follows arXiv 2407.08608, sections 3.3 and 4.3, in plain FP32 with E4M3 roundings (``parity.numerics.formats``); no TE,
no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.case.case import Rng
from parity.lab.studies.settings import DISTRIBUTIONS
from parity.numerics.formats import e4m3

BLOCK = 128  # rows that share a scale in block quantization
_LARGEST_PROBABILITY = 256.0  # unnormalised probabilities are scaled to it before they are cast to E4M3


@dataclass(frozen=True)
class AttentionRun:
    """Attention of one head, in all of ``WAYS``.

    Attributes:
        distribution: name of ``DISTRIBUTIONS``, of queries, keys and values.
        seq: tokens.
        head_dim: channels, a power of two.
        seed: of the values.
    """

    distribution: str
    seq: int
    head_dim: int
    seed: int


@dataclass(frozen=True)
class AttentionLoss:
    """The errors of attention's output against FP64.

    Attributes:
        rmse: root mean square error by way, as FlashAttention-3 reports it.
    """

    rmse: Mapping[str, float]


Rounder = Callable[[Tensor], Tensor]


def _exact(x: Tensor) -> Tensor:
    return x


def _fp16(x: Tensor) -> Tensor:
    return x.half().float()


def _per_block(x: Tensor) -> Tensor:
    return torch.cat([e4m3(rows) for rows in x.split(BLOCK)])


def _scaled_e4m3(probabilities: Tensor) -> Tensor:
    return (probabilities * _LARGEST_PROBABILITY).to(torch.float8_e4m3fn).float() / _LARGEST_PROBABILITY


@dataclass(frozen=True)
class _Way:
    """What rounds queries and keys, values, and unnormalised probabilities; and if the first two are rotated before."""

    scored: Rounder = _exact
    values: Rounder = _exact
    probabilities: Rounder = _exact
    rotate: bool = False


FP16, PLAIN, BLOCKS = "FP16", "FP8, a scale a tensor", "FP8, a scale a block"
ROTATED, ROTATED_BLOCKS = "FP8, rotated, a scale a tensor", "FP8, rotated, a scale a block"
_WAYS: Mapping[str, _Way] = {
    FP16: _Way(_fp16, _fp16, _fp16),
    PLAIN: _Way(e4m3, e4m3, _scaled_e4m3),
    BLOCKS: _Way(_per_block, _per_block, _scaled_e4m3),
    ROTATED: _Way(e4m3, e4m3, _scaled_e4m3, rotate=True),
    ROTATED_BLOCKS: _Way(_per_block, _per_block, _scaled_e4m3, rotate=True),
    "queries and keys alone in FP8": _Way(scored=e4m3),
    "queries and keys alone in FP8, rotated": _Way(scored=e4m3, rotate=True),
    "values alone in FP8": _Way(values=e4m3),
    "probabilities alone in FP8": _Way(probabilities=_scaled_e4m3),
}
WAYS = tuple(_WAYS)


def measure(run: AttentionRun) -> AttentionLoss:
    """Attend in every way; queries and keys that are rotated are so by one random orthogonal matrix."""
    draw = DISTRIBUTIONS[run.distribution]
    rng = Rng(run.seed, f"attention {run.distribution}")
    query, key, value = (draw(rng, run.seq, run.head_dim).half().float() for _ in range(3))
    rotation = _rotation(rng, run.head_dim)
    golden = _scores(query.double(), key.double()).softmax(-1) @ value.double()
    rmse = {}
    for name, way in _WAYS.items():
        scored = [way.scored(x @ rotation if way.rotate else x) for x in (query, key)]
        scores = _scores(*scored)
        weights = (scores - scores.amax(-1, keepdim=True)).exp_()
        output = way.probabilities(weights) @ way.values(value) / weights.sum(-1, keepdim=True)
        rmse[name] = (output - golden).square().mean().sqrt().item()
    return AttentionLoss(rmse)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.t() / math.sqrt(query.shape[-1])


def _rotation(rng: Rng, size: int) -> Tensor:
    """A random diagonal of signs times a Hadamard matrix, orthogonal."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = rng.integers(size, high=2) * 2.0 - 1.0
    return signs[:, None] * matrix / math.sqrt(size)
