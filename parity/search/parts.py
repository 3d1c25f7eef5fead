"""Find the part of a place in which a mistake is made: some heads, some sequences, some positions, some layers.

A mistake says what certain calls of the reference return instead, or with which parameters it computes. If a port makes
it only in some heads, making it everywhere explains nothing, and there are too many parts to try each of them. So the
mistake is made to a share in each element, from 0 to 1, and the squared error is differentiated by these shares.

If the effects of different parts do not overlap, two passes are enough. Let ``e_i`` be the effect of part ``i``, and
let the error be the sum of these over a set S. The derivative is ``-<e_i, sum of e_j over S>`` if no element is
replaced, and ``<e_i, sum of e_j outside of S>`` if all are. The negated first one over the difference of the two is the
part's share: 1 in S, and 0 outside, along every dimension of every call.

If effects overlap, as those of channels do, the shares along a dimension are fitted by least squares. Each step of the
fit is one more pass with the current shares.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from parity.mistakes.attention import Attention
from parity.mistakes.hypothesis import Hypothesis, ReadWeights, in_part, ordinal, read_in_part
from parity.mistakes.replay import BACKWARD, Outputs
from parity.mistakes.rotation import Rotation
from parity.numerics.errors import TINY, norm_of
from parity.search.failure import Budget, Failure, while_it_lasts
from parity.search.screen import FirstOrder, Screen
from parity.trace.calls import Misfit
from parity.trace.trace import Edit, grouped

_MOST = 32  # mistakes that are divided into parts, by each of two criteria
_MOST_ALIKE = 4  # of these may have one title and place
_MOST_OF_A_ROLE = 24  # mistakes in queries and keys that are tried in only one of the two
_LARGEST_FACTOR = 4.0  # the effect of all parts, along the error, over the error itself: 1 if effects do not overlap
_SMALLEST = 0.3  # the least effect of all parts, over the error; it may be less if the constant is fitted
_AN_EDIT = 0.1  # the cost of computing what an edit returns, in forward passes
_LARGEST_SHARE = 2.0  # of a mistake with its own constant, in the part where it is made: 1 if it is linear
_UNCLEAR = 0.3  # the most that a part may leave of the error's square to first order, over what it explains
_WAYS = 2  # dimensions of a mistake whose parts are tried, the clearest first
_CONSTANTS = (1 / 8, 1 / 3, 3, 8)  # factors of a mistake's constant that are tried in a part
_FITTED = 8  # mistakes along one dimension whose shares are fitted, the clearest first
_STEPS = (3, 9)  # steps of all fits, and of the best ones
_BEST = 3  # how many the best ones are
_LEFT = 0.5  # a fit must leave less than this share of the squared error; if the constant is free, less than all of it

_LEAST_EFFECT = 0.1  # of the mean, since the first-order effect of a single index is not exact

_Where = Callable[["_Slot"], str]
_Way = tuple[_Where, int | None]  # how a mistake is divided: which slots go together, and along which dimension
_Slot = Edit | str  # the place that is replaced to a share: an edit's result, or the parameter of this name


def in_parts(
    failure: Failure, screen: Screen, first_order: FirstOrder, known: Sequence[Hypothesis], budget: Budget
) -> Iterator[Hypothesis]:
    """Yield mistakes made only in the part of their place to which the error points, the likeliest first.

    Args:
        failure: a failure whose outputs are finite.
        screen: records the effect of each mistake, including those that are yielded.
        first_order: first-order effects for the failure.
        known: mistakes that have been screened.
        budget: the budget of this part of the search.
    """
    roles = list(_in_one_role(screen, known))
    yield from roles
    unclear: list[_Division] = []
    tried: list[_Division] = []
    likely = _likely(failure, screen, first_order, [*known, *roles])
    outputs = cache(lambda: Outputs(failure.prepared, torch.float64, differentiable=True))
    for one in while_it_lasts(likely, budget):
        derivatives = _derivatives(failure, outputs(), one)
        if derivatives is not None:
            ways = sorted(_divisions(one, derivatives), key=lambda way: way.part.unclear)
            clear = [way for way in ways if way.part.unclear < _UNCLEAR and way.part.indices]
            for way in clear[:_WAYS]:
                yield from way.made(failure)
            tried += clear[:_WAYS]
            if not clear:
                unclear += sorted(ways, key=lambda way: (way.where, way.dim) != likely[one])[:1]
    fitted = [_Fit(failure, outputs(), way) for way in unclear[:_FITTED]]
    for steps, most in zip(_STEPS, (_FITTED, _BEST), strict=True):
        fitted = sorted(fitted, key=lambda fit: fit.left)[:most]
        for fit in while_it_lasts(fitted, budget):
            fit.go(steps, budget)
    for fit in sorted(fitted, key=lambda fit: fit.left):
        if fit.is_good:
            yield from fit.division.made(failure)
            tried.append(fit.division)
    for division in tried:
        if division.one.read is not None:
            yield from _unread(division).made(failure)


def _in_one_role(screen: Screen, known: Sequence[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield mistakes in the rotation of queries and keys, made only in queries or only in keys."""
    error = screen.effects.error
    known = [one for one in known if one in screen.effects.known and one.scope in ("all", "kind")]
    some = [one for one in known if _can_be_divided(one)]
    nearest = sorted(some, key=lambda one: -(screen.effects.known[one] @ error).item())
    both = [one for one in nearest if len({_operand(edit) for edit in one.edits}) > 1]
    for one in both[:_MOST_OF_A_ROLE]:
        for role in dict.fromkeys(map(_operand, one.edits)):
            yield _made_in(one, role or "the rest", _operand, None, _Part({role: ()}, 0, 0.0))


def _likely(
    failure: Failure, screen: Screen, first_order: FirstOrder, known: Sequence[Hypothesis]
) -> dict[Hypothesis, _Way | None]:
    """Return the mistakes that may explain the error in a part of their place, each with the best way to divide it.

    They are judged to first order, and the likeliest come first.
    """
    error = screen.effects.error
    scores: dict[Hypothesis, float] = {}
    ways: dict[Hypothesis, _Way | None] = {}
    factors: dict[Hypothesis, float] = {}
    seen: set[tuple[object, ...]] = set()
    for one in known:
        effect = screen.effects.known.get(one)
        if effect is None or not _can_be_divided(one):
            continue
        factor = (effect @ error).item() / max(norm_of(error), TINY) ** 2
        what = one.title, one.read is None, f"{norm_of(effect):.4g}", f"{factor:.4g}"
        if what in seen or (one.tuned is None and norm_of(effect) < _SMALLEST * norm_of(error)):
            continue
        seen.add(what)
        failure.prepared.clock.advance(_AN_EDIT * len(one.edits))
        scores[one], ways[one] = _score(first_order, one)
        if 1.0 / _LARGEST_FACTOR < factor < _LARGEST_FACTOR:
            factors[one] = abs(math.log(factor))
    by_score = sorted((one for one in scores if scores[one] > 0.0), key=lambda one: -scores[one])
    by_factor = sorted(factors, key=lambda one: factors[one])
    return {one: ways[one] for one in (*_few_of_a_kind(by_score), *_few_of_a_kind(by_factor))}


def _few_of_a_kind(some: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the first mistake of each title and place, in their order, then the second of each, and so on."""
    alike = grouped(some, lambda one: (one.title, one.place)).values()
    return [ones[rank] for rank in range(_MOST_ALIKE) for ones in alike if rank < len(ones)][:_MOST]


def _score(first_order: FirstOrder, one: Hypothesis) -> tuple[float, _Way | None]:
    """Return the first-order share of the error's square that a mistake explains in its best part, and the division.

    Among so many parts, some explain a share by chance, which is subtracted.
    """
    found = first_order.elements(one) if len(first_order.error) else None
    elements = {slot: x for slot, x in (found or {}).items() if x.numel()}  # an expert may get no token
    if not elements:
        return 0.0, None
    error, tried = first_order.error.to(next(iter(elements.values())).device), 0
    best: tuple[float, _Way | None] = 0.0, None
    for where in _groupings(list(elements)):
        for dim in (None, *range(max(x.dim() - 1 for x in elements.values()))):
            cells = _cells(elements, where, dim)
            if cells is None:
                continue
            of_module = list(cells.values())
            sums = [torch.stack([x.sum(1) for x in of_module], 1)] if len(of_module) > 1 else []
            together = torch.stack(of_module).sum(0)
            for x in [*of_module, together] if len(of_module) > 1 else of_module:
                whole, ranges = x.sum(1, keepdim=True), x.cumsum(1)
                halves = [x[:, first::2].sum(1, keepdim=True) for first in (0, 1) if x.shape[1] > 2]
                sums += [x, whole - x, ranges, whole - ranges, *halves]
            parts = torch.cat(sums, 1)
            along, squares = error @ parts, parts.square().sum(0).clamp(min=1e-30)
            explained = along.clamp(min=0.0) ** 2 / squares
            share = explained.max().item() / error.square().sum().item()
            best = (share, (where, dim)) if share > best[0] else best
            tried += parts.shape[1]
    return best[0] - 2.0 * math.log(max(tried, 1)) / len(error), best[1]


def _cells(elements: Mapping[_Slot, Tensor], where: _Where, dim: int | None) -> dict[str, Tensor] | None:
    """Return the effect of each index of a dimension along each direction, ``[directions, indices]``, by module.

    The result is None if not every slot has the dimension.
    """
    if dim is not None and any(dim >= x.dim() - 1 for x in elements.values()):
        return None
    of_module: dict[str, list[Tensor]] = defaultdict(list)
    for slot, x in elements.items():
        by_index = x.unsqueeze(1) if dim is None else x.movedim(dim + 1, 1)
        of_module[where(slot)].append(by_index.reshape(*by_index.shape[:2], -1).sum(2))
    fewest = min(x.shape[1] for some in of_module.values() for x in some)
    if any(x.shape[1] % fewest for some in of_module.values() for x in some):
        return None
    return {
        module: torch.stack([x.unflatten(1, (fewest, -1)).sum(2) for x in some]).sum(0)
        for module, some in of_module.items()
    }


def _can_be_divided(one: Hypothesis) -> bool:
    """Return whether a mistake has a meaning and changes only results of calls, or only parameters that are read."""
    is_divisible = one.around is None and all(edit.detached is None for edit in one.edits)
    return one.title != "operation" and bool(one.edits) != (one.read is not None) and is_divisible


# A mistake that is made to a share.


_Share = Callable[[_Slot, Tensor], Tensor]  # maps a slot and its right tensor to the share of each element


def _squared_error(failure: Failure, outputs_with: Outputs, one: Hypothesis, share: _Share) -> Tensor | None:
    """Return half the sum of squared errors if the mistake is made to a share, each output in units of its tolerance.

    The result is None if it cannot be computed or is not differentiable.
    """
    edits = tuple(_mixed(edit, share) for edit in one.edits)
    read = None if one.read is None else partial(_read_mixed, one.read, share)
    outputs = outputs_with.under((replace(one, edits=edits, read=read),))
    loss = None
    for result in failure.outputs:
        candidate = failure.candidate[result.kind, result.name].double()
        output = None if outputs is None else outputs.get(result.name)
        if output is None or output.shape != candidate.shape:
            return None
        size = max(result.tolerance_relative_l2, TINY) * max(norm_of(candidate), TINY)
        term = 0.5 * ((output - candidate) / size).square().sum()
        loss = term if loss is None else loss + term
    failure.prepared.clock.advance(BACKWARD)
    return loss if loss is not None and loss.requires_grad else None


def _mixed(edit: Edit, share: _Share) -> Edit:
    """Return an edit that replaces each element of a call's result to its share."""

    def compute(was: Any, *values: Tensor) -> Any:
        mixed = partial(_lerp, lambda x: share(edit, x))
        return tree_map(mixed, was, edit.compute(was, *values))  # raises if shapes or dtypes differ, as for a mask

    return replace(edit, compute=compute, of=None)


def _read_mixed(read: ReadWeights, share: _Share, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    others = read(parameters)
    return {name: _lerp(partial(share, name), parameters[name], other) for name, other in others.items()}


def _lerp(share: Callable[[Tensor], Tensor], was: Any, other: Any) -> Any:
    if isinstance(was, Tensor) and not was.is_floating_point():
        if not torch.equal(was, other):
            raise Misfit("there is nothing between two integers")
        return was
    return torch.lerp(was, other, share(was)) if isinstance(was, Tensor) else other


_Derivatives = Mapping[_Slot, tuple[Tensor, Tensor]]
"""The squared error's derivatives by the share of each element of a slot: if none is replaced, and if all are."""


def _derivatives(failure: Failure, outputs: Outputs, one: Hypothesis) -> _Derivatives | None:
    """Return the derivatives by the shares of each element; None if they cannot be computed."""
    found: list[dict[_Slot, Tensor]] = []
    for size in (0.0, 1.0):
        leaves: dict[_Slot, Tensor] = {}

        def share(slot: _Slot, was: Tensor, size: float = size, leaves: dict[_Slot, Tensor] = leaves) -> Tensor:
            return leaves.setdefault(slot, torch.full_like(was, size).requires_grad_())

        loss = _squared_error(failure, outputs, one, share)
        if loss is None or not set(one.edits) <= set(leaves):
            return None
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        found.append(dict(zip(leaves, gradients, strict=True)))
    none, every = found
    if not all(bool(x.isfinite().all()) for some in found for x in some.values()):
        return None
    if any(x.shape != every[slot].shape for slot, x in none.items()):  # tokens go to other experts under the mistake
        return None
    return {slot: (x, every[slot]) for slot, x in none.items() if x.numel()} or None


# Ways to divide a mistake's place: by the modules that make the calls, along a dimension of their results, or both.
#
# The calls of one module go together. For example, if queries are rotated by another base, keys are, too. If that shows
# no part, queries and keys are divided separately.


def _module_of(slot: _Slot) -> str:
    return slot if isinstance(slot, str) else slot.site[0] or "the module"


def _operand(slot: _Slot) -> str:
    """Return which operand of attention a rotation turns; an empty text for anything else."""
    operation = slot.of.operation if not isinstance(slot, str) and slot.of is not None else None
    return f"the {operation.role}" if isinstance(operation, Rotation) else ""


def _role_of(slot: _Slot) -> str:
    """Return the operand that a rotation turns, and its module."""
    return " of ".join(filter(None, (_operand(slot), slot if isinstance(slot, str) else slot.site[0]))) or "the module"


def _groupings(slots: Sequence[_Slot]) -> list[_Where]:
    """Return the functions that group these slots differently."""
    found: dict[tuple[int, ...], _Where] = {}
    for where in (_module_of, _role_of):
        names = list(map(where, slots))
        found.setdefault(tuple(map(names.index, names)), where)
    return list(found.values())


@dataclass(frozen=True)
class _Part:
    """The part of a place in which a mistake is made.

    Attributes:
        indices: the indices in the part, by the result of ``_Where``.
        count: how many indices the division has.
        unclear: how much of the error's square the mistake leaves there to first order, over how much it explains.
    """

    indices: Mapping[str, Sequence[int]]
    count: int
    unclear: float


@dataclass
class _Division:
    """A mistake divided by modules and along a dimension, and the share to which it is made at each index.

    Attributes:
        one: the mistake.
        where: tells which slots go together.
        dim: the dimension of each slot; None to divide by modules only.
        shapes: the shape of what is replaced in each slot.
        shares: the share to which the mistake is made at each index of the dimension, by the result of ``where``. A
            slot with more indices, such as queries next to grouped keys, has several for each share.
        effects: the squared effect of each index, as weights of the shares.
        part: the part that the shares point to.
    """

    one: Hypothesis
    where: _Where
    dim: int | None
    shapes: Mapping[_Slot, torch.Size]
    shares: dict[str, Tensor]
    effects: dict[str, Tensor]
    part: _Part = _Part({}, 0, math.inf)

    def look(self) -> None:
        """Find the part from the shares."""
        self.part = _part(self.shares, self.effects, self.one.tuned is not None, self.dim is None)

    def made(self, failure: Failure) -> Iterator[Hypothesis]:
        """Yield the mistake made in the part, with larger and smaller constants, and in parts nearby.

        Parts without a name are left out.
        """
        for part in [self.part, *self._nearby()] if self.part.indices else []:
            place = self._place(failure, part)
            if place:
                made = _made_in(self.one, place, self.where, self.dim, part)
                yield made
                if part is self.part and made.tuned is not None and made.value is not None:
                    yield from map(made.tuned, (made.value * factor for factor in _CONSTANTS))

    def _nearby(self) -> Iterator[_Part]:
        """Yield the part with an end moved by one, if it is a range, since the index at its end may do little."""
        some, last = next(iter(self.part.indices.values())), self.part.count - 1
        if self.dim is not None and len(some) > 2 and list(some) == list(range(some[0], some[-1] + 1)):
            for before, after in ((0, 1), (0, -1), (-1, 0), (1, 0)):
                first, end = some[0] + before, some[-1] + after
                if first >= 0 and end <= last and end - first < last:
                    yield replace(self.part, indices=dict.fromkeys(self.part.indices, range(first, end + 1)))

    def _place(self, failure: Failure, part_of_it: _Part) -> str:
        inside, part = part_of_it.indices, ""
        if self.dim is not None:
            slot, shape = next(iter(self.shapes.items()))
            each = max(shape[self.dim] for shape in self.shapes.values()) // part_of_it.count
            indices = [index * each + one for index in next(iter(inside.values())) for one in range(each)]
            if isinstance(slot, str):
                axis = axis_of_parameter(shape, self.dim)
            else:
                axis = axis_of(failure, slot, shape, self.dim)
            is_part = len(indices) < each * part_of_it.count
            part = describe_indices(indices, each * part_of_it.count, axis) if is_part else ""
        modules = ", ".join(inside) if len(inside) < len(self.shares) else ""
        return " of ".join(filter(None, (part, modules)))


def _divisions(one: Hypothesis, derivatives: _Derivatives) -> list[_Division]:
    """Return every way to divide a mistake, with the shares that follow from its derivatives."""
    found = []
    for where in _groupings(list(derivatives)):
        for dim in (None, *range(max(none.dim() for none, _ in derivatives.values()))):
            division = _division(one, derivatives, where, dim)
            if division is not None:
                division.look()
                found.append(division)
    return found


def _division(one: Hypothesis, derivatives: _Derivatives, where: _Where, dim: int | None) -> _Division | None:
    """Return the division along a dimension, with calls of one module together.

    The result is None if not every slot has the dimension, or if there is only one index.
    """
    if dim is not None and any(dim >= none.dim() for none, _ in derivatives.values()):
        return None
    of_module: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for slot, both in derivatives.items():
        of_module[where(slot)].append((_summed(both[0], dim), _summed(both[1], dim)))
    shares, effects = {}, {}
    for module, some in of_module.items():
        fewest = min(len(none) for none, _ in some)
        if any(len(none) % fewest for none, _ in some):
            return None
        none, every = (torch.stack([both[at].view(fewest, -1).sum(1) for both in some]).sum(0).cpu() for at in (0, 1))
        effects[module] = (every - none).clamp(min=0.0)
        shares[module] = torch.where(effects[module] > 0, -none / effects[module].clamp(min=TINY), 0.0)
    if sum(map(len, shares.values())) < 2 or (dim is not None and len({*map(len, shares.values())}) > 1):
        return None
    return _Division(one, where, dim, {slot: none.shape for slot, (none, _) in derivatives.items()}, shares, effects)


def _summed(x: Tensor, dim: int | None) -> Tensor:
    """Return the sums over all dimensions but one; None sums over all."""
    return x.sum().view(1) if dim is None else x.movedim(dim, 0).reshape(x.shape[dim], -1).sum(1)


def _part(shares: Mapping[str, Tensor], effects: Mapping[str, Tensor], any_size: bool, by_module: bool) -> _Part:
    """Return the part that the shares point to; an empty one if it is all or nothing, or has no short name.

    With the mistake's own constant, the share is 1 in the part. With another constant, it is the same throughout.
    """
    nothing = _Part({}, 0, math.inf)
    share, effect = torch.cat([*shares.values()]), torch.cat([*effects.values()])
    telling = effect > min(1.0 / len(effect), _LEAST_EFFECT / 2.0) * effect.mean()
    largest = share[telling].max().item() if telling.any() else 0.0
    large = telling & (share > largest / 2.0)
    if largest <= 0.0:
        return nothing
    size = ((share * effect)[large].sum() / effect[large].sum()).item()
    if not any_size and not 1.0 / _LARGEST_SHARE < size < _LARGEST_SHARE:
        return nothing
    gains = {module: size * (2.0 * shares[module] - size) * effects[module] for module in shares}
    best = {module: gain.clamp(min=0.0).sum().item() for module, gain in gains.items()}
    modules = [module for module in gains if best[module] > _A_MODULE * max(best.values())]
    summed = torch.stack([gains[module] for module in modules]).sum(0)
    indices = nameable(summed) if not by_module else []
    if not indices and len(modules) < len(gains) and summed.sum() > _ALL_OF_IT * summed.clamp(min=0.0).sum():
        indices = list(range(len(summed)))
    chosen = {module: torch.zeros(len(some), dtype=some.dtype) for module, some in shares.items()}
    for module in modules:
        chosen[module][indices or summed > 0.0] = size
    residual = sum(((shares[module] - chosen[module]).square() * effects[module]).sum().item() for module in shares)
    explained = sum((chosen[module].square() * effects[module]).sum().item() for module in shares)
    count = len(next(iter(shares.values())))
    inside = dict.fromkeys(modules, indices) if indices else {}
    return _Part(inside, count, residual / max(explained, TINY))


_A_MODULE = 0.05  # a module is in the part if it explains more than this share of what the best module explains
_ALL_OF_IT = 0.9  # all indices are in the part if they explain this share of what the best choice explains


def _made_in(one: Hypothesis, place: str, where: _Where, dim: int | None, part: _Part) -> Hypothesis:
    """Return a mistake made in a part of its place, also if its constant is changed later."""
    tuned, read, inside = one.tuned, one.read, part.indices

    def divided(edit: Edit) -> Edit:
        return edit if dim is None else in_part(edit, dim, inside[where(edit)], part.count)

    return replace(
        one,
        name=f"{one.name} in {place}",
        repair=f"{one.repair}, in {place}",
        edits=tuple(divided(edit) for edit in one.edits if where(edit) in inside),
        read=None
        if read is None
        else read_in_part(read, {name: (dim, some, part.count) for name, some in inside.items()}),
        tuned=None if tuned is None else lambda value: _made_in(tuned(value), place, where, dim, part),
        scope="one",
        place=place,
        family=(one.name, one.repair),
    )


def _unread(division: _Division) -> _Division:
    """Return the division for parameters that are not read in the part, and so get no gradient there."""
    one, is_bias = division.one, all(str(name).endswith("bias") for name in division.shapes)

    def read(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.detach() for name, x in (one.read(parameters) if one.read else {}).items()}

    title = "bias-dropped" if is_bias and one.title == "weight-not-copied" else one.title
    name, repair = f"{one.name}, unread", f"{one.repair}, and it gets no gradient"
    return replace(division, one=replace(one, title=title, name=name, repair=repair, read=read, tuned=None))


# Shares that are fitted by least squares, because the effects of indices overlap.
#
# The fit uses a projected gradient with Barzilai and Borwein's steps (IMA J. Numer. Anal. 8, 1988). Shares stay between
# 0 and 1, or above 0 if the constant is free.


class _Fit:
    """An iterative fit of a division's shares that reduces the squared error.

    Attributes:
        division: the division whose shares are fitted.
        left: the share of the squared error that the best shares so far leave.
    """

    def __init__(self, failure: Failure, outputs: Outputs, division: _Division) -> None:
        self.division = division
        self.left = 1.0
        self._failure = failure
        self._outputs = outputs
        self._most = math.inf if division.one.tuned is not None else 1.0
        effect = torch.cat([*division.effects.values()])
        self._root = effect.clamp(
            min=1e-2 * effect.mean().item()
        ).sqrt()  # scales the shares so that steps go equally far in each
        self._at = torch.cat([*division.shares.values()]).clamp(0.0, self._most)
        self._before: tuple[Tensor, Tensor] | None = None
        self._whole = math.nan

    @property
    def is_good(self) -> bool:
        """Return whether the fit explains enough of the error."""
        return self.left < (1.0 if self._most > 1.0 else _LEFT)

    def go(self, steps: int, budget: Budget) -> None:
        """Make some steps of the fit, and find the part again."""
        if math.isnan(self._whole):
            self._whole = self._evaluated(torch.zeros_like(self._at))[0]
        for _ in range(steps):
            if budget.spent():
                break
            loss, gradient = self._evaluated(self._at)
            if not math.isfinite(loss):
                break
            if loss < self.left * self._whole:
                self.left = loss / max(self._whole, TINY)
                self.division.shares = self._like(self._at, self.division.shares)
            step = self._step(gradient)
            self._before = self._at, gradient
            self._at = (self._at - step * gradient / self._root.square()).clamp(0.0, self._most)
        self.division.look()

    @staticmethod
    def _like(all_in_one: Tensor, some: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(some, all_in_one.split([*map(len, some.values())]), strict=True))

    def _step(self, gradient: Tensor) -> float:
        if self._before is None:
            return 1.0
        moved, turned = self._at - self._before[0], gradient - self._before[1]
        along = (moved * turned).sum().item()
        return (self._root * moved).square().sum().item() / along if along > 0.0 else 1.0

    def _evaluated(self, at: Tensor) -> tuple[float, Tensor]:
        """Return the squared error and its derivatives by the shares; infinite if it cannot be computed."""
        division, leaf = self.division, at.clone().requires_grad_()
        parts = self._like(leaf, division.shares)

        def share(slot: _Slot, was: Tensor) -> Tensor:
            some = parts[division.where(slot)].to(was)
            if division.dim is None:
                return some.expand_as(was)
            each = some.repeat_interleave(was.shape[division.dim] // len(some))
            return each.view(-1, *[1] * (was.dim() - division.dim - 1)).expand_as(was)

        loss = _squared_error(self._failure, self._outputs, division.one, share)
        if loss is None or not bool(loss.isfinite()):
            return math.inf, torch.zeros_like(at)
        # A choice, as of the best experts, has no gradient.
        (gradient,) = torch.autograd.grad(loss, [leaf], allow_unused=True, materialize_grads=True)
        return loss.item(), gradient


# A part's name, as a reader would say it: ``every second head from 1 on``, ``positions 16 to 31 of 32``.
#
# The estimate of a part is not exact: some indices have so little effect that nothing tells whether they are in it. So
# among the parts that have a short name, the plainest is taken that fits about as well as the best choice of indices.


_LISTED = 3  # more indices than this are named only if they form a pattern
_LARGEST_STEP = 8  # of indices at regular distances
_AS_GOOD = 0.9  # a named part must gain at least this share of what the best choice of indices gains


def nameable(gains: Tensor) -> list[int]:
    """Return the indices of the plainest part that fits; empty if none does, or if all indices are in it.

    Args:
        gains: by how much the fit improves if an index is in the part.
    """
    best = gains.clamp(min=0.0).sum().item()
    fitting = (part for part in _plain_parts(gains) if gains[part].sum().item() >= _AS_GOOD * best)
    found = next(fitting, []) if best > 0.0 else []
    return found if len(found) < len(gains) else []


def _plain_parts(gains: Tensor) -> Iterator[list[int]]:
    """Yield the parts that have a name, for each sort the one that gains most, the plainest sorts first."""
    count = len(gains)
    order = gains.argsort(descending=True).tolist()
    yield order[:1]
    yield _largest_range(gains)
    yield sorted(order[: count - 1])
    for step in range(2, min(_LARGEST_STEP, count // 2) + 1):
        yield max((list(range(first, count, step)) for first in range(step)), key=lambda part: gains[part].sum().item())
    outside = set(_largest_range(-gains))
    yield [index for index in range(count) if index not in outside]
    yield from (sorted(order[:listed]) for listed in range(2, _LISTED + 1))


def _largest_range(gains: Tensor) -> list[int]:
    """Return the range that gains most; the longest if several gain equally much."""
    sums = torch.cat((gains.new_zeros(1), gains.cumsum(0)))
    least, at = sums.cummin(0)
    end = int((sums - least)[1:].argmax()) + 1
    begin = int(at[end])
    noise = 1e-3 * gains.abs().max()
    while begin > 0 and gains[begin - 1] > -noise:
        begin -= 1
    while end < len(gains) and gains[end] > -noise:
        end += 1
    return list(range(begin, end))


def describe_indices(indices: Sequence[int], count: int, axis: str) -> str:
    """Return indices in words, as people would name them.

    Args:
        indices: the indices, in order.
        count: how many indices the axis has.
        axis: the singular of what the axis counts.
    """
    inside, first = set(indices), indices[0]
    missing = [index for index in range(count) if index not in inside]
    if len(indices) == 1:
        return f"{axis} {first}"
    if len(missing) == 1:
        return f"all {axis}s but {missing[0]}"
    if list(indices) == list(range(first, indices[-1] + 1)):
        return f"{axis}s {first} to {indices[-1]} of {count}"
    step = indices[1] - first
    if list(indices) == list(range(first, count, step)):
        return f"every {'second' if step == 2 else ordinal(step)} {axis} from {first} on"
    if missing == list(range(missing[0], missing[-1] + 1)):
        return f"all {axis}s but {missing[0]} to {missing[-1]}"
    return f"{axis}s {', '.join(map(str, indices))}"


def axis_of(failure: Failure, edit: Edit, shape: torch.Size, dim: int) -> str:
    """Return what a dimension of a call's result counts, in the singular."""
    sizes = [x.shape for x in tree_leaves(failure.prepared.inputs) if isinstance(x, Tensor) and x.dim()]
    batch = sizes[0][0] if sizes else 0
    if dim == len(shape) - 1:
        return "channel"
    operation = edit.of.operation if edit.of is not None else None
    if isinstance(operation, Rotation) and dim == len(shape) + operation.axis:
        return "position"
    if isinstance(operation, Attention):
        return _axis_of_context(operation, shape, dim)
    if dim == 0 and shape[0] == batch:
        return "sequence"
    if len(shape) == 4 and isinstance(operation, Rotation):
        return "head"
    return "position" if len(shape) == 3 and dim == 1 else f"index of dimension {dim}"


def axis_of_parameter(shape: torch.Size, dim: int) -> str:
    """Return what a dimension of a parameter counts, in the singular."""
    return "channel" if len(shape) == 1 else "row" if dim == len(shape) - 2 else "column"


def _axis_of_context(attention: Attention, shape: torch.Size, dim: int) -> str:
    """Return what a dimension of an attention's result counts, from where the layout by heads puts each dimension."""
    names = ("sequence", "head", "position", "channel")
    for permutation in ((0, 1, 2, 3), (0, 2, 1, 3)):
        by_heads = tuple(shape[axis] for axis in permutation) if len(shape) == 4 else ()
        if by_heads and attention.from_heads(torch.empty(by_heads, device="meta")).shape == shape:
            marked = torch.zeros(by_heads)
            marked.narrow(permutation.index(dim), 0, 1).fill_(1.0)
            back = attention.from_heads(marked)
            if bool((back.select(dim, 0) == 1.0).all()):
                return names[permutation.index(dim)]
    return f"index of dimension {dim}"
