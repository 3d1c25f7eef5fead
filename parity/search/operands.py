"""Find calls of a candidate that are given another value than the reference's, in the stages where it departs.

Examples are a skip connection from another layer, the gate of another branch, the other stream's keys, or a router that
reads what is not normalised. Any value of the same shape that exists at that time may be read instead. Each is tried in
the stage that is off, from the candidate's own values, so that neither other stages nor a choice of experts hides it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.reads import Layers, Place, described, edits_at, is_activation, places
from parity.search.failure import Budget
from parity.search.located import Located
from parity.stages.judge import RATIO, Judged
from parity.trace.trace import Trace, Value, back, grouped

_Pairs = tuple[tuple[Place, Value], ...]

_MOST_PLACES = 4  # of one stage that are given other values
_TOGETHER = 8  # the most helpful exchanges, which are also tried in pairs


def other_operand_hypotheses(located: Located, trace: Trace, budget: Budget) -> Iterator[Hypothesis]:
    """Yield the exchange that makes every stage that is off right, then those of single stages.

    Args:
        located: where the candidate departs.
        trace: the reference's trace in FP64.
        budget: the budget for trying exchanges.
    """
    found: list[_Pairs] = []
    search = _Search(located, trace, budget)
    for one in located.stages.all:
        if one.stage.end in located.suspicion.flagged and not one.stage.backward and not budget.spent():
            pairs = search.find_exchange(one, found)
            found += [pairs] if pairs else []
    together = tuple(dict.fromkeys(pair for pairs in found for pair in pairs))
    if together:
        yield _make_hypothesis(together, trace)
    if len(found) > 1:
        yield from (_make_hypothesis(pairs, trace) for pairs in found)


class _Search:
    def __init__(self, located: Located, trace: Trace, budget: Budget) -> None:
        self._suspicion = located.suspicion
        self._trace = trace
        self._budget = budget
        self._layers = Layers(trace)
        self._values = _group_by_shape(trace)
        self._places: dict[object, list[Place]] = defaultdict(list)
        for place in places(trace):
            self._places[place.call.site].append(place)

    def find_exchange(self, one: Judged, known: Sequence[_Pairs]) -> _Pairs:
        """Return the exchange that makes a stage right, with what is known of earlier ones; empty for none.

        What makes another layer right is tried first.
        """
        here = [place for call in one.stage.calls for place in self._places[call.site]]
        earlier = tuple(pair for pairs in known for pair in pairs if pair[0] in here)
        if earlier and self._measure_left(one, earlier) <= RATIO:
            return earlier
        for pairs in known:
            moved = self._move_to_layer(pairs, [place for place in here if place not in dict(earlier)])
            if moved and self._measure_left(one, (*earlier, *moved)) <= RATIO:
                return (*earlier, *moved)
        singles: list[tuple[float, _Pairs]] = []
        for place in here:
            for value in self._values.get(tuple(self._trace.tensor(place.value).shape), ()):
                if value.number >= place.before or self._budget.spent():
                    break
                if value != place.value:
                    singles.append((self._measure_left(one, ((place, value),)), ((place, value),)))
        singles.sort(key=lambda entry: entry[0])
        if not singles or singles[0][0] <= RATIO:
            return singles[0][1] if singles else ()
        best = self._find_pair(one, here, [pairs for _, pairs in singles[:_TOGETHER]])
        return best if best and self._measure_left(one, best) <= RATIO else ()

    def _find_pair(self, one: Judged, here: Sequence[Place], likely: Sequence[_Pairs]) -> _Pairs:
        """Return the best of: two places with each other's values, and the likeliest exchanges made at once."""
        tried: list[_Pairs] = [
            ((a, b.value), (b, a.value))
            for a, b in combinations(here, 2)
            if a.value != b.value and a.call.site[:2] == b.call.site[:2] and self._may_exchange(a, b)
        ]
        for count in range(2, _MOST_PLACES + 1):
            for some in combinations(likely, count):
                places_of = [place for pairs in some for place, _ in pairs]
                if len(set(places_of)) == len(places_of):
                    tried.append(tuple(pair for pairs in some for pair in pairs))
        best: _Pairs = ()
        least = float("inf")
        for pairs in tried:
            if self._budget.spent():
                break
            left = self._measure_left(one, pairs)
            if left < least:
                best, least = pairs, left
            if left <= RATIO:
                break
        return best

    def _may_exchange(self, one: Place, other: Place) -> bool:
        shapes = (self._trace.tensor(place.value).shape for place in (one, other))
        return len(set(shapes)) == 1 and one.value.number < other.before and other.value.number < one.before

    def _move_to_layer(self, pairs: _Pairs, here: Sequence[Place]) -> _Pairs:
        """Return the same exchange in the layer of other places; empty if it has no such places or values."""
        moved = []
        for place, value in pairs:
            same = (each for each in here if each.role == place.role)
            there = next(same, None)
            other = None if there is None else self._layers.elsewhere(value, place.numbers, there.numbers)
            if there is None or other is None or other.number >= there.before:
                return ()
            moved.append((there, other))
        return tuple(moved)

    def _measure_left(self, one: Judged, pairs: _Pairs) -> float:
        return self._suspicion.ratio_of(one, Hypothesis("operation", "", "", edits_at(pairs, self._trace)))


def _group_by_shape(trace: Trace) -> Mapping[tuple[int, ...], list[Value]]:
    """Return the activations of each shape, in order; a matrix may also be a value of more dimensions, as rows."""
    values: dict[tuple[int, ...], dict[int, Value]] = defaultdict(dict)
    for call in trace.calls:
        for value in (*call.inputs, *call.outputs):
            if is_activation(trace, value) and back(trace, value) == value:
                shape = trace.tensor(value).shape
                for each in {tuple(shape), (shape[:-1].numel(), *shape[-1:])}:
                    values[each][value.number] = value
    return {shape: [some[number] for number in sorted(some)] for shape, some in values.items()}


def _make_hypothesis(others: _Pairs, trace: Trace) -> Hypothesis:
    alike = grouped(others, lambda pair: pair[0].role)
    told = [_describe_exchange(some, trace) for some in alike.values()]
    return Hypothesis(
        "operation",
        "; ".join(f"{wrong} for {right}" for right, wrong in told),
        "; ".join(f"give {right}, as the reference does, not {wrong}" for right, wrong in told),
        edits_at(others, trace),
        scope="call",
    )


def _describe_exchange(some: Sequence[tuple[Place, Value]], trace: Trace) -> tuple[str, str]:
    """Say which value must be given to some places that are alike, and which value is given instead."""
    place, other = some[0]
    others = f" and to {len(some) - 1} more like it" if len(some) > 1 else ""
    return f"{described(place.value, trace)} to the {place.call.described}{others}", described(other, trace)
