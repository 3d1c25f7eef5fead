"""Say how ranks divide a candidate's parameters: as TE marks them, else as their shapes tell."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from parity import te
from parity.case.case import Case, Size
from parity.case.weight_map import Shape, Side, Stack, WeightMap, shape_of
from parity.passes.modes import usual_modes
from parity.passes.on_rank import AsItIs, FromFile, source_of
from parity.ranks.launch import RanksFailed, launch
from parity.ranks.layout import DIVIDING, AxisName, Degrees, Over, Split, degrees, joined, marked, part
from parity.suggest.layouts import Shapes
from parity.user_error import UserError


@dataclass(frozen=True)
class Divided:
    """Tell how ranks divide one parameter of the candidate.

    Attributes:
        name: the whole parameter's.
        split: one axis after the other; none if each rank that has it has it whole.
        reason: what says so, in a few words.
    """

    name: str
    split: Split
    reason: str


# On a rank, where the candidate is built and not run.


@dataclass(frozen=True, eq=False)
class _Asked:
    source: FromFile | AsItIs
    made: Degrees
    size: Size
    shapes: Mapping[str, Shape]


@dataclass(frozen=True)
class _Seen:
    """Hold what a rank has of a whole parameter.

    Attributes:
        shape: of its part.
        marked: how TE marks the whole one as divided.
        sharded: whether FSDP holds a part of it, and tells the whole one's shape.
    """

    shape: Shape
    marked: Split
    sharded: bool


def _on_rank(asked: _Asked) -> dict[str, _Seen]:
    """Return what this rank has, by the names of the whole parameters."""
    kernels, ranks = te.kernels("cpu"), joined(asked.made)
    case = replace(asked.source.case(), at=ranks, ranks=(asked.made,))
    with usual_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        candidate = case.build(kernels.te, asked.size).candidate
    parameters = dict(candidate.named_parameters())
    held = marked(candidate, asked.shapes, asked.made, asked.made.place(ranks.world.rank))
    return {
        one.whole: _Seen(tuple(parameters[name].shape), one.split, hasattr(parameters[name], "device_mesh"))
        for name, one in held.items()
    }


# In this process: what all ranks have, for one axis after the other, so that nothing else can divide a parameter.


def divided(
    case: Case, size: Size, among: Sequence[Degrees], weights: WeightMap, shapes: Shapes
) -> tuple[tuple[Divided, ...], tuple[str, ...]]:
    """Return how each parameter of the candidate is divided along every axis, and what is not known of it.

    Args:
        case: whose candidate it is.
        size: at which it is built.
        among: how many ranks there are, by axis.
        weights: the weight map, by which a parameter may hold several of the reference's.
        shapes: of all parameters, in one process.
    """
    found: dict[str, list[Divided]] = {name: [] for name in shapes.candidate}
    problems: dict[str, None] = {}
    packed = {right: left for left, right in weights.items() if isinstance(right, str)}
    source = source_of(case)
    most = {axis: max(one.of(axis) for one in among) for axis in DIVIDING}
    for axis, count in most.items():
        if count == 1:
            continue
        made = degrees({axis: count})
        try:
            ranks = launch(_on_rank, count, [_Asked(source, made, size, shapes.candidate)])
        except RanksFailed as error:
            first = error.failures[0]
            problems[f"over {made.label}, rank {first.rank} {first.how}: {first.what}"] = None
            continue
        for name, whole in shapes.candidate.items():
            having = {rank: seen[name] for rank, seen in enumerate(ranks) if name in seen}
            try:
                found[name].append(_over(axis, made, name, whole, having, packed.get(name), shapes.reference))
            except UserError as error:
                problems[f"over {made.label}, {error}"] = None
    return tuple(_together(name, each) for name, each in found.items() if each), tuple(problems)


def _over(
    axis: AxisName,
    made: Degrees,
    name: str,
    whole: Shape,
    having: Mapping[int, _Seen],
    left: Side | None,
    reference: Mapping[str, Shape],
) -> Divided:
    """Return how a parameter is divided along an axis, by what ranks have of it.

    Raises:
        UserError: if nothing says it, or ``over`` cannot.
    """
    if not having:
        raise UserError(f"no rank has {name}, which the candidate has in one process")
    seen = next(iter(having.values()))
    if seen.shape == whole:
        if seen.sharded:
            return Divided(name, (), "whole, as FSDP tells it")
        return Divided(
            name, (), "whole" if len(having) == made.count else f"whole, on {axis} rank {next(iter(having))}"
        )
    by_shape = tuple(Over(axis, dim) for dim, length in enumerate(whole) if seen.shape[dim : dim + 1] != (length,))
    for split, reason in ((seen.marked, "as TE marks it"), (by_shape, "by its shape")):
        if len(split) == 1 and _part_of(whole, split, made) == seen.shape:
            return Divided(name, *_in_blocks(name, split[0], reason, left, reference))
    raise UserError(f"{name} is {seen.shape} on a rank, and {whole} in one process: no single split gives these shapes")


def _in_blocks(
    name: str, one: Over, reason: str, left: Side | None, reference: Mapping[str, Shape]
) -> tuple[Split, str]:
    """Return the split; where a parameter holds several of the reference's, each of them is divided by itself."""
    if not isinstance(left, Stack) or left.dim != one.dim or one.blocks > 1:
        return (one,), reason
    lengths = [shape_of(part, reference)[left.dim] for part in left.parts]
    if len(set(lengths)) > 1:
        raise UserError(
            f"{name} holds parts of {', '.join(map(str, lengths))}, and parity.over divides equal ones: give each a "
            "parameter of its own"
        )
    return (replace(one, blocks=len(lengths)),), f"{reason}; each of its {len(lengths)} parts by itself"


def _part_of(whole: Shape, split: Split, made: Degrees) -> Shape | None:
    """Return the shape of a rank's part, which is the same on all; None if the whole does not divide."""
    try:
        return tuple(part(torch.empty(whole, device="meta"), split, made, made.place(0)).shape)
    except UserError:
        return None


def _together(name: str, each: Sequence[Divided]) -> Divided:
    """Return the split along all axes."""
    split = tuple(one for own in each for one in own.split)
    reasons = dict.fromkeys(own.reason for own in each if own.split or not split)
    return Divided(name, split, "; ".join(reasons))
