"""A norm's eps: in which order a search tries numbers, and what it says of one that is too small to matter."""

from __future__ import annotations

import math
from typing import Any

import pytest
from ports import tells, twins
from torch import Tensor, nn

from parity.mistakes.alternatives import numbers
from parity.mistakes.hypothesis import Mistake
from parity.mistakes.norms import Norm


def make_mistake(value: float) -> Mistake[Norm]:
    return Mistake[Norm]("norm-eps", f"number {value:g}", "", lambda norm: ())


def test_the_search_begins_at_usual_numbers_and_on_both_sides_of_the_references_own():
    found = [one.value for one in numbers(make_mistake, own=[2.0, math.inf, 0.0], usual=(8.0, 2.0, math.inf))]
    assert found == [8.0, 2.0, pytest.approx(1.8), pytest.approx(2.2)]


def test_each_number_leads_to_any_other():
    first = next(numbers(make_mistake, own=[1.0]))
    assert first.tuned is not None
    other = first.tuned(7.0)
    assert (other.name, other.value) == ("number 7", 7.0)
    assert other.tuned is not None


class Normed(nn.Module):
    """A norm of rows of size ``scale``, and a linear layer."""

    def __init__(self, linear: Any, eps: float, scale: float) -> None:
        super().__init__()
        self.scale, self.norm, self.out = scale, nn.LayerNorm(64, eps), linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x * self.scale))


@pytest.mark.parametrize(("eps", "is_bound"), [(1e-12, True), (1e-6, False)])
def test_an_eps_that_is_too_small_to_matter_is_told_as_a_bound(eps, is_bound):
    right = dict(eps=1e-5, scale=0.01)
    result = twins(Normed, dict(right, eps=eps), lambda rng: rng.normal(64, 64), "fp32", right, probe=False)
    tells(result, "norm-eps", "it computes with eps=1e-" if is_bound else "it computes with eps=1e-06")
    assert ("or any smaller one: here, 0 has the same effect" in result.findings[0].message) == is_bound
