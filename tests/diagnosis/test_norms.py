"""The order in which a search tries numbers, such as a norm's eps."""

from __future__ import annotations

import math

import pytest

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
