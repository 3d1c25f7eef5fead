"""Find which hypotheses explain a failure, at a bounded cost.

Every hypothesis is screened on one row of the batch, forward only and in FP32 if that is exact enough. Only the calls
that it reaches are made again. The hypotheses that bring the outputs nearest to the candidate's are then computed in
full (``parity.search.in_full``): their outputs in FP64, their rounding at the precision and, as long as neither refutes
them, their gradients. If none explains the failure, pairs of mistakes are tried: first the pairs that are likeliest by
the effect of each mistake alone (``parity.search.screen``), then other mistakes on top of the best partial
explanations.

A diagnosis may cost 20 times as much as the failed check, and a check counts for at least a second. Each part of the
diagnosis has a budget, which is counted by the amount of computation (``parity.passes.nominal_clock``). A limit of real
time may end the diagnosis earlier. Then everything that has been verified is reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice, takewhile

import torch

from parity.mistakes.alternatives import is_written
from parity.mistakes.hypothesis import Hypothesis, Scope, at_places, together
from parity.mistakes.replay import tensors_with
from parity.numerics.errors import TINY
from parity.passes.nominal_clock import OutOfTime
from parity.passes.prepare import calls_of
from parity.search.factors import scaled_outputs
from parity.search.failure import Budget, Failure, few_outputs, outputs_tell_little, while_it_lasts
from parity.search.in_full import Explanation, exceeds_norm_limit, hardly_less, row_by_row, verified
from parity.search.parts import in_parts
from parity.search.screen import (
    FAITHFUL,
    HELPS,
    HELPS_LITTLE,
    FirstOrder,
    GradientScreen,
    Ranked,
    Screen,
    sharper,
    tuned,
    tuned_pairs,
)
from parity.trace.trace import grouped, parameters_around

CHECKS_FOR_SEARCH = 6.0
"""The budget of the search for hypotheses, in costs of the failed check. A whole diagnosis may take 20."""

CHECKS_FOR_THE_REST = 4.0
"""The same for a search for wrong gradients or for roundings."""

CHECKS_FOR_PARTS = 3.0
"""The same for mistakes in a part of their place, which are tried before two mistakes at once."""

CHECKS_FOR_PAIRS = 2.0
"""The same for two mistakes at once, if less is left of the search's own budget."""

CHECKS_FOR_BORDERS = 1.0
"""The same for the borders of a port's sequences, and for positions that begin again."""

CHECKS_FOR_DECODING = 1.0
"""The same for mistakes of a port that decodes token by token."""

CHECKS_FOR_OPERANDS = 2.0
"""The same for calls that read other values than the reference's; half of it is for listing them."""

CHECKS_FOR_UNLIKELY = 2.0
"""The same for mistakes that change nothing where the candidate departs from its reference."""

_STAGES: tuple[tuple[Scope, ...], ...] = (("all", "kind"), ("one",), ("call",))  # an explanation in one ends the search
# The share of the budget that is spent at the end of each stage. The rest of a stage comes after all of them.
_SPENT_BY_STAGES = (0.5, 0.7, 0.85)
_SPENT_BY_ONE = 0.92  # the share of the budget after which two mistakes at once are tried
_FEW = 200  # this few mistakes are tried as they come, since finding likelier ones would take as long
_AT_ONE_PLACE = 0.6  # the share of a stage's budget for mistakes at single places
_FOR_SEVERAL = 0.05  # of the whole budget, whatever single places took: few mistakes are tried at several places
_FOR_CONSTANTS = 0.15  # of the whole budget, at most
_PARTS_THEMSELVES = 0.7  # of the budget for parts; the rest is for their constants
_VERIFIED = 5  # hypotheses that are computed in full, the best first
_TO_VERIFY = 0.1  # the least share of the error's square beyond rounding that a mistake computed in full explains
_VERIFIED_OF_FEW = 40  # the same if outputs are few numbers, which do not tell the right mistake from others
_LIKELY_PAIRS = 16  # pairs of mistakes, by the effect of each alone
_TUNED = 2  # how many of these pairs have their constants fitted
_SPENT_BY_PAIRS = 0.96  # the share of the budget that is spent after that
_FOR_RIVALS = 0.5  # costs of the failed check, to look for mistakes that fit as well as the first
_PARTIAL = 6  # partial explanations on which a second hypothesis is tried
_NEARLY_ONE = 0.1  # of two constants this close, only one is reported
AS_WELL = 1.02
"""Explanations whose misfits differ by a smaller factor fit equally well."""

_FAR_BETTER = 1.1  # a fitted constant comes before a known one only if the known one leaves this many times as much
_DIGITS = 3  # partial explanations have the same effect if the shares that they leave agree in this many digits
_LARGEST = {"norm-eps": 0.1}  # the largest number that people write for a mistake with this title
_SMALLEST = {"factor": 1e-6}  # the smallest; a fit that ends below it found that the product is best left out
_BOUNDED = ("norm-eps",)  # titles of mistakes whose number may be too small to matter
_WHOLE = ("window",)  # titles of mistakes whose number a search rounds to a whole one
_MOST_OF_IT = 0.1  # report a partial cause only if it leaves less than this share of the error
_BY_A_CONSTANT = 0.01  # the same if its constant was fitted, since the best eps or factor explains some of any error
_OF_MOST_ROWS = 0.3  # the same for the average error of a row
_FAMILIES = 6  # mistakes at one place of several that are also tried at more places
_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")  # the path of a module or a parameter; 0.5 is not one


@dataclass(frozen=True)
class _Search:
    """The tools of a search, and its first partial successes.

    Attributes:
        failure: the failure to explain.
        screen: ranks hypotheses, before any is computed in full.
        verified: computes a combination in full, each only once.
        by_gradients: ranks hypotheses by all failed tensors.
        almost: the first explanations that leave a tensor wrong.
    """

    failure: Failure
    screen: Screen | GradientScreen
    verified: Callable[[tuple[Hypothesis, ...]], Explanation | None]
    by_gradients: Callable[[], GradientScreen]
    almost: list[Explanation] = field(default_factory=list)

    def explanation(self, combination: tuple[Hypothesis, ...]) -> Explanation | None:
        """Return the explanation that a combination of hypotheses gives; None if it explains nothing.

        If one mistake leaves a tensor wrong, a second one must make that tensor's error smaller. Otherwise the tensor
        may pass only because rounding costs more under the second one.
        """
        found = self.verified(combination)
        if found is None:
            return None
        for one in self.almost:
            if one.left is not None and set(_titles(one)) < set(_titles(found)):
                now = [each for each in found.results if each.key == one.left.key and each.probed == one.left.probed]
                if any(hardly_less(each, one.left) for each in now):
                    return None
        return found


@dataclass
class _OneByOne:
    """The single mistakes that were tried.

    Attributes:
        tried: all of them.
        ranked: those that change anything, with known constants; sorted, best first, once none explains the failure.
        fitted: the same with fitted constants.
    """

    tried: set[Hypothesis] = field(default_factory=set)
    ranked: list[Ranked] = field(default_factory=list)
    fitted: list[Ranked] = field(default_factory=list)


@dataclass
class Screened:
    """The results of a search that found no explanation.

    Attributes:
        best: the mistake that leaves the least of the error, if that is little.
        helping: titles and names of the mistakes that explained a part of the error, or that no budget was left for.
        untried: how many mistakes no budget was left for.
    """

    best: Ranked | None = None
    helping: set[tuple[str, str]] = field(default_factory=set)
    untried: int = 0


def explanations(
    failure: Failure,
    hypotheses: Iterable[Hypothesis],
    budget: Budget,
    screened: Screened | None = None,
    first_order: Callable[[], FirstOrder] | None = None,
) -> list[Explanation]:
    """Return the explanations of the candidate's outputs, the best first; empty if there are none.

    Known constants are tried before others, mistakes at several places before those at one, mistakes with a meaning
    before single calls that are computed differently, and one mistake before two.

    Args:
        failure: a failure whose candidate's outputs are finite.
        hypotheses: the hypotheses to try, the likeliest first.
        budget: the search's budget.
        screened: is given the partial results, beside those that it has, if nothing explains the error.
        first_order: first-order effects of mistakes, by which those at single places are ordered and parts of a place
            are found; None to do neither.
    """
    known = list(hypotheses)
    if not known:
        return []
    screen = GradientScreen(failure) if outputs_tell_little(failure) else Screen(failure)
    search = _Search(failure, screen, cache(partial(verified, failure)), cache(partial(GradientScreen, failure)))
    one_by_one = _OneByOne()
    found = _by_stages(search, known, budget, partial(_promising_first, first_order), one_by_one)
    ranked = one_by_one.ranked
    if not found and first_order is not None:
        of_parts = failure.budget(CHECKS_FOR_PARTS)
        found = _complete(search, _in_parts(search, first_order, [one for _, (one,) in ranked], of_parts))
        budget = budget.longer_by(of_parts.passed)
    at_least = failure.budget(CHECKS_FOR_PAIRS)
    of_pairs = at_least if at_least.seconds > budget.left else budget
    found = found or _complete(search, _in_pairs(search, known, of_pairs, ranked)) or search.almost
    if screened is not None and not found:
        fitted = (entry for entry in one_by_one.fitted if entry[0] < _BY_A_CONSTANT)
        helping = (entry for entry in (*ranked, *fitted) if entry[1][0].scope != "call")
        best = min(helping, key=lambda entry: entry[0], default=None)
        if best is not None and best[0] < min(_MOST_OF_IT, math.inf if screened.best is None else screened.best[0]):
            screened.best = best
        help_a_bit = {one for share, (one,) in ranked if share < (HELPS_LITTLE if one.tuned else HELPS)}
        untried = set(known) - one_by_one.tried
        screened.helping |= {(one.title, one.name) for one in help_a_bit | untried}
        screened.untried += len(untried)
    return [_as_bound(search, one) for one in found]


def _as_bound(search: _Search, found: Explanation) -> Explanation:
    """Return the explanation, which says so if a number in it is only a bound, because 0 explains as much."""
    told = list(found.hypotheses)
    for i, one in enumerate(told):
        if one.title in _BOUNDED and one.tuned is not None and one.value:
            without = search.verified((*told[:i], one.tuned(0.0), *told[i + 1 :]))
            if without is not None and without.complete >= found.complete and without.misfit <= AS_WELL * found.misfit:
                told[i] = replace(one, repair=f"{one.repair}, or any smaller one: here, 0 has the same effect")
    return replace(found, hypotheses=tuple(told))


def _promising_first(first_order: Callable[[], FirstOrder] | None, some: Sequence[Hypothesis]) -> Sequence[Hypothesis]:
    return some if first_order is None or len(some) <= _FEW else first_order().promising_first(some)


def _by_stages(
    search: _Search,
    known: Sequence[Hypothesis],
    budget: Budget,
    ordered: Callable[[Sequence[Hypothesis]], Sequence[Hypothesis]],
    one_by_one: _OneByOne,
) -> list[Explanation]:
    """Return the explanations by one mistake, trying each scope in turn; ``one_by_one`` gets the mistakes tried."""
    tried = one_by_one.tried
    of_stages: list[list[Ranked]] = [[] for _ in _STAGES]
    stages = [
        _in_order(_nearest_first(search.failure, [one for one in known if one.scope in scopes]), of_stages[0], ordered)
        for scopes in _STAGES
    ]
    # A model of many layers has so many weights to get wrong that the budget may not last for other mistakes.
    for last in (False, True):
        for number, (stage, some) in enumerate(zip(stages, of_stages, strict=True)):
            at_one, spend = _shares(budget, number, last)
            before = len(some)
            found = _complete(search, _screened(search, ((one,) for one in _untried(stage, tried)), some, at_one))
            if last and len(some) == before:  # everything was tried
                continue
            if not found:
                at_several = _at_several(known, some, tried)
                found = _complete(search, _screened(search, at_several, some, budget.more(_FOR_SEVERAL)))
            for_constants = min(spend, budget.more(_FOR_CONSTANTS), key=lambda part: part.seconds)
            if not found or not exceeds_norm_limit(search.failure):
                fitted = tuned(search.screen, some, for_constants, _enough(search.failure))
                better = _verified(search, fitted, spend)
                if not any(one.complete for one in better):
                    better = _verified(search, _refitted(search, fitted, spend), spend) + better
                found = _complete(search, _clearly_better(better, found)) or found
            if found:
                return found
            one_by_one.fitted += fitted
    one_by_one.ranked += sorted((entry for some in of_stages for entry in some), key=lambda entry: entry[0])
    return []


def _clearly_better(some: list[Explanation], others: list[Explanation]) -> list[Explanation]:
    """Return complete explanations that fit clearly better than others, followed by these others.

    If there are no others, all are returned. If none is clearly better, the result is empty. If an error is below its
    noise, a mistake that the port does not make may pass with a known constant, before the right one's constant is
    fitted. The same mistake with a fitted constant must fit better than rounding does by chance, and another mistake
    must fit far better.
    """
    if not others:
        return some
    titles, best = [_titles(one) for one in others], min(one.misfit for one in others)
    better = [
        one for one in some if one.complete and (AS_WELL if _titles(one) in titles else _FAR_BETTER) * one.misfit < best
    ]
    return [*better, *others] if better else []


def _titles(one: Explanation) -> list[str]:
    return [hypothesis.title for hypothesis in one.hypotheses]


def _complete(search: _Search, found: list[Explanation]) -> list[Explanation]:
    """Return the explanations if one leaves nothing wrong, or only rounding in the tensor that fails by most.

    Otherwise the search goes on, and keeps the first ones. Once some are kept, an unusual number that leaves nothing
    wrong does not end the search, since it may fit by chance.
    """
    if any(_ends_the_search(one) and not (search.almost and _has_unusual(one)) for one in found):
        return found
    if not search.almost:
        search.almost.extend(found)
    return []


def _ends_the_search(one: Explanation) -> bool:
    left = one.left
    is_right = left is None or left.errors.relative_l2 <= FAITHFUL * left.expected.relative_l2
    return is_right and not one.against


def _has_unusual(one: Explanation) -> bool:
    return any(map(is_unusual, one.hypotheses))


def is_unusual(one: Hypothesis) -> bool:
    """Return whether a mistake is about a fitted number that people hardly ever write there."""
    if one.tuned is None or one.value is None:
        return False
    value = round(one.value) if one.title in _WHOLE else one.value
    return not is_written(value) or not _SMALLEST.get(one.title, 0.0) <= value <= _LARGEST.get(one.title, math.inf)


def _shares(budget: Budget, stage: int, last: bool) -> tuple[Budget, Budget]:
    """Return a stage's budgets: that for mistakes at single places, and that for the whole stage."""
    ends = (0.0, *_SPENT_BY_STAGES, _SPENT_BY_ONE)
    begin, end = ends[-2:] if last else ends[stage : stage + 2]
    return budget.share(begin + _AT_ONE_PLACE * (end - begin)), budget.share(end)


def _in_parts(
    search: _Search, first_order: Callable[[], FirstOrder], known: Sequence[Hypothesis], budget: Budget
) -> list[Explanation]:
    """Return the explanations by mistakes in a part of their place, with their known constants or fitted ones."""
    if isinstance(search.screen, GradientScreen):  # parts are found by outputs, which tell little
        return []
    parts = in_parts(search.failure, search.screen, first_order(), known, budget.share(_PARTS_THEMSELVES))
    ranked: list[Ranked] = []
    found = _screened(search, ((part,) for part in parts), ranked, budget.share(_PARTS_THEMSELVES))
    enough = _enough(search.failure)
    return found or _verified(search, tuned(search.screen, ranked, budget, enough, len(ranked)), budget)


def _in_pairs(
    search: _Search,
    known: Sequence[Hypothesis],
    budget: Budget,
    ranked: Sequence[Ranked],
) -> list[Explanation]:
    """Return the explanations by two mistakes.

    The pairs that are likeliest by the effect of each mistake alone are tried first, then each of the mistakes that
    help most together with any other.
    """
    found = _of_likely_pairs(search, known, budget)
    partial_ones = {round(share, _DIGITS): first for share, (first,) in reversed(ranked) if share < HELPS}
    for first in list(reversed(partial_ones.values()))[:_PARTIAL]:
        if not found and not budget.spent():
            others = (one for one in search.screen.effects.beside(first, known) if one.scope != "call")
            pairs = ((first, second) for second in others if _go_together(first, second))
            found = _screened(search, pairs, [], budget)
    return found


def _of_likely_pairs(search: _Search, known: Sequence[Hypothesis], budget: Budget) -> list[Explanation]:
    """Return the explanations among the likeliest pairs, with their known constants or fitted ones."""
    scaled = [scaled_outputs(2.0), scaled_outputs(0.5)]
    list(
        search.screen.shares([(one,) for one in scaled], budget)
    )  # this notes their effects; alone, they need no search
    likely = search.screen.effects.likely_pairs([*scaled, *known], _LIKELY_PAIRS, _go_together)
    pairs: list[Ranked] = []
    found = _screened(search, map(_as_one_if_alike, likely.as_they_are), pairs, budget)
    found = found or _screened(search, map(_as_one_if_alike, likely.by_multiples), pairs, budget)
    if found:
        return found
    to_be_tuned = [*likely.by_multiples[:_TUNED], *(pair for _, pair in pairs[:_TUNED])]
    enough = _enough(search.failure)
    best = tuned_pairs(search.screen, to_be_tuned, budget.share(_SPENT_BY_PAIRS), enough)
    return _verified(search, best, budget)


def partly_explained(failure: Failure, combination: tuple[Hypothesis, ...]) -> tuple[str, float, float] | None:
    """Return the label of the output whose error falls least under the mistakes, and its error before and after.

    The result is None if the mistakes do not explain most of each error.
    """
    golden = tensors_with(failure.prepared, combination)
    if golden is None:
        return None
    found = []
    for result in (result for result in failure.outputs if not result.passed):
        key = result.key
        right, candidate, was = golden[key].double(), failure.candidate[key].double(), failure.golden[key]
        if right.shape != was.shape or row_by_row(right, candidate) > _OF_MOST_ROWS * row_by_row(was, candidate):
            return None  # only a few large rows are explained, not the whole error
        after = torch.linalg.vector_norm(candidate - right) / torch.linalg.vector_norm(right).clamp(min=TINY)
        found.append((result.label, result.errors.relative_l2, after.item()))
    worst = max(found, key=lambda one: one[2] / max(one[1], TINY), default=None)
    return worst if worst is not None and worst[2] < _MOST_OF_IT * worst[1] else None


def _nearest_first(failure: Failure, known: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the hypotheses, those near the parameter whose gradient is farthest off first.

    A budget may not last for every layer of a model, and it lasts least if only gradients tell mistakes apart. Then
    nearness is judged by the parameters in a mistake's name. A mistake whose name has none is made everywhere, so it
    counts as near. Single calls are then ordered by the gradients that they may change.
    """
    gradients = [one for one in failure.results if one.kind == "weight gradient" and not one.passed]
    worst = max(gradients, key=lambda one: one.margin, default=None)
    if worst is None:
        return list(known)
    by_name = outputs_tell_little(failure)
    if by_name and all(one.scope == "call" for one in known):
        return _by_what_they_change(failure, known)

    def near(one: Hypothesis) -> int:
        paths = _PATH.findall(one.name) if by_name else [one.place]
        return max((_shared(path, worst.name) for path in paths), default=len(worst.name))

    return sorted(known, key=near, reverse=True)


def _by_what_they_change(failure: Failure, known: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return mistakes in single calls, ordered by the gradients that they change.

    Those that change the fewest right gradients come first, and among these, those that most wrong gradients flow
    back through.
    """
    trace = calls_of(failure.prepared).trace
    around = dict(zip((call.site for call in trace.calls), parameters_around(trace), strict=True))
    right, wrong = (
        {one.name for one in failure.results if one.kind == "weight gradient" and one.passed == passed}
        for passed in (True, False)
    )

    def order(one: Hypothesis) -> tuple[int, int]:
        changed = [around[edit.site] for edit in one.edits if edit.site in around]
        before, after = (set().union(*some) for some in zip(*changed, strict=True)) if changed else (set(), set())
        return len(right & (before | after)), -len(wrong & before)

    return sorted(known, key=order)


def _in_order(
    some: Sequence[Hypothesis],
    everywhere: Sequence[Ranked],
    ordered: Callable[[Sequence[Hypothesis]], Sequence[Hypothesis]],
) -> Iterator[Hypothesis]:
    """Yield mistakes in the order in which to try them, first those that help if they are made everywhere.

    Whether they do is looked up in ``everywhere``, which may grow until the first one is tried. The others follow in
    their order. Only those at single places or in single calls, and those beyond the first ``_FEW``, are put in order
    by ``ordered``.
    """
    shares = {(one.title, one.name): share for share, (one, *_) in everywhere if share < HELPS}
    helping = [one for one in some if (one.title, one.family[0]) in shares]
    yield from sorted(helping, key=lambda one: shares[one.title, one.family[0]])
    others = [one for one in some if (one.title, one.family[0]) not in shares]
    several = [one for one in others if one.scope in ("all", "kind")]
    yield from several[:_FEW]
    yield from ordered(several[_FEW:])
    single = [one for one in others if one.scope not in ("all", "kind")]
    yield from ordered(single) if single else ()


def _shared(path: str, name: str) -> int:
    """Return how many leading modules two dotted paths have in common."""
    pairs = zip(path.split("."), name.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _screened(
    search: _Search,
    combinations: Iterable[tuple[Hypothesis, ...]],
    ranked: list[Ranked],
    budget: Budget,
) -> list[Explanation]:
    """Return the explanations among combinations, ending the search at one that leaves no more than rounding costs.

    ``ranked`` gets every combination that changes anything, the best first.
    """
    entries = search.screen.shares(combinations, budget)
    for entry in entries:
        ranked.append(entry)
        if search.screen.is_exact(entry):
            for nearest in (*sharper(search.screen, entry, budget), entry):
                explanation = search.explanation(nearest[1])
                if explanation is not None and explanation.complete and not explanation.against:
                    return [
                        *_best_of_its_place(search, explanation, nearest, entries),
                        *_find_rivals(search, explanation, nearest, entries),
                    ]
    ranked.sort(key=lambda entry: entry[0])
    return _verified(search, ranked, budget)


def _best_of_its_place(
    search: _Search, found: Explanation, entry: Ranked, entries: Iterable[Ranked]
) -> list[Explanation]:
    """Return a complete explanation, preceded by those that fit better among the next mistakes in the same calls.

    If rounding hides much, the first mistake to pass may only be close to the right one.
    """
    sites = _sites(entry[1])
    beside = takewhile(lambda other: _sites(other[1]) == sites, entries if sites else ())
    likelier = [combination for share, combination in beside if AS_WELL * share < entry[0]]
    others = [search.explanation(combination) for combination in likelier[:_VERIFIED]]
    better = [one for one in others if one is not None and one.complete and AS_WELL * one.misfit < found.misfit]
    return [*sorted(better, key=lambda one: one.misfit), found]


def _find_rivals(
    search: _Search, found: Explanation, entry: Ranked, entries: Iterable[Ranked]
) -> Iterator[Explanation]:
    """Yield explanations of another kind that fit as well as a complete one, among the mistakes that come next in FP8.

    What FP8 costs hides the difference of two mistakes, so the first one to pass is no better than the second.
    """
    if search.failure.precision.recipe is None:
        return
    next_ones = while_it_lasts(entries, search.failure.budget(_FOR_RIVALS))
    likely = (combination for share, combination in next_ones if share <= AS_WELL * entry[0])
    for combination in islice(likely, _VERIFIED):
        one = search.explanation(combination)
        if one is not None and one.complete and _titles(one) != _titles(found) and one.misfit <= AS_WELL * found.misfit:
            yield one


def _sites(combination: tuple[Hypothesis, ...]) -> list[object]:
    return [edit.site for one in combination for edit in one.edits]


def _at_several(
    known: Sequence[Hypothesis], ranked: Sequence[Ranked], tried: set[Hypothesis]
) -> Iterator[tuple[Hypothesis, ...]]:
    """Yield the mistakes that help most at one place, now at each other place, then at the best two, three and so on.

    Args:
        known: hypotheses of all families.
        ranked: the combinations that were screened; the list may grow during the iteration.
        tried: the hypotheses that were screened; those that are yielded are added.
    """
    likeliest = {
        (one.title, one.family): None for share, (one, *more) in ranked if _helps_somewhere(share, one) and not more
    }
    for family in list(likeliest)[:_FAMILIES]:
        elsewhere = [one for one in known if one.place and (one.title, one.family) == family]
        yield from ((one,) for one in _untried(elsewhere, tried))
        shares = [(share, one) for share, (one, *_) in ranked if _helps_somewhere(share, one) and one in elsewhere]
        same = [one for _, one in sorted(shares, key=lambda entry: entry[0])]
        yield from ((at_places(same[:count]),) for count in range(2, len(same) + 1))


def _helps_somewhere(share: float, one: Hypothesis) -> bool:
    return share < HELPS_LITTLE and bool(one.place)


def _untried(some: Iterable[Hypothesis], tried: set[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield the mistakes that were not tried yet, and add them to the tried ones."""
    for one in some:
        if one not in tried:
            tried.add(one)
            yield one


def _go_together(first: Hypothesis, second: Hypothesis) -> bool:
    """Return whether both mistakes can be made at once because they change different things."""
    return first is not second and together(first.edits, second.edits) is not None


def _verified(search: _Search, ranked: Sequence[Ranked], budget: Budget) -> list[Explanation]:
    """Return the explanations among the best screened combinations, those that fit best first."""
    found: list[Explanation] = []
    failure, by_gradients = search.failure, outputs_tell_little(search.failure)
    enough = _enough(failure)
    helping = [combination for share, combination in ranked if share < enough]
    most = _VERIFIED_OF_FEW if few_outputs(failure) and not by_gradients else _VERIFIED
    with suppress(OutOfTime):
        for tried, combination in enumerate(_one_of_each_name(helping)[:most]):
            if budget.spent() and (found or tried >= _VERIFIED):
                break
            if any(one.complete and _are_nearly_one(one.hypotheses, combination) for one in found):
                continue
            explanation = search.explanation(combination)
            if explanation is not None:
                found.append(explanation)
    best = min((one.misfit for one in found if one.complete), default=math.inf)
    # Explanations that fit equally well up to rounding stay in the order of the screen, which is not chance, except
    # that numbers that people write come first.
    return sorted(
        found, key=lambda one: (bool(one.against), not one.complete, max(one.misfit, AS_WELL * best), _has_unusual(one))
    )


def _refitted(search: _Search, fitted: Sequence[Ranked], budget: Budget) -> list[Ranked]:
    """Return the fitted mistakes that help most, with the constants that fit all failed tensors best.

    The screen fits only the outputs of one row, and rounding may shift the best constant there away from the right one.
    """
    if isinstance(search.screen, GradientScreen):
        return []
    enough = _enough(search.failure, 1.0 - HELPS**2)
    helping = {(one.title, one.scope, one.place): one for share, (one,) in reversed(fitted) if share < enough}
    if not helping or budget.spent():
        return []
    screen = search.by_gradients()
    # Whatever share the screen's constant leaves, another one near it may leave less.
    return [entry for one in helping.values() for entry in sharper(screen, (math.inf, (one,)), budget)]


def _enough(failure: Failure, explained: float = _TO_VERIFY) -> float:
    """Return the share of the error that is left if this share of its square beyond rounding is explained."""
    by_gradients = outputs_tell_little(failure)
    if not exceeds_norm_limit(failure) and not by_gradients:
        return HELPS_LITTLE
    results = [one for one in failure.results if not one.passed and one.finite] if by_gradients else failure.outputs
    error, noise = (
        math.hypot(
            *(x.relative_l2 / max(one.tolerance_relative_l2, TINY) for x, one in zip(some, results, strict=True))
        )
        for some in ([one.errors for one in results], [one.expected for one in results])
    )
    beyond = max(1.0 - (noise / max(error, TINY)) ** 2, 0.0)
    return min(math.sqrt(1.0 - explained * beyond), HELPS_LITTLE)


def _are_nearly_one(some: tuple[Hypothesis, ...], others: tuple[Hypothesis, ...]) -> bool:
    """Return whether two combinations are the same single mistake with nearly the same constant."""
    if len(some) != 1 or len(others) != 1:
        return False
    (one,), (other,) = some, others
    alike = (one.title, one.scope, one.place) == (other.title, other.scope, other.place)
    return (
        alike
        and one.value is not None
        and other.value is not None
        and math.isclose(one.value, other.value, rel_tol=_NEARLY_ONE)
    )


def _as_one_if_alike(pair: tuple[Hypothesis, Hypothesis]) -> tuple[Hypothesis, ...]:
    """Return one combined mistake if the two are the same mistake at two places, else the pair."""
    first, second = pair
    alike = first.place and second.place and (first.title, first.family) == (second.title, second.family)
    return (at_places(pair),) if alike else pair


def _one_of_each_name(combinations: Sequence[tuple[Hypothesis, ...]]) -> list[tuple[Hypothesis, ...]]:
    return [some[0] for some in grouped(combinations, lambda ones: tuple(one.name for one in ones)).values()]
