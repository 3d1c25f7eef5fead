"""Keep of an error what a picture of it needs: its profile along each axis, and how it is distributed.

A record must stay small, so only the tensors that people look at have a picture: those that failed by most, or the
worst one of a comparison that passed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parity.numerics.errors import Deviations, Summed, Truth, Truths
from parity.passes.all_passes import Tensors
from parity.result import Histogram, Picture, Profile, TensorResult

MOST_PICTURES = 4  # of a comparison that failed
PARTS, PARTS_OF_A_PASS = 64, 16  # of an axis, at most
BINS, FIRST, WIDTH = 40, -5.0, 0.25  # from 1/100,000 of the expected error to 100,000 times it, four bins a decade
_FEWEST = 16  # elements of which a histogram says anything
_CHUNK = 2**20  # elements whose logarithms are in memory at once


def pictured(
    tensors: Sequence[TensorResult], golden: Truths, candidate: Tensors, models: Sequence[Tensors]
) -> tuple[TensorResult, ...]:
    """Return the verdicts, with a picture for the worst of them.

    Args:
        tensors: the verdicts.
        golden: by kind and name of the tensor.
        candidate: the candidate's tensors.
        models: the rounding model's; the one whose error is largest is what is expected.
    """
    parts = PARTS_OF_A_PASS if all(tensor.passed for tensor in tensors) else PARTS
    worth = {tensor.label for tensor in _worth_a_picture(tensors) if tensor.key in golden}
    return tuple(
        dataclasses.replace(tensor, picture=_picture(golden[tensor.key], tensor, candidate, models, parts))
        if tensor.label in worth
        else tensor
        for tensor in tensors
    )


def thinned(tensors: Sequence[TensorResult]) -> tuple[TensorResult, ...]:
    """Return the verdicts of several passes, such as a training's steps, with no more pictures than one pass has."""
    worth = {tensor.label for tensor in _worth_a_picture(tensors)}
    return tuple(tensor if tensor.label in worth else dataclasses.replace(tensor, picture=None) for tensor in tensors)


def _worth_a_picture(tensors: Sequence[TensorResult]) -> list[TensorResult]:
    """Return those that failed by most, an output among them if one failed; or the worst one if none failed."""
    by_margin = sorted(tensors, key=lambda tensor: tensor.margin, reverse=True)
    failed = [tensor for tensor in by_margin if not tensor.passed]
    outputs = [tensor for tensor in failed if tensor.kind == "output"][:1]
    others = [tensor for tensor in failed if tensor not in outputs]
    return outputs + others[: MOST_PICTURES - len(outputs)] or by_margin[:1]


def _picture(
    truth: Truth, tensor: TensorResult, candidate: Tensors, models: Sequence[Tensors], parts: int
) -> Picture | None:
    """Return a tensor's picture; None if there is no error of any kind."""
    deviations: Deviations = truth.deviations([candidate[tensor.key], *(model[tensor.key] for model in models)])
    error, *model_errors = deviations.errors
    expected = _finite(max(model_errors, key=lambda one: one.norm if one.is_finite else -1.0))
    spoiled = None if error.is_finite else ~error.values.isfinite()
    error = _finite(error)
    unit = expected.root_mean_square or error.root_mean_square
    if not unit and spoiled is None:
        return None
    axes = [axis for axis, length in enumerate(error.values.shape) if length > 1]
    return Picture(
        unit=_rounded(unit),
        profiles=tuple(_profile(axis, error, expected, spoiled, parts) for axis in axes),
        histogram=_histogram(error.values, expected.values, unit) if error.values.numel() >= _FEWEST and unit else None,
    )


def _finite(error: Summed) -> Summed:
    """Return an error without what is not finite, which has no size."""
    return error if error.is_finite else Summed(error.values.nan_to_num(0.0, 0.0, 0.0))


def _profile(axis: int, error: Summed, expected: Summed, spoiled: Tensor | None, parts: int) -> Profile:
    length = error.values.shape[axis]
    span = math.ceil(length / parts)
    others = tuple(dim for dim in range(error.values.dim()) if dim != axis)
    elements = error.values.numel() // length

    def sizes(one: Summed) -> tuple[float, ...]:
        squares = one.squares_over(others) if others else one.squares
        means = (_summed(squares, span) / (elements * _summed(torch.ones_like(squares), span))).sqrt()
        return tuple(map(_rounded, means.tolist()))

    counts = None if spoiled is None else spoiled.sum(others) if others else spoiled
    return Profile(
        axis=axis,
        span=span,
        error=sizes(error),
        expected=sizes(expected),
        spoiled=() if counts is None else tuple(map(int, _summed(counts.float(), span).tolist())),
    )


def _summed(values: Tensor, span: int) -> Tensor:
    """Return the sums over parts of so many consecutive values; the last part may have fewer."""
    padding = -len(values) % span
    return torch.nn.functional.pad(values, (0, padding)).view(-1, span).sum(-1)


def _histogram(error: Tensor, expected: Tensor, unit: float) -> Histogram:
    of_error, exact = _counted(error, unit)
    of_expected, exact_of_expected = _counted(expected, unit)
    return Histogram(FIRST, WIDTH, of_error, of_expected, (exact, exact_of_expected))


def _counted(values: Tensor, unit: float) -> tuple[tuple[int, ...], int]:
    """Return how many elements each bin has, and how many elements are 0."""
    counts, exact = values.new_zeros(BINS, dtype=torch.int64), 0
    for chunk in values.flatten().split(_CHUNK):
        magnitudes = chunk[chunk != 0].abs().double() / unit
        bins = ((magnitudes.log10() - FIRST) / WIDTH).floor().clamp(0, BINS - 1)
        counts += torch.bincount(bins.long(), minlength=BINS)
        exact += chunk.numel() - magnitudes.numel()
    return tuple(counts.tolist()), exact


def _rounded(value: float) -> float:
    """Return three digits of a number, which are all that a picture shows."""
    return float(f"{value:.3g}")
