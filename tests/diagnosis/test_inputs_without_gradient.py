"""An input that a port never reads, and computes from another in its place, is told."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import parity

WIDTH = 32


class Both(nn.Module):
    """A layer of what is decoded, and one of the memory."""

    def __init__(self, linear: Any, forgets_memory: bool = False) -> None:
        super().__init__()
        self.own, self.cross, self.forgets_memory = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), forgets_memory

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.own(x).relu() * self.cross(x if self.forgets_memory else memory).sigmoid()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_an_input_to_which_nothing_flows_back_is_told_first(precision):
    def factory(te: Any) -> parity.Pair:
        names = [f"{layer}.{kind}" for layer in ("own", "cross") for kind in ("weight", "bias")]
        return parity.Pair(
            Both(nn.Linear),
            Both(te.Linear, forgets_memory=True),
            lambda rng: {"x": rng.normal(48, WIDTH), "memory": rng.normal(48, WIDTH)},
            {name: name for name in names},
        )

    (result,) = parity.compare(parity.Case("both", factory, sizes=({},)), [precision])
    assert result.findings[0].title == "no-gradient"
    assert "no gradient flows back to the input memory" in result.findings[0].message


def test_what_is_read_in_its_place_is_told_after_it():
    def factory(te: Any) -> parity.Pair:
        reference = Both(nn.Linear)
        return parity.Pair(
            reference,
            Both(te.Linear, forgets_memory=True),
            lambda rng: {"x": rng.normal(48, WIDTH), "memory": rng.normal(48, WIDTH)},
            {name: name for name, _ in reference.named_parameters()},
        )

    (result,) = parity.compare(parity.Case("both", factory, sizes=({},)), ["fp32"])
    assert [one.title for one in result.findings] == ["no-gradient", "operation"]
    read = "not the input of the module that the 1st 'linear' of own is given"
    assert result.findings[1].message.endswith(read)
