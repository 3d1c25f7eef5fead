"""Rank mistakes, alone and in pairs, by how much of the error they leave in one row of the batch or in gradients."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.mistakes.alternatives import SMALL, written_near
from parity.mistakes.hypothesis import Hypothesis, ReadWeights
from parity.mistakes.replay import BACKWARD, Outputs, Passes, differentiable_outputs, outputs_with
from parity.numerics.errors import TINY, norm_of
from parity.passes.all_passes import Tensors
from parity.result import Kind
from parity.search.failure import Budget, Failure, while_it_lasts
from parity.trace.trace import Call, Edit, Trace, Value, edit

# The likeliest pairs of mistakes, judged by the effect of each mistake alone.
#
# To first order, the effect of two mistakes is the sum of their effects. So the pairs to try are those whose summed
# effects are most like the candidate's error: as they are, or each times some factor, since one mistake may amplify
# another, and a constant need not be the known one. Comparing all pairs of some thousand effects takes only a few
# matrix products on a sample of the tensors' elements.


_ELEMENTS = 4096  # elements of a sample
_MOST_EFFECTS = 2000  # the largest effects, which are paired
_SMALLEST, _LARGEST = 1e-3, 1e3  # in norms of the error: smaller effects do nothing, larger ones are not in it
_SAME = 1e-4  # pairs have the same effect if they explain the same up to this share of the error's square
_LISTED = 4096  # pairs that are listed, before those with the same effect are left out
_LITTLE = 0.5  # of the error
_ALONG = 0.3  # the cosine of an effect with what another mistake leaves of the error
_ONE_DIRECTION = 1e-6  # two effects have one direction if their Gram determinant is below this share of its largest


@dataclass(frozen=True)
class LikelyPairs:
    """Pairs of mistakes, the likeliest first.

    Attributes:
        as_they_are: pairs whose summed effects are most like the error.
        by_multiples: pairs whose effects are most like it if each is multiplied by some factor.
    """

    as_they_are: list[tuple[Hypothesis, Hypothesis]]
    by_multiples: list[tuple[Hypothesis, Hypothesis]]


@dataclass(eq=False)
class Effects:
    """The effects of single mistakes on a candidate's outputs or gradients, each in units of its tolerance.

    Attributes:
        error: the candidate's error, ``[elements]``.
        tensors: how many outputs or gradients the elements are from.
        known: each mistake's effect on the same elements.
    """

    error: Tensor
    tensors: int
    known: dict[Hypothesis, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(errors: Sequence[Tensor]) -> Effects:
        """Return an instance without known effects; ``errors`` are those of each tensor, with all its elements."""
        return Effects(_sample(errors), len(errors))

    def note(self, one: Hypothesis, effects: Sequence[Tensor]) -> None:
        """Note a mistake's effects on each tensor, which are given with all its elements."""
        self.known[one] = _sample(effects)

    def multiples(self, ones: Sequence[Hypothesis]) -> tuple[list[float], float]:
        """Return the factors by which mistakes' effects together explain most of the error, and the share that is left.

        An effect that is not known may explain all of it, and one that overflows explains nothing.
        """
        if any(one not in self.known for one in ones):
            return [1.0] * len(ones), 0.0
        effects, error = torch.stack([self.known[one] for one in ones]).double(), self.error.double()
        if not bool(effects.isfinite().all()):
            return [0.0] * len(ones), 1.0
        factors = torch.linalg.pinv(effects @ effects.T) @ (effects @ error)
        return factors.tolist(), norm_of(error - factors @ effects) / max(norm_of(error), TINY)

    def beside(self, first: Hypothesis, known: Sequence[Hypothesis]) -> list[Hypothesis]:
        """Return the mistakes that may be made in addition to another one, the likeliest first.

        If that one leaves little of the error, all are returned, since another's effect then differs from its effect
        alone. Otherwise, only those are returned whose effects point along the error that it leaves.
        """
        left = self.error - self.known[first]
        if norm_of(left) < _LITTLE * norm_of(self.error):
            return list(known)
        others = [one for one in known if one in self.known and one is not first]
        aligned = [
            (self.known[one] @ left / max(norm_of(self.known[one]) * norm_of(left), TINY)).item() for one in others
        ]
        order = sorted(range(len(others)), key=lambda i: -aligned[i])
        return [others[i] for i in order if aligned[i] > _ALONG]

    def likely_pairs(
        self, known: Sequence[Hypothesis], most: int, go_together: Callable[[Hypothesis, Hypothesis], bool]
    ) -> LikelyPairs:
        """Return the likeliest pairs that differ in their effects, the likeliest first.

        Args:
            known: the mistakes, likeliest first. If several pairs have the same effect, the first one is returned.
            most: how many pairs of each sort to return.
            go_together: says whether two mistakes can be made at once.
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
        """Return the mistakes with the largest effects, in the order of ``known``, with single calls last."""
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
        # A mistake's effect may be a small part of a large error, unless it is less than rounding.
        same = min(_SAME, self.tensors / max(norm_of(self.error), TINY) ** 2)
        upper = explained.triu(1)
        listed = upper.flatten().topk(min(_LISTED, upper.numel()))
        alike: dict[int, list[tuple[int, int]]] = {}
        for value, index in zip(listed.values.tolist(), listed.indices.tolist(), strict=True):
            if 0.0 < value < math.inf:
                alike.setdefault(round(value / same), []).append(divmod(index, len(some)))
        found: dict[tuple[Hashable, Hashable], tuple[Hypothesis, Hypothesis]] = {}
        for pairs in alike.values():
            # Among pairs with the same effect, take the one whose later mistake is nearest to the top of the list.
            in_order = ((some[i], some[j]) for i, j in sorted(pairs, key=lambda pair: pair[::-1]))
            pair = next((pair for pair in in_order if go_together(*pair)), None)
            if pair is not None:
                found.setdefault((_but_for_its_number(pair[0]), _but_for_its_number(pair[1])), pair)
            if len(found) == most:
                break
        return list(found.values())


def _but_for_its_number(one: Hypothesis) -> Hashable:
    """Return a key that is the same for a mistake with another constant, which is fitted once a pair is found."""
    return one if one.value is None else (one.title, one.place, tuple(edit.site for edit in one.edits))


def _sample(tensors: Sequence[Tensor]) -> Tensor:
    """Return a sample of elements in FP32, which are always the same for tensors of these sizes.

    They are drawn at random, since regularly spaced ones may all be from one column.
    """
    return torch.cat([_some(x, _ELEMENTS // len(tensors) + 1).float() for x in tensors])


def _some(x: Tensor, count: int) -> Tensor:
    if x.numel() <= count:
        return x.flatten()
    elements = torch.randint(x.numel(), (count,), generator=torch.Generator().manual_seed(0))
    return x.flatten()[elements.to(x.device)] * math.sqrt(x.numel() / count)


# The screen for outputs: it ranks hypotheses by the share of the error that they leave, on one row of the batch if rows
# are computed independently. It computes only forward passes, in FP32 if that is exact enough.


FAITHFUL = 1.2
"""The search ends when no more than this many times the expected error is left."""

EXACT = 0.5
"""A hypothesis must bring the error down to this share."""

CHANGES = 1e-6
"""A hypothesis that changes the error by less than this share changes nothing."""

_FAITHFUL_AT_LEAST = 0.4  # this share of the tolerance is good enough, even if the rounding model expects less
_FP32_IS_EXACT = 0.02  # FP32 is used if its own error is below this share of the candidate's


Ranked = tuple[float, tuple[Hypothesis, ...]]  # the share of the error that is left, and the mistakes that leave it


class Screen:
    """Rank hypotheses by the share of the error that they leave in the row where the candidate's error is largest."""

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
        plain = outputs_with(self._prepared, (), torch.float32)
        exact = plain is not None and self._error(plain, False, self._golden) < _FP32_IS_EXACT * self._before[False]
        self._dtype = torch.float32 if exact else torch.float64
        self._outputs = functools.cache(self._outputs_of)
        self.effects = Effects.of(self._effect(self._candidate, cut=True))

    def shares(self, combinations: Iterable[tuple[Hypothesis, ...]], budget: Budget) -> Iterator[Ranked]:
        """Yield combinations with the share of the error that each leaves, except those that change nothing.

        Nothing is taken from an iterator once the budget is spent.
        """
        for combination in while_it_lasts(combinations, budget):
            alone = self._is_alone(combination)
            outputs = self._outputs(alone).under(combination)
            if alone and outputs is None:
                # A model may make other calls for a single row, for example because no mask needs to be expanded.
                self._misfits.add(combination)
                alone = False
                outputs = self._outputs(False).under(combination)
            if outputs is not None and self._same_shapes(outputs, alone):
                share = self._error(outputs, alone, cut=False) / self._before[alone]
                if math.isfinite(share) and abs(share - 1.0) > CHANGES:
                    if len(combination) == 1:
                        self.effects.note(combination[0], self._effect(outputs, cut=not alone))
                    yield share, combination

    def is_exact(self, entry: Ranked) -> bool:
        """Return whether the error that is left is no larger than that of a faithful port at the precision."""
        share, combination = entry
        return share < EXACT and share * self._before[self._is_alone(combination)] <= self._faithful

    def _outputs_of(self, alone: bool) -> Outputs:
        return Outputs(self._prepared, self._dtype, self._rows if alone else None)

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
        alone = outputs_with(self._prepared, (), torch.float64, rows)
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
            outputs: the outputs of that row, or of all rows.
            cut: whether they are of all rows, and must be cut to the screened one.
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
            outputs: the outputs to measure.
            alone: whether only the screened row counts.
            truth: the outputs to compare them with; None for the candidate's.
            cut: whether ``outputs`` are of all rows, also if only one row counts.
        """
        truth = self._of_rows(self._candidate if truth is None else truth, alone)
        golden = self._of_rows(self._golden, alone)
        outputs = self._of_rows(outputs, alone) if cut else outputs
        return max(norm_of(outputs[name].double() - x) / self._size(name, golden) for name, x in truth.items())


# First-order effects of mistakes on a module's outputs, from one forward pass and a few backward passes.
#
# A mistake changes the results of some calls. The resulting move of the outputs along a random direction is the product
# of the change with a gradient, so thousands of mistakes can be compared with the candidate's error at the cost of a
# few passes. Mistakes are large, and modules are not linear. So this tells which mistakes to try first, but rules out
# none.


_DIRECTIONS = 32  # of the outputs: the cosine of an unrelated effect with the error is about 1/sqrt(32)
_FEWEST = 8
_MOST_BYTES = 2**29  # of all gradients together
_PROMISING = 0.3
_BYTES = torch.float32.itemsize


class FirstOrder:
    """The candidate's error, and the effects of changes in the reference's calls, along directions of the outputs.

    Attributes:
        error: the candidate's error along each direction.
    """

    def __init__(self, failure: Failure, trace: Trace, budget: Budget) -> None:
        """Run the reference once.

        Args:
            failure: a failure whose outputs failed and are finite.
            trace: the reference's trace in FP64.
            budget: once it is spent, no more directions are taken than are needed.
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
            except RuntimeError:  # the reference overwrites a tensor that a gradient needs
                return
            found.append([None if x is None else x.float() for x in gradients])
        self.error = torch.tensor(error)
        keys: tuple[int | str, ...] = (*kept, *parameters)
        for key, of_key in zip(keys, zip(*found, strict=True), strict=False):
            known = [x for x in of_key if x is not None]
            if len(known) == len(error):
                self._gradients[key] = torch.stack(known)

    def gradient(self, value: Value) -> Tensor | None:
        """Return each direction's gradient by a call's result, ``[directions, *shape]``, if there is one."""
        return self._gradients.get(value.number)

    def effect(self, hypothesis: Hypothesis) -> Tensor | None:
        """Return the effect of a mistake along each direction; None if it is not known."""
        if hypothesis.around is not None or (hypothesis.read is None and not hypothesis.edits):
            return None
        total = torch.zeros_like(self.error)
        for effect in (self._of_read(hypothesis.read), *map(self._of_edit, hypothesis.edits)):
            if effect is None:
                return None
            total = total + effect
        return total

    def elements(self, hypothesis: Hypothesis) -> dict[Edit | str, Tensor] | None:
        """Return the effect of each element that a mistake changes along each direction, ``[directions, *shape]``.

        The elements are those of its edits' results and of the parameters that it reads differently. The result is None
        if the effect is not known.
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
        except Exception:  # a mistake's function may raise anything on tensors that do not suit it
            return None
        return found

    def alignment(self, effects: Tensor) -> Tensor:
        """Return the cosines of effects ``[..., directions]`` with the error."""
        sizes = torch.linalg.vector_norm(effects, dim=-1) * torch.linalg.vector_norm(self.error)
        return ((effects @ self.error) / sizes.clamp(min=1e-30)).nan_to_num(nan=-1.0)

    def promising_first(self, known: Iterable[Hypothesis]) -> list[Hypothesis]:
        """Return the hypotheses, those that may explain the error first, each group in its order."""
        ordered: tuple[list[Hypothesis], list[Hypothesis]] = ([], [])
        for one in known:
            effect = self.effect(one) if len(self.error) else None
            ordered[effect is None or self.alignment(effect).item() < _PROMISING].append(one)
        return [*ordered[0], *ordered[1]]

    def _of_read(self, read: ReadWeights | None) -> Tensor | None:
        """Return the effect of reading parameters differently."""
        total = torch.zeros_like(self.error)
        if read is None:
            return total
        try:
            with torch.no_grad():
                for name, moved in self._parameters_moved(read):
                    total = total + (as_rows(self._gradients[name]) @ moved.flatten()).cpu()
        except Exception:  # a mistake's function may raise anything on tensors that do not suit it
            return None
        return total

    def _parameters_moved(self, read: ReadWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the change of each parameter that is read differently."""
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
        except Exception:  # a mistake's function may raise anything on tensors that do not suit it
            return None
        return self._moved(call.result, was, result)

    def _moved(self, named: Any, was: Any, result: Any) -> Tensor | None:
        """Return the effect of a call's changed result."""
        total = torch.zeros_like(self.error)
        for value, before, after in zip(*map(tree_leaves, (named, was, result)), strict=False):
            gradient = self.gradient(value) if isinstance(value, Value) else None
            if gradient is not None:
                if not isinstance(after, Tensor) or after.shape != before.shape:
                    return None
                total = total + (as_rows(gradient) @ (after.float() - before.float()).flatten()).cpu()
        return total


def as_rows(gradients: Tensor) -> Tensor:
    """Return gradients ``[directions, *shape]`` with one row for each direction, also those of a single number."""
    return gradients.reshape(len(gradients), -1)


def _keep(kept: dict[int, Tensor], call: Call, was: Any) -> Any:
    """Keep a call's results by the numbers of their values, and make them require a gradient if they do not."""
    values = iter([leaf for leaf in tree_leaves(call.result) if isinstance(leaf, Value)])

    def one(tensor: Tensor) -> Tensor:
        value = next(values)
        if not tensor.is_floating_point():
            return tensor
        if not tensor.requires_grad:
            tensor = tensor.clone().requires_grad_()
            kept[value.number] = tensor
            return tensor.clone()  # because the tensor may be written to
        kept[value.number] = tensor
        return tensor

    return tree_map_only(Tensor, one, was)


# The screen for gradients: it ranks hypotheses by the share of every failed tensor's error that they leave, if outputs
# tell too little.
#
# A loss is one number, which many mistakes change. If every output is within rounding at the precision, as a loss often
# is in BF16, outputs cannot tell mistakes apart at all. The gradients of parameters can.


_NEAR = 3.0  # an output may be off by this many tolerances, since rounding may cost more under a mistake
_HELPS = 0.9  # or by this share of its previous error, if that is more
_PARTIAL = 3.0  # the same for a mistake that may be a part of the cause, since the rest may cancel it in one number
_AT_LEAST = 0.4  # this share of a tolerance is near enough, even if the rounding model expects less


class GradientScreen:
    """Rank hypotheses by the share that they leave of the failed tensors' errors, as a root mean square.

    An error is counted in tolerances of its tensor. Gradients are computed, in FP64, only for hypotheses whose outputs
    may be the candidate's.
    """

    def __init__(self, failure: Failure) -> None:
        self._passes = Passes(failure.prepared)
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
        """Yield combinations with the share of the errors that each leaves, except those with other outputs.

        Nothing is taken from an iterator once the budget is spent.
        """
        for combination in while_it_lasts(combinations, budget):
            # A mistake made at one of several places, or with another number, may be only a part of the cause.
            most = _PARTIAL if any(one.place or one.tuned for one in combination) else _HELPS
            tensors = self._passes.under(combination, partial(self._are_near, most), self._failed)
            if tensors is not None:
                share = _mean(self._errors(tensors)) / max(_mean(self._before), TINY)
                if math.isfinite(share) and abs(share - 1.0) > CHANGES:
                    if len(combination) == 1:
                        self.effects.note(combination[0], self._effect(tensors))
                    yield share, combination

    def is_exact(self, entry: Ranked) -> bool:
        """Return whether the error that is left is no larger than that of a faithful port at the precision."""
        return entry[0] < EXACT and entry[0] * _mean(self._before) <= _mean(self._failed)

    def _are_near(self, most: float, outputs: Mapping[str, Tensor]) -> bool:
        """Return whether outputs may be the candidate's: off by at most ``most`` times as much as golden's."""
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


# Fitted constants: the eps or factor of a mistake that leaves the smallest error.


HELPS = 0.9  # a partial explanation must bring the error below this share of what it was
HELPS_LITTLE = 0.999  # the same if no output's error is too large in norm, so that the mistake is below the noise
_MOST = 6  # mistakes whose constant is fitted
_ROUNDS = 2  # how often both constants of a pair are fitted, since each depends on the other
_MOST_ALIKE = 3  # how many of these may be of one kind: the right place of a factor may not help most at first
_RANGE = math.log(8.0)  # the constant may be off by this much, either way
_FAR = math.log(1000.0)  # the same if a known constant points the right way but explains little
_STEPS = 30
_MULTIPLES = 0.4, 1.5  # multiples of its effect for which a constant is near the right one, if effects are about linear
_NEARBY = math.log(1.25)  # the same as ``_RANGE`` if a known constant explains the error: the port's own may be near it
_FINE = 0.002  # constants whose logarithms are this close are the same, if one of them is exact enough
_HOPELESS = 0.1  # once a constant is known that finely, the right one leaves less than this share of the error
_WINDOWS = 3  # ranges that are searched, one beyond the other
_AS_GOOD = 1.05  # a plainer constant may leave this many times the error that the best one leaves
_AS_MUCH = 0.9  # but must explain this share of the error's square that the best one explains
_INDISTINCT = 1.5  # the same as ``_AS_GOOD`` if no more is left than a faithful port has
_ABOUT_EQUAL = 10  # shares are about equal if their logarithms agree to a tenth; the likelier effect comes first then
_NUMBER = re.compile(r"-?\d[\d.]*(?:e[+-]?\d+)?")  # in a mistake's name
_DIGITS = 3  # people write 1e-4 where the search ends at 1.04e-4; roundings to at most this many digits are tried
_AT_THE_EDGE = 0.9  # if the best constant is beyond this share of the range, the right one may be outside of it
_PROMISING_STEPS = 10  # after this many steps, a constant that explains has brought the error down to ``EXACT``
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def tuned(
    screen: Screen | GradientScreen,
    ranked: Sequence[Ranked],
    budget: Budget,
    enough: float,
    most_alike: int = _MOST_ALIKE,
) -> list[Ranked]:
    """Return the mistakes that are about a constant and help most, with the constant that leaves the smallest error.

    No more than ``most_alike`` are of one kind. A known constant that is farther from the reference's than the port's
    makes the error larger, although a multiple of its effect explains the error. Such a multiple must leave less than
    ``enough`` of it.
    """
    by_place: dict[Hashable, list[_Known]] = defaultdict(list)
    for share, (one,) in ranked:
        found = _known(screen, share, one, enough)
        if found is not None:
            # One place may have several numbers, which names tell apart.
            by_place[_but_for_its_number(one), _NUMBER.sub("#", one.name)].append(found)
    nearest = [min(some, key=lambda one: (not one.helps, *one.off, one.left)) for some in by_place.values()]
    alike: Counter[Hashable] = Counter()
    to_fit: list[_Known] = []
    for known in sorted(nearest, key=lambda known: (not known.helps, known.about, known.off)):
        kind = known.mistake.title, known.mistake.scope, _setting(known.mistake)
        alike[kind] += 1
        if alike[kind] <= most_alike:
            to_fit.append(known)
    best = [_line_search(screen, known.mistake, known.reach, budget) for known in to_fit[:_MOST]]
    # Only a few are computed in full, so one constant of each mistake comes first.
    return [entry for entries in best for entry in entries[:1]] + [entry for entries in best for entry in entries[1:]]


@dataclass(frozen=True)
class _Known:
    """A mistake with a known constant, from which the search for the port's constant starts.

    Attributes:
        mistake: the mistake with that constant.
        helps: whether it explains a part of the error as it is.
        left: the share of the error that it, or the best multiple of its effect, leaves.
        off: whether its effect points away from the error, and how far it is from the error's size, as a logarithm.
        reach: how far the constant may be off, as a logarithm.
    """

    mistake: Hypothesis
    helps: bool
    left: float
    off: tuple[bool, float]
    reach: float

    @property
    def about(self) -> int:
        """Return the logarithm of the share that it leaves, rounded so that about equal shares are equal."""
        return round(_ABOUT_EQUAL * math.log(max(self.left, TINY)))


def _known(screen: Screen | GradientScreen, share: float, one: Hypothesis, enough: float) -> _Known | None:
    """Return the starting point for fitting a mistake's constant; None if it is not to be fitted."""
    if one.tuned is None or one.value is None:
        return None
    (factor,), left = screen.effects.multiples([one])
    nearby, farthest = _MULTIPLES
    off = factor < 0.0, abs(math.log(max(abs(factor), TINY)))
    if share < HELPS:
        return _Known(one, True, min(share, left), (False, 0.0), _RANGE)
    if abs(factor) < farthest and left < enough:
        return _Known(one, False, min(share, left), off, _NEARBY if abs(factor) > nearby else _RANGE)
    return _Known(one, False, share, off, _FAR) if share < HELPS_LITTLE else None


def _setting(one: Hypothesis) -> str:
    """Return which setting, such as an optimizer's, a mistake is about; an empty text if it names none."""
    setting, is_one, _ = one.name.partition("=")
    return setting if is_one else ""


def tuned_pairs(
    screen: Screen | GradientScreen, pairs: Iterable[tuple[Hypothesis, ...]], budget: Budget, enough: float
) -> list[Ranked]:
    """Return the pairs that are about a constant, with the constants, fitted in turn, that leave the smallest error.

    Multiples of their effects must leave less than ``enough`` of the error.
    """
    found: list[Ranked] = []
    for pair in dict.fromkeys(pair for pair in pairs if any(one.tuned is not None for one in pair)):
        if screen.effects.multiples(pair)[1] >= enough:
            continue
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
    """Return a mistake that explains the error with a nearby constant that leaves less; empty if there is none.

    A plain constant that is about as good comes first. If that leaves no less, which is usually because it is the known
    one, the result is empty.
    """
    share, (one, *others) = entry
    found = [] if others else _line_search(screen, one, _NEARBY, budget)
    return found if found and _AS_GOOD * found[0][0] < share else []


def _line_search(
    screen: Screen | GradientScreen,
    one: Hypothesis,
    reach: float,
    budget: Budget,
    others: tuple[Hypothesis, ...] = (),
) -> list[Ranked]:
    """Return the mistake with the best constant, preceded by one with a plainer constant if that is about as good.

    The constant's logarithm is at most ``reach`` from that of the known one, unless the best one is at that edge; then
    the search goes further. ``others`` are made at the same time.
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
    power_of_two = round(best / math.log(2.0)) * math.log(2.0)
    one_digit, two_digits, *more = (math.log(float(f"{math.exp(best):.{digits}e}")) for digits in range(_DIGITS))
    inverse = float(f"{math.exp(-best):.1e}")
    one_over_integer = -math.log(inverse if inverse >= 10.0 else max(round(inverse), 1))  # as a scale of 1/48
    plainest = [one_digit, power_of_two]
    if best > math.log(SMALL):
        plainest.sort(key=share)
    written = [math.log(number) for number in (written_near(math.exp(best)),) if number > 0.0]
    plain = (*plainest, *sorted((two_digits, one_over_integer), key=share), *written, *more)
    chosen = next((number for number in plain if _is_as_good(screen, share(number), tried[best])), best)
    return [tried[number] for number in dict.fromkeys((chosen, best)) if math.isfinite(share(number))]


def _is_as_good(screen: Screen | GradientScreen, share: float, best: Ranked) -> bool:
    """Return whether a plainer constant is about as good as the best one, or differs from it only by rounding.

    It must leave about as little and explain about as much, since every constant leaves about as much if noise is most
    of the error.
    """
    leaves_rounding = screen.is_exact((share, best[1])) and share < _INDISTINCT * best[0]
    explains = 1.0 - share**2 >= _AS_MUCH * (1.0 - best[0] ** 2)
    return (share < _AS_GOOD * best[0] and explains) or leaves_rounding
