"""DiT's modulation ``x * (1 + scale) + shift``, of which a port leaves out the 1, at one place or at several."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HIDDEN, FFN, OUT = 48, 96, 32

Places = tuple[str, ...]  # where 1 is left out


class Modulated(nn.Module):
    def __init__(self, left_out: Places) -> None:
        super().__init__()
        self.left_out = left_out

    def modulated(self, x: Tensor, shift: Tensor, scale: Tensor, place: str) -> Tensor:
        x = F.layer_norm(x, x.shape[-1:], eps=1e-6)
        return x * (scale if place in self.left_out else 1 + scale) + shift


class Block(Modulated):
    def __init__(self, linear: Any, left_out: Places) -> None:
        super().__init__(left_out)
        self.modulation, self.mix = linear(HIDDEN, 6 * HIDDEN), linear(HIDDEN, HIDDEN)
        self.up, self.down = linear(HIDDEN, FFN), linear(FFN, HIDDEN)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        x = x + gate1 * self.mix(self.modulated(x, shift1, scale1, "attention"))
        return x + gate2 * self.down(F.silu(self.up(self.modulated(x, shift2, scale2, "mlp"))))


class Last(Modulated):
    def __init__(self, linear: Any, left_out: Places) -> None:
        super().__init__(left_out)
        self.modulation, self.out = linear(HIDDEN, 2 * HIDDEN), linear(HIDDEN, OUT)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, -1)
        return self.out(self.modulated(x, shift, scale, "last"))


class Transformer(nn.Module):
    def __init__(self, linear: Any, left_out: Places = ()) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(linear, left_out) for _ in range(2))
        self.last = Last(linear, left_out)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return self.last(x, condition)


def result(left_out: Places, precision: str) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        plain, port = Transformer(nn.Linear), Transformer(te.Linear, left_out)
        names = {name: name for name, _ in plain.named_parameters()}
        return parity.Pair(plain, port, lambda rng: (rng.normal(2, 16, HIDDEN), rng.normal(2, HIDDEN)), weights=names)

    (one,) = parity.compare(parity.Case("modulated", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("left_out", "told"),
    [
        (("attention",), "the 1st 'add' of blocks.0 and of 1 more like it"),
        (("attention", "mlp"), "the 1st 'add' of blocks.0 and of 3 more like it"),
        (("attention", "mlp", "last"), "the 1st 'add' of blocks.0 and of 4 more like it"),
        (("last",), "the 1st 'add' of last as"),
    ],
)
def test_the_one_that_is_left_out_is_told_with_the_number_of_places(left_out, told, precision):
    (finding,) = result(left_out, precision).findings
    assert finding.title == "operation"
    assert told in finding.message
    assert finding.message.endswith("it is left out")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_modulation_passes(precision):
    assert result((), precision).passed
