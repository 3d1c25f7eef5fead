"""Patches that are rotated by their row and their column, as EVA-02's and Flux's, and ports that mistake these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, HEADS, HEIGHT, ACROSS, TEXT = 64, 2, 4, 8, 5
HEAD = WIDTH // HEADS


def table(rows: Tensor, columns: Tensor, base: float = 10_000.0) -> Tensor:
    """Angles ``[tokens, head_dim / 2]`` behind a text, which is not rotated."""
    frequencies = base ** (-torch.arange(0, HEAD // 2, 2).double() / (HEAD // 2))
    of_patches = torch.cat([places.double()[:, None] * frequencies for places in (rows, columns)], -1)
    return torch.cat((torch.zeros(TEXT, HEAD // 2), of_patches))


PATCHES = torch.arange(HEIGHT * ACROSS)
ROWS, COLUMNS = PATCHES // ACROSS, PATCHES % ACROSS


class Attention(nn.Module):
    def __init__(self, linear: Any, angles: Tensor) -> None:
        super().__init__()
        self.qkv, self.angles = linear(WIDTH, 3 * WIDTH), angles

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin = (function(self.angles).to(x.dtype)[:, None] for function in (torch.cos, torch.sin))
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in (self.rotated(q), self.rotated(k), v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def result(precision: str, angles: Tensor) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        right, port = Attention(nn.Linear, table(ROWS, COLUMNS)), Attention(te.Linear, angles)
        names = {name: name for name, _ in right.named_parameters()}
        inputs = lambda rng: rng.normal(2, TEXT + HEIGHT * ACROSS, WIDTH)  # noqa: E731
        return parity.Pair(right, port, inputs, weights=names)

    (one,) = parity.compare(parity.Case("patches", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("angles", "told"),
    [
        (table(COLUMNS, ROWS), "rows and columns are exchanged"),
        (table(PATCHES % HEIGHT, PATCHES // HEIGHT), "patches are counted column by column"),
        (table(PATCHES, PATCHES), "both are the number of the patch"),
    ],
)
def test_what_stands_for_rows_and_columns_is_told(angles, told, precision):
    finding = result(precision, angles).findings[0]
    assert finding.title == "rope-position"
    assert told in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_base_of_both_axes_is_told(precision):
    finding = result(precision, table(ROWS, COLUMNS, base=100.0)).findings[0]
    assert finding.title == "rope-base"
    assert "the base 10000; it is 100" in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_angles_pass(precision):
    assert result(precision, table(ROWS, COLUMNS)).passed
