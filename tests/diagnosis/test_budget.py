"""A search ends by what it has computed, not by how long that took."""

from __future__ import annotations

import math
import time

from language_model import HIDDEN, Options, result

from parity.passes.nominal_clock import Clock
from parity.search import failure
from parity.search.failure import Budget, while_it_lasts


def slow(monkeypatch, factor: float) -> None:
    """Processor time passes so many times as fast, as on a slower machine."""
    usual = time.process_time
    monkeypatch.setattr(failure.time, "process_time", lambda: factor * usual())


def test_a_budget_is_spent_when_its_clock_has_passed_it():
    clock = Clock(seconds=5.0)
    budget = Budget.of(clock, 2.0)
    clock.seconds = 6.9
    assert not budget.spent()
    clock.seconds = 7.1
    assert budget.spent()


def test_a_share_begins_with_the_budget_and_more_begins_now():
    clock = Clock()
    budget = Budget.of(clock, 10.0)
    clock.seconds = 6.0
    assert budget.share(0.5).spent()
    more = budget.more(0.1)
    assert not more.spent()
    clock.seconds = 7.1
    assert more.spent()
    assert not budget.spent()


def test_what_comes_after_the_budget_is_left_in_the_iterator():
    clock, left = Clock(), iter(range(4))
    budget = Budget.of(clock, 1.5)
    for _ in while_it_lasts(left, budget):
        clock.seconds += 1.0
    assert list(left) == [2, 3]


def test_a_machine_on_which_it_takes_far_longer_ends_it(monkeypatch):
    budget = Budget.of(Clock(), 0.0625)
    slow(monkeypatch, 1e9)
    assert budget.spent()


def test_a_machine_three_times_as_slow_finds_the_same(monkeypatch):
    scaled = Options(embedding=math.sqrt(HIDDEN))
    here = result(scaled, "fp8_current", embedding=float(HIDDEN))
    slow(monkeypatch, 3.0)
    assert result(scaled, "fp8_current", embedding=float(HIDDEN)).findings == here.findings
