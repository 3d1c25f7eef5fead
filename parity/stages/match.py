"""Match a candidate's values with those of its reference.

The candidate is walked in the order of its calls. What is matched is put into the reference at once, so that later
values are compared free of earlier errors. In order of evidence:

1. *weights*: what a linear layer of the candidate returns is what the reference's layer with the mapped weight does;
2. *agrees*: a value equals one of the reference's that is computed from the same parameters, up to its layout;
3. *next*: a value that agrees with nothing is assumed to be one of those, if what follows then agrees;
4. *output*: an output of the pair is the output of this name.

A value that fits nothing stays unmatched, and its stage is longer.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from parity.case.weight_map import WeightMap, names
from parity.stages.graph import MOVES, PICKS, Graph, Values
from parity.stages.layouts import Layout, layouts, sample_of
from parity.stages.token_rows import TokenRows, find_rows, may_share_rows
from parity.stages.watch import SMALLEST, Watched
from parity.stages.weight_rows import WeightRows
from parity.trace.calls import Misfit
from parity.trace.trace import LINEAR, Call, Value, added

Evidence = Literal["weights", "agrees", "next", "output"]

_ROUNDINGS = 3.0  # values agree if they differ by less than this many unit roundoffs of the stored dtype, relatively
_AS_NEAR = 1.02  # values whose distances differ by a smaller factor are as near
_UNRELATED = 1.2  # two unrelated values of the same norm differ by 1.4 times it
_RELATED = 0.28  # their cosine at this distance; for other norms the distance tells less
_MOST_ASSUMED = 3  # arguments of one call, such as q, k and v
_MOST_CHOICES = 6  # values that an argument may be
_MOST_COMBINATIONS = 48
_TRIES = 4  # values in which rows are looked for, since only those before the first layer are nearly exact
_GRAPH = "te.Graphed"  # replays a CUDA graph of whole layers, which may end with anything
_MULTIPLIES = LINEAR | {"embedding", "conv1d", "conv2d", "conv3d"}


@dataclass(frozen=True)
class Match:
    """A value that both sides compute.

    Attributes:
        watched: the candidate's.
        value: the reference's.
        arrange: returns a tensor in the layout of ``watched``, such as its gradient, in the reference's layout.
        evidence: why they are taken for the same.
        end: the candidate's tensor in the reference's layout, in FP64, as it was computed.
        begin: the same as later calls read it, such as after a cast.
        distance: how far the two were apart when they were matched, relatively.
        replaced: whether an earlier value agreed, and the candidate went on with this one in its place.
        rows: which tokens it holds; None if these are the reference's.
    """

    watched: Watched
    value: Value
    arrange: Callable[[Tensor], Tensor]
    evidence: Evidence
    end: Tensor
    begin: Tensor
    distance: float
    replaced: bool = False
    rows: TokenRows | None = None


@dataclass(frozen=True)
class _Hit:
    """A reference's value that a candidate's may be, and how far they are apart, relative to the reference's norm."""

    distance: float
    value: Value
    arrange: Callable[[Tensor], Tensor]
    tensor: Tensor
    layout: Layout | None = None
    rows: TokenRows | None = None
    held: Tensor | None = None  # what of the value the candidate has; None for all


class Matcher:
    """Matches the values of one pass.

    Args:
        graph: the reference's.
        unit: the unit roundoff of the dtype in which the candidate stores values.
        rows: see ``weight_rows``.
        weights: the weight map.

    Attributes:
        found: the matches, by the reference's value's number.
        unmatched: activations that fit nothing.
    """

    def __init__(self, graph: Graph, unit: float, rows: Mapping[str, WeightRows], weights: WeightMap) -> None:
        self.found: dict[int, Match] = {}
        self.unmatched: list[Watched] = []
        self._graph = graph
        self._values = Values(graph)
        self._unit = unit
        self._rows = rows
        self._together = _held_together(graph, weights)
        self._of: dict[Watched, list[Match]] = {}  # what a value, or one that it was moved from, was matched with
        self._uses = _uses_of_weights(graph)
        self._used = 0  # the parameters that any of the candidate's values is computed from
        self._likely: dict[int, list[Value]] = {}  # by a candidate's lineage
        self._norms: dict[int, tuple[Tensor, float]] = {}
        self._token_rows: list[TokenRows] = []
        self._tried: Counter[int] = Counter()  # values in which rows were looked for, by how many they have
        self._token_orders: set[tuple[object, ...]] = set()  # of the values that agree

    def match(self, seen: Sequence[Watched], outputs: Mapping[str, Tensor]) -> None:
        """Match the values of a pass.

        Args:
            seen: the candidate's values, in order.
            outputs: the pair's outputs, by name, as the candidate returned them.
        """
        self._used = self._graph.bits(frozenset[str]().union(*(one.lineage for one in seen)))
        for one in seen:
            if not one.is_activation or self._is_known(one) or not bool(torch.isfinite(one.tensor).all()):
                continue
            if not self._match_value(one):
                self.unmatched.append(one)
        for name, x in outputs.items():
            self._match_output(name, x, seen)

    def _match_value(self, one: Watched) -> bool:
        """Match a value of the candidate's if it fits one, or several with rows of each; return whether it does."""
        hits = self._by_weights(one)
        near = [] if hits else self._list_agreeing(one, self._values)
        if one.name == _GRAPH and not near:
            nearest = self._list_choices(one)[:1]
            for hit in nearest:
                self._take_match(one, hit, "next")
            return bool(nearest)
        agrees = bool(near) or (bool(hits) and max(hit.distance for hit in hits) <= self._most)
        if not agrees and self._learn_rows(one, self._likely_values(one)):
            hits = self._by_weights(one)
            near = [] if hits else self._list_agreeing(one, self._values)
        if hits and max(hit.distance for hit in hits) > self._most and self._assume_arguments(one, hits):
            hits = self._by_weights(one)
        is_matched = bool(hits)
        while hits:
            for hit in hits:
                self._take_match(one, hit, "weights")
            # The same layer may be called again, with other rows.
            hits = [hit for hit in self._by_weights(one) if hit.rows is not None and hit.distance <= self._most]
        if is_matched:
            return True
        if not near and self._assume_arguments(one, ()):
            near = self._list_agreeing(one, self._values)
        for hit in near:
            self._take_match(one, hit, "agrees")
        return bool(near)

    @property
    def _most(self) -> float:
        return _ROUNDINGS * self._unit

    def _take_match(self, one: Watched, hit: _Hit, evidence: Evidence) -> None:
        end = hit.tensor.double().clone()
        rows = self._graph.rows_read(hit.value, end)
        if hit.held is not None:
            rows = hit.held if rows is None else rows & hit.held
            self._graph.read[hit.value.number] = rows
        if rows is not None:  # whatever is in a row that nothing reads may go on as the reference has it
            now = self._compute_value(hit.value, self._values)
            end = end if now is None else torch.where(rows, end, now)
        before = self.found.get(hit.value.number)
        agreed = before is not None and before.distance <= self._most
        match = Match(one, hit.value, hit.arrange, evidence, end, end, hit.distance, agreed, hit.rows)
        self.found[hit.value.number] = match
        self._of.setdefault(one, []).append(match)
        self._values.give(hit.value, end)
        self._norms.clear()
        if hit.layout is not None and hit.distance <= self._most:
            self._token_orders.add(_token_order(hit.layout))

    # Values that are known without a comparison.

    def _is_known(self, one: Watched) -> bool:
        """Return whether a value is one that was matched, moved or cast; what is cast is what later calls read."""
        if not one.parents or one.weights:
            return False
        sources = [parent for parent in one.parents if parent.is_activation]
        if not sources or any(source not in self._of for source in sources):
            return False
        if one.name in MOVES:
            self._narrow_begins(one, sources)
            is_rearranged = len(sources) > 1 or sources[0].tensor.shape != one.tensor.shape
            if is_rearranged and one.tensor.dim() > 1:  # such as rows that fill up packed sequences
                self._learn_rows(one, [match.value for source in sources for match in self._of[source]])
            self._of[one] = [match for source in sources for match in self._of[source]]
            return True
        same = [x for x in sources if _holds_the_same(one.tensor, x.tensor)]
        if same:
            self._of[one] = self._of[same[0]]
        return bool(same)

    def _narrow_begins(self, one: Watched, sources: Sequence[Watched]) -> None:
        """Let later stages begin from values as they were cast to 16 bits, if the port casts matched ones whole."""
        for source in sources:
            if one.tensor.element_size() >= source.tensor.element_size():
                continue
            for match in self._of[source]:
                is_whole = one.tensor.numel() >= match.watched.tensor.numel()
                if is_whole and self.found.get(match.value.number) is match:
                    begin = match.begin.to(one.tensor.dtype).double()
                    changed = replace(match, begin=begin)
                    self._of[source] = [changed if other is match else other for other in self._of[source]]
                    self.found[match.value.number] = changed
                    self._values.give(match.value, begin)

    # What linear layers return.

    def _by_weights(self, one: Watched, values: Values | None = None) -> list[_Hit]:
        """Return what the reference's linear layers with the weights of the candidate's return."""
        multiplies = one.is_of_te or one.name in _MULTIPLIES or one.name.startswith("module ")
        if not one.weights or not multiplies or one.name == _GRAPH:
            return []
        hits: list[_Hit] = []
        for name in one.weights:
            held = self._rows.get(name)
            width = one.tensor.shape[-1]
            if held is None:
                continue
            for theirs, columns in held.columns.items():
                uses = self._uses.get(theirs, ())
                call = next((use for use in uses if self._is_free(use, one, len(uses) == 1)), None)
                if call is None:
                    continue
                wanted = self._graph.trace.tensor(self._result_of(call, one)).shape
                if call.name == "embedding":
                    columns = torch.arange(width)
                if (call.name != "embedding" and width != held.size) or len(columns) != wanted[-1]:
                    continue
                hit = self._best_arrangement(one, call, columns, values or self._values)
                if hit is not None:
                    hits.append(hit)
        # What a function with several layers returns is what its last one does.
        return [one for one in hits if not any(self._graph.is_above(one.value, other.value) for other in hits)]

    def _is_free(self, use: Call, one: Watched, is_only: bool) -> bool:
        """Return whether a use of a weight is still to be matched, and is the only one or made of what is the same."""
        value = self._result_of(use, one)
        if value.number in self.found or is_only:
            return value.number not in self.found
        lineage, other = self._graph.bits(one.lineage), self._graph.lineage(value)
        missing = other & self._used & ~lineage  # TE may add a bias later
        only_biases = all(name.endswith("bias") for name in self._graph.names(missing))
        return only_biases and self._is_made_alike(lineage | other if missing else lineage, other)

    def _result_of(self, use: Call, one: Watched) -> Value:
        """Return what a layer of the reference returns, after a bias that it adds later if the candidate's has it."""
        value = use.outputs[0]
        lineage = self._graph.bits(one.lineage)
        for user in self._graph.trace.users(value):
            terms = added(user)
            bias = next((term for term in terms or () if term.number in self._graph.trace.parameters), value)
            of_bias = self._graph.lineage(bias)
            if of_bias & lineage and not of_bias & self._graph.lineage(value):
                return user.outputs[0]
        return value

    def _best_arrangement(self, one: Watched, call: Call, columns: Tensor, values: Values) -> _Hit | None:
        value = self._result_of(call, one)
        y = self._compute_value(value, values)
        if y is None:
            return None
        bias = call.args[2] if call.name == "linear" and len(call.args) > 2 else call.kwargs.get("bias")
        added_later = isinstance(bias, Value) and not self._graph.lineage(bias) & self._graph.bits(one.lineage)
        lacks_bias = added_later and isinstance(bias, Value) and bool(self._graph.lineage(bias) & self._used)
        addend = self._graph.trace.tensor(bias).double() if lacks_bias and isinstance(bias, Value) else 0.0
        found: list[_Hit] = []
        for rows in self._rows_of(one.tensor):
            picked = (*_shape_in(rows, one.tensor)[:-1], len(columns))
            for layout in layouts(picked, tuple(y.shape)):
                if layout.is_whole and math.prod(picked) == y.numel():
                    found.append(self._measure_hit(one.tensor, y, value, layout, rows, columns, addend))
        return self._choose_nearest(found)

    def _measure_hit(
        self,
        x: Tensor,
        y: Tensor,
        value: Value,
        layout: Layout,
        rows: TokenRows | None,
        columns: Tensor | None = None,
        addend: Tensor | float = 0.0,
    ) -> _Hit:
        arrange = _compose_arrangement(rows, layout, columns)
        held = None if rows is None or rows.is_whole else arrange(torch.ones_like(x)).bool()
        tensor = arrange(x).double() + addend
        return _Hit(self._measure_distance(tensor, y, value, held), value, arrange, tensor, layout, rows, held)

    # Tokens that only one side has.

    def _rows_of(self, x: Tensor) -> list[TokenRows | None]:
        """Return in which rows of the reference a value of the candidate's may be: as they are, or as was learned."""
        return [None, *(rows for rows in self._token_rows if rows.fits(x))]

    def _learn_rows(self, one: Watched, among: Sequence[Value]) -> bool:
        """Learn from a value which tokens the candidate holds, if these are some of those of one of the reference's."""
        count = one.tensor.shape[:-1].numel()
        if self._tried[count] == _TRIES:
            return False
        self._tried[count] += 1
        before = len(self._token_rows)
        for value in among:
            may_share = may_share_rows(one.tensor, self._graph.trace.tensor(value))
            y = self._compute_value(value, self._values) if may_share else None
            found = None if y is None else find_rows(one.tensor, y, self._most)
            if found is not None and not any(map(found.equals, self._token_rows)):
                self._token_rows.append(found)
        return len(self._token_rows) > before

    def _choose_nearest(self, hits: Sequence[_Hit]) -> _Hit | None:
        """Return the nearest of one value's layouts; for a value that is wrong, among those of values that agree."""
        nearest = min(hits, key=lambda hit: hit.distance, default=None)
        if nearest is None or nearest.distance <= self._most:
            return nearest
        hits = [hit for hit in hits if self._has_only_rows(hit)]
        nearest = min(hits, key=lambda hit: hit.distance, default=None)
        known = [hit for hit in hits if hit.layout is not None and _token_order(hit.layout) in self._token_orders]
        return min(known, key=lambda hit: hit.distance, default=nearest)

    def _has_only_rows(self, hit: _Hit) -> bool:
        """Return whether a value's tokens are known without its numbers: two experts may be given equally many."""
        if hit.rows is None:
            return True
        alike = [rows for rows in self._token_rows if (rows.count, rows.shape) == (hit.rows.count, hit.rows.shape)]
        above = (match for match in self.found.values() if match.rows is hit.rows)
        return len(alike) == 1 or any(self._graph.is_above(match.value, hit.value) for match in above)

    # Values that agree.

    def _find_agreeing(self, one: Watched, values: Values, below: Sequence[Value] = ()) -> _Hit | None:
        """Return the value that the candidate's equals up to rounding: the nearest, and the first of those as near."""
        return next(iter(self._list_agreeing(one, values, below)), None)

    def _list_agreeing(self, one: Watched, values: Values, below: Sequence[Value] = ()) -> list[_Hit]:
        """Return the same, and for other rows of the candidate's value the values that these equal."""
        x = one.tensor.double()
        hits = [
            hit
            for value in self._likely_values(one)
            if not self._is_moved(value) and all(self._graph.is_above(other, value) for other in below)
            for hit in self._compare_layouts(x, value, values)
        ]
        if not hits:
            return []
        nearest = min(hit.distance for hit in hits)
        best = min((hit for hit in hits if hit.distance <= _AS_NEAR * nearest), key=lambda hit: hit.value.number)
        found = [best]
        for hit in sorted(hits, key=lambda hit: hit.distance):
            if not any(hit.value == other.value or not _are_apart(hit.rows, other.rows) for other in found):
                found.append(hit)
        return found

    def _compute_value(self, value: Value, values: Values) -> Tensor | None:
        """Return a value in FP64; None if it cannot be computed from what is matched."""
        try:
            return values.get(value).double()
        except Misfit:
            return None

    def _compare_layouts(self, x: Tensor, value: Value, values: Values) -> Iterator[_Hit]:
        """Yield the layouts in which a candidate's value, in FP64, is a value of the reference's up to rounding."""
        wanted = tuple(self._graph.trace.tensor(value).shape)
        for rows in self._rows_of(x):
            found = layouts(_shape_in(rows, x), wanted)
            y = self._compute_value(value, values) if found else None
            if y is None:
                continue
            norm = self._norm_of(y)
            are_all_read = value.number not in self._graph.read and rows is None
            if are_all_read and x.numel() == y.numel() and abs(self._norm_of(x) - norm) > self._most * norm:
                continue  # moving elements keeps the norm
            flat, theirs = x.flatten(), y.flatten()
            for layout in found:
                came, at = sample_of(layout)
                if are_all_read and _relative_distance(flat[came], theirs[at]) > 1.5 * self._most:
                    continue
                hit = self._measure_hit(x, y, value, layout, rows)
                if hit.distance <= self._most:
                    yield hit

    def _measure_distance(self, x: Tensor, y: Tensor, value: Value, held: Tensor | None = None) -> float:
        """Return how far a tensor is from a value, both in the reference's layout, in what is held and read."""
        return _relative_distance(*self._mask_unread(x, y, value, held))

    def _mask_unread(self, x: Tensor, y: Tensor, value: Value, held: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x.double()
        for mask in (self._graph.rows_read(value, x), held):
            if mask is not None:
                x, y = x * mask, y * mask
        return x, y

    def _is_moved(self, value: Value) -> bool:
        """Return whether a value is matched, or only moved from matched ones."""
        if value.number in self.found:
            return True
        call = self._graph.trace.producer(value)
        if call is None or call.name not in MOVES:
            return False
        sources = [each for each in call.inputs if self._graph.is_activation(each)]
        return bool(sources) and all(map(self._is_moved, sources))

    def _norm_of(self, x: Tensor) -> float:
        if id(x) not in self._norms:
            self._norms[id(x)] = x, torch.linalg.vector_norm(x.double()).item()
        return self._norms[id(x)][1]

    def _likely_values(self, one: Watched) -> list[Value]:
        """Return the reference's values that are made of what the candidate's is made of."""
        lineage = self._graph.bits(one.lineage)
        if lineage not in self._likely:
            self._likely[lineage] = [
                value
                for other, some in self._graph.by_lineage.items()
                if self._is_made_alike(lineage, other)
                for value in some
            ]
        return self._likely[lineage]

    def _is_made_alike(self, lineage: int, other: int) -> bool:
        """Return whether a candidate's value of one lineage may be a reference's of another.

        TE may hold several of the reference's parameters in one module: what one of them makes then seems to depend on
        all of them.
        """
        other &= self._used  # what the candidate never reads, as a bias that it lacks, tells nothing
        if other & ~lineage:
            return False
        more = lineage & ~other
        if not more:
            return True
        reach = 0
        for name in self._graph.names(other):
            reach |= self._together.get(name, 0)
        return more & ~reach == 0

    # Values that agree with nothing, but from which the next one follows.

    def _assume_arguments(self, one: Watched, ends: Sequence[_Hit]) -> bool:
        """Match unmatched arguments of a call if its result follows from them in the reference; return whether it does.

        Args:
            one: the result.
            ends: what the result is known to be; empty to look for a value that it equals then.
        """
        asked = [parent for parent in one.parents if parent in self.unmatched]
        if not asked or len(asked) > _MOST_ASSUMED:
            return False
        choices = {each: self._list_choices(each) for each in asked}
        # With few assumptions first: what follows must hang on each of them, or it tells nothing about it.
        for count in range(1, len(asked) + 1):
            combinations = (
                tuple(zip(some, hits, strict=True))
                for some in itertools.combinations(asked, count)
                for hits in itertools.product(*(choices[each] for each in some))
            )
            best = min(
                (
                    (distance, number, combination)
                    for number, combination in enumerate(itertools.islice(combinations, _MOST_COMBINATIONS))
                    if (distance := self._try_assumption(one, [hit for _, hit in combination], ends)) is not None
                ),
                default=None,
            )
            if best is not None:
                for each, hit in best[2]:
                    self._take_match(each, hit, "next")
                    self.unmatched.remove(each)
                return True
        return False

    def _try_assumption(self, one: Watched, hits: Sequence[_Hit], ends: Sequence[_Hit]) -> float | None:
        """Return how far a result is from what follows from assumed arguments; None if it is another value."""
        assumed = [hit.value for hit in hits]
        if len({value.number for value in assumed}) < len(assumed):
            return None
        values = self._values.assuming({hit.value: hit.tensor.double() for hit in hits})
        if ends:
            found = max(self._by_weights(one, values), key=lambda hit: hit.distance, default=None)
            found = found if found is not None and found.distance <= self._most else None
        else:
            found = self._find_agreeing(one, values, assumed)
        if found is None or not self._is_computed_from(found.value, assumed) or self._breaks_agreement(assumed, values):
            return None
        return found.distance

    def _list_choices(self, one: Watched) -> list[_Hit]:
        """Return what a value may be if it is wrong: the likely values, each in the layout that is nearest to it.

        A port may also compute a right value and then spoil it: then it may be what it was before.
        """
        found: list[_Hit] = []
        earlier = [match.value for match in self._matches_above(one)]
        for value in (*earlier, *self._likely_values(one)):
            if value.number in self.found and value not in earlier:
                continue
            wanted = tuple(self._graph.trace.tensor(value).shape)
            near = []
            for rows in self._rows_of(one.tensor):
                shape = _shape_in(rows, one.tensor)
                y = self._compute_value(value, self._values) if math.prod(shape) == math.prod(wanted) else None
                if y is not None:
                    near += [self._measure_hit(one.tensor, y, value, layout, rows) for layout in layouts(shape, wanted)]
            nearest = self._choose_nearest(near)
            if nearest is not None and nearest.distance <= _UNRELATED and self._is_related(nearest):
                found.append(nearest)
        return sorted(found, key=lambda hit: hit.distance)[:_MOST_CHOICES]

    def _is_related(self, hit: _Hit) -> bool:
        y = self._compute_value(hit.value, self._values)
        if y is None:
            return False
        x, y = self._mask_unread(hit.tensor, y, hit.value, hit.held)
        return (x * y).sum().item() > _RELATED * (torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y)).item()

    def _matches_above(self, one: Watched) -> Iterator[Match]:
        """Yield what the values of the same lineage that a value was computed from were matched with."""
        todo, seen = list(one.parents), {one}
        while todo:
            each = todo.pop(0)
            if each in seen or each.lineage != one.lineage:
                continue
            seen.add(each)
            yield from (match for match in self._of.get(each, ()) if self.found.get(match.value.number) is match)
            todo += each.parents

    def _is_computed_from(self, value: Value, assumed: Sequence[Value]) -> bool:
        """Return whether the reference computes, and does not only pick, a value from all of the assumed ones."""
        given = self._values.given.keys() | {one.number for one in assumed}
        calls, read = self._graph.between(value, given)
        # A mask by which some rows are taken is computed as well, but of other values.
        made = [out for call in calls if call.name not in PICKS for out in call.outputs]
        is_computed = any(self._graph.is_above(one, out) for one in assumed for out in made)
        return {one.number for one in assumed} <= read and is_computed

    def _breaks_agreement(self, assumed: Sequence[Value], values: Values) -> bool:
        """Return whether a value that agreed would no longer follow from the assumed ones."""
        numbers = {one.number for one in assumed}
        for match in self.found.values():
            if match.evidence != "agrees" or not any(self._graph.is_above(one, match.value) for one in assumed):
                continue
            _, read = self._graph.between(match.value, values.given.keys())
            if read & numbers:
                now = self._compute_value(match.value, values.without(match.value))
                if now is None or self._measure_distance(now, match.end, match.value) > self._most:
                    return True
        return False

    # Outputs.

    def _match_output(self, name: str, x: Tensor, seen: Sequence[Watched]) -> None:
        value = self._graph.outputs.get(name)
        if value is None or x.numel() != self._graph.trace.tensor(value).numel():
            return
        shape = self._graph.trace.tensor(value).shape
        tensor = x.reshape(shape)
        if not bool(torch.isfinite(tensor).all()):
            return
        known = self.found.get(value.number)
        if known is not None and self._measure_distance(tensor, known.end, value) <= self._most:
            return
        now = self._compute_value(value, self._values)
        calls, _ = self._graph.between(value, self.found.keys())
        if now is not None and all(call.name in MOVES for call in calls) and torch.equal(now, tensor.double()):
            return  # what it is moved from was matched
        watched = next((one for one in reversed(seen) if _holds_the_same(one.tensor, x)), None)
        if watched is None:
            watched = Watched(len(seen), f"output {name}", x, frozenset(), True, (), (), True)
        hit = _Hit(0.0, value, lambda gradient: gradient.reshape(shape), tensor)
        self._take_match(watched, hit, "output")


def _token_order(layout: Layout) -> tuple[object, ...]:
    """Return how a layout places tokens, whatever it does with their channels."""
    moved = len(layout.order)
    while moved and layout.order[moved - 1] == moved - 1:
        moved -= 1
    return layout.given[:2], layout.split[:moved], layout.order[:moved]


def _are_apart(rows: TokenRows | None, others: TokenRows | None) -> bool:
    """Return whether two lists of the candidate's rows have none in common."""
    return rows is not None and others is not None and not bool(torch.isin(rows.own, others.own).any())


def _shape_in(rows: TokenRows | None, x: Tensor) -> tuple[int, ...]:
    """Return the shape of a candidate's value in the reference's rows."""
    return tuple(x.shape) if rows is None else rows.shape_of(x)


def _compose_arrangement(rows: TokenRows | None, layout: Layout, columns: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a function that brings the candidate's tensors into rows, then takes columns, then lays them out."""
    if rows is None and columns is None:
        return layout

    def arrange(x: Tensor) -> Tensor:
        x = x if rows is None else rows(x)
        return layout(x if columns is None else x[..., columns.to(x.device)])

    return arrange


def _held_together(graph: Graph, weights: WeightMap) -> dict[str, int]:
    """Return for each of the reference's parameters all that TE holds in the same module, as bits."""
    of_module: dict[str, int] = {}
    for left, right in weights.items():
        for name in names(right):
            path = name.rpartition(".")[0]
            of_module[path] = of_module.get(path, 0) | graph.bits(list(names(left)))
    together: dict[str, int] = {}
    for left, right in weights.items():
        for name in names(right):
            for theirs in names(left):
                together[theirs] = together.get(theirs, 0) | of_module[name.rpartition(".")[0]]
    return together


def _uses_of_weights(graph: Graph) -> dict[str, list[Call]]:
    """Return the calls that multiply by each parameter, in order; the parameter may be transposed or cast first."""
    found: dict[str, list[Call]] = {}
    made: dict[int, str] = dict(graph.trace.parameters)
    for call in graph.trace.calls:
        of = next((made[value.number] for value in call.inputs if value.number in made), None)
        if of is None:
            continue
        if call.name in _MULTIPLIES and call.outputs:
            found.setdefault(of, []).append(call)
        elif call.name in MOVES and len(call.inputs) == 1:
            made.update((value.number, of) for value in call.outputs)
    return found


def _relative_distance(x: Tensor, y: Tensor) -> float:
    """Return the norm of a difference, relative to that of ``y``."""
    apart, norm = torch.linalg.vector_norm(x - y).item(), torch.linalg.vector_norm(y).item()
    return apart / norm if norm > 0.0 else (0.0 if apart == 0.0 else math.inf)


def _holds_the_same(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors hold the same numbers in the same order, whatever their shapes."""
    return x.numel() == y.numel() and x.numel() >= SMALLEST and torch.equal(x.flatten().double(), y.flatten().double())
