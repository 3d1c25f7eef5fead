"""Rank mistakes, alone and in pairs, by what they leave of the error on one row of the batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.mistakes.hypothesis import Hypothesis, ReadWeights
from parity.mistakes.trial import BACKWARD, differentiable_outputs, outputs_under
from parity.numerics.errors import norm_of
from parity.search.failure import Budget, Failure, while_it_lasts
from parity.trace.trace import Call, Edit, Trace, Value, edit

# Which two mistakes together are likeliest, judged by what each does alone.
#
# To first order, two mistakes together do the sum of what each does. So the pairs to try are those whose summed effects
# are most like the candidate's error: as they are, or each times some factor, since one mistake may amplify another,
# and a constant need not be the known one. Comparing all pairs of some thousand effects takes a few matrix products on
# a sample of the tensors' elements.


_ELEMENTS = 4096  # elements of a sample
_MOST_EFFECTS = 2000  # the largest effects, which are paired
_SMALLEST, _LARGEST = 1e-3, 1e3  # in norms of the error: a smaller effect does nothing, a larger one is not in it
_SAME = 1e-4  # pairs do the same if what they leave differs by less than this share of the error's square
_LISTED = 4096  # pairs that are listed, before those that do the same are left out
_ONE_DIRECTION = 1e-6  # two effects have one direction if their Gram determinant is below this share of its largest


@dataclass(frozen=True)
class LikelyPairs:
    """Pairs of mistakes, the likeliest first.

    Attributes:
        as_they_are: pairs whose effects together are most like the error.
        by_multiples: pairs whose effects, each times some factor, are.
    """

    as_they_are: list[tuple[Hypothesis, Hypothesis]]
    by_multiples: list[tuple[Hypothesis, Hypothesis]]


@dataclass(eq=False)
class Effects:
    """Hold what single mistakes do to a candidate's outputs or gradients, each in units of its tolerance.

    Attributes:
        error: the candidate's error, ``[elements]``.
        tensors: how many outputs or gradients these are elements of.
        known: each mistake's effect, as a sample of as many elements.
    """

    error: Tensor
    tensors: int
    known: dict[Hypothesis, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(errors: Sequence[Tensor]) -> Effects:
        """Begin with no known effect; ``errors`` are those of each tensor, with all its elements."""
        return Effects(_sample(errors), len(errors))

    def note(self, one: Hypothesis, effects: Sequence[Tensor]) -> None:
        """Note what a mistake does to each tensor, given all its elements."""
        self.known[one] = _sample(effects)

    def likely_pairs(
        self, known: Sequence[Hypothesis], most: int, go_together: Callable[[Hypothesis, Hypothesis], bool]
    ) -> LikelyPairs:
        """Return pairs that do different things, as far as these effects tell; the likeliest first.

        Args:
            known: the likeliest mistakes first: of pairs that do the same, the first is returned.
            most: how many of each sort.
            go_together: says whether two mistakes can hold at once.
        """
        some = self._large(known)
        if len(some) < 2:
            return LikelyPairs([], [])
        size = torch.linalg.vector_norm(self.error)  # the unit of all effects, so that no square overflows
        effects = torch.stack([self.known[one] for one in some]).double() / size
        products, along = effects @ effects.T, effects @ (self.error.double() / size)
        squares = products.diagonal()
        as_they_are = 2.0 * (along[:, None] + along) - squares[:, None] - squares - 2.0 * products
        both = squares[:, None] * squares - products**2
        by_multiples = along[:, None] ** 2 * squares + along**2 * squares[:, None]
        by_multiples = by_multiples - 2.0 * along[:, None] * along * products
        by_multiples = torch.where(both > _ONE_DIRECTION * squares[:, None] * squares, by_multiples / both, 0.0)
        return LikelyPairs(
            self._distinct(some, as_they_are, most, go_together), self._distinct(some, by_multiples, most, go_together)
        )

    def _large(self, known: Sequence[Hypothesis]) -> list[Hypothesis]:
        """Return the mistakes that do most, in the order in which they are known, and single calls last."""
        sizes = {one: norm_of(effect) for one, effect in self.known.items()}
        of_error = norm_of(self.error)
        some = [one for one, size in sizes.items() if _SMALLEST * of_error < size < _LARGEST * of_error]
        largest = sorted(some, key=sizes.__getitem__, reverse=True)[:_MOST_EFFECTS]
        order = {one: position for position, one in enumerate(known)}
        return sorted(largest, key=lambda one: (one.scope == "call", order.get(one, len(order))))

    def _distinct(
        self,
        some: list[Hypothesis],
        explained: Tensor,
        most: int,
        go_together: Callable[[Hypothesis, Hypothesis], bool],
    ) -> list[tuple[Hypothesis, Hypothesis]]:
        """Return the pairs that explain most of the error's square; ``some`` has the likeliest mistakes first."""
        # A small part of a large error may be what a mistake does, unless it is less than rounding.
        same = min(_SAME, self.tensors / max(norm_of(self.error), TINY) ** 2)
        upper = explained.triu(1)
        listed = upper.flatten().topk(min(_LISTED, upper.numel()))
        alike: dict[int, list[tuple[int, int]]] = {}
        for value, index in zip(listed.values.tolist(), listed.indices.tolist(), strict=True):
            if 0.0 < value < math.inf:
                alike.setdefault(round(value / same), []).append(divmod(index, len(some)))
        found: dict[tuple[Hashable, Hashable], tuple[Hypothesis, Hypothesis]] = {}
        for pairs in alike.values():
            # Of pairs that do the same, take the one whose second mistake, the later one, is nearest to the list's top.
            in_order = ((some[i], some[j]) for i, j in sorted(pairs, key=lambda pair: pair[::-1]))
            pair = next((pair for pair in in_order if go_together(*pair)), None)
            if pair is not None:
                found.setdefault((_but_for_its_number(pair[0]), _but_for_its_number(pair[1])), pair)
            if len(found) == most:
                break
        return list(found.values())


def _but_for_its_number(one: Hypothesis) -> Hashable:
    """Return what is the same for a mistake with another constant, which is looked for once a pair is found."""
    return one if one.value is None else (one.title, one.place, tuple(edit.site for edit in one.edits))


def _sample(tensors: Sequence[Tensor]) -> Tensor:
    """Sample the same elements whenever tensors of these sizes are given, in FP32.

    They are drawn at random, since regularly spaced ones may all be of one column.
    """
    return torch.cat([_some(x, _ELEMENTS // len(tensors) + 1).float() for x in tensors])


def _some(x: Tensor, count: int) -> Tensor:
    if x.numel() <= count:
        return x.flatten()
    elements = torch.randint(x.numel(), (count,), generator=torch.Generator().manual_seed(0))
    return x.flatten()[elements.to(x.device)] * math.sqrt(x.numel() / count)


# Rank hypotheses by what they leave of the error, on one row of the batch if rows are computed independently.
#
# Only forward, and in FP32 where that is exact enough.


FAITHFUL = 1.2
"""The search ends when no more than so many times the expected error is left."""

EXACT = 0.5
"""A hypothesis must bring the error down to this share."""

TINY = 1e-300
"""Stands for a norm of zero in a denominator."""

CHANGES = 1e-6
"""A hypothesis that changes the error by less than this share changes nothing."""

_FAITHFUL_AT_LEAST = 0.4  # this share of the tolerance is as good, also where the rounding model expects less
_FP32_IS_EXACT = 0.02  # FP32 is used if its own error is below this share of the candidate's


Ranked = tuple[float, tuple[Hypothesis, ...]]  # the share of the error that is left, and what leaves it


class Screen:
    """Ranks hypotheses by the share of the error that they leave in the row where the candidate's is largest."""

    def __init__(self, failure: Failure) -> None:
        self._prepared = failure.prepared
        self._golden = failure.prepared.golden.outputs
        self._candidate = {name: x.double() for (kind, name), x in failure.candidate.items() if kind == "output"}
        self._tolerances = {result.name: result.tolerance_relative_l2 for result in failure.outputs}
        self._rows = self._worst_row()
        self._misfits: set[tuple[Hypothesis, ...]] = set()
        self._before = {rows: self._error(self._golden, rows) for rows in (True, False)}
        self._faithful = max(
            max(FAITHFUL * result.expected.relative_l2 / result.tolerance_relative_l2, _FAITHFUL_AT_LEAST)
            for result in failure.outputs
            if result.numel
        )
        plain = outputs_under(self._prepared, (), torch.float32)
        exact = plain is not None and self._error(plain, False, self._golden) < _FP32_IS_EXACT * self._before[False]
        self._dtype = torch.float32 if exact else torch.float64
        self.effects = Effects.of(self._effect(self._candidate, cut=True))

    def shares(self, combinations: Iterable[tuple[Hypothesis, ...]], budget: Budget) -> Iterator[Ranked]:
        """Yield combinations with the share of the error that each leaves, apart from those that change nothing.

        Nothing is taken from an iterator once the budget is spent.
        """
        for combination in while_it_lasts(combinations, budget):
            alone = self._is_alone(combination)
            outputs = outputs_under(self._prepared, combination, self._dtype, self._rows if alone else None)
            if alone and outputs is None:
                # A model may make other calls for a single row, for example because no mask needs to be expanded.
                self._misfits.add(combination)
                alone = False
                outputs = outputs_under(self._prepared, combination, self._dtype)
            if outputs is not None and self._same_shapes(outputs, alone):
                share = self._error(outputs, alone, cut=False) / self._before[alone]
                if math.isfinite(share) and abs(share - 1.0) > CHANGES:
                    if len(combination) == 1:
                        self.effects.note(combination[0], self._effect(outputs, cut=not alone))
                    yield share, combination

    def is_exact(self, entry: Ranked) -> bool:
        """Return whether what is left is no more than a faithful port at the precision has."""
        share, combination = entry
        return share < EXACT and share * self._before[self._is_alone(combination)] <= self._faithful

    def _is_alone(self, combination: tuple[Hypothesis, ...]) -> bool:
        """Return whether the combination is tried on one row."""
        whole = combination in self._misfits or any(one.around for one in combination)
        return self._rows is not None and not whole

    def _worst_row(self) -> slice | None:
        """Return the row of the batch with the largest error, if rows are computed independently; else None."""
        counts = {x.shape[0] for x in self._candidate.values() if x.dim() > 1}
        if any(not x.dim() or (x.dim() == 1 and len(x) not in counts) for x in self._candidate.values()):
            return None
        if len(counts) != 1 or counts == {1}:
            return None
        errors = [
            ((x - self._golden[name]) ** 2).reshape(len(x), -1).sum(1) / self._golden[name].square().sum()
            for name, x in self._candidate.items()
        ]
        row = int(torch.stack(errors).sum(0).argmax())
        rows = slice(row, row + 1)
        alone = outputs_under(self._prepared, (), torch.float64, rows)
        independent = alone is not None and all(
            alone[name].shape == x[rows].shape and torch.allclose(alone[name], x[rows], rtol=1e-5, atol=1e-7)
            for name, x in self._golden.items()
        )
        return rows if independent else None

    def _of_rows(self, tensors: dict[str, Tensor], alone: bool) -> dict[str, Tensor]:
        return {name: x[self._rows] for name, x in tensors.items()} if alone and self._rows else tensors

    def _same_shapes(self, outputs: dict[str, Tensor], alone: bool) -> bool:
        expected = self._of_rows(self._golden, alone)
        return all(name in outputs and outputs[name].shape == x.shape for name, x in expected.items())

    def _effect(self, outputs: dict[str, Tensor], cut: bool) -> list[Tensor]:
        """Return how far outputs move in the screened row, each in units of its tolerance.

        Args:
            outputs: those of that row, or of all rows.
            cut: whether they are of all rows.
        """
        outputs, golden = self._of_rows(outputs, cut), self._of_rows(self._golden, True)
        return [(outputs[name] - x) / self._size(name, golden) for name, x in golden.items()]

    def _size(self, name: str, golden: dict[str, Tensor]) -> float:
        """Return the size of an output's tolerance."""
        return max(norm_of(golden[name]), TINY) * self._tolerances[name]

    def _error(
        self, outputs: dict[str, Tensor], alone: bool, truth: dict[str, Tensor] | None = None, cut: bool = True
    ) -> float:
        """Return the largest relative error of an output, in units of its tolerance.

        Args:
            outputs: the outputs whose error it is.
            alone: whether only the screened row counts.
            truth: what they should be; None for the candidate's.
            cut: whether ``outputs`` are of all rows, also if one row counts alone.
        """
        truth = self._of_rows(self._candidate if truth is None else truth, alone)
        golden = self._of_rows(self._golden, alone)
        outputs = self._of_rows(outputs, alone) if cut else outputs
        return max(norm_of(outputs[name].double() - x) / self._size(name, golden) for name, x in truth.items())


# What mistakes do to a module's outputs, to first order: from one forward pass and a few backward ones.
#
# A mistake changes what some calls return. How far that moves the outputs along a random direction is the product of
# the change with a gradient, so thousands of mistakes are compared with the candidate's error at the cost of few
# passes. Mistakes are large, and modules are not linear: this tells which mistakes to try first, and rules out none.


_DIRECTIONS = 32  # of the outputs: the cosine of an unrelated effect with the error is about 1/sqrt(32)
_FEWEST = 8
_MOST_BYTES = 2**29  # of all gradients together
_PROMISING = 0.3
_BYTES = torch.float32.itemsize


class FirstOrder:
    """The candidate's error, and the effects of changing the reference's calls, along directions of the outputs.

    Attributes:
        error: the error along each direction.
    """

    def __init__(self, failure: Failure, trace: Trace, budget: Budget) -> None:
        """Run the reference once.

        Args:
            failure: one whose outputs failed and are finite.
            trace: the reference's trace in FP64.
            budget: when it is spent, no more directions are taken than are needed.
        """
        self._trace = trace
        self._calls = {call.site: call for call in trace.calls}
        self._gradients: dict[int | str, Tensor] = {}  # by a value's number, or by a parameter's name
        self._parameters = dict(failure.prepared.reference.named_parameters())
        self.error = torch.zeros(0)
        values = [x for call in trace.calls for x in call.outputs if trace.tensor(x).is_floating_point()]
        count = min(_DIRECTIONS, _MOST_BYTES // max(_BYTES * sum(trace.tensor(x).numel() for x in values), 1))
        if count >= _FEWEST:
            self._differentiate(failure, count, budget)

    def _differentiate(self, failure: Failure, count: int, budget: Budget) -> None:
        kept: dict[int, Tensor] = {}
        edits = tuple(edit(call, (), functools.partial(_keep, kept, call)) for call in self._trace.calls)
        hypothesis = Hypothesis("operation", "none", "", edits)
        outputs = differentiable_outputs(failure.prepared, (hypothesis,))
        if outputs is None or not kept:
            return
        golden = failure.prepared.golden.outputs
        weights = {
            one.name: 1.0 / max(norm_of(golden[one.name]) * one.tolerance_relative_l2, TINY) for one in failure.outputs
        }
        reached = [name for name in weights if name in outputs and outputs[name].requires_grad]
        off = {name: failure.candidate["output", name].double() - golden[name] for name in weights}
        rng = torch.Generator().manual_seed(0)
        parameters = {name: x for name, x in self._parameters.items() if x.requires_grad}
        error: list[float] = []
        found: list[list[Tensor | None]] = []
        for number in range(count if reached else 0):
            if number >= _FEWEST and budget.spent():
                break
            failure.prepared.clock.advance(BACKWARD)
            drawn = {
                name: weight * torch.randn(golden[name].shape, generator=rng, dtype=torch.float64).to(golden[name])
                for name, weight in weights.items()
            }
            error.append(sum((drawn[name] * off[name]).sum().item() for name in weights))
            derived = [*kept.values(), *parameters.values()]
            given = [outputs[name] for name in reached], derived, [drawn[name] for name in reached]
            try:
                gradients = torch.autograd.grad(*given, retain_graph=True, allow_unused=True)
            except RuntimeError:  # it writes to what a gradient needs
                return
            found.append([None if x is None else x.float() for x in gradients])
        self.error = torch.tensor(error)
        keys: tuple[int | str, ...] = (*kept, *parameters)
        for key, of_key in zip(keys, zip(*found, strict=True), strict=False):
            known = [x for x in of_key if x is not None]
            if len(known) == len(error):
                self._gradients[key] = torch.stack(known)

    def gradient(self, value: Value) -> Tensor | None:
        """Return the gradient of each direction with respect to what a call returned, ``[directions,
        *shape]``, if there is one.
        """
        return self._gradients.get(value.number)

    def effect(self, hypothesis: Hypothesis) -> Tensor | None:
        """Return what a mistake does along each direction; None if that is not known."""
        if hypothesis.around is not None or (hypothesis.read is None and not hypothesis.edits):
            return None
        total = torch.zeros_like(self.error)
        for effect in (self._of_read(hypothesis.read), *map(self._of_edit, hypothesis.edits)):
            if effect is None:
                return None
            total = total + effect
        return total

    def elements(self, hypothesis: Hypothesis) -> dict[Edit | str, Tensor] | None:
        """Return what a mistake does along each direction by each element of what its edits return, or of the
        parameters that it reads otherwise, ``[directions, *shape]``; None if that is not known.
        """
        found: dict[Edit | str, Tensor] = {}
        try:
            with torch.no_grad():
                if hypothesis.read is not None:
                    for name, moved in self._parameters_moved(hypothesis.read):
                        found[name] = self._gradients[name] * moved
                for one in hypothesis.edits:
                    call = self._calls[one.site]
                    value = call.outputs[0]
                    was = tree_map_only(Value, self._trace.tensor, call.result)
                    result = one.compute(was, *map(self._trace.tensor, one.needs))
                    before, after = tree_leaves(was)[0], tree_leaves(result)[0]
                    found[one] = self._gradients[value.number] * (after.float() - before.float())
        except Exception:  # as anybody's code, given what it does not take
            return None
        return found

    def alignment(self, effects: Tensor) -> Tensor:
        """Return the cosines of effects ``[..., directions]`` with the error."""
        sizes = torch.linalg.vector_norm(effects, dim=-1) * torch.linalg.vector_norm(self.error)
        return ((effects @ self.error) / sizes.clamp(min=1e-30)).nan_to_num(nan=-1.0)

    def promising_first(self, known: Iterable[Hypothesis]) -> list[Hypothesis]:
        """Return the hypotheses that may explain the error before the others, each group in its order."""
        ordered: tuple[list[Hypothesis], list[Hypothesis]] = ([], [])
        for one in known:
            effect = self.effect(one) if len(self.error) else None
            ordered[effect is None or self.alignment(effect).item() < _PROMISING].append(one)
        return [*ordered[0], *ordered[1]]

    def _of_read(self, read: ReadWeights | None) -> Tensor | None:
        """Return the effect of reading parameters otherwise."""
        total = torch.zeros_like(self.error)
        if read is None:
            return total
        try:
            with torch.no_grad():
                for name, moved in self._parameters_moved(read):
                    total = total + (self._gradients[name].flatten(1) @ moved.flatten()).cpu()
        except Exception:  # as anybody's code, given what it does not take
            return None
        return total

    def _parameters_moved(self, read: ReadWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield by how much each parameter that is read otherwise moves, by its name."""
        for name, other in read(self._parameters).items():
            yield name, (other - self._parameters[name]).float()

    def _of_edit(self, one: Edit) -> Tensor | None:
        call = self._calls.get(one.site)
        if call is None or one.detached is not None:
            return None
        was = tree_map_only(Value, self._trace.tensor, call.result)
        try:
            with torch.no_grad():
                result = one.compute(was, *map(self._trace.tensor, one.needs))
        except Exception:  # as anybody's code, given what it does not take
            return None
        return self._moved(call.result, was, result)

    def _moved(self, named: Any, was: Any, result: Any) -> Tensor | None:
        """Return the effect of a call's other result."""
        total = torch.zeros_like(self.error)
        for value, before, after in zip(*map(tree_leaves, (named, was, result)), strict=False):
            gradient = self.gradient(value) if isinstance(value, Value) else None
            if gradient is not None:
                if not isinstance(after, Tensor) or after.shape != before.shape:
                    return None
                total = total + (gradient.flatten(1) @ (after.float() - before.float()).flatten()).cpu()
        return total


def _keep(kept: dict[int, Tensor], call: Call, was: Any) -> Any:
    """Keep what a call returned by its values' numbers, with a gradient even if none would be asked for."""
    values = iter([leaf for leaf in tree_leaves(call.result) if isinstance(leaf, Value)])

    def one(tensor: Tensor) -> Tensor:
        value = next(values)
        if not tensor.is_floating_point():
            return tensor
        if not tensor.requires_grad:
            tensor = tensor.clone().requires_grad_()
            kept[value.number] = tensor
            return tensor.clone()  # since the tensor may be written to
        kept[value.number] = tensor
        return tensor

    return tree_map_only(Tensor, one, was)
