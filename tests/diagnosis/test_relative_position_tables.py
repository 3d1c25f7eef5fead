"""Tables of relative positions in two dimensions, Swin's and SAM's, and the shifts, paddings and views beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, HEADS, SIDE = 64, 4, 4
HEAD = WIDTH // HEADS
SPAN = 2 * SIDE - 1


def numbers(exchanged: bool = False) -> Tensor:
    """Of each pair of a window's places its row in Swin's table, ``[places, places]``."""
    places = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")).flatten(1)
    down, across = (places[:, :, None] - places[:, None]) + SIDE - 1
    return across * SPAN + down if exchanged else down * SPAN + across


class Swin(nn.Module):
    """Attention in a window, with a bias of its own for each step down and across."""

    def __init__(self, linear: Any, exchanged: bool = False, view: bool = False, turned: bool = False) -> None:
        super().__init__()
        self.qkv, self.view = linear(WIDTH, 3 * WIDTH), view
        self.table = nn.Parameter(torch.randn(SPAN**2, HEADS))
        self.numbers = numbers(exchanged).T if turned else numbers(exchanged)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        rows = self.table[self.numbers]
        bias = rows.reshape(HEADS, SIDE**2, SIDE**2) if self.view else rows.permute(2, 0, 1)
        return (((q * HEAD**-0.5) @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Sam(nn.Module):
    """Attention whose scores get two biases, of rows and of columns, which queries make with two tables."""

    def __init__(self, linear: Any, spread: float = 1.0, turned: bool = False) -> None:
        super().__init__()
        self.qkv, self.turned = linear(WIDTH, 3 * WIDTH), turned
        self.rows, self.columns = (nn.Parameter(spread * torch.randn(SPAN, HEAD)) for _ in range(2))

    def biases(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Both, ``[batch, heads, rows, columns, rows, 1]`` and ``[..., 1, columns]``; queries have heads first."""
        places = torch.arange(SIDE)
        steps = places[:, None] - places + SIDE - 1
        steps = steps.T if self.turned else steps
        patches = q.unflatten(2, (SIDE, SIDE))
        down = torch.einsum("bnhwc,hkc->bnhwk", patches, self.rows[steps])
        across = torch.einsum("bnhwc,wkc->bnhwk", patches, self.columns[steps])
        return down[..., :, None], across[..., None, :]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = ((q * HEAD**-0.5) @ k.mT).unflatten(3, (SIDE, SIDE)).unflatten(2, (SIDE, SIDE))
        down, across = self.biases(q)
        scores = (scores + down + across).flatten(4).flatten(2, 3)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class SamInTE(Sam):
    def __init__(self, te: Any, **port: Any) -> None:
        super().__init__(te.Linear, **port)
        self.core = te.DotProductAttention(
            HEADS, HEAD, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.0
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)).contiguous() for part in self.qkv(x).chunk(3, -1))
        down, across = self.biases(q.transpose(1, 2))
        bias = (down + across).flatten(4).flatten(2, 3).contiguous()
        return self.core(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)


class Padded(nn.Module):
    """A convolution in time, around each step, behind one that sees no later step."""

    def __init__(self, linear: Any, causal: bool = False, later: bool = False) -> None:
        super().__init__()
        self.up, self.causal, self.later = linear(WIDTH, WIDTH), causal, later
        self.conv = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(F.pad(x, (0, 0, 0, 1) if self.later else (0, 0, 1, 0))).transpose(1, 2)
        y = y[..., 1:] + y[..., :-1]
        seen = F.conv1d(F.pad(y, (4, 0)), self.conv.weight, self.conv.bias, groups=WIDTH)
        return x + (seen if self.causal else self.conv(y)).transpose(1, 2)


class Shifted(nn.Module):
    """Sums of neighbours in windows that are shifted by less than half of one."""

    def __init__(self, linear: Any, shift: int = 2) -> None:
        super().__init__()
        self.up, self.shift = linear(WIDTH, WIDTH), shift

    def forward(self, x: Tensor) -> Tensor:
        y = x.roll(-self.shift, 1).unflatten(1, (2, -1)).cumsum(2).flatten(1, 2)
        return x + self.up(y).roll(self.shift, 1)


def results(module: Any, precision: str, port: Any = None, seeds: Any = (0,), **mistake: Any) -> list[parity.Result]:
    def factory(te: Any, **_: Any) -> parity.Pair:
        right = module(nn.Linear)
        names = {name: name for name, _ in right.named_parameters()}
        candidate = module(te.Linear, **mistake) if port is None else port(te, **mistake)
        return parity.Pair(right, candidate, lambda rng: rng.normal(2, SIDE**2, WIDTH), weights=names)

    return parity.compare(parity.Case("tables", factory, sizes=({},)), [precision], seeds)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("module", "mistake", "title", "told"),
    [
        (Swin, dict(exchanged=True), "attention-bias", "that of a position in two dimensions is (column, row)"),
        (Swin, dict(view=True), "operation", "it is a view, which moves no element"),
        (Sam, dict(turned=True), "attention-bias", "look up the relative position of query and key"),
        (Padded, dict(causal=True), "operation", "'conv1d' of conv as the reference does; its input is padded at its"),
        (Padded, dict(later=True), "operation", "'pad' of the module as the reference does; it pads the other end"),
        (
            Shifted,
            dict(shift=-2),
            "operation",
            "'roll' of the module and of 1 more like it",
        ),
    ],
)
def test_the_mistake_is_told(module, mistake, title, told, precision):
    (result,) = results(module, precision, **mistake)
    assert result.findings[0].title == title
    assert told in result.findings[0].message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("module", [Swin, Sam, Padded, Shifted])
def test_right_ports_pass(module, precision):
    (result,) = results(module, precision)
    assert result.passed


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_port_that_adds_both_biases_before_the_scores_is_right(precision):
    first_looks = results(Sam, precision, SamInTE, seeds=range(4))
    assert all(result.passed and not result.notes for result in first_looks)
