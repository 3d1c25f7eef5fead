"""Compare a candidate's error with the model's: in norm, in the worst row, and along a mistake's direction."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from scipy import special
from torch import Tensor

from parity.judge.limits import FALSE_ALARMS_A_RUN, STATISTICS_A_RUN
from parity.numerics.errors import CachedTensor, norm_of, over_rows
from parity.result import TensorResult

if TYPE_CHECKING:
    from parity.judge.directions import Direction

# The error's component along a direction (golden, or a mistake's change), compared with those of the models.


# Fewer elements do not show how errors scatter.
_FEWEST_ELEMENTS = 32
# The unit roundoff of FP32, in which kernels compute.
_UNIT = torch.finfo(torch.float32).eps / 2
# Rounding errors lean by up to this share of their norm in the models' runs; independent errors would not.
_LEANING = 0.02
# A direction's allowance has two parts. One is not computed if it is below this share of the other.
_NEGLIGIBLE = 0.1
# If no element holds this share of a direction's square, the scatter that a regression removes is negligible.
_LEVERAGE = 0.01
# Fewer clusters do not show how their sums scatter.
_FEWEST_CLUSTERS = 8
# If drawn runs lean more than this many times as much as the elements show, only the runs tell how errors lean.
_BY_RUNS_ALONE = 2.0


def has_enough(output: Tensor) -> bool:
    """Return whether an output is large enough for a filter: few elements tell nothing about how errors scatter."""
    return output.numel() >= _FEWEST_ELEMENTS


def has_component(direction: CachedTensor) -> bool:
    """Return whether errors can be regressed on a direction."""
    return has_enough(direction.values) and direction.norm != 0.0


class Component:
    """The error's component along a direction, compared with those of the models.

    Args:
        error, model_errors: as in ``statistics``.
        direction: a tensor of that shape, FP64 or FP32, that ``has_component``.
        golden: as in ``statistics``.
        expected_norm: the expected norm of the error.
    """

    def __init__(
        self,
        error: CachedTensor,
        model_errors: Sequence[CachedTensor],
        direction: CachedTensor,
        golden: CachedTensor,
        expected_norm: float,
    ) -> None:
        product = error.dot(direction)
        self._drawn = [model for model in model_errors if model.is_drawn and model.leans]
        model_errors = [model for model in model_errors if not model.is_drawn] or model_errors
        modelled = [model.dot(direction) for model in model_errors]
        nearest = min(range(len(modelled)), key=lambda index: abs(product - modelled[index]))
        # Kernels may round less than the model does, as FP32 products without TF32 do, so no error at all is faithful.
        is_between = min(0.0, *modelled) <= product <= max(0.0, *modelled)
        self._outside = 0.0 if is_between else product - modelled[nearest]
        self._error, self._nearest, self._direction = error, model_errors[nearest], direction
        # The allowance of a direction: as much as rounding errors lean, and a unit roundoff of golden, since a number
        # that a kernel rounds to FP32 may scale the whole tensor (a constant) or a row (a norm's root).
        leaning = _LEANING * expected_norm * direction.norm
        self._granted = math.hypot(leaning, _UNIT * abs(golden.dot(direction)))
        if _UNIT * golden.norm * direction.norm > _NEGLIGIBLE * leaning:
            self._granted = math.hypot(self._granted, _UNIT * norm_of(golden.dots_in_rows(direction)))

    @property
    def at_most(self) -> float:
        """Return an upper bound on the magnitude of ``value`` that costs nothing to compute."""
        return abs(self._in_deviations(self._granted))

    @property
    def value(self) -> float:
        """Return the signed distance from the models' range, in standard deviations of the nearest model.

        It is infinite if no error is expected.
        """
        return self._in_deviations(self.deviation) if self.at_most else 0.0

    @property
    def coefficient(self) -> float:
        """Return how much more of the direction the error contains than the nearest model's does."""
        return self._outside / self._direction.total

    @cached_property
    def deviation(self) -> float:
        """Return the standard deviation of the distance from the nearest model.

        The roundings that error and model share cancel in their difference. Its standard deviation combines its scatter
        about its regression on the direction, robust to errors of a row that share a cause, with the allowance that
        every direction has, and with how far such differences lean in runs whose roundings are drawn.
        """
        residual = self._error.values - self._nearest.values
        direction = self._direction.values.to(residual.dtype)
        residual.sub_(direction, alpha=self.coefficient)
        leaning = self._drawn_leaning(norm_of(residual)) if len(self._drawn) > 1 else 0.0
        size = self._direction.root_mean_square  # divided out, so that FP32 holds the squares of the products
        scatter = size * _estimate_scatter(torch.addcmul(residual.new_zeros(()), residual, direction, value=1.0 / size))
        if leaning > _BY_RUNS_ALONE * scatter:
            leaning *= _times_for_few(len(self._drawn))
        return math.hypot(max(scatter, leaning), self._taken_out(residual), self._granted)

    def _taken_out(self, residual: Tensor) -> float:
        """Return the standard deviation that the regression removed from the difference of error and model.

        Regression leaves ``1 - h`` of the variance at an element that has the share h of the direction's square (its
        leverage), and nothing if only one element is not 0, as behind a clamp. The removed part is estimated from the
        model's error, times the ratio of the difference to that error at the other elements. If there are no others,
        the two count as errors without a rounding in common.

        Args:
            residual: the difference without its component.
        """
        direction, model = self._direction, self._nearest
        if direction.max_abs**2 <= _LEVERAGE * direction.total:
            return 0.0
        leverage = direction.values.square() / direction.total
        squares = model.values.square()
        left = ((1.0 - leverage) * squares).sum().item()
        share = norm_of(residual) / math.sqrt(left) if left > _LEVERAGE * model.total else math.sqrt(2.0)
        taken_out = math.sqrt((leverage.square() * squares).sum().item()) * direction.norm
        return min(share, math.sqrt(2.0)) * taken_out

    def _drawn_leaning(self, difference: float) -> float:
        """Return the standard deviation of a difference's component, from how far independently rounded errors lean.

        Elements do not show it if a few numbers scale them all, as a loss's few scores scale gradients. Two errors
        without a rounding in common differ by sqrt(2) times the variation of one of them. If they share some roundings,
        they differ by less, and so do their components.

        Args:
            difference: the norm of the difference of candidate and model without its component.
        """
        values = torch.stack([model.values for model in self._drawn])
        varies = norm_of(values - values.mean(0)) / math.sqrt(len(self._drawn) - 1)
        leans = float(np.std([model.dot(self._direction) for model in self._drawn], ddof=1))
        beside = varies**2 - (leans / self._direction.norm) ** 2
        return leans * min(difference / math.sqrt(beside), math.sqrt(2.0)) if beside > 0 else 0.0

    def _in_deviations(self, deviation: float) -> float:
        if self._outside == 0.0:
            return 0.0
        return self._outside / deviation if deviation > 0 else math.copysign(math.inf, self._outside)


def _times_for_few(runs: int) -> float:
    """Return the factor by which a limit must be wider if the deviation is estimated from only this many runs."""
    probability = FALSE_ALARMS_A_RUN / STATISTICS_A_RUN / 2
    return float(special.stdtrit(runs - 1, probability) / special.ndtri(probability))


def _estimate_scatter(products: Tensor) -> float:
    """Return the standard deviation of a sum of products with random signs: one by one, by row, by first or last index.

    A norm's rounded root scales a whole row, and a rounded input spoils a column of a weight's gradient, so errors are
    not independent. If such sums scatter more than elements do, they count (the variance of a sum over clusters: Liang
    and Zeger, Biometrika 73(1), 1986). Few clusters do not show how their sums scatter.
    """
    scatter = norm_of(products)
    if products.dim() > 1:
        rows = products.sum(-1)
        first = rows.flatten(1).sum(1) if rows.dim() > 1 else rows
        for sums in (rows, first, over_rows(products)):
            if sums.numel() >= _FEWEST_CLUSTERS:
                scatter = max(scatter, norm_of(sums))
    return scatter


# How far the size of an error is a matter of chance, judged by runs whose roundings are drawn independently.
#
# The norm of many independent roundings hardly scatters. But if a few roundings decide it, such as those of a saturated
# softmax's scores or of the few queries that are undecided between two keys, one faithful run's error is many times
# another's. An extreme case is a gradient whose terms cancel, so that rounding leaves nothing but noise.


# If the norm of a row's error reaches this many times its median among drawn runs, it depends on few roundings.
_SCATTERS = 2.0
# Fewer drawn runs have no meaningful median.
FEWEST_DRAWN = 4
# A row of fewer elements says too little about its own error.
_SMALLEST_ROW = 32
# A tensor depends on few roundings if its norm scatters like that of fewer independent roundings than this, and if it
# has many times more elements than that.
_FEW_ROUNDINGS = 32
_MANY_TIMES = 4
# A normal variable exceeds this many deviations as rarely as a faithful port exceeds a limit.
_DEVIATIONS = -float(special.ndtri(FALSE_ALARMS_A_RUN / STATISTICS_A_RUN))


def scatters(drawn: Sequence[CachedTensor]) -> bool:
    """Return whether a few roundings decide how large an error is, such as those of a saturated softmax's scores.

    The norm of many independent roundings hardly scatters: that of 32 scatters by an eighth of itself. Few roundings
    show in the norm of a row, or in that of the whole tensor if others hide them in each row, as in a mean over tokens.

    Args:
        drawn: errors of runs whose roundings are independent; those that are not finite are left out.
    """
    drawn = [error for error in drawn if error.is_finite]
    if len(drawn) < FEWEST_DRAWN:
        return False
    few = min(_FEW_ROUNDINGS, drawn[0].values.numel() / _MANY_TIMES)
    return _rows_scatter(drawn) or _count_independent_roundings(drawn) < few


def slices_scatter(drawn: Sequence[CachedTensor]) -> bool:
    """Return whether a few roundings decide an error's size in a slice across one dimension.

    An example is a column whose rows agree.

    Args:
        drawn: as for ``scatters``.
    """
    drawn = [error for error in drawn if error.is_finite]
    if len(drawn) < FEWEST_DRAWN:
        return False
    dims = range(drawn[0].values.dim())
    slices = (tuple(other for other in dims if other != dim) for dim in dims)
    return any(
        _exceeds_median([error.squares_over(others) for error in drawn])
        for others in slices
        if others and math.prod(drawn[0].values.shape[other] for other in others) >= _SMALLEST_ROW
    )


def _count_independent_roundings(drawn: Sequence[CachedTensor]) -> float:
    """Return how many independent roundings would make the squared norm scatter as it does.

    The sum of n squared roundings has mean n and variance ``2 n``. The runs of the two kinds of kernels alternate, and
    each kind's variance is computed separately.
    """
    squares = [error.total for error in drawn]
    variance = (np.var(squares[::2], ddof=1) + np.var(squares[1::2], ddof=1)) / 2.0
    return float(2.0 * np.mean(squares) ** 2 / variance) if variance > 0.0 else math.inf


def _rows_scatter(drawn: Sequence[CachedTensor]) -> bool:
    """Return whether a row's norm, or the whole tensor's if rows are short, is far above its median in some run."""
    shape = drawn[0].values.shape
    sums = [torch.tensor([error.total]) for error in drawn]
    if len(shape) > 1 and shape[-1] >= _SMALLEST_ROW:
        sums = [error.squares_over((len(shape) - 1,)).flatten() for error in drawn]
    return _exceeds_median(sums)


def _exceeds_median(sums: Sequence[Tensor]) -> bool:
    """Return whether one of the squared norms is far above its median in some run."""
    squares = torch.stack(list(sums))
    return bool((squares.amax(0) > _SCATTERS**2 * squares.median(0).values).any())


def allowance(golden: CachedTensor, model_errors: Sequence[CachedTensor], limit: float) -> float:
    """Return the factor by which the error of a gradient that is lost to rounding may exceed its limits by chance.

    Among the drawn runs the norms of such errors scatter by factors, those of others by a few hundredths. Their
    logarithm is modelled as normal, as in a law. An error as far above the mean as a limit may still be chance.

    Args:
        golden: the gradient.
        model_errors: the errors of all models, finite; an error as large as any of theirs is expected.
        limit: the limit of ``norm``.

    Returns:
        At least 1; 1 if no model loses all of the gradient, or too few are drawn.
    """
    largest = max(error.norm for error in model_errors)
    drawn = [math.log(error.norm) for error in model_errors if error.is_drawn and error.norm > 0.0]
    if largest <= golden.norm or len(drawn) < FEWEST_DRAWN:
        return 1.0
    reached = float(np.mean(drawn) + _DEVIATIONS * np.std(drawn, ddof=1))
    return max(1.0, math.exp(reached) / (limit * largest))


def is_lost(tensor: TensorResult) -> bool:
    """Return whether a tensor is a gradient that is expected to be nothing but rounding and may have any size."""
    return tensor.kind.endswith("gradient") and tensor.expected.relative_l2 > 1.0


# The statistics that tolerances judge: how a tensor's error compares with the rounding model's error in that tensor.
#
# Each statistic looks at the error from another side, because a mistake in one head, one row or one column hides in the
# norm of the whole:
#
# ===========  =======================================================================================================
# statistic    what it compares, candidate over model
# ===========  =======================================================================================================
# ``norm``     the Euclidean norm of the error
# ``largest``  the largest error of an element
# ``row``      the norm in the worst row (along the last dimension, at least 32 elements; of activations)
# ``slice``    the norm in the worst slice across any one dimension: a sequence, a position, a head, a column
# ``shift``    the mean of the error over all rows, column by column: a bias that is missing, a rounding that leans
# ``gain``     the error's component along golden, a factor: how far it lies outside the models' own, in the standard
#              deviations that independent errors would give it
# ``mistake``  the same along the change that a known mistake would make, see ``parity.judge.directions``
# ===========  =======================================================================================================
#
# All but the last two are ratios, near 1 for a faithful port. Ratios of norms are divided by the factor by which the
# norm of few elements may exceed another's by chance.


Count = TypeVar("Count", float, Tensor)

# A slice of fewer elements says too little about its own error.
SMALLEST_SLICE = 32
# In the expectation for a slice, the model's error in the whole tensor weighs as much as this many elements. This keeps
# a slice in which the model happened to be lucky from failing.
_PRIOR_ELEMENTS = 8
# A slice whose root mean square is below this share of the largest is only the FP64 residue of terms that cancel.
_VANISHING = 1e-12
# Above this, the number of elements that make up an error is counted, which takes time. The worst slices of faithful
# ports' outputs stay below, those of their gradients do not always (``reports/calibration.md``).
_USUAL = 1.5
# What lies within this many standard deviations may be chance.
_BY_CHANCE = 3.0
_CHANCE = float(special.ndtr(_BY_CHANCE))
# With more degrees of freedom than this, chance does not count.
_MOST_FREEDOM = 1e4
# For runs of the model with jitter, which are not drawn. Fewer do not show how the error of few elements scatters. Nor
# do runs whose error scatters like that of more independent errors than this many times the number of elements.
_FEWEST_RUNS = 8
_FREEDOM_OF_FEW = 2.0
# A handful of steps in FP32, such as a norm's statistics and its scaling, cost this many unit roundoffs.
_FP32_STEPS = 2.0
# The result's own rounding costs this share of the unit roundoff, on average over mantissas.
_MEAN_ROUNDING = 0.5


@dataclass(frozen=True)
class Statistic:
    """One comparison of a candidate's error with the model's.

    Attributes:
        name: as in the table above.
        value: as in the table; infinite if the model expects no error where there is one.
        where: the worst place, such as ``dim 2 at 5``, or the known mistake that the error resembles most; empty if
            the statistic is about the whole tensor.
        coefficient: how much of that mistake's change, or for ``gain`` of golden, the error contains.
    """

    name: str
    value: float
    where: str = ""
    coefficient: float = 0.0


def least_error(dtype: torch.dtype, summed_terms: int) -> float:
    """Return the relative error that no model may fall below: the result's rounding, and FP32 steps and sums before it.

    Adding n terms of random sign one after another loses about ``u sqrt(n / 6)`` relative to the sum, with unit
    roundoff u: each of the n roundings is at most u times a partial sum that grows with the square root of its length,
    and they add up as a random walk (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).

    Args:
        dtype: the dtype in which the candidate returns the tensor.
        summed_terms: how many terms a kernel accumulates for one element.
    """
    return max(_MEAN_ROUNDING * torch.finfo(dtype).eps / 2, _FP32_STEPS * _UNIT, _UNIT * math.sqrt(summed_terms / 6))


def statistics(
    error: CachedTensor,
    model_errors: Sequence[CachedTensor],
    golden: CachedTensor,
    least: float,
    of_parameter: bool = False,
    terms: float = 0.0,
) -> Iterator[Statistic]:
    """Yield every statistic that a tensor of this shape has.

    Args:
        error: candidate minus golden, FP64 or FP32, finite.
        model_errors: rounding model minus golden for each way in which faithful kernels compute, same dtype and shape,
            finite; an error as large as any of theirs is expected.
        golden: same dtype and shape, finite.
        least: see ``least_error``.
        of_parameter: whether the tensor is a parameter's gradient.
        terms: the relative error of terms as large as the tensor that may nearly cancel in a slice; 0 if they do not
            cancel. It counts no more than the tensor's own relative error.
    """
    shape, count = golden.values.shape, golden.values.numel()
    if not count:
        return
    total = max(*(model.total for model in model_errors), least**2 * golden.total)
    yield Statistic("norm", math.sqrt(_compute_ratio(error.total, total)) / _chance_of_norm(model_errors, count))
    yield _compare_largest(error, model_errors, least * golden.max_abs)
    if has_component(golden):
        along = Component(error, model_errors, golden, golden, math.sqrt(total))
        yield Statistic("gain", along.value, coefficient=along.coefficient)
    relative = math.sqrt(total / golden.total) if golden.total > 0 else 0.0
    worst: dict[str, Statistic] = {}
    for name, label, dims in _list_slices(shape, of_parameter):
        there = math.prod(shape[dim] for dim in dims)
        own = functools.reduce(torch.maximum, (model.squares_over(dims) for model in model_errors))
        share = there / (there + _PRIOR_ELEMENTS)
        expected = (own * share).add_(golden.squares_over(dims), alpha=(1.0 - share) * relative**2)
        here = golden.squares_over(dims)
        floor = (least**2 * here).clamp_(min=min(terms, relative) ** 2 * golden.total * there / count)
        # The first query of causal attention sees one key, so the terms of its gradient cancel: it is zero except for
        # rounding, whose size no model can tell. So the tensor's average is expected there.
        floor[here <= _VANISHING**2 * here.max()] = total * there / count
        expected = torch.maximum(expected, floor).clamp_(min=there * torch.finfo(here.dtype).tiny)
        ratios = _compute_ratios(error.squares_over(dims), expected)
        value = math.sqrt(ratios.max().item()) / _compute_chance_factor(there)
        if value > _USUAL:
            ratios /= torch.maximum(
                _compute_chance_factor(_count_independent_errors(model_errors, dims, there)),
                _chance_by_runs(model_errors, dims),
            ).square()
            value = math.sqrt(ratios.max().item())
        if name not in worst or worst[name].value < value:
            place = _describe_place(int(ratios.argmax()), ratios.shape)
            worst[name] = Statistic(name, value, f"{label} at {place}")
    yield from worst.values()
    if len(shape) > 1 and shape[-1] >= SMALLEST_SLICE <= count // shape[-1]:
        yield Statistic("shift", _compare_shift(error, model_errors, total))


def _list_slices(shape: torch.Size, of_parameter: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the statistic, what its slices are called, and the dimensions that are summed over.

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


def _describe_place(flat: int, shape: torch.Size) -> str:
    return ", ".join(str(index) for index in np.unravel_index(flat, shape))


def _compare_largest(error: CachedTensor, model_errors: Sequence[CachedTensor], least: float) -> Statistic:
    shape = error.values.shape
    value = _compute_ratio(error.max_abs, max(*(model.max_abs for model in model_errors), least))
    row = int(error.largest_in_rows.argmax())
    index = int(error.values.reshape(-1, shape[-1])[row].abs().argmax()) if shape else 0
    place = _describe_place(row * (shape[-1] if shape else 1) + index, shape)
    return Statistic("largest", value / _compute_chance_factor(error.values.numel()), f"element {place}")


def _compare_shift(error: CachedTensor, model_errors: Sequence[CachedTensor], total: float) -> float:
    """Return the ratio of the norms of the sums over rows.

    For independent errors, the square of such a norm is that of the whole error.
    """
    shifted, *modelled = [norm_of(over_rows(x.values)) ** 2 for x in (error, *model_errors)]
    return math.sqrt(_compute_ratio(shifted, max(*modelled, total))) / _compute_chance_factor(error.values.shape[-1])


def _compute_chance_factor(count: Count) -> Count:
    """Return the factor by which one norm may exceed another by chance: three standard deviations of their ratio.

    The norm of n independent errors scatters by ``1 / sqrt(2 n)`` of itself, and so does the model's.
    """
    return 1.0 + _BY_CHANCE / count**0.5


def _count_independent_errors(model_errors: Sequence[CachedTensor], dims: tuple[int, ...], count: int) -> Tensor:
    """Return how many independent errors of one size would make each slice's norm scatter as the models' errors do.

    A few elements make up most of the error if they make up most of the values, as in a softmax. The variance of a sum
    of squares is ``2 sum(sigma**4)`` for independent errors of deviations sigma, and ``2 n sigma**4`` for n equal
    deviations. A normal error's fourth power is ``3 sigma**4`` on average.

    Args:
        dims: the dimensions that a slice extends over.
        count: the number of elements in a slice.
    """
    powers = [_even_powers(model.values, dims) for model in model_errors]
    second, fourth = (torch.stack(sums).amax(0) for sums in zip(*powers, strict=True))
    return torch.where(fourth > 0, 3.0 * second.square() / fourth, count).clamp(1.0, count)


def _even_powers(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the FP64 sums of the second and fourth powers; make one copy only, as a weight's gradient may be large."""
    powers = x.to(torch.float64, copy=True).square_()
    second = powers.sum(dims)
    return second, powers.square_().sum(dims)


def _chance_of_norm(model_errors: Sequence[CachedTensor], count: int) -> float:
    """Return ``_compute_chance_factor``; for few elements, such as a loss, no more than many runs leave to chance.

    The model's error in one number may happen to be tiny, which ``_compute_chance_factor`` allows for. The largest
    error of many runs is not tiny, so it needs no such allowance. Runs with jitter may have most roundings in common,
    so they count only if their errors scatter like those of few independent ones.
    """
    usual = _compute_chance_factor(float(count))
    drawn = [model.total for model in model_errors if model.is_drawn]
    totals = torch.tensor(drawn or [model.total for model in model_errors], dtype=torch.float64)
    if count >= SMALLEST_SLICE or len(totals) < (FEWEST_DRAWN if drawn else _FEWEST_RUNS):
        return usual
    if not drawn and _estimate_degrees_of_freedom(totals) > _FREEDOM_OF_FEW * count:
        return usual
    return min(usual, _beyond_largest(totals).item())


def _chance_by_runs(model_errors: Sequence[CachedTensor], dims: tuple[int, ...]) -> Tensor:
    """Return the factor by which the norm of each slice may exceed the largest of the drawn runs' by chance.

    One rounding may move a whole slice, as that of a query which sees many keys alike moves a row of the queries'
    weights. The slice's elements do not show that, but the scatter of runs that round independently does. For n
    independent normal errors the squared norm has a chi-squared distribution with mean n and variance ``2 n``. The
    squared factor is its quantile at three standard deviations of a normal one, over the median of the largest of all
    runs.

    Args:
        dims: the dimensions that a slice extends over.
    """
    drawn = [model.squares_over(dims) for model in model_errors if model.is_drawn]
    return _beyond_largest(torch.stack(drawn)) if len(drawn) >= FEWEST_DRAWN else torch.ones(())


def _beyond_largest(squares: Tensor) -> Tensor:
    """Return this factor from the squared norms of runs, which lie along the first dimension."""
    half = _estimate_degrees_of_freedom(squares).numpy(force=True) / 2.0
    reached, largest = (special.gammaincinv(half, p) for p in (_CHANCE, 0.5 ** (1 / len(squares))))
    return torch.as_tensor(np.sqrt(reached / largest), dtype=squares.dtype, device=squares.device)


def _estimate_degrees_of_freedom(squares: Tensor) -> Tensor:
    """Return how many independent normal errors would scatter as squared norms do over runs, the first dimension."""
    variance, mean = squares.double().var(0), squares.double().mean(0)
    return torch.where(variance > 0, 2.0 * mean.square() / variance, _MOST_FREEDOM).clamp(1.0, _MOST_FREEDOM)


def _compute_ratio(error: float, expected: float) -> float:
    """Return the ratio of two numbers that are not negative."""
    if error == 0:
        return 0.0
    return error / expected if expected > 0 else math.inf


def _compute_ratios(errors: Tensor, expected: Tensor) -> Tensor:
    """Return the ratio of each element, as ``_compute_ratio`` does."""
    return torch.where(errors > 0, errors / expected, 0.0)


# The known mistake whose direction an error points in.


# Directions whose components are at least this share of the largest cannot be told apart by size, so the coefficient
# decides.
_ALIKE_IN_SIZE = 0.9


def resemblance(
    output: str,
    error: CachedTensor,
    model_errors: Sequence[CachedTensor],
    golden: CachedTensor,
    expected_norm: float,
    known: Sequence[Direction],
) -> Statistic | None:
    """Return the statistic of the mistake that an output's error resembles most; None if none changes this output.

    Args:
        output: its name.
        error, model_errors, golden: as for ``statistics``.
        expected_norm: the expected norm of the error.
        known: all directions.
    """
    along = [d for d in known if output in d.changes and has_component(d.changes[output])]
    if not along:
        return None
    components = [(Component(error, model_errors, d.changes[output], golden, expected_norm), d) for d in along]
    components.sort(key=lambda entry: entry[0].at_most, reverse=True)
    largest, judged = 0.0, []
    for component, direction in components:
        if component.at_most < _ALIKE_IN_SIZE * largest:
            break
        largest = max(largest, abs(component.value))
        judged.append((component.value, direction))
    close = [entry for entry in judged if abs(entry[0]) >= _ALIKE_IN_SIZE * largest]
    value, likeliest = min(close, key=lambda entry: abs(coefficient(error, entry[1].changes[output]) - 1.0))
    share = coefficient(error, likeliest.changes[output])
    return Statistic("mistake", largest_of(len(along), value), likeliest.mistake.name, share)


def largest_of(count: int, value: float) -> float:
    """Return the deviation that a single direction exceeds as rarely as the largest of ``count`` exceeds ``value``.

    The probability that any of them exceeds it is at most the sum of their probabilities, however they are related. So
    each further known mistake makes all others a little harder to find, and a false alarm no likelier.

    Args:
        count: how many directions an error was compared with, at least 1.
        value: the largest component, signed, in standard deviations.
    """
    likely = special.log_ndtr(-abs(value)) + math.log(count)
    return math.copysign(-float(special.ndtri_exp(likely)) if likely < math.log(0.5) else 0.0, value)


def coefficient(error: CachedTensor, change: CachedTensor) -> float:
    """Return how much of the change the error contains: near 1 if the mistake was made, near 0 if it was not."""
    return error.dot(change) / change.total
