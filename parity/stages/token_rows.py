"""Know which tokens a candidate holds if one side packs its sequences, fills them up, or leaves tokens out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FEWEST = 8  # rows
_PROJECTIONS = 16  # by which rows are compared
_MOST_PAIRS = 2**23  # of a row and another that it may be; their distances take 64 MiB


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Which rows of a candidate's values are which tokens of its reference's.

    Attributes:
        count: how many rows the candidate's values have.
        own: the numbers of those that the reference has as well, ascending.
        theirs: their numbers among the reference's rows, in the same order.
        shape: the dimensions in which the reference holds its rows, such as batch and positions.
    """

    count: int
    own: Tensor
    theirs: Tensor
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the candidate holds all of the reference's rows."""
        return len(self.theirs) == math.prod(self.shape)

    def equals(self, other: TokenRows) -> bool:
        """Return whether others are the same rows of as many."""
        same = self.count == other.count and self.shape == other.shape and len(self.own) == len(other.own)
        return same and bool((self.own == other.own).all()) and bool((self.theirs == other.theirs).all())

    def fits(self, x: Tensor) -> bool:
        """Return whether a value of the candidate's has these rows, whatever its channels."""
        return self._count_dims(x) is not None

    def shape_of(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape that a value of the candidate's has in the reference's rows."""
        return (*self.shape, *x.shape[self._count_dims(x) :])

    def _count_dims(self, x: Tensor) -> int | None:
        """Return how many first dimensions of a value are its rows; None if it has other rows."""
        return next((dims for dims in range(1, x.dim()) if math.prod(x.shape[:dims]) == self.count), None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[*shape, *channels]``: the candidate's rows where the reference has them, and zeros elsewhere."""
        shape = self.shape_of(x)
        rows = x.reshape(self.count, *shape[len(self.shape) :])
        held = rows.new_zeros(math.prod(self.shape), *rows.shape[1:])
        held[self.theirs.to(x.device)] = rows[self.own.to(x.device)]
        return held.reshape(shape)


def are_left_out(x: Tensor, known: Sequence[TokenRows]) -> bool:
    """Return whether a value of the candidate's has anything in rows that are in none of these."""
    count = known[0].count
    kept = torch.zeros(count, dtype=torch.bool)
    for rows in known:
        kept[rows.own] = True
    return bool(x.reshape(count, -1)[~kept.to(x.device)].any())


def may_share_rows(x: Tensor, y: Tensor) -> bool:
    """Return whether the shapes of a candidate's and a reference's value allow them to share some of their rows."""
    return {x.dim(), y.dim()} <= {2, 3} and x.shape[-1] == y.shape[-1] and x.shape[:-1].numel() != y.shape[:-1].numel()


def find_rows(x: Tensor, y: Tensor, near: float) -> TokenRows | None:
    """Return the rows that a candidate's value shares with a reference's; None if there is no or more than one way.

    The rows must be in the same order. Rows of zeros are left out: FP8 takes only certain numbers of rows, and a port
    may fill up packed sequences.

    Args:
        x: the candidate's value, ``[..., channels]``.
        y: the reference's, with another number of rows.
        near: how far two rows may be apart to count as the same, relative to the norm of the candidate's.
    """
    if not may_share_rows(x, y):
        return None
    count, others = x.shape[:-1].numel(), y.shape[:-1].numel()
    filled = x.flatten(0, -2).any(-1).nonzero().flatten().cpu()
    if min(len(filled), others) < _FEWEST or count * others > _MOST_PAIRS:
        return None
    directions = torch.randn(x.shape[-1], _PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own, held = (one.double().cpu().flatten(0, -2) @ directions for one in (x, y))
    own = own[filled]
    may_be = torch.cdist(own, held) <= near * torch.linalg.vector_norm(own, dim=1, keepdim=True)
    has_fewer = len(filled) <= others
    may_be = may_be if has_fewer else may_be.T
    block = _find_only_block(may_be)
    chosen = _find_only_way_in_order(may_be) if block is None else block
    if chosen is None:
        return None
    own, theirs = (filled, chosen) if has_fewer else (filled[chosen], torch.arange(others))
    return TokenRows(count, own, theirs, tuple(y.shape[:-1]))


def _find_only_block(may_be: Tensor) -> Tensor | None:
    """Return the neighbouring columns that belong to all rows, as the tokens of one expert do; None if not one way."""
    rows, columns = may_be.shape
    fits = [first for first in range(columns - rows + 1) if may_be[:, first : first + rows].diagonal().all()]
    return torch.arange(fits[0], fits[0] + rows) if len(fits) == 1 else None


def _find_only_way_in_order(may_be: Tensor) -> Tensor | None:
    """Return which column belongs to each row, in ascending order; None if there is no way, or more than one.

    Args:
        may_be: whether a column may belong to a row, ``[rows, columns]``.
    """

    def first_ones(may_be: Tensor) -> list[int] | None:
        found = [-1]
        for columns in may_be:
            after = columns[found[-1] + 1 :].nonzero()
            if not len(after):
                return None
            found.append(found[-1] + 1 + int(after[0]))
        return found[1:]

    forward, backward = first_ones(may_be), first_ones(may_be.flip(0, 1))
    last = may_be.shape[1] - 1
    if forward is None or backward is None or forward != [last - column for column in reversed(backward)]:
        return None
    return torch.tensor(forward)
