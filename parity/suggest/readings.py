"""Weights that the reference stores with more dimensions than TE: convolutions over patches, projections to heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from parity.suggest.units import WEIGHT, Unit
from parity.weights.notation import rearrange
from parity.weights.sides import renamed, shape_of
from parity.weights.terms import Shape, Side

# Axes of a convolution's weight: channels out and in, then time, rows and columns of a patch.
_KERNEL_AXES = {3: "o c p", 4: "o c p q", 5: "o c t p q"}
_AXES = "abcdefgh"


@dataclass(frozen=True)
class Reading:
    """One way to read the reference's weights in as many dimensions as the candidate's have.

    Attributes:
        units: the reference's, in the shapes that they are read in.
        patterns: of ``rearrange``, by parameter; empty where they are read as they are.
        usual: whether it is tried at once.
    """

    units: tuple[Unit, ...]
    patterns: dict[str, str]
    usual: bool = True

    def side(self, side: Side) -> Side:
        """A side of an entry over the parameters as they are stored, from one over those that are read."""
        return renamed(side, lambda name: rearrange(name, self.patterns[name]) if name in self.patterns else name)


def flat(shape: Shape) -> Shape:
    """Without dimensions of 1, and a convolution's input channels and patch as one dimension, as a linear layer has."""
    long = tuple(length for length in shape if length != 1)
    return (long[0], math.prod(long[1:])) if len(long) > 2 else long


def readings(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Iterator[Reading]:
    """The ways to read the reference's weights that the candidate's shapes ask for, the likeliest first."""
    if len(reference) == len(candidate) and all(map(_same_but_for_ones, reference, candidate)):
        yield _without_ones(reference, candidate)
        return
    convolutions = [unit for unit in reference if len(unit.shape) > 2]
    ranks = {len(unit.shape) for unit in convolutions}
    if not ranks or any(len(unit.shape) != 2 for unit in candidate):
        yield Reading(tuple(reference), {})
    elif len(ranks) == 1 and ranks <= _KERNEL_AXES.keys():
        yield from _matrices(reference, convolutions)
        if ranks == {3}:
            yield from _of_heads(reference, convolutions)


def _matrices(reference: Sequence[Unit], convolutions: Sequence[Unit]) -> Iterator[Reading]:
    """Each order in which a patch's channels, rows and columns can follow each other; one where it has one element."""
    shape = convolutions[0].shape
    outer, channels, *patch = _KERNEL_AXES[len(shape)].split()
    units = tuple(
        replace(unit, shapes={**unit.shapes, WEIGHT: (unit.shape[0], math.prod(unit.shape[1:]))})
        if unit in convolutions
        else unit
        for unit in reference
    )
    names = [unit.parameters[WEIGHT] for unit in convolutions]
    if math.prod(shape[2:]) == 1:
        pattern = f"{outer} {channels} {' '.join('1' for _ in patch)} -> {outer} {channels}"
        yield Reading(units, dict.fromkeys(names, pattern))
        return
    usual = [(channels, *patch), (*patch, channels)]
    others = [order for order in permutations((channels, *patch)) if order not in usual]
    for order in (*usual, *others):
        pattern = f"{outer} {channels} {' '.join(patch)} -> {outer} ({' '.join(order)})"
        yield Reading(units, dict.fromkeys(names, pattern), usual=order in usual)


def _of_heads(reference: Sequence[Unit], projections: Sequence[Unit]) -> Iterator[Reading]:
    """Projections to heads and back: ``[in, heads, head_dim]`` or ``[heads, head_dim, in]``, and the latter for out."""
    for pattern in ("d h k -> (h k) d", "h k d -> (h k) d", "h k d -> d (h k)"):
        units = tuple(
            replace(unit, shapes={**unit.shapes, WEIGHT: shape_of(rearrange(WEIGHT, pattern), unit.shapes)})
            if unit in projections
            else unit
            for unit in reference
        )
        yield Reading(units, {unit.parameters[WEIGHT]: pattern for unit in projections})


def _without_ones(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Reading:
    """Dimensions of 1 where the candidate has them."""
    units: list[Unit] = []
    patterns: dict[str, str] = {}
    for left, right in zip(reference, candidate, strict=True):
        shared = left.parameters.keys() & right.parameters.keys()
        other = {kind: right.shapes[kind] for kind in shared if _differ_by_ones(left.shapes[kind], right.shapes[kind])}
        patterns |= {left.parameters[kind]: _pattern(left.shapes[kind], shape) for kind, shape in other.items()}
        units.append(replace(left, shapes={**left.shapes, **other}))
    return Reading(tuple(units), patterns)


def _same_but_for_ones(one: Unit, other: Unit) -> bool:
    return one.shape == other.shape or _differ_by_ones(one.shape, other.shape)


def _differ_by_ones(one: Shape, other: Shape) -> bool:
    return one != other and [n for n in one if n != 1] == [n for n in other if n != 1]


def _pattern(one: Shape, other: Shape) -> str:
    """From a shape to another that has its dimensions of 1 in other places."""
    left, right = iter(_AXES), iter(_AXES)
    before = " ".join("1" if n == 1 else next(left) for n in one)
    after = " ".join("1" if n == 1 else next(right) for n in other)
    return f"{before} -> {after}"
