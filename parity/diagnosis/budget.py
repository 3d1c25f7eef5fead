"""How much a part of a search may compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from parity.nominal_clock import Clock, OutOfTime

# Seconds of processor time for each nominal one, after which a search ends wherever it is.
_SLOWEST_MACHINE = 4.0

Tried = TypeVar("Tried")


@dataclass
class Budget:
    """Seconds of a nominal machine that may be spent, so that a search ends at the same place on every one.

    Attributes:
        clock: by which they are counted.
        seconds: that may pass on it.
        began: at which of its seconds.
        began_here: at which second of this process's processor time, for machines that are far slower.
        exceeded: whether it was found to be spent.
    """

    clock: Clock
    seconds: float
    began: float
    began_here: float
    exceeded: bool = False

    @staticmethod
    def of(clock: Clock, seconds: float) -> Budget:
        """So many from now on."""
        return Budget(clock, seconds, clock.seconds, time.process_time())

    def share(self, part: float) -> Budget:
        """What is left until so much of it is spent."""
        return Budget(self.clock, part * self.seconds, self.began, self.began_here)

    def more(self, part: float) -> Budget:
        """So much of it from now on, whatever is spent."""
        return Budget(self.clock, self.clock.seconds - self.began + part * self.seconds, self.began, self.began_here)

    def spent(self) -> bool:
        """Return whether they are, or the search has reached its limit of real time; remembered in ``exceeded``."""
        here = time.process_time() - self.began_here
        nominal = self.clock.seconds - self.began
        self.exceeded = self.exceeded or nominal > self.seconds or here > _SLOWEST_MACHINE * self.seconds
        self.exceeded = self.exceeded or self.clock.is_over()
        return self.exceeded


def while_it_lasts(tried: Iterable[Tried], budget: Budget) -> Iterator[Tried]:
    """Of what is to be tried, as much as a budget lasts for."""
    left = iter(tried)
    while not budget.spent():
        try:
            one = next(left)
        except StopIteration:
            return
        yield one


def in_time(tried: Callable[[], Iterable[Tried]]) -> list[Tried]:
    """All that a part of a search finds, or what it has found when the limit of real time ends it."""
    found: list[Tried] = []
    with suppress(OutOfTime):
        for one in tried():
            found.append(one)
    return found
