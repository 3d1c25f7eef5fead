"""Finds the alternatives under which two modules agree best: a search over choices, bounded in runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

Picks = tuple[int, ...]
ErrorOf = Callable[[Picks], float]

# How much lower an error must be to count as lower. The noise of two maps that fit equally well differs by a few per
# cent; a wrong entry adds an error of its own, and the squares of the two add up.
CLEARLY = 0.5
_BETTER = 0.99


@dataclass(frozen=True)
class Settled:
    """Where a search ended.

    Attributes:
        picks: the chosen alternative of each choice.
        error: under these.
        alternatives: for each choice, the error of each of its alternatives with the other choices as picked; NaN
            where there was no run left to try it.
        runs: how many maps were tried.
    """

    picks: Picks
    error: float
    alternatives: tuple[tuple[float, ...], ...]
    runs: int


class _Search:
    """Errors that are known, and how many runs there may be."""

    def __init__(self, error_of: ErrorOf, max_runs: int) -> None:
        self._error_of = error_of
        self._known: dict[Picks, float] = {}
        self.max_runs = max_runs

    @property
    def runs(self) -> int:
        return len(self._known)

    @property
    def best(self) -> Picks:
        """Of equals the one tried first, which is the likelier."""
        return min(self._known, key=lambda picks: self._known[picks])

    def error(self, picks: Picks) -> float:
        """NaN where no run is left."""
        if picks not in self._known:
            if self.runs >= self.max_runs:
                return math.nan
            self._known[picks] = self._error_of(picks)
        return self._known[picks]

    def try_until(self, limit: float, candidates: Iterable[Picks]) -> None:
        """One after the other, until one is within the limit or no run is left."""
        for picks in candidates:
            if not self.error(picks) > limit:
                return


def settle(counts: Sequence[int], error_of: ErrorOf, limit: float, max_runs: int) -> Settled:
    """Search for picks whose error is at most ``limit``, or else for the best.

    From the likeliest picks, choices are changed one by one as long as the error falls. If that ends above the limit,
    all combinations are tried where the runs suffice, else pairs of choices and random starts: in a chain of layers
    nothing gets better before all is right.

    Args:
        counts: how many alternatives each choice has, the likeliest first.
        error_of: the error under picks; costs a run.
        limit: an error that is good enough to end the search.
        max_runs: how often ``error_of`` may be called, at least once.
    """
    for_the_end = sum(count - 1 for count in counts)
    search = _Search(error_of, max(1, max_runs - for_the_end))
    best = _descend((0,) * len(counts), counts, search, limit)
    if search.error(best) > limit:
        if math.prod(counts) <= search.max_runs:
            search.try_until(limit, product(*map(range, counts)))
        else:
            search.try_until(limit, _pairs(best, counts))
            _restart(counts, search, limit)
        best = search.best
    search.max_runs = max_runs
    best = _descend(best, counts, search, limit)
    alternatives = tuple(
        tuple(search.error((*best[:i], pick, *best[i + 1 :])) for pick in range(count))
        for i, count in enumerate(counts)
    )
    return Settled(best, search.error(best), alternatives, search.runs)


def _descend(start: Picks, counts: Sequence[int], search: _Search, limit: float) -> Picks:
    """Change one choice after the other to its best alternative, until none helps; within the limit only clear help."""
    best, error = start, search.error(start)
    moved = True
    while moved:
        moved = False
        for i, count in enumerate(counts):
            for pick in range(count):
                picks = (*best[:i], pick, *best[i + 1 :])
                other = search.error(picks)
                if other < error * (_BETTER if error > limit else CLEARLY):
                    best, error, moved = picks, other, True
    return best


def _pairs(best: Picks, counts: Sequence[int]) -> Iterator[Picks]:
    """The picks with two choices changed."""
    for i, j in combinations(range(len(counts)), 2):
        for one, other in product(range(counts[i]), range(counts[j])):
            picks = list(best)
            picks[i], picks[j] = one, other
            yield tuple(picks)


def _restart(counts: Sequence[int], search: _Search, limit: float) -> None:
    """Descend from the best so far, then from random picks, while there are runs."""
    start = search.best
    generator = random.Random(0)
    while search.runs < search.max_runs:
        if search.error(_descend(start, counts, search, limit)) <= limit:
            return
        start = tuple(generator.randrange(count) for count in counts)
