"""Swin's shifted windows: other shifts, masks of other shifts, and biases of scores in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, HEADS, SIDE, WINDOW = 64, 2, 8, 4
HEAD = WIDTH // HEADS


def windows(x: Tensor) -> Tensor:
    """``[batch, rows, columns, ...]`` to ``[batch, windows, places, ...]``."""
    count = SIDE // WINDOW
    return x.unflatten(1, (count, WINDOW)).unflatten(3, (count, WINDOW)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def mask_of(shift: int) -> Tensor:
    """Swin's own, ``[windows, places, places]``."""
    regions = torch.zeros(1, SIDE, SIDE)
    cuts = (slice(0, -WINDOW), slice(-WINDOW, -shift), slice(-shift, None))
    for number, (rows, columns) in enumerate((one, other) for one in cuts for other in cuts):
        regions[:, rows, columns] = number
    region = windows(regions)[0]
    return -100.0 * (region[:, None] != region[:, :, None])


class Swin(nn.Module):
    """Attention in shifted windows, written out."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.qkv = mistake, linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, WINDOW**2, WINDOW**2))
        self.shift = 2 if mistake == "shift" else 1
        mask = mask_of(2 if mistake in ("shift", "mask of another shift") else 1)[:, None]
        self.mask = {"windows": mask.roll(1, 0), "keys": mask.flip(-1)}.get(mistake, mask)

    def forward(self, x: Tensor) -> Tensor:
        y = windows(x.roll((-self.shift, -self.shift), (1, 2)))
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, HEAD)).permute(3, 0, 1, 4, 2, 5)
        bias = self.bias.flip(-1, -2) if self.mistake == "bias" else self.bias
        scores = q @ k.mT * HEAD**-0.5 + bias + self.mask.to(x)
        y = (scores.softmax(-1) @ v).transpose(2, 3).flatten(3)
        y = y.unflatten(2, (WINDOW, WINDOW)).unflatten(1, (SIDE // WINDOW, -1)).transpose(2, 3)
        return x + y.flatten(3, 4).flatten(1, 2).roll((self.shift, self.shift), (1, 2))


class Biased(nn.Module):
    """Attention with a bias that is not the same from query to key as back."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.qkv = mistake, linear(WIDTH, 3 * WIDTH)
        self.register_buffer("table", torch.randn(1, HEADS, SIDE, SIDE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, 0]).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        table = {"keys": self.table.flip(-1), "turned": self.table.mT}.get(self.mistake, self.table)
        return F.scaled_dot_product_attention(q, k, v, table).transpose(1, 2).flatten(2)


class Prefix(nn.Module):
    """Attention with a boolean mask: all see a prefix, and what came before."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.qkv = linear(WIDTH, 3 * WIDTH)
        seen = torch.ones(SIDE, SIDE, dtype=torch.bool).tril() | (torch.arange(SIDE) < 3)
        self.seen = seen.T.contiguous() if mistake else seen

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, 0]).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, self.seen).transpose(1, 2).flatten(2)


def result(module: Any, mistake: str, precision: str) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        torch.manual_seed(0)
        right = module(nn.Linear)
        torch.manual_seed(0)
        port = module(te.Linear, mistake)
        names = {name: name for name, _ in right.named_parameters()}
        if module is Biased:
            port.table = right.table
        return parity.Pair(right, port, lambda rng: rng.normal(2, SIDE, SIDE, WIDTH), weights=names)

    (one,) = parity.compare(parity.Case("windows", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("module", "mistake", "title", "told"),
    [
        (Swin, "shift", "window", "windows by 1, as the reference does; they are shifted by 2, and masked so"),
        (Swin, "mask of another shift", "window", "the mask is that of 2"),
        (Swin, "windows", "operation", "its right operand is rolled by 1 along dimension 0"),
        (Swin, "keys", "operation", "its right operand is that of keys in reverse order"),
        (Swin, "bias", "operation", "its right operand is that of queries and keys in reverse order"),
        (Biased, "keys", "attention-bias", "it is that of keys in reverse order"),
        (Biased, "turned", "attention-bias", "that of query and key is exchanged"),
        (Prefix, "turned", "mask", "queries and keys are exchanged"),
    ],
)
def test_the_mistake_is_told(module, mistake, title, told, precision):
    finding = result(module, mistake, precision).findings[0]
    assert finding.title == title
    assert finding.message.endswith(told)


@pytest.mark.parametrize("module", [Swin, Biased, Prefix])
def test_right_ports_pass(module):
    assert result(module, "", "bf16").passed
