"""Norms that take more or fewer channels together than the reference's: those of one head, or of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.norms.norms import Norm, kinds, norms
from parity.diagnosis.walk import RESHAPES, back, chain
from parity.watching.trace import Edit, Trace, edit


@dataclass(frozen=True)
class _Grouped:
    """A norm, and how its channels could be taken together otherwise.

    Attributes:
        norm: of the reference.
        parts: the numbers of channels, fewer than the norm's, into which the reference cuts its result.
        axis: of what is normalised, the one that was cut off its channels; None where none was.
    """

    norm: Norm
    parts: tuple[int, ...]
    axis: int | None


def norm_group_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Norms of each head for one of all heads, and one of all heads for one of each.

    OLMo 2 and OLMoE normalise the queries of all heads at once, TE's ``qk_norm_type`` and most models those of each.
    """
    found = [_Grouped(norm, _parts(trace, norm), _axis(trace, norm)) for norm in norms(trace)]
    parts = sorted({part for one in found for part in one.parts})
    yield from everywhere_and_somewhere(
        [*map(_in_parts, parts), _all_at_once()],
        found,
        module,
        lambda one: one.norm.call.module,
        lambda one: kinds(one.norm, trace),
    )


def _parts(trace: Trace, norm: Norm) -> tuple[int, ...]:
    channels = trace.tensor(norm.x).shape[-1]
    shapes = (trace.tensor(made).shape for made in chain(trace, norm.call.outputs[0], RESHAPES))
    return tuple({shape[-1] for shape in shapes if shape[-1] < channels in (shape[-1] * size for size in shape[:-1])})


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


def _in_parts(channels: int) -> Mistake[_Grouped]:
    def edits(one: _Grouped) -> tuple[Edit, ...]:
        if channels not in one.parts:
            return ()
        return _edits(one.norm, lambda x: x.unflatten(-1, (-1, channels)), lambda y, x: y.view_as(x))

    return Mistake(
        "norm-groups",
        f"norm of {channels} channels at a time",
        f"normalise all channels at once, as the reference does; {channels} at a time are, as those of each head",
        edits,
    )


def _all_at_once() -> Mistake[_Grouped]:
    def edits(one: _Grouped) -> tuple[Edit, ...]:
        axis = one.axis
        if axis is None:
            return ()
        return _edits(
            one.norm,
            lambda x: _with_last(x, axis),
            lambda y, x: y.unflatten(-1, (x.shape[axis], -1)).movedim(-2, axis),
        )

    return Mistake(
        "norm-groups",
        "norm of all heads at once",
        "normalise each head's channels by themselves, as the reference does; those of all heads are, at once",
        edits,
    )


def _edits(
    norm: Norm, grouped: Callable[[Tensor], Tensor], back_to: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Edit, ...]:
    """The norm is over the last dimension of what ``grouped`` returns; ``back_to`` brings it to the shape of x."""

    def computed(was: Tensor, x: Tensor, *parameters: Tensor) -> Tensor:
        return norm.scaled(back_to(norm.normalized(grouped(x)), x), *parameters).to(was.dtype)

    return (edit(norm.call, norm.needs, computed),)
