"""One way to scale rotary frequencies in the place of another, by the same factor from the same length."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from language_model import HEAD_DIM, Options, first, frequencies, result

FACTOR, LENGTH, BASE = 8.0, 64.0, 10_000.0


def llama3(factor: float = FACTOR, length: float = LENGTH) -> torch.Tensor:
    plain = frequencies()
    kept = ((length * plain / (2 * math.pi) - 1.0) / 3.0).clamp(0.0, 1.0)
    return plain * (kept + (1 - kept) / factor)


def yarn(factor: float = FACTOR, length: float = LENGTH) -> torch.Tensor:
    plain = frequencies()
    count = len(plain)
    fast, slow = (count * math.log(length / (beta * 2 * math.pi)) / math.log(BASE) for beta in (32.0, 1.0))
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), 2 * count - 1)
    kept = 1.0 - ((torch.arange(count, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return plain * (kept + (1 - kept) / factor)


def linear(factor: float = FACTOR) -> torch.Tensor:
    return frequencies() / factor


def ntk(factor: float = FACTOR) -> torch.Tensor:
    return frequencies(BASE * factor ** (HEAD_DIM / (HEAD_DIM - 2)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("right", "port", "told"),
    [
        (yarn, llama3, "Llama 3's scaling by 8"),
        (llama3, yarn, "YaRN's scaling by 8"),
        (ntk, linear, "base 10000 that are all divided by 8"),
        (linear, ntk, "enlarged for longer sequences by 8 (NTK)"),
        (llama3, linear, "divides all by 8"),
        (linear, partial(linear, 2.0), "divides all by 2"),
    ],
)
def test_another_kind_is_told_by_its_name(right, port, told, precision):
    one = result(Options(loss=False, frequency=right), precision, seq=48, frequency=port)
    assert first(one) == "rope-scaling"
    assert told in one.findings[0].message
