"""Rank mistakes by what they leave of gradients' errors, and find the constant of one that nearly fits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from parity.mistakes.hypothesis import Hypothesis, Scope
from parity.mistakes.trial import tensors_under
from parity.numerics.errors import norm_of
from parity.passes.all_passes import Tensors
from parity.result import Kind
from parity.search.failure import Budget, Failure, few_outputs, while_it_lasts
from parity.search.screen import CHANGES, EXACT, FAITHFUL, TINY, Effects, Ranked, Screen

# Rank hypotheses by what they leave of every failed tensor's error, if outputs tell too little.
#
# A loss is one number, which many mistakes change. If every output is within what the precision costs, as a loss often
# is in BF16, outputs cannot tell mistakes apart at all. The gradients of parameters can.


_NEAR = 3.0  # an output may differ by so many tolerances: a mistake may cost more rounding than the reference does
_HELPS = 0.9  # or by this share of its error before, if that is more
_PARTIAL = 3.0  # the same for a mistake that may be a part of what is wrong: in one number the rest may cancel it
_AT_LEAST = 0.4  # this share of a tolerance is near enough, also where the rounding model expects less


def outputs_tell_little(failure: Failure) -> bool:
    """Return whether gradients failed while outputs are few numbers or all passed."""
    gradients = any(not one.passed and one.kind != "output" and one.finite for one in failure.results)
    return gradients and (few_outputs(failure) or all(result.passed for result in failure.outputs))


class GradientScreen:
    """Ranks hypotheses by the share that they leave of the failed tensors' errors, as a root mean square.

    An error is counted in tolerances of its tensor. Gradients are computed, in FP64, only for
    hypotheses whose outputs may be the candidate's.
    """

    def __init__(self, failure: Failure) -> None:
        self._prepared = failure.prepared
        self._golden = failure.golden
        self._candidate = {key: x.double() for key, x in failure.candidate.items()}
        self._tolerances = {one.key: one.tolerance_relative_l2 for one in failure.results}
        self._failed = {
            one.key: max(FAITHFUL * one.expected.relative_l2 / one.tolerance_relative_l2, _AT_LEAST)
            for one in failure.results
            if not one.passed and one.finite
        }
        self._before = self._errors(self._golden)
        self._outputs_before = self._away(failure.prepared.golden.outputs)
        self.effects = Effects.of(self._effect(self._candidate))

    def shares(self, combinations: Iterable[tuple[Hypothesis, ...]], budget: Budget) -> Iterator[Ranked]:
        """Yield combinations with the share of the errors that each leaves, apart from those with other outputs.

        Nothing is taken from an iterator once the budget is spent.
        """
        for combination in while_it_lasts(combinations, budget):
            # A mistake made at one of several places, or with another number, may be a part of what is wrong.
            most = _PARTIAL if any(one.place or one.tuned for one in combination) else _HELPS
            tensors = tensors_under(self._prepared, combination, only_if=partial(self._are_near, most))
            if tensors is not None:
                share = _mean(self._errors(tensors)) / max(_mean(self._before), TINY)
                if math.isfinite(share) and abs(share - 1.0) > CHANGES:
                    if len(combination) == 1:
                        self.effects.note(combination[0], self._effect(tensors))
                    yield share, combination

    def is_exact(self, entry: Ranked) -> bool:
        """Return whether what is left is no more than a faithful port at the precision has."""
        return entry[0] < EXACT and entry[0] * _mean(self._before) <= _mean(self._failed)

    def _are_near(self, most: float, outputs: Mapping[str, Tensor]) -> bool:
        """Return whether outputs may be the candidate's: off by no more than so many times what golden's are off."""
        away = self._away(outputs)
        return all(one <= max(_NEAR, most * self._outputs_before[name]) for name, one in away.items())

    def _away(self, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        """Return how far outputs are from the candidate's, in tolerances; infinitely far if they have other shapes."""
        found = {}
        for key in (key for key in self._golden if key[0] == "output"):
            x, size = outputs.get(key[1]), self._size(key)
            alike = x is not None and x.shape == self._golden[key].shape
            found[key[1]] = norm_of(x - self._candidate[key]) / size if x is not None and alike else math.inf
        return found

    def _size(self, key: tuple[Kind, str]) -> float:
        """Return the size of a tensor's tolerance."""
        return max(norm_of(self._golden[key]), TINY) * self._tolerances[key]

    def _effect(self, tensors: Tensors) -> list[Tensor]:
        """Return by how much the failed tensors change, each in units of its tolerance."""
        return [(tensors[key] - self._golden[key]) / self._size(key) for key in self._failed]

    def _errors(self, tensors: Tensors) -> dict[tuple[Kind, str], float]:
        """Return the failed tensors' errors, in tolerances."""
        return {key: norm_of(tensors[key] - self._candidate[key]) / self._size(key) for key in self._failed}


def _mean(values: Mapping[tuple[Kind, str], float]) -> float:
    """Return the root mean square."""
    return math.hypot(*values.values()) / math.sqrt(max(len(values), 1))  # squares of infinite margins overflow


# Find the constant of a mistake that is about one: the eps or factor that leaves the smallest error.


HELPS = 0.9  # a partial explanation must bring the error below this share of what it was
HELPS_LITTLE = 0.999  # the same if the norm of no output's error is too large: what is wrong is below its noise
_MOST = 6  # mistakes whose constant is looked for
_ROUNDS = 2  # how often both constants of a pair are looked for: each depends on the other
_MOST_ALIKE = 2  # how many of these may be of one kind: the right place of a factor may not help most at first
_RANGE = math.log(8.0)  # the constant may be off by this much, either way
_FAR = math.log(1000.0)  # the same if a known constant points the right way, but explains little
_STEPS = 30
_NEARBY = math.log(1.25)  # the same if a known constant explains the error: the port's own may lie beside it
_FINE = 0.002  # constants whose logarithms are so near are the same, if one of them is exact enough
_HOPELESS = 0.1  # with a constant known so finely, the right one leaves less than this share of the error
_WINDOWS = 3  # so many ranges are searched, one beyond the other
_AS_GOOD = 1.05  # a plainer constant may leave so many times the error that the best one leaves
_INDISTINCT = 1.5  # the same if no more is left than a faithful port has
_DIGITS = 3  # people write 1e-4 where the search ends at 1.04e-4; so many digits, or all that were found
_AT_THE_EDGE = 0.9  # if the best constant is beyond this share of the range, the right one may be outside of it
_PROMISING_STEPS = 10  # after so many steps a constant that explains has brought the error down to ``EXACT``
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def tuned(
    screen: Screen | GradientScreen, ranked: Sequence[Ranked], budget: Budget, most_alike: int = _MOST_ALIKE
) -> list[Ranked]:
    """Return the mistakes that are about a constant and help most, with the constant that leaves the smallest error.

    No more than ``most_alike`` are of one kind.
    """
    found: list[tuple[Hypothesis, float]] = []
    alike: Counter[tuple[str, Scope, str]] = Counter()
    for share, (one,) in ranked:
        if one.tuned is not None and one.value is not None and share < HELPS_LITTLE:
            setting, is_one, _ = one.name.partition("=")  # an optimizer has several
            kind = one.title, one.scope, setting if is_one else ""
            alike[kind] += 1
            if alike[kind] <= most_alike:
                found.append((one, _RANGE if share < HELPS else _FAR))
    best = [_line_search(screen, *one, budget) for one in found[:_MOST]]
    # Few are computed in full: one constant of each mistake comes first.
    return [entry for entries in best for entry in entries[:1]] + [entry for entries in best for entry in entries[1:]]


def tuned_pairs(
    screen: Screen | GradientScreen, pairs: Iterable[tuple[Hypothesis, ...]], budget: Budget
) -> list[Ranked]:
    """Return the pairs that are about a constant, with the constants that leave the smallest error,
    searched in turn.
    """
    found: list[Ranked] = []
    for pair in dict.fromkeys(pair for pair in pairs if any(one.tuned is not None for one in pair)):
        best: Ranked = math.inf, pair
        for _ in range(_ROUNDS):
            for position in range(len(pair)):
                one, *others = best[1][position:] + best[1][:position]
                best = min(
                    [best, *_line_search(screen, one, _RANGE, budget, tuple(others))[:1]], key=lambda entry: entry[0]
                )
        found.append(best)
    return [entry for entry in found if math.isfinite(entry[0])]


def sharper(screen: Screen | GradientScreen, entry: Ranked, budget: Budget) -> list[Ranked]:
    """Return a mistake about a constant that explains, with a constant nearby that leaves less, if there is one."""
    share, (one, *others) = entry
    found = [] if others else _line_search(screen, one, _NEARBY, budget)
    return [nearest for nearest in found if _AS_GOOD * nearest[0] < share]


def _line_search(
    screen: Screen | GradientScreen,
    one: Hypothesis,
    reach: float,
    budget: Budget,
    others: tuple[Hypothesis, ...] = (),
) -> list[Ranked]:
    """Return the mistake with the best constant, at most ``reach`` from the known one in logarithms; before it the same
    with a plainer constant that is about as good, if there is one.

    The search goes further if the best is at that edge. ``others`` hold at the same time.
    """
    if one.tuned is None or one.value is None:
        return []
    tried: dict[float, Ranked] = {}

    def share(exponent: float) -> float:
        if exponent not in tried and one.tuned is not None:
            combination = (one.tuned(math.exp(exponent)), *others)
            tried[exponent] = next(screen.shares([combination], budget), (math.inf, combination))
        return tried[exponent][0]

    center = math.log(one.value)
    for _ in range(_WINDOWS):
        low, high = center - reach, center + reach
        for step in range(_STEPS):
            promising = step < _PROMISING_STEPS or any(left < EXACT for left, _ in tried.values())
            hopeless = high - low < _FINE and min(left for left, _ in tried.values()) > _HOPELESS
            fine = high - low < _FINE and any(map(screen.is_exact, tried.values()))
            if not promising or hopeless or fine or budget.spent():
                break
            left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            low, high = (low, right) if share(left) < share(right) else (left, high)
        best = min(tried, key=share, default=center)
        if abs(best - center) < _AT_THE_EDGE * reach or share(best) > HELPS:
            break
        center = best
    if not tried:
        return []
    best = min(tried, key=share)
    plain = (math.log(float(f"{math.exp(best):.{digits}e}")) for digits in range(_DIGITS))
    chosen = next((number for number in plain if _is_as_good(screen, share(number), tried[best])), best)
    return [tried[number] for number in dict.fromkeys((chosen, best)) if math.isfinite(share(number))]


def _is_as_good(screen: Screen | GradientScreen, share: float, best: Ranked) -> bool:
    """Return whether a plainer constant leaves as little, or so little that only rounding tells the two apart."""
    leaves_rounding = screen.is_exact((share, best[1])) and share < _INDISTINCT * best[0]
    return share < _AS_GOOD * best[0] or leaves_rounding
