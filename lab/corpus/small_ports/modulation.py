"""Shifts, scales and gates from a condition: in another order, used twice, without their 1, or by another function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small import Expert, normal, twins

WIDTH = 64
CONDITIONED = normal((16, 8, WIDTH), (16, WIDTH))

# Parts of one tensor, as in DiT, PixArt and Flux.

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
    """A model whose own loop gives each layer its gate, a part of one tensor."""

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
    """Flux's single-stream block: one layer makes both the mixed and the activated part, which differ in width."""

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


MODULATED, IN_A_LOOP, FOR_BOTH = (twins(one, CONDITIONED) for one in (Modulated, InALoop, OneLayerForBoth))


# Two MLPs behind the parts, where the port exchanges the same two parts of each.


class OfTwoMlps(nn.Module):
    """Two MLPs whose input is shifted and scaled, and whose result is gated, by one condition, as in DiT."""

    def __init__(self, linear: Any, order: tuple[int, ...] = RIGHT) -> None:
        super().__init__()
        self.order, self.condition = order, linear(WIDTH, 6 * WIDTH)
        self.first, self.second = Expert(linear, F.silu), Expert(linear, F.silu)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.condition(F.silu(condition)).chunk(6, -1)
        shift, scale, gate, second_shift, second_scale, second_gate = (parts[i] for i in self.order)
        x = x + gate * self.first(x * (1.0 + scale) + shift)
        return x + second_gate * self.second(x * (1.0 + second_scale) + second_shift)


OF_TWO_MLPS = twins(OfTwoMlps, normal((32, WIDTH), (32, WIDTH)), probe=False)


# DiT's ``x * (1 + scale) + shift``, where a port leaves out the 1 at one place or at several.

HIDDEN, FFN, OUT = 48, 96, 32
Places = tuple[str, ...]  # where 1 is left out


class WithoutOne(nn.Module):
    def __init__(self, left_out: Places) -> None:
        super().__init__()
        self.left_out = left_out

    def modulated(self, x: Tensor, shift: Tensor, scale: Tensor, place: str) -> Tensor:
        x = F.layer_norm(x, x.shape[-1:], eps=1e-6)
        return x * (scale if place in self.left_out else 1 + scale) + shift


class DitBlock(WithoutOne):
    def __init__(self, linear: Any, left_out: Places) -> None:
        super().__init__(left_out)
        self.modulation, self.mix = linear(HIDDEN, 6 * HIDDEN), linear(HIDDEN, HIDDEN)
        self.up, self.down = linear(HIDDEN, FFN), linear(FFN, HIDDEN)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        x = x + gate1 * self.mix(self.modulated(x, shift1, scale1, "attention"))
        return x + gate2 * self.down(F.silu(self.up(self.modulated(x, shift2, scale2, "mlp"))))


class Last(WithoutOne):
    def __init__(self, linear: Any, left_out: Places) -> None:
        super().__init__(left_out)
        self.modulation, self.out = linear(HIDDEN, 2 * HIDDEN), linear(HIDDEN, OUT)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, -1)
        return self.out(self.modulated(x, shift, scale, "last"))


class DiffusionTransformer(nn.Module):
    def __init__(self, linear: Any, left_out: Places = ()) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DitBlock(linear, left_out) for _ in range(2))
        self.last = Last(linear, left_out)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return self.last(x, condition)


DIT = twins(DiffusionTransformer, normal((2, 16, HIDDEN), (2, HIDDEN)))

PORTS = (
    *(host.right() for host in (MODULATED, IN_A_LOOP, FOR_BOTH, DIT)),
    MODULATED.wrong("operation", "its parts are in the order 1, 3, 5, 2, 4, 6", order=(0, 2, 4, 1, 3, 5), others=True),
    MODULATED.wrong("operation", "its parts are in the order 1, 2, 3, 4, 5, 3", order=(0, 1, 2, 3, 4, 2), others=True),
    MODULATED.wrong("operation", "its parts are in the order 1, 2, 3, 1, 2, 6", order=(0, 1, 2, 0, 1, 5), others=True),
    MODULATED.wrong("operation", "1 is added to its left operand", one=1.0, others=True),
    IN_A_LOOP.wrong("operation", "the 1st 'tanh' of the module and of 1 more like it", bounded=False, others=True),
    FOR_BOTH.wrong("operation", "its parts are stored in the order 2, 1", activated_first=True, others=True),
    OF_TWO_MLPS.wrong("operation", "its parts are in the order 2, 1, 3, 5, 4, 6", order=(1, 0, 2, 4, 3, 5)),
    OF_TWO_MLPS.wrong("operation", "its parts are in the order 3, 1, 2, 6, 4, 5", order=(2, 0, 1, 5, 3, 4)),
    DIT.wrong("operation", "the 1st 'add' of blocks.0 and of 1 more like it", left_out=("attention",)),
    DIT.wrong("operation", "the 1st 'add' of blocks.0 and of 4 more like it", left_out=("attention", "mlp", "last")),
    DIT.wrong("operation", "the 1st 'add' of last as", left_out=("last",)),
)
