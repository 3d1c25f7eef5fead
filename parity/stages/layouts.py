"""Know the layouts in which a candidate may hold a value of its reference: dimensions in another order, or merged."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]

_MOST_DIMENSIONS = 5
_MOST_BLOCKS = 8  # a fused value is at most this many values side by side, such as q, k and v
_SAMPLED = 1024  # elements


@dataclass(frozen=True)
class Layout:
    """How elements of a candidate's value are found in the reference's order.

    Attributes:
        given: the candidate's shape, up to dimensions of 1.
        columns: the first column that is taken, and how many.
        split: the shape of these columns once dimensions are split.
        order: the dimensions of ``split`` in the reference's order.
        wanted: the reference's shape.
    """

    given: Shape
    columns: tuple[int, int]
    split: Shape
    order: tuple[int, ...]
    wanted: Shape

    def __call__(self, x: Tensor) -> Tensor:
        """Return the candidate's value in the reference's layout; views where possible."""
        first, count = self.columns
        taken = x.reshape(self.given)[..., first : first + count]
        return taken.reshape(self.split).permute(self.order).reshape(self.wanted)

    @property
    def is_whole(self) -> bool:
        """Whether it takes all columns."""
        return self.columns == (0, self.given[-1])


@functools.lru_cache(4096)
def layouts(given: Shape, wanted: Shape) -> tuple[Layout, ...]:
    """Return the layouts in which a candidate's value of shape ``given`` may hold a reference's of shape ``wanted``.

    Dimensions may be merged or split and in another order. A value with more elements may hold the other in one of
    several equal blocks of columns.
    """
    n, m = math.prod(given), math.prod(wanted)
    given = tuple(d for d in given if d != 1) or (1,)
    if not m or n % m or n // m > _MOST_BLOCKS or given[-1] % (n // m):
        return ()
    width = given[-1] // (n // m)
    return tuple(
        Layout(given, (first, width), split, order, wanted)
        for split, order in _orders((*given[:-1], width), wanted)
        for first in range(0, given[-1], width)
    )


@functools.lru_cache(4096)
def _orders(given: Shape, wanted: Shape) -> tuple[tuple[Shape, tuple[int, ...]], ...]:
    """Return how to split dimensions, and the order that then makes the wanted shape; the plainest first."""
    target = tuple(d for d in wanted if d != 1) or (1,)
    found: dict[int, tuple[Shape, tuple[int, ...]]] = {}
    for split in sorted(_splits(given, target), key=len):
        for order in itertools.permutations(range(len(split))):
            if _merges_to(tuple(split[i] for i in order), target):
                moved = torch.arange(math.prod(split)).reshape(split).permute(order).flatten()
                found.setdefault(hash(moved.numpy().tobytes()), (split, order))
    return tuple(found.values())


def _splits(given: Shape, target: Shape) -> Iterator[Shape]:
    """Yield a shape with its last dimension split into heads, its first into batch and tokens, both, or neither."""
    lasts = {given[-1:], *(_in_two(given[-1], target[-1])), *(_in_two(given[-1], target[1 % len(target)], True))}
    for last in lasts:
        if len(given) == 1:
            yield last
            continue
        for first in {
            given[:1],
            *_in_two(given[0], target[0], True),
            *_in_two(given[0], target[1 % len(target)], True),
        }:
            split = (*first, *given[1:-1], *last)
            if len(split) <= _MOST_DIMENSIONS:
                yield split


def _in_two(size: int, part: int, first: bool = False) -> Iterator[Shape]:
    """Yield a dimension split in two, of which one has the size of ``part``."""
    if 1 < part < size and size % part == 0:
        yield (part, size // part) if first else (size // part, part)


def _merges_to(shape: Shape, wanted: Shape) -> bool:
    """Return whether merging neighbouring dimensions of a shape gives another."""
    sizes = iter(shape)
    for size in wanted:
        product = 1
        while product < size:
            product *= next(sizes, 0)
            if not product:
                return False
        if product != size:
            return False
    return next(sizes, None) is None


@functools.lru_cache(4096)
def sample_of(layout: Layout) -> tuple[Tensor, Tensor]:
    """Return a sample of places in the candidate's flattened value, and where a layout puts these elements."""
    moved = layout(torch.arange(math.prod(layout.given))).flatten()
    places = torch.randperm(len(moved), generator=torch.Generator().manual_seed(0))[:_SAMPLED]
    return moved[places], places
