"""Find mistakes over ranks: how their pieces would have to be reduced or joined to be right.

Each rank's piece of a tensor is known, and so is the right tensor in FP64. So a mistake need not be imitated: if the
sum of the pieces is right, the reduction is missing; if the pieces are right in another order, they were gathered in
the wrong one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parity.mistakes.codes import repairable
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.replay import outputs_with
from parity.mistakes.rotation import counted_as, rotations
from parity.passes.prepare import Prepared, calls_of
from parity.ranks.layout import DIVIDING, AxisName, Degrees, GatheredTensor, Over, Shard, Split, part, places
from parity.result import Finding
from parity.user_error import UserError

# An explanation leaves at most the first share of an error: once a mistake is undone, only rounding is left, and
# nothing improves a right tensor, whose error is only rounding, that much. Or it leaves no more than the tensor's
# limit, and at most the second share of the error, since what FP8 costs may be a good part of a mistake's error.
_LEFT, _LEFT_WITHIN_LIMIT = 0.2, 0.7
_MOST_PERMUTED = 4  # ranks whose orders are tried
# Right weights in a dtype of 16 bits are off by no more than this.
_ROUNDED = 2.0**-8


@dataclass(frozen=True)
class _Guess:
    title: str
    told: str
    repair: str
    pieces: Sequence[Shard]


def explained_over_ranks(
    wholes: Sequence[GatheredTensor], made: Degrees, weights: Mapping[str, Tensor]
) -> tuple[Finding, ...]:
    """Return the findings that explain the errors of tensors that ranks have computed.

    Outputs come before gradients, since a wrong output spoils everything that follows from it.

    Args:
        wholes: the tensors.
        made: how many ranks there are.
        weights: the weights of the whole candidate, by name.
    """
    for kind in ("weight", "output", "input gradient", "weight gradient"):
        told: dict[tuple[str, str, str], list[str]] = {}
        for one in (whole for whole in wholes if whole.kind == kind):
            best = _find_best_guess(one, made, weights)
            if best is not None:
                told.setdefault((best.title, best.told, best.repair), []).append(one.name)
            elif kind == "weight" and one.off() > _ROUNDED:
                told.setdefault(("weights-not-as-mapped", *_other_weights(one)), []).append(one.name)
        if told:
            return tuple(_make_finding(*found, kind, names) for found, names in told.items())
    return ()


def _other_weights(whole: GatheredTensor) -> tuple[str, str]:
    worst = max(whole.pieces, key=lambda piece: whole.off([piece]))
    return (
        f"on rank {worst.rank}, {{what}} differs from the reference's, converted by the map, by "
        f"{whole.off([worst]):.2g} of its norm",
        "look at how this rank loads it",
    )


def explained_by_outputs(
    wholes: Sequence[GatheredTensor], gradients_of: Callable[[str], Mapping[tuple[str, str], Tensor]]
) -> tuple[Finding, ...]:
    """Return findings on how often each of several outputs counts in the gradients, if that explains them.

    Args:
        wholes: the tensors.
        gradients_of: returns the gradients that flow back from only the output of this name, by kind and name, in FP64.
    """
    names = [one.name for one in wholes if one.kind == "output"]
    gradients = [one for one in wholes if one.kind in ("input gradient", "weight gradient")]
    joined = [one.joined().double().flatten() for one in gradients]
    if len(names) < 2 or not gradients or not bool(torch.cat(joined).isfinite().all()):
        return ()
    alone = [gradients_of(name) for name in names]
    if any((one.kind, one.name) not in each for one in gradients for each in alone):
        return ()
    columns = [torch.stack([each[one.kind, one.name].flatten().cpu() for each in alone], 1) for one in gradients]
    factors = torch.linalg.lstsq(torch.cat(columns), torch.cat(joined)[:, None]).solution
    for one, computed, column in zip(gradients, joined, columns, strict=True):
        left = float((computed - (column @ factors).flatten()).norm())
        if not left <= max(may_be_left(one), one.limit) * float(one.exact.norm()):
            return ()
    return tuple(
        repairable(
            "gradient-scale",
            f"the gradients are those of a backward pass in which {name} counts {factor:.3g} times instead of once",
            f"look at whether the loss on {name} is scaled by a number of ranks, or of a rank's own tokens, and the "
            "others are not",
        )
        for name, factor in zip(names, factors.flatten().tolist(), strict=True)
        if abs(factor - 1) > _ROUNDED
    )


def explained_by_inputs(
    wholes: Sequence[GatheredTensor],
    made: Degrees,
    splits: Mapping[str, Split],
    inputs: Mapping[str, Tensor],
    reference: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> tuple[Finding, ...]:
    """Return a finding if the reference computes the outputs that ranks have computed from other inputs.

    Args:
        wholes: the tensors.
        made: how many ranks there are.
        splits: how inputs and outputs are divided, by name.
        inputs: the whole inputs, by name, in FP64.
        reference: returns the reference's outputs, by name, for other inputs.
    """
    outputs = [one for one in wholes if one.kind == "output"]
    divided = {over.axis for name in inputs for over in splits.get(name, ()) if made.of(over.axis) > 1}
    for axis in (axis for axis in DIVIDING if axis in divided):
        alone = [_run_reference_on_part(rank, made, splits, inputs, reference) for rank in range(made.count)]
        if all(_is_as(one, [each.get(one.name) for each in alone]) for one in outputs):
            return (
                repairable(
                    "nothing-exchanged",
                    f"each rank computes its part as if it were the whole, and nothing is exchanged over {axis}",
                    "pass the process group to TE, such as with set_context_parallel_group",
                ),
            )
        other = {name: tuple(_toggle_balance(over, axis) for over in split) for name, split in splits.items()}
        moved = {name: _move_parts(x, splits.get(name, ()), other.get(name, ()), made) for name, x in inputs.items()}
        of_moved = {name: _parts_of(x, other.get(name, ()), made) for name, x in reference(moved).items()}
        if all(_is_as(one, of_moved[one.name]) for one in outputs):
            is_balanced = any(over.balanced for split in splits.values() for over in split if over.axis == axis)
            given, taken = ("balanced", "plain") if is_balanced else ("plain", "balanced")
            return (
                repairable(
                    "sequence-order",
                    f"ranks of {axis} get the sequence in {given} order, but compute as if it were in {taken} order",
                    f"divide the sequence in {taken} order, or compute in {given} order; in the balanced order, which "
                    "TE's causal attention needs, each rank has a part from the front and one from the back",
                ),
            )
    return ()


def explained_by_positions(
    wholes: Sequence[GatheredTensor], made: Degrees, splits: Mapping[str, Split], prepared: Prepared
) -> tuple[Finding, ...]:
    """Return a finding if ranks that divide a sequence rotate by wrong positions, and this explains the outputs.

    Args:
        wholes: the tensors.
        made: how many ranks there are.
        splits: how inputs and outputs are divided, by name.
        prepared: the whole comparison.
    """
    turned = [one for one in rotations(calls_of(prepared).trace) if one.phases is not None]
    seq = {len(one.angles) for one in turned}
    outputs = [one for one in wholes if one.kind == "output"]
    if len(seq) != 1 or not outputs:
        return ()
    for over, told, positions in _list_wrong_positions(seq.pop(), splits, made):
        counted = tuple(edit for one in turned for edit in counted_as(positions)(one))
        mistake = Hypothesis("rope-position", told, told, counted)
        right = outputs_with(prepared, [mistake], torch.float64) if counted else None
        if right is None:
            continue
        if all(_is_as(one, _parts_of(right[one.name], splits.get(one.name, ()), made)) for one in outputs):
            return (
                repairable(
                    "rope-position",
                    f"ranks of {over.axis} rotate their parts of a sequence by the wrong positions: {told}",
                    "give each rank the positions of its own tokens, or give TE the angles of the whole sequence, from "
                    "which it takes the rank's part",
                ),
            )
    return ()


def _list_wrong_positions(seq: int, splits: Mapping[str, Split], made: Degrees) -> Iterator[tuple[Over, str, Tensor]]:
    """Yield wrong positions that ranks may use for their tokens, with the sequence's division and how they arise."""
    everywhere = torch.arange(seq)
    divided = {replace(one, dim=0) for split in splits.values() for one in split if one.axis in ("cp", "tp")}
    for one in divided:
        if made.of(one.axis) < 2 or seq % (2 * made.of(one.axis)):
            continue
        own, other = _parts_of(everywhere, (one,), made), replace(one, blocks=1, balanced=not one.balanced)
        order = "plain" if one.balanced else "balanced"
        for told, taken in (
            ("each counts its tokens from 0", [torch.arange(len(tokens)) for tokens in own]),
            (f"those of tokens in {order} order", _parts_of(everywhere, (other,), made)),
        ):
            positions = everywhere.clone()
            for tokens, counted in zip(own, taken, strict=True):
                positions[tokens] = counted
            yield one, told, positions


def _parts_of(x: Tensor, split: Split, made: Degrees) -> list[Tensor]:
    """Return each rank's part of a whole tensor."""
    return [part(x, split, made, made.place(rank)) for rank in range(made.count)]


def _run_reference_on_part(
    rank: int,
    made: Degrees,
    splits: Mapping[str, Split],
    inputs: Mapping[str, Tensor],
    reference: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> Mapping[str, Tensor]:
    """Return the reference's outputs for one rank's part of the inputs; empty if it does not accept that."""
    try:
        return reference({name: part(x, splits.get(name, ()), made, made.place(rank)) for name, x in inputs.items()})
    except (RuntimeError, ValueError, IndexError):
        return {}


def _toggle_balance(over: Over, axis: AxisName) -> Over:
    return replace(over, blocks=1, balanced=not over.balanced) if over.axis == axis else over


def _move_parts(x: Tensor, split: Split, other: Split, made: Degrees) -> Tensor:
    """Return a whole tensor whose parts under another split are this tensor's parts."""
    moved = x.clone().flatten()
    for rank in range(made.count):
        values = part(x, split, made, made.place(rank))
        moved[places(tuple(x.shape), other, made, rank).flatten()] = values.flatten()
    return moved.view(x.shape)


def may_be_left(whole: GatheredTensor) -> float:
    """Return the error that an explanation may leave in a tensor, relative to the whole."""
    off = whole.off()
    return max(_LEFT * off, min(whole.limit, _LEFT_WITHIN_LIMIT * off))


def _is_as(whole: GatheredTensor, right: Sequence[Tensor | None]) -> bool:
    """Return whether each rank's piece equals the one in ``right``, given by rank, up to rounding."""
    limit = may_be_left(whole)
    for piece in whole.pieces:
        explained = right[piece.rank]
        if explained is None or explained.numel() != piece.values.numel():
            return False
        off = piece.values.flatten().double() - explained.flatten().double()
        if not float(off.norm()) <= limit * float(explained.double().norm()):
            return False
    return True


def _make_finding(title: str, text: str, repair: str, kind: str, names: Sequence[str]) -> Finding:
    more = f" (and of {len(names) - 1} more: {', '.join(names[1:3])})" if len(names) > 1 else ""
    what = kind if names[0] == kind else f"{kind} {names[0]}"
    return repairable(title, text.format(what=f"the {what}{more}"), repair)


def _find_best_guess(whole: GatheredTensor, made: Degrees, weights: Mapping[str, Tensor]) -> _Guess | None:
    if not whole.off():
        return None
    offs = [(whole.off(guess.pieces), guess) for guess in _list_guesses(whole, made, weights)]
    left, best = min(offs, key=lambda entry: entry[0], default=(math.inf, None))
    return best if left <= may_be_left(whole) else None


def _list_guesses(whole: GatheredTensor, made: Degrees, weights: Mapping[str, Tensor]) -> Iterator[_Guess]:
    for axis in (axis for axis in DIVIDING if made.of(axis) > 1):
        yield from _guess_wrong_reduction(whole, made, axis)
        yield from _in_another_order(whole, made, axis)
        yield from _guess_unequal_factors(whole, made, axis)
        yield from _added_to_other_parts(whole, made, axis)
        if whole.kind == "output":
            yield from _with_biases(whole, made, axis, weights)


def _guess_wrong_reduction(whole: GatheredTensor, made: Degrees, axis: AxisName) -> Iterator[_Guess]:
    """Yield the guesses that ranks of an axis, which have the same part, have reduced it wrongly."""
    count = made.of(axis)
    own = {one.rank: one for one in whole.pieces}  # an expert's weight is on some ranks only
    groups = [group for peers in made.peers(axis) if (group := [own[rank] for rank in peers if rank in own])]
    if not all(torch.equal(one.places, group[0].places) for group in groups for one in group):
        return
    if any(not torch.equal(one.values, group[0].values) for group in groups for one in group):
        distinct = [_find_distinct_values(group) for group in groups]
        parts = max(map(len, distinct))
        some = "" if parts == count else f" (some ranks have summed theirs, and {parts} parts are left)"
        added = [torch.stack(list(values)).double().sum(0) for values in distinct]
        sums = [replace(group[0], values=values) for group, values in zip(groups, added, strict=True)]
        yield _Guess(
            "reduction-missing",
            f"{{what}} is only a part of the sum on each of the {count} ranks of {axis}{some}",
            f"all-reduce it over {axis}",
            sums,
        )
        means = [replace(one, values=one.values / parts) for one in sums]
        yield _Guess(
            "reduction-missing",
            f"{{what}} differs on the {count} ranks of {axis}{some}, and their average is right",
            f"all-reduce it over {axis}, and divide by {parts}",
            means,
        )
    for factor in (count, count**2):
        yield _Guess(
            "reduced-twice",
            f"{{what}} is {factor} times too large: it is summed over {axis} though each rank has all of it already",
            "reduce it once",
            [replace(one, values=one.values.double() / factor) for one in whole.pieces],
        )
    yield _Guess(
        "averaged-over-ranks",
        f"{{what}} is 1/{count} of the right one: it is averaged over {axis}, or a loss is divided by the number of "
        "ranks twice",
        f"sum it over {axis}, or divide the loss once",
        [replace(one, values=one.values.double() * count) for one in whole.pieces],
    )


def _find_distinct_values(pieces: Sequence[Shard]) -> list[Tensor]:
    """Return the distinct values of ranks' pieces."""
    found: list[Tensor] = []
    for piece in pieces:
        if not any(torch.equal(piece.values, other) for other in found):
            found.append(piece.values)
    return found


def _guess_unequal_factors(whole: GatheredTensor, made: Degrees, axis: AxisName) -> Iterator[_Guess]:
    """Yield the guess that each rank of an axis has its own part of the whole times a factor of its own."""
    if whole.kind != "input gradient" or all(one.axis != axis for one in whole.pieces[0].split):
        return
    exact, factors = whole.exact.flatten().to("cpu", torch.float64), [0.0] * made.of(axis)
    for at in range(made.of(axis)):
        mine = [one for one in whole.pieces if made.place(one.rank)[axis] == at]
        right = torch.cat([exact[one.places.flatten()] for one in mine])
        square = float(right.square().sum())
        factors[at] = (
            float(torch.cat([one.values.flatten().double() for one in mine]) @ right) / square if square else 1.0
        )
    if not all(factors):
        return
    scaled = [replace(one, values=one.values.double() / factors[made.place(one.rank)[axis]]) for one in whole.pieces]
    if max(factors) - min(factors) < _LEFT * max(map(abs, factors)):
        yield from _guess_multiplied_loss(scaled, sum(factors) / len(factors), made.of(axis), axis)
        return
    told = ", ".join(f"{factor:.3g}" for factor in factors)
    yield _Guess(
        "shares-of-ranks",
        f"{{what}} is {told} times the right one on the ranks of {axis}: each divides its loss by its own count, "
        "such as its number of tokens",
        "divide by the count of all ranks together",
        scaled,
    )


def _guess_multiplied_loss(pieces: Sequence[Shard], factor: float, count: int, axis: AxisName) -> Iterator[_Guess]:
    for right, title, told in (
        (count, "reduced-twice", f"{count} times the right one on each rank of {axis}: a loss is multiplied"),
        (1 / count, "averaged-over-ranks", f"1/{count} of the right one on each rank of {axis}: a loss is divided"),
    ):
        if abs(factor / right - 1) < _ROUNDED:
            yield _Guess(
                title,
                f"{{what}} is {told} by the number of ranks, whose gradients are not averaged",
                "leave the number of ranks out of the loss, or average gradients over the ranks",
                pieces,
            )


def _added_to_other_parts(whole: GatheredTensor, made: Degrees, axis: AxisName) -> Iterator[_Guess]:
    """Yield the guess that ranks of an axis that divides the tensor have added other ranks' parts to their own."""
    if all(one.axis != axis for one in whole.pieces[0].split):
        return
    exact, others = whole.exact.flatten().to("cpu", torch.float64), []
    for one in whole.pieces:
        (peers,) = (peers for peers in made.peers(axis) if one.rank in peers)
        parts = [each for each in whole.pieces if each.rank in peers and each.rank != one.rank]
        if any(each.places.shape != one.places.shape for each in parts):
            return
        others.append(torch.stack([exact[each.places] for each in parts]).sum(0) if parts else torch.zeros(()))
    yield _Guess(
        "parts-added-up",
        f"{{what}} is split over {axis}, and each rank has the sum of all parts",
        f"leave it out of the reduction over {axis}, whose ranks hold different parts of it",
        [replace(one, values=one.values.double() - more) for one, more in zip(whole.pieces, others, strict=True)],
    )


def _in_another_order(whole: GatheredTensor, made: Degrees, axis: AxisName) -> Iterator[_Guess]:
    """Yield the guesses that the pieces are parts of the whole in another order than declared."""
    count, shape = made.of(axis), tuple(whole.exact.shape)
    over = next((one for one in whole.pieces[0].split if one.axis == axis), None)
    if over is None:
        yield from _gathered_otherwise(whole, count, axis)
        return
    orders = list(itertools.permutations(range(count)))[1:] if count <= _MOST_PERMUTED else []
    for order in orders:
        yield _Guess(
            "shards-in-another-order",
            f"{{what}} is split over {axis} in another order: rank {order.index(0)} has the part of rank 0",
            "give each rank the part whose number is its own within the group",
            [replace(one, places=_find_places_elsewhere(whole, made, one, {axis: order})) for one in whole.pieces],
        )
    yield _Guess(
        "shards-in-another-order",
        f"{{what}} is the first rank's part on each rank of {axis}",
        "give each rank its own part",
        [replace(one, places=_find_places_elsewhere(whole, made, one, {axis: [0] * count})) for one in whole.pieces],
    )
    for other, text, right in _list_other_splits(over):
        split = tuple(other if one is over else one for one in whole.pieces[0].split)
        try:
            moved = [replace(one, places=places(shape, split, made, one.rank)) for one in whole.pieces]
        except UserError:  # the whole cannot be divided this way
            continue
        if all(one.places.numel() == one.values.numel() for one in moved):
            yield _Guess("shard-layout", f"{{what}} is split over {axis} {text}", f"split it {right}", moved)


def _list_other_splits(over: Over) -> Iterator[tuple[Over, str, str]]:
    """Yield other ways to split, each with the words for how it was split and how it should be."""
    if over.blocks > 1:
        yield replace(over, blocks=1), "as one block", f"so that each of its {over.blocks} blocks is split by itself"
    elif not over.balanced:
        for blocks, such in ((2, "two blocks, such as gate and up"), (3, "three blocks, such as Q, K and V")):
            yield replace(over, blocks=blocks), f"as {such}, each by itself", "as one block"
    balanced, plain = "so that each rank has a part from the front and one from the back", "in plain order"
    if over.balanced:
        yield replace(over, balanced=False), plain, balanced
    else:
        yield replace(over, blocks=1, balanced=True), balanced, plain


def _find_places_elsewhere(
    whole: GatheredTensor, made: Degrees, piece: Shard, moved: Mapping[AxisName, Sequence[int]]
) -> Tensor:
    """Return the places of a piece as if it were that of another rank."""
    place = made.place(piece.rank)
    other = {axis: moved[axis][at] if axis in moved else at for axis, at in place.items()}
    return next((one.places for one in whole.pieces if made.place(one.rank) == other), piece.places)


def _gathered_otherwise(whole: GatheredTensor, count: int, axis: AxisName) -> Iterator[_Guess]:
    """Yield the guesses that a tensor that each rank has whole was gathered from parts in the wrong order."""
    shape = whole.exact.shape
    if whole.kind == "weight gradient" or any(one.values.shape != shape for one in whole.pieces):
        return
    for dim, size in enumerate(shape):
        for parts in (count, 2 * count):
            if size % parts:
                continue
            orders = itertools.permutations(range(parts)) if parts <= _MOST_PERMUTED else _list_balanced_orders(parts)
            for order in orders:
                yield _Guess(
                    "gathered-in-another-order",
                    f"{{what}} is right if the {parts} parts of its dimension {dim} are put in the order "
                    f"{', '.join(map(str, order))}",
                    f"undo the order in which {axis} splits it, and gather the ranks' parts in the order of the ranks",
                    [replace(one, values=_reorder_parts(one.values, dim, order)) for one in whole.pieces],
                )


def _reorder_parts(x: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    pieces = x.chunk(len(order), dim)
    return torch.cat([pieces[at] for at in order], dim)


def _list_balanced_orders(parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the orders that undo, and make, the division in which each rank has a part from the front and the back."""
    made = tuple(itertools.chain.from_iterable((rank, parts - 1 - rank) for rank in range(parts // 2)))
    yield tuple(made.index(at) for at in range(parts))
    yield made


def _with_biases(
    whole: GatheredTensor, made: Degrees, axis: AxisName, weights: Mapping[str, Tensor]
) -> Iterator[_Guess]:
    """Yield the guesses that each rank of an axis adds a bias."""
    count = made.of(axis)
    for name, bias in weights.items():
        if bias.dim() != 1 or bias.shape != whole.exact.shape[-1:] or "norm" in name:
            continue
        more = (count - 1) * bias.detach().cpu().double().expand(whole.exact.shape).flatten()
        yield _Guess(
            "bias-on-every-rank",
            f"{{what}} has {name} {count} times: each of the {count} ranks of {axis} adds it before the sum over them",
            "let only one rank add it, or add it after the sum",
            [
                replace(one, values=one.values.double() - more[one.places.flatten()].view(one.values.shape))
                for one in whole.pieces
            ],
        )
