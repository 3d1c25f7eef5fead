"""Finds where a port's rotary positions begin again in attention that sees both ways.

There no position is right before the first wrong one is reached, as behind a causal mask (``borders``). But a beginning
that is assumed a few positions off leaves the positions between wrong alone: the error falls all the way to the right
place. So each beginning is looked for by what it leaves, in ever smaller steps, with those before assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from parity.diagnosis.borders import turned_from, wrong_rows
from parity.diagnosis.budget import Budget
from parity.diagnosis.failure import Failure
from parity.diagnosis.gradient_screen import GradientScreen, outputs_tell_little
from parity.diagnosis.rope.rotation import Rotation, rotations
from parity.diagnosis.screen import Screen
from parity.diagnosis.verify import Explanation, verified
from parity.watching.trace import Trace

_MOST = 8  # beginnings
_STEPS = 16  # of a sequence, at which a beginning is tried first
_HELPS = 0.9  # of the error before, below which another beginning brings it


def restart_explanations(failure: Failure, trace: Trace, budget: Budget) -> list[Explanation]:
    """That rotary positions begin again somewhere, if that explains everything.

    Args:
        failure: the outputs of the candidate are finite.
        trace: of the reference in FP64.
        budget: of the search.
    """
    turned = [one for one in rotations(trace) if one.phases is not None]
    lengths = {len(one.angles) for one in turned}
    if len(lengths) != 1:
        return []
    starts = _Descent(failure, turned, lengths.pop(), budget).starts()
    if not starts:
        return []
    batches = {trace.tensor(one.x).shape[0] for one in turned}
    some = [] if outputs_tell_little(failure) else wrong_rows(failure, batches)
    for rows in ((), some) if some else ((),):
        explanation = verified(failure, (turned_from(starts, turned, failure.prepared.reference, rows),))
        if explanation is not None and explanation.complete:
            return [explanation]
    return []


class _Descent:
    """Beginnings that leave ever less of the error, as a screen counts it.

    Args:
        failure, budget: as in ``restart_explanations``.
        turned: the rotations.
        seq: how many positions they have.
    """

    def __init__(self, failure: Failure, turned: Sequence[Rotation], seq: int, budget: Budget) -> None:
        self._screen = GradientScreen(failure) if outputs_tell_little(failure) else Screen(failure)
        self._module = failure.prepared.reference
        self._turned = turned
        self._seq = seq
        self._budget = budget
        self._shares: dict[tuple[int, ...], float] = {(0,): 1.0}

    def starts(self) -> list[int]:
        """Under which what is left is no more than the precision costs; empty if there are none."""
        found: tuple[int, ...] = (0,)
        while len(found) <= _MOST and not self._budget.spent():
            before = self._share(found)
            found = self._nearby((*found, self._first_guess(found)))
            if self._share(found) > _HELPS * before:
                return []
            if self._screen.is_exact((self._share(found), ())):
                return list(found)
        return []

    def _first_guess(self, found: tuple[int, ...]) -> int:
        step = max(1, self._seq // _STEPS)
        places = [place for place in range(step, self._seq, step) if place not in found]
        return min(places, key=lambda place: self._share((*found, place)), default=self._seq - 1)

    def _nearby(self, starts: tuple[int, ...]) -> tuple[int, ...]:
        """The beginnings moved, the latest first, by ever less, as long as that leaves less."""
        step = max(1, self._seq // _STEPS)
        while step:
            for moved in starts[:0:-1]:
                others = [start for start in starts if start != moved]
                starts = self._best([starts, *((*others, place) for place in (moved - step, moved + step))])
            step //= 2
        return starts

    def _best(self, choices: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return min((tuple(sorted(one)) for one in choices), key=self._share)

    def _share(self, starts: Sequence[int]) -> float:
        """Of the error, which these beginnings leave; infinite for what are none."""
        key = tuple(sorted(set(starts)))
        if len(key) < len(starts) or not 0 <= key[0] <= key[-1] < self._seq:
            return math.inf
        if key not in self._shares:
            assumed = turned_from(key, self._turned, self._module)
            self._shares[key] = next((share for share, _ in self._screen.shares([(assumed,)], self._budget)), math.inf)
        return self._shares[key]
