"""Norms that take more or fewer channels together than the reference's: those of one head, of a group, or of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.norms.norms import Norm, kinds, norms
from parity.diagnosis.walk import RESHAPES, back, chain
from parity.watching.trace import Edit, Trace, edit

_FEWEST = 16  # channels of such a group
_USUAL_COUNTS = (2, 4, 8)  # of groups, which nothing else in a reference may show, as of Mamba 2's norm


@dataclass(frozen=True)
class _Grouped:
    """A norm, and how its channels could be taken together otherwise.

    Attributes:
        norm: of the reference.
        axis: of what is normalised, the one that was cut off its channels; None where none was.
        channels: how many there are, of all heads or groups.
        parts: of how many at a time they could be normalised, other than as they are.
    """

    norm: Norm
    axis: int | None
    channels: int
    parts: frozenset[int]

    def edits(self, channels: int) -> tuple[Edit, ...]:
        """So many channels are to be normalised at a time; none where they are, or where they are no part of all."""
        if channels not in self.parts:
            return ()
        norm, axis = self.norm, self.axis

        def computed(was: Tensor, x: Tensor, *parameters: Tensor) -> Tensor:
            whole = x if axis is None else _with_last(x, axis)
            y = norm.normalized(whole.unflatten(-1, (-1, channels))).reshape(whole.shape)
            y = y if axis is None else y.unflatten(-1, (x.shape[axis], -1)).movedim(-2, axis)
            return norm.scaled(y, *parameters).to(was.dtype)

        return (edit(norm.call, norm.needs, computed),)


def norm_group_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Norms of each head for one of all heads, one of all heads for one of each, and other numbers of groups.

    OLMo 2 and OLMoE normalise the queries of all heads at once, TE's ``qk_norm_type`` and most models those of each.
    """
    found = [_grouped(trace, norm) for norm in norms(trace)]
    yield from everywhere_and_somewhere(
        [_all_at_once(), *map(_at_a_time, sorted({part for one in found for part in one.parts - {one.channels}}))],
        found,
        module,
        lambda one: one.norm.call.module,
        lambda one: kinds(one.norm, trace),
    )


def _grouped(trace: Trace, norm: Norm) -> _Grouped:
    x, axis = trace.tensor(norm.x), _axis(trace, norm)
    whole = x.shape[-1] * (1 if axis is None else x.shape[axis])
    shapes = (trace.tensor(made).shape for made in chain(trace, norm.call.outputs[0], RESHAPES))
    cut = {shape[-1] for shape in shapes if whole in (shape[-1] * size for size in shape[:-1])}
    usual = {whole // count for count in _USUAL_COUNTS if whole % count == 0 and whole // count >= _FEWEST}
    return _Grouped(norm, axis, whole, frozenset({whole, *cut, *usual} - {x.shape[-1]}))


def _axis(trace: Trace, norm: Norm) -> int | None:
    x, whole = trace.tensor(norm.x), trace.tensor(back(trace, norm.x, RESHAPES))
    for axis, size in enumerate(x.shape[:-1]):
        if size > 1 and _are_rows_of(_with_last(x, axis), whole):
            return axis
    return None


def _with_last(x: Tensor, axis: int) -> Tensor:
    """One more dimension is part of the channels."""
    return x.movedim(axis, -2).flatten(-2)


def _are_rows_of(x: Tensor, whole: Tensor) -> bool:
    """Whether two tensors have the same rows, in whatever order, as far as their first channel shows."""
    if x.shape[-1:] != whole.shape[-1:] or x.numel() != whole.numel():
        return False
    return torch.equal(*(tensor[..., 0].flatten().sort().values for tensor in (x, whole)))


def _all_at_once() -> Mistake[_Grouped]:
    return Mistake(
        "norm-groups",
        "norm of all channels at once",
        "normalise the channels of each head, or group, by themselves, as the reference does; all are, at once",
        lambda one: one.edits(one.channels),
    )


def _at_a_time(channels: int) -> Mistake[_Grouped]:
    return Mistake(
        "norm-groups",
        f"norm of {channels} channels at a time",
        f"normalise as many channels at a time as the reference does, such as those of one head, or of all heads; "
        f"{channels} at a time are",
        lambda one: one.edits(channels),
    )
