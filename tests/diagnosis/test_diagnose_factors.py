"""Numbers by which a reference multiplies are told from those of the port."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import parity

HIDDEN, RANK = 64, 16


class LowRank(nn.Module):
    """A linear layer with a low-rank addition, scaled."""

    def __init__(self, linear, scale: float) -> None:
        super().__init__()
        self.base, self.a, self.b = linear(HIDDEN, HIDDEN), linear(HIDDEN, RANK), linear(RANK, HIDDEN)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * self.scale


def found(right: float, scale: float):
    def factory(te, **_):
        return parity.Pair(
            reference=LowRank(nn.Linear, right),
            candidate=LowRank(te.Linear, scale),
            inputs=lambda rng, batch: rng.normal(batch, 32, HIDDEN),
            weights={f"{name}.{kind}": f"{name}.{kind}" for name in ("base", "a", "b") for kind in ("weight", "bias")},
        )

    case = parity.Case("low_rank", factory, sizes=(dict(batch=2),))
    (result,) = parity.compare(case, ["bf16"])
    return [(finding.title, finding.message) for finding in result.findings]


@pytest.mark.parametrize(("right", "scale"), [(2.0, 1.0), (0.5, 3.0), (2.0, 2.2), (2.0, 1.82), (0.22, 0.2)])
def test_another_factor_is_found_and_both_are_told(right, scale):
    ((title, message),) = found(right, scale)
    assert title == "factor"
    assert f"multiply by {right:g}" in message
    assert f"the factor is {scale:g}" in message


def test_the_same_factor_is_none_to_tell():
    assert found(2.0, 2.0) == []
