"""Parts of a condition that a port takes in another order, or twice, and gates that it makes 1 larger: DiT, PixArt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH = 64
RIGHT = (0, 1, 2, 3, 4, 5)


class Block(nn.Module):
    """Two modulated branches, whose shifts, scales and gates are parts of one tensor."""

    def __init__(self, linear: Any, order: tuple[int, ...] = RIGHT, one: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.order, self.one = order, one

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = condition.chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = (parts[i] for i in self.order)
        x = x + (self.one + gate1 if self.one else gate1) * self.first(x * (1 + scale1) + shift1)
        return x + gate2 * self.second(x * (1 + scale2) + shift2)


class Modulated(nn.Module):
    def __init__(self, linear: Any, **port: Any) -> None:
        super().__init__()
        self.condition, self.block = linear(WIDTH, 6 * WIDTH), Block(linear, **port)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.block(x, self.condition(condition)[:, None])


class InALoop(nn.Module):
    """The gates of all layers are parts of one tensor, which the model's own code gives to each."""

    def __init__(self, linear: Any, bounded: bool = True) -> None:
        super().__init__()
        self.condition, self.bounded = linear(WIDTH, 2 * WIDTH), bounded
        self.layers = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        gates = self.condition(condition)[:, None].chunk(2, -1)
        for gate, layer in zip(gates, self.layers, strict=True):
            x = x + (gate.tanh() if self.bounded else gate) * layer(x)
        return x


class OneLayerForBoth(nn.Module):
    """Flux's single-stream block: one layer makes what is mixed and what is activated, of other widths."""

    def __init__(self, linear: Any, activated_first: bool = False) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 3 * WIDTH), linear(3 * WIDTH, WIDTH)
        self.activated_first = activated_first

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        up = self.up(x)
        if self.activated_first:
            activated, mixed = up.split([2 * WIDTH, WIDTH], -1)
        else:
            mixed, activated = up.split([WIDTH, 2 * WIDTH], -1)
        return x + self.down(torch.cat((mixed.cumsum(1) / 8, F.silu(activated)), -1))


def result(module: Any, precision: str, **port: Any) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        right = module(nn.Linear)
        names = {name: name for name, _ in right.named_parameters()}
        return parity.Pair(
            right,
            module(te.Linear, **port),
            lambda rng: (rng.normal(16, 8, WIDTH), rng.normal(16, WIDTH)),
            weights=names,
        )

    (one,) = parity.compare(parity.Case("parts", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("module", "port", "told"),
    [
        (Modulated, dict(order=(0, 2, 4, 1, 3, 5)), "its parts are in the order 1, 3, 5, 2, 4, 6"),
        (Modulated, dict(order=(0, 1, 2, 3, 4, 2)), "its parts are in the order 1, 2, 3, 4, 5, 3"),
        (Modulated, dict(order=(0, 1, 2, 0, 1, 5)), "its parts are in the order 1, 2, 3, 1, 2, 6"),
        (Modulated, dict(one=1.0), "1 is added to its left operand"),
        (InALoop, dict(bounded=False), "the 1st 'tanh' of the module and of 1 more like it"),
        (OneLayerForBoth, dict(activated_first=True), "its parts lie in the order 2, 1"),
    ],
)
def test_what_became_of_the_parts_is_told(module, port, told, precision):
    finding = result(module, precision, **port).findings[0]
    assert finding.title == "operation"
    assert told in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current"])
@pytest.mark.parametrize("module", [Modulated, InALoop, OneLayerForBoth])
def test_right_ports_pass(module, precision):
    assert result(module, precision).passed
