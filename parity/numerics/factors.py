"""Say whether a tensor is a multiple of another one by a single factor, or by another factor in each of its slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from parity.numerics.errors import TINY

_BLOCKS = (128, 64, 32, 16)  # widths of blocks in which weights are quantized
_FEWEST = 16  # elements that a slice must have for its factor to be known
_SURE = 6.0  # standard deviations by which rounding hardly ever moves the factor of any slice
_LEAST = 1e-6  # of a factor, since sums are computed in another order
_AS_GOOD = 1.1  # of several ways to cut a tensor, the plainest is told that leaves hardly more than the best
_LISTED = 8


class Uneven(NamedTuple):
    """What is known of a tensor whose slices are multiplied by different factors.

    Attributes:
        left: the share of the tensor's norm that is left if each slice is divided by its factor.
        told: says which slices have which factors, apart from those that are right.
    """

    left: float
    told: str


def uneven(own: Tensor, right: Tensor, rounded: Sequence[Tensor] = (), unsure: float = _LEAST) -> Uneven | None:
    """Return what is known of slices with different factors; None if all may have the same, as far as one can tell.

    Slices are taken along each dimension, and as the blocks in which weights are quantized. The factor of a slice may
    be off by what its own residue tells, or by as much as rounding moves it in other tensors.

    Args:
        own: the tensor.
        right: what it is a multiple of.
        rounded: tensors that differ from ``right`` only by rounding.
        unsure: the share of the factor by which rounding may move that of a slice in any case.
    """
    found, is_uneven = [], False
    tensors = [x.double().to(right.device) for x in (right, own, *rounded)]
    for what, (due, mine, *others) in _cut_into_slices(tensors):
        squares = due.square().sum(1).clamp(min=TINY)
        factors, *near = ((x * due).sum(1) / squares for x in (mine, *others))
        whole = factors @ squares / squares.sum()
        residue = (mine - factors[:, None] * due).square()
        # Errors may be equally large in all elements, or in proportion to each of them.
        errors = residue.maximum(residue.mean() * (1.0 + due.square() / due.square().mean()))
        spread = max([unsure / _SURE, *(float((x - 1.0).square().mean().sqrt()) for x in near)]) * whole
        allowed = _SURE * torch.hypot((due.square() * errors).sum(1).sqrt() / squares, spread)
        allowed[squares <= TINY] = torch.inf
        is_uneven = is_uneven or bool(((factors - whole).abs() > allowed).any())
        wrong = ((factors - 1.0).abs() > allowed).nonzero().flatten()
        if not len(wrong):  # each may be right by itself, though they differ
            continue
        numbers = " to ".join(dict.fromkeys(f"{x:.4g}" for x in factors[wrong].aminmax()))
        listed = ", ".join(map(str, wrong[:_LISTED].tolist())) + ", and so on" * (len(wrong) > _LISTED)
        told = f"{numbers} times what it should be in {len(wrong)} of its {len(factors)} {what} ({listed})"
        found.append(Uneven(float((residue.sum() / mine.square().sum().clamp(min=TINY)).sqrt()), told))
    most = _AS_GOOD * min((one.left for one in found), default=0.0) + _LEAST
    return next((one for one in found if one.left <= most), None) if is_uneven else None


def _cut_into_slices(tensors: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the tensors cut into slices, ``[slices, elements]``, in several ways, the plainest first, with a name."""
    shape, count = tensors[0].shape, tensors[0].numel()
    for dim, size in enumerate(shape):
        if 1 < size <= count // _FEWEST:
            yield f"slices of dimension {dim}", [x.movedim(dim, 0).flatten(1) for x in tensors]
    for width, is_flat in product(_BLOCKS, (False, True)) if len(shape) > 1 else ():
        height = 1 if is_flat else width
        if not shape[-1] % width and not count // shape[-1] % height and count > width * height:
            blocks = [x.reshape(-1, height, shape[-1] // width, width).transpose(1, 2) for x in tensors]
            yield f"blocks of {height} x {width}", [x.flatten(2).flatten(0, 1) for x in blocks]
