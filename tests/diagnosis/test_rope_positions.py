"""Rotary positions that begin again in the middle of a sequence, where the reference counts through."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_model import HEAD_DIM, HEADS, HIDDEN, frequencies
from torch import Tensor, nn

import parity

SEQ, BATCH = 24, 3

Positions = Callable[[Tensor], Tensor]  # from [batch, seq] to the same


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """``[batch, heads, seq, head_dim]`` rotated by halves."""
    angles = (positions.double()[..., None] * frequencies())[:, None]
    cos, sin = (torch.cat((table, table), -1).to(x.dtype) for table in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self, linear: Any, positions: Positions, causal: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.positions, self.causal = positions, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        positions = self.positions(torch.arange(x.shape[1]).repeat(len(x), 1))
        q, k = (turned(one, positions) for one in (q, k))
        scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
        if self.causal:
            scores = scores.masked_fill(torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1), -math.inf)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def found(positions: Positions, precision: str, causal: bool = True) -> tuple[str, str]:
    """Title and message of the first finding; the status where the comparison did not fail."""

    def factory(te: Any, **_: Any) -> parity.Pair:
        plain = Attention(nn.Linear, lambda positions: positions, causal)
        port = Attention(te.Linear, positions, causal)
        names = {name: name for name, _ in plain.named_parameters()}
        return parity.Pair(plain, port, lambda rng: 2.0 * rng.normal(BATCH, SEQ, HIDDEN), weights=names)

    (one,) = parity.compare(parity.Case("attention", factory, sizes=({},)), [precision])
    return (one.findings[0].title, one.findings[0].message) if one.status == "failed" else (one.status, "")


def from_starts(*starts: int) -> Positions:
    first = torch.tensor(starts)
    return lambda positions: positions - first[torch.bucketize(positions, first, right=True) - 1]


def in_row(row: int, other: Positions) -> Positions:
    return lambda positions: torch.where(torch.arange(BATCH)[:, None] == row, other(positions), positions)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [True, False])
def test_positions_modulo_half_of_the_sequence_are_told(causal, precision):
    title, message = found(lambda positions: positions % (SEQ // 2), precision, causal)
    assert title == "rope-position"
    assert message.endswith(f"they begin again after each {SEQ // 2}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_positions_that_begin_again_at_each_document_are_told_with_its_beginning(precision):
    title, message = found(from_starts(0, 7, 17), precision)
    assert title == "rope-position"
    assert message.endswith("they begin again at [7, 17]")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_positions_that_begin_again_in_one_row_of_the_batch_are_told_with_it(precision):
    title, message = found(in_row(1, from_starts(0, 9)), precision)
    assert title == "rope-position"
    assert message.endswith("they begin again at [9] in row 1 of the batch")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("starts", [(3,), (13,), (7, 17), (5, 10, 15, 20), (4, 9, 20)])
def test_without_a_causal_mask_positions_that_begin_again_are_told_with_their_beginnings(starts, precision):
    title, message = found(from_starts(0, *starts), precision, causal=False)
    assert title == "rope-position"
    assert message.endswith(f"they begin again at {list(starts)}")


def test_without_a_causal_mask_the_row_is_told_in_which_positions_begin_again():
    title, message = found(in_row(1, from_starts(0, 9)), "bf16", causal=False)
    assert title == "rope-position"
    assert message.endswith("they begin again at [9] in row 1 of the batch")


def test_positions_that_all_begin_later_change_nothing():
    assert found(lambda positions: positions + 5, "bf16") == ("passed", "")
