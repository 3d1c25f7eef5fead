"""Find the part of a place in which a mistake is made: some heads, some sequences, some positions, some layers.

A mistake says what certain calls of the reference return instead. Where a port makes it in some heads only, making it
everywhere explains nothing, and there are too many parts to try each. But the effects of different parts hardly
overlap: so the derivatives of the squared error, at the reference and at the mistake made everywhere, by how far each
element is replaced, tell which parts the error holds. If ``e_i`` is the effect of part ``i``, and the error is their
sum over a set S, the two are ``-<e_i, sum of e_j over S>`` and ``<e_i, sum of e_j outside of S>``. The first, with its
sign turned, over the difference of the two is the part's share: 1 in S, and 0 outside. Two passes give the shares along
every dimension of every call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parity.mistakes.attention import Attention
from parity.mistakes.hypothesis import Hypothesis, in_part, ordinal
from parity.mistakes.rotation import Rotation
from parity.mistakes.trial import differentiable_outputs
from parity.numerics.errors import norm_of
from parity.search.failure import Budget, Failure, while_it_lasts
from parity.search.screen import TINY, Screen
from parity.trace.trace import Edit
from parity.trace.walk import grouped

_MOST, _MOST_TUNED = 8, 8  # mistakes of which a part is looked for: with their constants, and with any
_MOST_OF_A_TITLE = 2  # of these may have one title
_LARGEST_FACTOR = 2.0  # the effect of all parts, along the error, over the error itself: 1 if effects do not overlap
_LEAST_COSINE = 0.1  # between the effect of all parts and the error, where the constant may be another
_UNCLEAR = 0.3  # what a part leaves of the error's square to first order, over what it explains
_WAYS = 2  # dimensions of a mistake whose parts are tried, the clearest first
_LISTED = 3  # more indices than these are told only if they form a pattern


def in_parts(failure: Failure, screen: Screen, known: Sequence[Hypothesis], budget: Budget) -> Iterator[Hypothesis]:
    """Yield mistakes made in the part of their place in which the error tells that they are made, the likeliest first.

    Args:
        failure: its outputs are finite.
        screen: has noted what each mistake does.
        known: mistakes that have been screened.
        budget: of this part of the search.
    """
    for one in while_it_lasts(_likely(screen, known), budget):
        derivatives = _derivatives(failure, one)
        if derivatives is not None:
            yield from _parts(failure, one, derivatives)[:_WAYS]


def _likely(screen: Screen, known: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the mistakes whose effect contains the error, as far as first order tells: the nearest first.

    With another constant, an effect has about the same direction, and another size.
    """
    error, effects = screen.effects.error, screen.effects.known
    size = torch.linalg.vector_norm(error).clamp(min=TINY)
    factors, cosines = {}, {}
    for one in (one for one in known if one in effects and _can_be_divided(one)):
        along = (effects[one] @ error / size).item()
        factors[one] = along / size.item()
        cosines[one] = along / max(torch.linalg.vector_norm(effects[one]).item(), TINY)
    exact = [one for one, factor in factors.items() if 1.0 / _LARGEST_FACTOR < factor < _LARGEST_FACTOR]
    exact.sort(key=lambda one: abs(factors[one] - 1.0))
    others = [one for one, cosine in cosines.items() if one.tuned is not None and cosine > _LEAST_COSINE]
    others.sort(key=lambda one: -cosines[one])
    return list(dict.fromkeys((*_few_of_a_title(exact)[:_MOST], *_few_of_a_title(others)[:_MOST_TUNED])))


def _few_of_a_title(some: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the first few of each title, in their order."""
    by_title = grouped(some, lambda one: one.title)
    few = {one for alike in by_title.values() for one in alike[:_MOST_OF_A_TITLE]}
    return [one for one in some if one in few]


def _can_be_divided(one: Hypothesis) -> bool:
    """Return whether the mistake has a meaning, and is all in what calls return."""
    only_calls = one.read is None and one.around is None and all(edit.detached is None for edit in one.edits)
    return one.scope != "call" and bool(one.edits) and only_calls


@dataclass(frozen=True)
class _Derivatives:
    """The derivatives of the squared error by the share in which each element of an edit's call is replaced.

    Attributes:
        at_none, at_all: where no element is replaced, and where all are; of the shape that the call returns.
    """

    at_none: Tensor
    at_all: Tensor


def _derivatives(failure: Failure, one: Hypothesis) -> list[_Derivatives] | None:
    """Return the derivatives for each edit; None if they cannot be computed."""
    found: list[list[Tensor]] = []
    for share in (0.0, 1.0):
        leaves: dict[Edit, Tensor] = {}
        edits = tuple(_mixed(edit, share, leaves) for edit in one.edits)
        outputs = differentiable_outputs(failure.prepared, (replace(one, edits=edits),))
        loss = None if outputs is None or len(leaves) < len(edits) else _squared_error(failure, outputs)
        if loss is None or not loss.requires_grad:
            return None
        found.append(list(torch.autograd.grad(loss, [leaves[edit] for edit in one.edits], materialize_grads=True)))
    if not all(bool(x.isfinite().all()) for some in found for x in some):
        return None
    return [_Derivatives(at_none, at_all) for at_none, at_all in zip(*found, strict=True)]


def _mixed(edit: Edit, share: float, leaves: dict[Edit, Tensor]) -> Edit:
    """Return an edit that replaces each element of a call's result in this share, by which it can be derived."""

    def compute(was: Tensor, *values: Tensor) -> Tensor:
        leaf = torch.full(was.shape, share, dtype=was.dtype, device=was.device, requires_grad=True)
        leaves[edit] = leaf
        return torch.lerp(was, edit.compute(was, *values), leaf)  # raises if shapes or dtypes differ, as for a mask

    return replace(edit, compute=compute, of=None)


def _squared_error(failure: Failure, outputs: dict[str, Tensor]) -> Tensor | None:
    """Return half the sum of squared errors, each output in units of its tolerance; None if a shape differs."""
    loss = None
    for result in failure.outputs:
        candidate = failure.candidate[result.kind, result.name].double()
        output = outputs.get(result.name)
        if output is None or output.shape != candidate.shape:
            return None
        size = max(result.tolerance_relative_l2, TINY) * max(norm_of(candidate), TINY)
        term = 0.5 * ((output - candidate) / size).square().sum()
        loss = term if loss is None else loss + term
    return loss


# The parts of a mistake's place, as a reader would name them.
#
# A place is divided by the modules that make the calls, along a dimension of what these return, or both ways. What the
# calls of one module do goes together: where queries and keys are rotated by another base, both of them are. If that
# tells no part, queries and keys are divided apart.


_Where = Callable[[Edit], str]
_Chosen = Mapping[str, tuple[int, ...]]  # by what ``_Where`` returns, the indices that are in the part


def _module_of(edit: Edit) -> str:
    return edit.site[0] or "the module"


def _role_of(edit: Edit) -> str:
    """Return which operand of attention a rotation turns, and in which module."""
    operation = edit.of.operation if edit.of is not None else None
    role = f"the {operation.role}" if isinstance(operation, Rotation) else ""
    return " of ".join(filter(None, (role, edit.site[0]))) or "the module"


def _parts(failure: Failure, one: Hypothesis, derivatives: Sequence[_Derivatives]) -> list[Hypothesis]:
    """Return the mistake in the part that the derivatives tell, for each way to divide that tells one clearly."""
    return _parts_by(_module_of, failure, one, derivatives) or _parts_by(_role_of, failure, one, derivatives)


def _parts_by(
    where: _Where, failure: Failure, one: Hypothesis, derivatives: Sequence[_Derivatives]
) -> list[Hypothesis]:
    """Return the same if calls for which ``where`` returns the same go together."""
    found: list[tuple[float, Hypothesis]] = []
    for dim in (None, *range(max(each.at_none.dim() for each in derivatives))):
        cells = _cells(one, derivatives, where, dim)
        chosen = None if cells is None else _chosen(cells, one.tuned is not None)
        if cells is None or chosen is None:
            continue
        unclear, indices = chosen
        counts = {module: none.numel() for module, (none, _) in cells.items()}
        axis = "" if dim is None else _axis(failure, one.edits[0], derivatives[0].at_none.shape, dim)
        most = 1 if dim is None else max(each.at_none.shape[dim] for each in derivatives)
        place = _place(indices, counts, axis, most)
        if unclear < _UNCLEAR and place:
            found.append((unclear, _made_in(one, place, where, dim, indices, counts)))
    return [part for _, part in sorted(found, key=lambda entry: entry[0])]


def _cells(
    one: Hypothesis, derivatives: Sequence[_Derivatives], where: _Where, dim: int | None
) -> dict[str, tuple[Tensor, Tensor]] | None:
    """Return the derivatives of each module at each index of a dimension; None if its calls have no such dimension.

    Calls of one module are added; of fewer indices, as of grouped keys beside queries, each stands for as many others.
    """
    of_module: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for edit, each in zip(one.edits, derivatives, strict=True):
        if dim is not None and dim >= each.at_none.dim():
            return None
        of_module[where(edit)].append((_along(each.at_none, dim), _along(each.at_all, dim)))
    cells = {}
    for module, some in of_module.items():
        fewest = min(len(none) for none, _ in some)
        if any(len(none) % fewest for none, _ in some):
            return None
        summed = [torch.stack([each[at].view(fewest, -1).sum(1) for each in some]).sum(0) for at in (0, 1)]
        cells[module] = summed[0], summed[1]
    return cells


def _along(x: Tensor, dim: int | None) -> Tensor:
    """Return the sums over all dimensions but one; None sums over all."""
    if dim is None:
        return x.sum().view(1)
    return x.movedim(dim, 0).flatten(1).sum(1)


def _chosen(cells: Mapping[str, tuple[Tensor, Tensor]], any_size: bool) -> tuple[float, _Chosen] | None:
    """Return how unclear it is which cells are in the part, and those that are; None if all are, or none.

    With the mistake's own constant, the share of a cell in the part is 1; with another, that of all cells is the same.
    """
    none, every = (torch.cat([each[at].cpu() for each in cells.values()]) for at in (0, 1))
    effects = (every - none).clamp(min=0.0)
    shares = torch.where(effects > 0, -none / effects.clamp(min=TINY), 0.0)
    telling = effects > effects.mean() / len(effects)
    largest = shares[telling].max().item() if telling.any() else 0.0
    inside = telling & (shares > largest / 2.0)
    if largest <= 0.0 or bool(inside.all()):
        return None
    size = ((shares * effects)[inside].sum() / effects[inside].sum()).item()
    if not any_size and not 1.0 / _LARGEST_FACTOR < size < _LARGEST_FACTOR:
        return None
    residual = (shares - size * inside).square() * effects
    unclear = (residual.sum() / (size**2 * effects[inside].sum()).clamp(min=TINY)).item()
    of_module = inside.split([len(none) for none, _ in cells.values()])
    indices = (tuple(some.nonzero().flatten().tolist()) for some in of_module)
    return unclear, {module: some for module, some in zip(cells, indices, strict=True) if some}


def _place(chosen: _Chosen, counts: Mapping[str, int], axis: str, most: int) -> str:
    """Name the part, of which a call returns ``most`` indices; return an empty text if it has no short name."""
    (some, count), *others = {(some, counts[module]) for module, some in chosen.items()}
    if others:
        return ""
    each = most // count
    indices = [index * each + one for index in some for one in range(each)]
    part = _told(indices, count * each, axis) if len(some) < count else ""
    modules = ", ".join(chosen) if len(chosen) < len(counts) else ""
    return " of ".join(filter(None, (part, modules))) if part is not None else ""


def _made_in(
    one: Hypothesis, place: str, where: _Where, dim: int | None, chosen: _Chosen, counts: Mapping[str, int]
) -> Hypothesis:
    """Return a mistake made in a part of its place, whichever constant it has."""
    tuned = one.tuned

    def divided(edit: Edit) -> Edit:
        key = where(edit)
        return edit if dim is None else in_part(edit, dim, chosen[key], counts[key])

    return replace(
        one,
        name=f"{one.name} in {place}",
        repair=f"{one.repair}, in {place}",
        edits=tuple(divided(edit) for edit in one.edits if where(edit) in chosen),
        tuned=None if tuned is None else lambda value: _made_in(tuned(value), place, where, dim, chosen, counts),
        scope="one",
        place=place,
        family=(one.name, one.repair),
    )


def _axis(failure: Failure, edit: Edit, shape: torch.Size, dim: int) -> str:
    """Return what a dimension counts, in the singular."""
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


def _axis_of_context(attention: Attention, shape: torch.Size, dim: int) -> str:
    """Return what a dimension of an attention's result counts: see where its layout by heads puts each of its own."""
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


def _told(indices: Sequence[int], count: int, axis: str) -> str | None:
    """Name indices of so many as people would; None if they are several and form no pattern."""
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
    if len(indices) <= _LISTED:
        return f"{axis}s {', '.join(map(str, indices))}"
    return None
