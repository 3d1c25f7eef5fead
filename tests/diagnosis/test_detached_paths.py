"""Ports that detach a part of the residual stream: outputs are right, gradients lack what comes back through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity

HIDDEN, FFN, TOKENS, LAYERS = 48, 96, 40, 2

Detached = frozenset[tuple[int, str]]  # layers, and what is detached there


class Layer(nn.Module):
    def __init__(self, linear: Any, norm: Any, detached: Detached, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(HIDDEN), norm(HIDDEN)
        self.mix, self.up, self.down = linear(HIDDEN, HIDDEN), linear(HIDDEN, FFN), linear(FFN, HIDDEN)
        self.detached, self.number = detached, number

    def forward(self, x: Tensor) -> Tensor:
        x = self.given(x, "input")
        x = self.given(x, "first stream") + self.given(self.mix(self.norm1(x)), "first branch")
        normed = self.given(self.norm2(x), "second norm")
        return self.given(x, "second stream") + self.down(self.up(normed).relu())

    def given(self, x: Tensor, name: str) -> Tensor:
        return x.detach() if (self.number, name) in self.detached else x


class Model(nn.Sequential):
    def __init__(self, linear: Any, norm: Any, detached: Detached = frozenset()) -> None:
        super().__init__(linear(HIDDEN, HIDDEN), *(Layer(linear, norm, detached, i) for i in range(LAYERS)))


def result(precision: str, *detached: tuple[int, str]) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        plain, port = Model(nn.Linear, nn.LayerNorm), Model(te.Linear, te.LayerNorm, frozenset(detached))
        names = {name: name for name, _ in plain.named_parameters()}
        return parity.Pair(plain, port, lambda rng: rng.normal(TOKENS, HIDDEN), weights=names)

    (one,) = parity.compare(parity.Case("stream", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("detached", "told"),
    [
        ([(1, "first stream")], "the stream of the 1st sum in 2;"),
        ([(0, "second stream")], "the stream of the 2nd sum in 1;"),
        ([(0, "first stream"), (1, "first stream")], "the stream of each layer's 1st sum;"),
        ([(i, f"{which} stream") for i in (0, 1) for which in ("first", "second")], "the stream of all residual sums;"),
        ([(1, "input")], "stream and branch of the 1st sum in 2;"),
        ([(1, "first branch")], "the branch of the 1st sum in 2;"),
        ([(1, "second norm")], "what the branch is made from, of the 2nd sum in 2;"),
    ],
)
def test_the_place_through_which_nothing_flows_back_is_told_first(detached, told, precision):
    first = result(precision, *detached).findings[0]
    assert first.title == "gradient-path-missing"
    assert f"what comes back through {told}" in first.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_port_that_detaches_nothing_passes(precision):
    assert result(precision).passed


def test_a_gradient_that_is_scaled_is_no_path():
    def factory(te: Any, **_: Any) -> parity.Pair:
        plain, port = Model(nn.Linear, nn.LayerNorm), Model(te.Linear, te.LayerNorm)
        layer: Any = port[1]
        layer.down.weight.register_hook(lambda gradient: 0.5 * gradient)
        names = {name: name for name, _ in plain.named_parameters()}
        return parity.Pair(plain, port, lambda rng: rng.normal(TOKENS, HIDDEN), weights=names)

    (one,) = parity.compare(parity.Case("stream", factory, sizes=({},)), ["fp32"])
    assert one.findings[0].title == "gradient-scale"


class Adapted(nn.Module):
    """A frozen layer with a LoRA adapter, whose input is detached."""

    def __init__(self, linear: Any, detach: bool) -> None:
        super().__init__()
        self.base, self.a, self.b = linear(HIDDEN, FFN), linear(HIDDEN, 16), linear(16, FFN)
        self.base.requires_grad_(False)
        self.detach = detach

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x.detach() if self.detach else x))


class Halves(nn.Module):
    """Two halves of a batch in turn, of which the second is detached."""

    def __init__(self, linear: Any, detach: bool) -> None:
        super().__init__()
        self.up, self.down, self.detach = linear(HIDDEN, FFN), linear(FFN, HIDDEN), detach

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.down(self.up(half).relu()) for half in x.chunk(2))
        return torch.cat([first, second.detach() if self.detach else second])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("module", "told"),
    [(Adapted, "the 1st 'linear' of a;"), (Halves, "the 2nd operand of the 1st 'cat' of the module;")],
)
def test_what_is_detached_where_values_fork_or_join_is_told(module, told, precision):
    def factory(te: Any, **_: Any) -> parity.Pair:
        plain, port = module(nn.Linear, False), module(te.Linear, True)
        names = {name: name for name, _ in plain.named_parameters()}
        return parity.Pair(plain, port, lambda rng: rng.normal(64, HIDDEN), weights=names)

    (one,) = parity.compare(parity.Case("detached", factory, sizes=({},)), [precision])
    assert one.findings[0].title == "gradient-path-missing"
    assert f"what comes back through {told}" in one.findings[0].message
