"""Halves of a weight that changed places are told as a gate and its up projection only where they are these."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.case.weight_map import Reorder, describe, reorder

WIDTH = 64


class Modulated(nn.Module):
    """A scale and a shift, which a condition makes."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.halves, self.down = linear(WIDTH, 2 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.halves(condition).chunk(2, -1)
        return self.down(x * (1 + scale) + shift)


class Gated(Modulated):
    """A gate and an up projection."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        gate, up = self.halves(x).chunk(2, -1)
        return self.down(F.silu(gate) * up) + condition


def first_finding(module, weight):
    def factory(te, **_):
        reference = module(nn.Linear)
        names = {name: name for name, _ in reference.named_parameters()}
        names = {weight(name) if "halves" in name else name: right for name, right in names.items()}
        return parity.Pair(
            reference, module(te.Linear), lambda rng: (rng.normal(32, WIDTH), rng.normal(32, WIDTH)), weights=names
        )

    (result,) = parity.compare(parity.Case("halves", factory, sizes=({},)), ["bf16"])
    return result.findings[0]


class Exchanging(Modulated):
    """A port that takes the halves in the other order."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.halves(condition).chunk(2, -1)
        return self.down(x * (1 + scale) + shift)


ORDERS = {
    "halves": (1, 0),
    "rows": (*range(WIDTH, 2 * WIDTH), *range(WIDTH)),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_scale_and_a_shift_are_parts_in_another_order(order):
    finding = first_finding(Modulated, lambda name: reorder(name, order))
    assert (finding.code, finding.title) == ("PAR101", "stacked-in-another-order")
    assert "gate" not in finding.message
    assert len(finding.message) < 500


def test_what_the_port_takes_in_another_order_has_no_gate_either():
    def factory(te, **_):
        reference, port = Modulated(nn.Linear), Exchanging(te.Linear)
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, port, lambda rng: (rng.normal(32, WIDTH), rng.normal(32, WIDTH)), weights=names)

    (result,) = parity.compare(parity.Case("halves", factory, sizes=({},)), ["fp32"])
    assert [finding.title for finding in result.findings] == ["stacked-in-another-order"]
    assert "gate" not in result.findings[0].message


def test_a_gate_and_its_up_projection_are():
    class UpFirst(Gated):
        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            up, gate = self.halves(x).chunk(2, -1)
            return self.down(F.silu(gate) * up) + condition

    def factory(te, **_):
        reference, port = Gated(nn.Linear), UpFirst(te.Linear)
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, port, lambda rng: (rng.normal(32, WIDTH), rng.normal(32, WIDTH)), weights=names)

    (result,) = parity.compare(parity.Case("halves", factory, sizes=({},)), ["fp32"])
    assert [finding.title for finding in result.findings] == ["gate-up-swapped"]


def test_an_order_of_many_rows_is_shortened_but_where_it_is_to_be_pasted():
    term = Reorder(("w",), tuple(range(100)))
    assert describe(term) == 'reorder("w", order=(0, 1, 2, ..., 97, 98, 99))'
    assert "50, 51, 52" in describe(term, "parity.")
