"""Find values that are right but in the wrong place: outputs that are exchanged, and calls that get another tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parity.case.case import Rng
from parity.case.weight_map import WeightMap, names
from parity.mistakes.codes import repairable
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.reads import Layers, Place, described, edits_at, is_activation, made_again, places
from parity.numerics.errors import Tolerance, margin, measure
from parity.passes.nominal_clock import Work
from parity.result import Finding, TensorResult
from parity.search.failure import Budget, Failure
from parity.search.screen import FirstOrder, as_rows
from parity.trace.trace import RESHAPES, Trace, Value, back, grouped, unnumbered

# Outputs in the place of another output, or with rows in another order.


# An output in the place of another one.


def exchange_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if every failed output equals another output of the reference, within its tolerance."""
    failed = [result for result in failure.outputs if not result.passed]
    if len(failed) < 2:
        return
    stands_for = {one.label: [other.label for other in failed if _is(failure, one, other)] for one in failed}
    if all(len(labels) == 1 for labels in stands_for.values()):
        told = ", ".join(f"{label} is the reference's {labels[0]}" for label, labels in stands_for.items())
        if len({labels[0] for labels in stands_for.values()}) == len(failed):
            yield repairable("outputs-exchanged", told, "return them in the reference's order")


def _is(failure: Failure, one: TensorResult, other: TensorResult) -> bool:
    """Return whether the candidate's output equals another output of the reference."""
    candidate = failure.candidate[one.key]
    right = failure.golden[other.key]
    if one is other or candidate.shape != right.shape:
        return False
    bound = Tolerance(other.tolerance_relative_l2, other.tolerance_max_abs)
    return margin(measure(candidate, right, failure.precision.dtype), bound) <= 1.0


# Rows in another order: those of a batch, or the positions of a sequence.


_MOST = 2048  # rows, since each is compared with each
_LEAST = 8  # elements that a row must have: fewer are near to those of some other row by chance
_FEW = 4096  # elements of a row by which rows are told apart
_HELPS = 0.3  # of the error may be left; otherwise rows are only alike, for example all near zero


def order_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if every failed output is the reference's with rows, along one dimension, in another order."""
    failed = [result for result in failure.outputs if not result.passed]
    told: dict[str, list[str]] = {}
    for result in failed:
        found = _moved(failure.candidate[result.key], failure.golden[result.key], result.tolerance_relative_l2)
        if not found:
            return
        told.setdefault(found, []).append(result.label)
    for text, labels in told.items():
        yield repairable("rows-exchanged", f"{' and '.join(labels)}: {text}", "return rows in the reference's order")


def _moved(candidate: Tensor, golden: Tensor, limit: float) -> str:
    """Say which rows are in the place of which, if that leaves no more than the limit; else return an empty text.

    Rows are exchanged, or all but those at an end are shifted. If several have what belongs to one row, none is told,
    unless the reference's own rows are equal: wrong rows are often near to one that is small or like many others.
    """
    if candidate.shape != golden.shape:
        return ""
    for dim in range(golden.dim()):
        count = golden.shape[dim]
        if not 2 <= count <= _MOST or golden.numel() < _LEAST * count:
            continue
        own, right = (x.double().movedim(dim, 0).reshape(count, -1) for x in (candidate, golden))
        if own.shape[1] > _FEW:
            some = Rng(0, "elements of a row").integers(_FEW, high=own.shape[1]).to(own.device)
            own, right = own[:, some], right[:, some]
        of, equal = (torch.cdist(x, right).argmin(1) for x in (own, right))
        by = _shift(of)
        if not by and not torch.equal(equal[of].sort().values, equal.sort().values):
            continue
        kept = slice(max(-by, 0), count - max(by, 0)) if by else slice(None)
        off = (own - right[of])[kept].norm() / right[of][kept].norm()
        if bool(off <= limit) and bool(off <= _HELPS * (own - right)[kept].norm() / right[kept].norm()):
            return _in_words(of.tolist(), dim, by)
    return ""


def _shift(of: Tensor) -> int:
    """Return the shift that all rows share, except those at the end that it leaves without a source; 0 if none."""
    by = of - torch.arange(len(of), device=of.device)
    shift = int(by.median())
    kept = by[max(-shift, 0) : len(of) - max(shift, 0)]
    return shift if abs(shift) < len(of) // 2 and bool((kept == shift).all()) else 0


def _in_words(of: list[int], dim: int, by: int) -> str:
    count = len(of)
    if by:
        at = max(-by, 0)
        return f"dimension {dim} is shifted by {abs(by)}: index {at} has what belongs to index {at + by}, and so on"
    if of == list(range(count))[::-1]:
        return f"dimension {dim} is in reverse"
    wrong = [(i, j) for i, j in enumerate(of) if i != j]
    some = ", ".join(f"index {i} has what belongs to index {j}" for i, j in wrong[:3])
    return f"along dimension {dim}, {some}{f' and so on, {len(wrong)} of {count}' if len(wrong) > 3 else ''}"


# Calls that are given another tensor than the reference's, of the same shape.
#
# Examples are a skip connection from another layer, the gate of another branch, the other stream's keys, or a scale in
# the place of a shift. Any value that exists at that time may be read instead: by one call, by the same call of all
# layers, or by all calls that read a value. Two places may have each other's values, and a loop's rounds those of other
# rounds. A few passes show the first-order effect of each exchange on the outputs. Those whose effect is most like the
# candidate's error are tried.


_TRIED = 24  # the likeliest exchanges of each kind that are tried
_PAIRED = 512  # exchanges at one place, or at one place of each layer, that are combined in pairs
_PAIRS = 64  # the likeliest pairs, which are tried
_MOST_PARTS = 6  # parts of a tensor in a module
_MOST_ROUNDS = 12  # rounds of a loop
_MOST_ELEMENTS = 2**26  # elements of all values of one shape together
_COST = 0.02  # the penalty for each further place, in cosines, since small effects fit an error by chance
_LIKELY = 0.3  # only exchanges with at least this cosine with the error are tried
_DIGITS = 4  # cosines that agree in this many digits are equally likely; then the kind that is listed first comes first


@dataclass(frozen=True, eq=False)
class _Alike:
    """One place, or the same place of all layers, and the values that may stand there.

    Attributes:
        places: the places, in the order of the forward pass.
        others: for each value that may stand at the last place, the values at all places; None for a place without one.
        effects: the effect of each of them, ``[others, directions]``.
    """

    places: tuple[Place, ...]
    others: list[tuple[Value | None, ...]]
    effects: Tensor

    def exchange(self, index: int) -> _Exchange:
        pairs = zip(self.places, self.others[index], strict=True)
        return _Exchange(tuple((p, v) for p, v in pairs if v is not None and v != p.value), self.effects[index])


@dataclass(frozen=True, eq=False)
class _Exchange:
    """The values that stand at several places, and their first-order effect, ``[directions]``."""

    others: tuple[tuple[Place, Value], ...]
    effect: Tensor

    def together(self, other: _Exchange) -> _Exchange | None:
        """Join two exchanges; return None if they have a place in common."""
        both = (*self.others, *other.others)
        return _Exchange(both, self.effect + other.effect) if len({p for p, _ in both}) == len(both) else None


def other_operand_hypotheses(trace: Trace, first_order: FirstOrder, budget: Budget) -> Iterator[Hypothesis]:
    """Yield the exchanges that may explain the error, the likeliest first.

    Args:
        trace: the reference's trace in FP64.
        first_order: the error, and the first-order effects of changes in the trace.
        budget: the budget for finding the exchanges.
    """
    if not len(first_order.error):
        return
    for exchange in _Exchanges(trace, first_order, budget).likeliest():
        yield _hypothesis(exchange.others, trace)


class _Exchanges:
    """The exchanges that could be made in a trace, with their effects to first order."""

    def __init__(self, trace: Trace, first_order: FirstOrder, budget: Budget) -> None:
        self._trace = trace
        self._first_order = first_order
        self._budget = budget
        self._values, self._tensors = _by_shape(trace)
        self._layers = Layers(trace)
        self._effects: dict[Place, dict[int, Tensor]] = {}
        self._alone: list[_Alike] = []
        for place in places(trace):
            if not budget.spent():
                self._learn(place)
        self._in_layers = list(self._of_layers())

    def likeliest(self) -> list[_Exchange]:
        """Return the exchanges to try, the likeliest first."""
        alone = self._best_alone([*self._alone, *self._in_layers])
        kinds: list[Iterable[_Exchange]] = [self._of_two(), self._in_rounds(), self._of_calls(), self._pairs(alone)]
        found = [one for kind in kinds for one in self._best(kind, _TRIED)]
        return self._best([*alone[: 3 * _TRIED], *found], len(alone) + len(found))

    def _pairs(self, alone: Sequence[_Exchange]) -> Iterator[_Exchange]:
        """Yield the likeliest pairs of these exchanges."""
        if not alone:
            return
        effects = torch.stack([one.effect for one in alone])
        products = effects @ effects.T
        squares = products.diagonal()
        sizes = (squares[:, None] + squares + 2.0 * products).clamp(min=1e-30).sqrt()
        along = effects @ self._first_order.error
        aligned = ((along[:, None] + along) / sizes).triu(1).flatten()
        for index in aligned.argsort(descending=True)[:_PAIRS].tolist():
            both = alone[index // len(alone)].together(alone[index % len(alone)])
            if both is not None:
                yield both

    def _learn(self, place: Place) -> None:
        """Compute the effect that each other value would have at a place."""
        shape = tuple(self._trace.tensor(place.value).shape)
        values = self._values.get(shape, [])
        count = sum(value.number < place.before for value in values)
        gradient = self._gradient(place) if count > 1 else None
        if gradient is not None:
            self._budget.clock.spend(Work(2 * len(gradient), 2 * count * gradient.numel()))
            own = self._trace.tensor(place.value).float().flatten()
            effects = ((self._tensors[shape][:count] - own) @ gradient.T).cpu()
            self._alone.append(_Alike((place,), [(value,) for value in values[:count]], effects))
            self._effects[place] = dict(zip((value.number for value in values), effects, strict=False))

    def _gradient(self, place: Place) -> Tensor | None:
        """Return the gradient with respect to the value at a place, ``[directions, elements]``."""
        if place.position is None:
            gradient = self._first_order.gradient(place.value)
            return None if gradient is None else as_rows(gradient)
        call = place.call
        of_results = [self._first_order.gradient(value) for value in call.outputs]
        inputs = [self._trace.tensor(value) for value in call.inputs]
        inputs[place.position] = inputs[place.position].clone().requires_grad_()
        try:
            with torch.enable_grad():
                results = [x for x in tree_leaves(made_again(call, inputs)) if isinstance(x, Tensor)]
            known = [(x, g) for x, g in zip(results, of_results, strict=True) if g is not None and x.requires_grad]
            found = []
            for direction in range(len(self._first_order.error) if known else 0):
                given = [x for x, _ in known], [inputs[place.position]], [g[direction].to(x) for x, g in known]
                found.append(torch.autograd.grad(*given, retain_graph=True)[0].float().flatten())
            return torch.stack(found) if found else None
        except Exception:  # the call cannot be made again by itself
            return None

    def _of_layers(self) -> Iterator[_Alike]:
        """Yield the same place of several layers."""
        by_role = grouped(self._alone, lambda one: (one.places[0].role, one.places[0].position is None))
        for same in by_role.values():
            if len(same) < 2 or self._budget.spent():
                continue
            last, others, effects = same[-1], [], []
            for index, (value,) in enumerate(last.others):
                everywhere = [self._in_layer_of(one.places[0], value, last.places[0]) for one in same[:-1]]
                if any(everywhere):
                    others.append((*everywhere, value))
                    of_each = [self._effect(one.places[0], v) for one, v in zip(same, everywhere, strict=False)]
                    effects.append(torch.stack([*of_each, last.effects[index]]).sum(0))
            if others:
                yield _Alike(tuple(one.places[0] for one in same), others, torch.stack(effects))

    def _in_layer_of(self, place: Place, value: Value | None, last: Place) -> Value | None:
        """Return the value of a place's own layer that corresponds to ``value``; None if its effect is not known."""
        found = None if value is None else self._layers.elsewhere(value, last.numbers, place.numbers)
        return found if found is not None and found.number in self._effects[place] else None

    def _effect(self, place: Place, value: Value | None) -> Tensor:
        none = torch.zeros_like(self._first_order.error)
        return none if value is None else self._effects.get(place, {}).get(value.number, none)

    def _of_two(self) -> Iterator[_Exchange]:
        """Yield exchanges in which two places have each other's values, in one layer or in all."""
        for group in (self._alone, self._in_layers):
            for same in grouped(group, self._module_and_shape).values():
                for one, other in combinations(same, 2):
                    found = None if self._budget.spent() else self._exchanged(one, other)
                    if found is not None:
                        yield found

    def _module_and_shape(self, one: _Alike) -> tuple[object, ...]:
        place = one.places[-1]
        return place.call.site[:2], tuple(self._trace.tensor(place.value).shape), len(one.places)

    def _exchanged(self, one: _Alike, other: _Alike) -> _Exchange | None:
        pairs: list[tuple[Place, Value]] = []
        for first, second in zip(one.places, other.places, strict=True):
            self._budget.clock.spend(Work(1))
            if first.value == second.value:
                return None
            if second.value.number not in self._effects[first] or first.value.number not in self._effects[second]:
                return None
            pairs += [(first, second.value), (second, first.value)]
        return self._all(pairs)

    def _all(self, pairs: Sequence[tuple[Place, Value]]) -> _Exchange:
        return _Exchange(tuple(pairs), torch.stack([self._effect(*pair) for pair in pairs]).sum(0))

    def _in_rounds(self) -> Iterator[_Exchange]:
        """Yield exchanges in which the rounds of a loop read the values of other rounds."""
        loops: dict[object, list[Place]] = defaultdict(list)
        for (place,) in (one.places for one in self._alone):
            path, invocation, name, _ = place.call.site
            made = self._trace.producer(place.value)
            source = (unnumbered(made.site[0]), made.name) if made is not None else None
            shape = tuple(self._trace.tensor(place.value).shape)
            loops[unnumbered(path), invocation, name, place.position, shape, source].append(place)
        for rounds in loops.values():
            values = [place.value for place in rounds]
            for order in _orders(len(rounds)) if 1 < len(set(values)) == len(rounds) <= _MOST_ROUNDS else ():
                pairs = [(place, values[i]) for i, place in zip(order, rounds, strict=True) if values[i] != place.value]
                if all(value.number in self._effects[place] for place, value in pairs):
                    yield self._all(pairs)

    def _of_calls(self) -> Iterator[_Exchange]:
        """Yield exchanges of several parts of a tensor for another's, such as the other stream's keys and values."""
        for group in (self._alone, self._in_layers):
            by_calls: dict[object, dict[int, _Exchange]] = defaultdict(dict)
            for one in group if not self._budget.spent() else ():
                place = one.places[-1]
                own = self._part(place.value)
                for index, (*_, value) in enumerate(one.others if own is not None else ()):
                    other = self._part(value)
                    if own is not None and other is not None and own[1:] == other[1:] and own[0] != other[0]:
                        calls = place.call.site[:2], own[0], other[0], len(one.places)
                        by_calls[calls].setdefault(id(place), one.exchange(index))
            for parts in by_calls.values():
                some = list(parts.values())[:_MOST_PARTS]
                several = (combinations(some, count) for count in range(2, len(some) + 1))
                for exchanges in chain.from_iterable(several):
                    effect = torch.stack([one.effect for one in exchanges]).sum(0)
                    yield _Exchange(tuple(pair for one in exchanges for pair in one.others), effect)

    def _part(self, value: Value | None) -> tuple[object, int, int] | None:
        """Return the call of whose result a value is a part, even if reshaped, which part it is, and of how many."""
        root = back(self._trace, value, RESHAPES)
        made = self._trace.producer(root)
        if (
            made is None or root not in made.outputs or len(made.outputs) < 2
        ):  # else it was written to as a part of another tensor
            return None
        return made.site, made.outputs.index(root), len(made.outputs)

    def _best_alone(self, alike: Sequence[_Alike]) -> list[_Exchange]:
        """Return the likeliest exchanges among all values at all places."""
        if not alike:
            return []
        aligned = torch.cat([self._first_order.alignment(one.effects) for one in alike])
        where = [(one, index) for one in alike for index in range(len(one.others))]
        order = aligned.argsort(descending=True)[:_PAIRED].tolist()
        found = [where[i][0].exchange(where[i][1]) for i in order if aligned[i] > _LIKELY]
        return [one for one in found if one.others]

    def _best(self, exchanges: Iterable[_Exchange], most: int) -> list[_Exchange]:
        """Return at most ``most`` exchanges among those that are likely, the likeliest first."""
        known = [one for one in exchanges if one.others]
        if not known:
            return []
        aligned = self._first_order.alignment(torch.stack([one.effect for one in known]))
        places = torch.tensor([len({place.role for place, _ in one.others}) for one in known])
        likely = (aligned - _COST * places).round(decimals=_DIGITS)
        order = likely.argsort(descending=True, stable=True)[:most].tolist()
        return [known[i] for i in order if aligned[i] > _LIKELY]


def _orders(count: int) -> list[list[int]]:
    """Return the orders in which rounds may read others' values: in reverse, shifted by one, or all from one round."""
    last = count - 1
    return [
        [last - i for i in range(count)],
        [max(i - 1, 0) for i in range(count)],
        [min(i + 1, last) for i in range(count)],
        [(i - 1) % count for i in range(count)],
        [(i + 1) % count for i in range(count)],
        [0] * count,
        [last] * count,
    ]


def _by_shape(trace: Trace) -> tuple[dict[tuple[int, ...], list[Value]], dict[tuple[int, ...], Tensor]]:
    """Return the activations of each shape, in order, and all of them as rows."""
    values: dict[tuple[int, ...], dict[int, Value]] = defaultdict(dict)
    for call in trace.calls:
        for value in (*call.inputs, *call.outputs):
            if is_activation(trace, value) and back(trace, value) == value:
                values[tuple(trace.tensor(value).shape)][value.number] = value
    few = {
        shape: [some[number] for number in sorted(some)]
        for shape, some in values.items()
        if len(some) > 1 and len(some) * torch.Size(shape).numel() <= _MOST_ELEMENTS
    }
    return few, {shape: torch.stack([trace.tensor(x).float().flatten() for x in some]) for shape, some in few.items()}


def _hypothesis(others: Sequence[tuple[Place, Value]], trace: Trace) -> Hypothesis:
    alike = grouped(others, lambda pair: (pair[0].role, pair[0].position is None))
    told = [_told(trace, some) for some in alike.values()]
    return Hypothesis(
        "operation",
        "; ".join(f"{wrong} for {right}" for right, wrong in told),
        "; ".join(f"give {right}, as the reference does, not {wrong}" for right, wrong in told),
        edits_at(others, trace),
        scope="call",
    )


def _told(trace: Trace, some: Sequence[tuple[Place, Value]]) -> tuple[str, str]:
    """Say which value must be given to some places that are alike, and which value is given instead."""
    place, other = some[0]
    where = f"to the {place.call.described}" if place.position is not None else "to all that read it"
    others = f" and to {len(some) - 1} more like it" if len(some) > 1 else ""
    return f"{described(place.value, trace)} {where}{others}", described(other, trace)


# A submodule that is given another value than the reference's call with the same parameters.
#
# If the result decides which experts get a token, an exchange has no first-order effect, so the search above misses it.
# But the first submodule that differs shows which value of the reference it is given.


def misread_hypotheses(weights: WeightMap, trace: Trace, module: str, given: Value) -> Iterator[Hypothesis]:
    """Yield the mistake that a submodule of the candidate is given this value, in its own layer and in all.

    Args:
        weights: the pair's map, which says which of the reference's parameters the submodule holds.
        trace: the reference's trace in FP64.
        module: the submodule's path.
        given: a value of the reference.
    """
    own = {
        name
        for left, right in weights.items()
        if any(one.startswith(f"{module}.") for one in names(right))
        for name in names(left)
    }
    first = next((call for call in trace.calls if not own.isdisjoint(map(trace.parameter, call.inputs))), None)
    if first is None:
        return
    here, layers = Place(given, first), Layers(trace)
    found = []
    for call in (call for call in trace.calls if Place(given, call).role == here.role):
        value = layers.elsewhere(given, here.numbers, Place(given, call).numbers)
        position = next((i for i, one in enumerate(call.inputs) if is_activation(trace, one)), None)
        if value is not None and position is not None and value.number < Place(value, call).before:
            found.append((Place(call.inputs[position], call, position), value))
    for some in dict.fromkeys((tuple(one for one in found if one[0].call is first), tuple(found))):
        dims = [(trace.tensor(place.value).dim(), trace.tensor(value).dim()) for place, value in some]
        if some and all(own == other or own == 2 < other for own, other in dims):
            yield _hypothesis(some, trace)
