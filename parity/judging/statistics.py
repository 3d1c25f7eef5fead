"""How a tensor's error compares with the error that the rounding model has there: the numbers that tolerances judge.

Each statistic looks at the error from another side, because a mistake that touches one head, one row or one column
hides in the norm of the whole:

===========  =======================================================================================================
statistic    what it compares, candidate over model
===========  =======================================================================================================
``norm``     the Euclidean norm of the error
``largest``  the largest error of an element
``row``      the norm in the worst row (along the last dimension, at least 32 elements; of activations)
``slice``    the norm in the worst slice across any one dimension: a sequence of the batch, a position, a head, a column
``shift``    the mean of the error over all rows, column by column: a bias that is missing, a rounding that leans
``gain``     the error's component along golden, a factor: how far it lies outside of the models' own, in the standard
             deviations that independent errors would give it
``mistake``  ditto along the change that a known mistake would make, see ``parity.judging.directions``
===========  =======================================================================================================

All but the last two are ratios, near 1 for a faithful port; those of norms leave out what the norm of few elements may
exceed another's by chance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from scipy import special
from torch import Tensor

from parity.judging.component import Component, _norm, has_component
from parity.judging.scatter import FEWEST_DRAWN
from parity.summed import Summed, over_rows

Count = TypeVar("Count", float, Tensor)

# A slice of fewer elements says too little about its own error.
SMALLEST_SLICE = 32
# How many elements' weight the model's error in the whole tensor has in the expectation for one slice, which keeps a
# slice in which the model happened to be lucky from failing.
_PRIOR_ELEMENTS = 8
# Of the root mean square of the largest slice, below which another's is what FP64 leaves of terms that cancel.
_VANISHING = 1e-12
# Above what right ports' worst slices have; from there on it is worth to count how many elements make up an error.
_USUAL = 1.5
# Of a normal law below three standard deviations, in how many degrees of freedom chance no longer counts.
_CHANCE = float(special.ndtr(3.0))
_MOST_FREEDOM = 1e4
# Runs of the model that are not drawn, but with jitter: fewer do not tell how the error of few elements scatters, nor
# do those whose error scatters like that of more independent ones, times the number of elements.
_FEWEST_RUNS = 8
_FREEDOM_OF_FEW = 2.0
# The unit roundoff of FP32, in which kernels compute.
_UNIT = torch.finfo(torch.float32).eps / 2
# What a handful of steps in FP32 cost, as a norm's statistics and its scaling, in unit roundoffs.
_FP32_STEPS = 2.0
# What the result's own rounding costs, of the unit roundoff, on average over mantissas.
_MEAN_ROUNDING = 0.5


@dataclass(frozen=True)
class Statistic:
    """One comparison of a candidate's error with the model's.

    Attributes:
        name: as in the table above.
        value: as in the table; infinite if the model expects no error where there is one.
        where: the worst place, such as ``dim 2 at 5``, or the known mistake that the error resembles most; empty where
            the whole tensor is meant.
        coefficient: how much of that mistake's change the error contains.
    """

    name: str
    value: float
    where: str = ""
    coefficient: float = 0.0


def least_error(dtype: torch.dtype, summed_terms: int) -> float:
    """The relative error that no model may fall below: the rounding of the result, and FP32 steps and sums before it.

    Adding n terms of random sign one after the other loses about ``u sqrt(n / 6)`` relative to the sum, with u the unit
    roundoff: each of the n roundings is at most u times a partial sum that grows with the square root of its length,
    and they add up as a random walk (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).

    Args:
        dtype: in which the candidate returns the tensor.
        summed_terms: how many terms a kernel accumulates for one element.
    """
    return max(_MEAN_ROUNDING * torch.finfo(dtype).eps / 2, _FP32_STEPS * _UNIT, _UNIT * math.sqrt(summed_terms / 6))


def statistics(
    error: Summed,
    model_errors: Sequence[Summed],
    golden: Summed,
    least: float,
    of_parameter: bool = False,
    terms: float = 0.0,
) -> Iterator[Statistic]:
    """Every statistic that a tensor of this shape has.

    Args:
        error: candidate minus golden, FP64 or FP32, finite.
        model_errors: rounding model minus golden for each way in which faithful kernels compute, same dtype and shape,
            finite; what any of them loses is expected.
        golden: same dtype and shape, finite.
        least: see ``least_error``.
        of_parameter: whether the tensor is a parameter's gradient.
        terms: the relative error of terms as large as the tensor, of which a slice may be what is left where they
            cancel; 0 where they do not, and what exceeds the tensor's own counts as that.
    """
    shape, count = golden.values.shape, golden.values.numel()
    if not count:
        return
    total = max(*(model.total for model in model_errors), least**2 * golden.total)
    yield Statistic("norm", math.sqrt(_ratio(error.total, total)) / _chance_of_norm(model_errors, count))
    yield _largest(error, model_errors, least * golden.max_abs)
    if has_component(golden):
        yield Statistic("gain", Component(error, model_errors, golden, golden, math.sqrt(total)).value)
    relative = math.sqrt(total / golden.total) if golden.total > 0 else 0.0
    worst: dict[str, Statistic] = {}
    for name, label, dims in _slices(shape, of_parameter):
        there = math.prod(shape[dim] for dim in dims)
        own = functools.reduce(torch.maximum, (model.squares_over(dims) for model in model_errors))
        share = there / (there + _PRIOR_ELEMENTS)
        expected = (own * share).add_(golden.squares_over(dims), alpha=(1.0 - share) * relative**2)
        here = golden.squares_over(dims)
        # What FP64 leaves of terms that cancel has no size of its own: the first query of causal attention has one key,
        # so its gradient is zero but for rounding, of which no model knows the size. The tensor's average does.
        floor = (least**2 * here).clamp_(min=min(terms, relative) ** 2 * golden.total * there / count)
        # What FP64 leaves of terms that cancel has no size of its own: the first query of causal attention has one key,
        # so its gradient is zero but for rounding, of which no model knows the size. The tensor's average does.
        floor[here <= _VANISHING**2 * here.max()] = total * there / count
        expected = torch.maximum(expected, floor).clamp_(min=there * torch.finfo(here.dtype).tiny)
        ratios = _ratios(error.squares_over(dims), expected)
        value = math.sqrt(ratios.max().item()) / _chance(there)
        if value > _USUAL:
            ratios /= torch.maximum(
                _chance(_independent(model_errors, dims, there)), _chance_by_runs(model_errors, dims)
            ).square()
            value = math.sqrt(ratios.max().item())
        if name not in worst or worst[name].value < value:
            place = _place(int(ratios.argmax()), ratios.shape)
            worst[name] = Statistic(name, value, f"{label} at {place}")
    yield from worst.values()
    if len(shape) > 1 and shape[-1] >= SMALLEST_SLICE <= count // shape[-1]:
        yield Statistic("shift", _shift(error, model_errors, total))


def _slices(shape: torch.Size, of_parameter: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The statistic, what its slices are called, and the dimensions that are summed over.

    A parameter of more than two dimensions is a stack of matrices, one for each expert: its rows are the slices that
    each matrix would have alone.
    """
    every = tuple(range(len(shape)))
    for dim in every:
        others = tuple(other for other in every if other != dim)
        if shape[dim] > 1 and others and math.prod(shape[other] for other in others) >= SMALLEST_SLICE:
            yield "slice", f"dim {dim}", others
    if len(shape) > 2 and shape[-1] >= SMALLEST_SLICE:
        yield "slice" if of_parameter else "row", "row", (every[-1],)


def _place(flat: int, shape: torch.Size) -> str:
    return ", ".join(str(index) for index in np.unravel_index(flat, shape))


def _largest(error: Summed, model_errors: Sequence[Summed], least: float) -> Statistic:
    shape = error.values.shape
    value = _ratio(error.max_abs, max(*(model.max_abs for model in model_errors), least))
    row = int(error.largest_in_rows.argmax())
    index = int(error.values.reshape(-1, shape[-1])[row].abs().argmax()) if shape else 0
    place = _place(row * (shape[-1] if shape else 1) + index, shape)
    return Statistic("largest", value / _chance(error.values.numel()), f"element {place}")


def _shift(error: Summed, model_errors: Sequence[Summed], total: float) -> float:
    """The norm of the sums over rows; for independent errors its square is expected to be that of the whole error."""
    shifted, *modelled = [_norm(over_rows(x.values)) ** 2 for x in (error, *model_errors)]
    return math.sqrt(_ratio(shifted, max(*modelled, total))) / _chance(error.values.shape[-1])


def _chance(count: Count) -> Count:
    """What the norm of few elements may exceed another's by, three standard deviations of their ratio, and not count.

    The norm of n independent errors scatters by ``1 / sqrt(2 n)`` of itself, and so does the model's.
    """
    return 1.0 + 3.0 / count**0.5


def _independent(model_errors: Sequence[Summed], dims: tuple[int, ...], count: int) -> Tensor:
    """Of how many independent errors of one size the norm of each slice scatters like, by the models' errors.

    A few elements make up the error where their values do, as of a softmax. The variance of a sum of squares is
    ``2 sum(sigma**4)`` for errors of deviations sigma, and that of n alike ones ``2 n sigma**4``; a normal error's
    fourth power is 3 sigma**4 on average.

    Args:
        dims: over which a slice extends.
        count: of the elements of a slice.
    """
    squares = [model.values.double().square() for model in model_errors]
    second = torch.stack([x.sum(dims) for x in squares]).amax(0)
    fourth = torch.stack([x.square().sum(dims) for x in squares]).amax(0)
    return torch.where(fourth > 0, 3.0 * second.square() / fourth, count).clamp(1.0, count)


def _chance_of_norm(model_errors: Sequence[Summed], count: int) -> float:
    """As ``_chance``; of few elements, as a loss is one, no more than many runs leave to it, if there are any.

    The model's error in one number may happen to be hardly any. That of the largest of many runs is not, so that what
    allows for the one must not be allowed on top of the other. Runs with jitter may have most roundings in common, and
    tell only if their errors scatter as those of few independent ones do.
    """
    usual = _chance(float(count))
    drawn = [model.total for model in model_errors if model.is_drawn]
    totals = torch.tensor(drawn or [model.total for model in model_errors], dtype=torch.float64)
    if count >= SMALLEST_SLICE or len(totals) < (FEWEST_DRAWN if drawn else _FEWEST_RUNS):
        return usual
    if not drawn and _freedom(totals) > _FREEDOM_OF_FEW * count:
        return usual
    return min(usual, _beyond_largest(totals).item())


def _chance_by_runs(model_errors: Sequence[Summed], dims: tuple[int, ...]) -> Tensor:
    """What the norm of each slice may exceed the largest of the drawn runs' by, as ``_chance``, by their scatter.

    One rounding may move all of a slice, as a query's that sees many keys alike moves a row of the queries' weights:
    its elements do not show that, but runs do that round independently. For n independent normal errors the squared
    norm has mean n and variance ``2 n``, and a chi-squared distribution: its quantile at three standard deviations of a
    normal one, over the median of the largest of so many.

    Args:
        dims: over which a slice extends.
    """
    drawn = [model.squares_over(dims) for model in model_errors if model.is_drawn]
    return _beyond_largest(torch.stack(drawn)) if len(drawn) >= FEWEST_DRAWN else torch.ones(())


def _beyond_largest(squares: Tensor) -> Tensor:
    """Ditto, from the squared norms of drawn runs, which are the first dimension."""
    half = _freedom(squares).numpy(force=True) / 2.0
    reached, largest = (special.gammaincinv(half, p) for p in (_CHANCE, 0.5 ** (1 / len(squares))))
    return torch.as_tensor(np.sqrt(reached / largest), dtype=squares.dtype, device=squares.device)


def _freedom(squares: Tensor) -> Tensor:
    """Of how many independent normal errors such squared norms scatter like, by runs, which are the first dimension."""
    variance, mean = squares.double().var(0), squares.double().mean(0)
    return torch.where(variance > 0, 2.0 * mean.square() / variance, _MOST_FREEDOM).clamp(1.0, _MOST_FREEDOM)


def _ratio(error: float, expected: float) -> float:
    """Of two that are not negative."""
    if error == 0:
        return 0.0
    return error / expected if expected > 0 else math.inf


def _ratios(errors: Tensor, expected: Tensor) -> Tensor:
    """Ditto, of each element."""
    return torch.where(errors > 0, errors / expected, 0.0)
