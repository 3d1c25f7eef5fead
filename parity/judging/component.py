"""The error's component along a direction, golden's or that of a mistake's change, next to those of the models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from scipy import special
from torch import Tensor

from parity.limits.aim import FALSE_ALARMS_A_RUN, STATISTICS_A_RUN
from parity.summed import Summed, over_rows

# Fewer elements do not tell how errors scatter.
_FEWEST_ELEMENTS = 32
# The unit roundoff of FP32, in which kernels compute.
_UNIT = torch.finfo(torch.float32).eps / 2
# Rounding errors lean by up to this share of their norm, in the models' runs; independent ones do not.
_LEANING = 0.02
# Of what a direction is granted, below which another part of it is not computed.
_NEGLIGIBLE = 0.1
# Of a direction's square in one element: where less is, what a regression takes out of the scatter is negligible.
_LEVERAGE = 0.01
# The sums of fewer clusters do not tell how they scatter.
_FEWEST_CLUSTERS = 8
# Times what elements show, beyond which the drawn runs alone tell how errors lean.
_BY_RUNS_ALONE = 2.0


def has_component(direction: Summed) -> bool:
    """Whether errors can be regressed on it: the scatter of few elements says nothing."""
    return direction.values.numel() >= _FEWEST_ELEMENTS and direction.norm != 0.0


class Component:
    """The error's component along a direction, next to those of the models.

    Args:
        error, model_errors: as in ``statistics``.
        direction: a tensor of that shape, FP64 or FP32, that ``has_component``.
        golden: as in ``statistics``.
        expected_norm: of the error.
    """

    def __init__(
        self, error: Summed, model_errors: Sequence[Summed], direction: Summed, golden: Summed, expected_norm: float
    ) -> None:
        product = error.dot(direction)
        self._drawn = [model for model in model_errors if model.is_drawn and model.leans]
        model_errors = [model for model in model_errors if not model.is_drawn] or model_errors
        modelled = [model.dot(direction) for model in model_errors]
        nearest = min(range(len(modelled)), key=lambda index: abs(product - modelled[index]))
        # Kernels may round less than the model does, as where FP32 products use no TF32: no error at all is faithful.
        is_between = min(0.0, *modelled) <= product <= max(0.0, *modelled)
        self._outside = 0.0 if is_between else product - modelled[nearest]
        self._error, self._nearest, self._direction = error, model_errors[nearest], direction
        # What a direction is granted: the leaning that rounding errors have, and a unit roundoff of golden, since what
        # a kernel rounds to FP32 may scale all of it, as a constant does, or a row, as a norm's root does.
        leaning = _LEANING * expected_norm * direction.norm
        self._granted = math.hypot(leaning, _UNIT * abs(golden.dot(direction)))
        if _UNIT * golden.norm * direction.norm > _NEGLIGIBLE * leaning:
            self._granted = math.hypot(self._granted, _UNIT * _norm(golden.dots_in_rows(direction)))

    @property
    def at_most(self) -> float:
        """A bound of the magnitude of ``value`` that costs nothing."""
        return abs(self._in_deviations(self._granted))

    @property
    def value(self) -> float:
        """How far it lies outside of what the models have: the signed distance from the nearest in standard deviations.

        Infinite where no error is expected.
        """
        return self._in_deviations(self.deviation) if self.at_most else 0.0

    @property
    def coefficient(self) -> float:
        """How much of the direction the error contains beyond what the nearest model's does."""
        return self._outside / self._direction.total

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of the distance from the nearest model.

        What error and model share cancels in their difference. Its standard deviation is that of its scatter about its
        regression on the direction, robust to errors of a row that share a cause, what every direction is granted, and
        how such differences lean where roundings are drawn.
        """
        residual = self._error.values - self._nearest.values
        direction = self._direction.values.to(residual.dtype)
        residual.sub_(direction, alpha=self.coefficient)
        leaning = self._drawn_leaning(_norm(residual)) if len(self._drawn) > 1 else 0.0
        size = self._direction.root_mean_square  # taken out, so that FP32 holds the squares of the products
        scatter = size * _scatter(torch.addcmul(residual.new_zeros(()), residual, direction, value=1.0 / size))
        if leaning > _BY_RUNS_ALONE * scatter:
            leaning *= _times_for_few(len(self._drawn))
        return math.hypot(max(scatter, leaning), self._taken_out(residual), self._granted)

    def _taken_out(self, residual: Tensor) -> float:
        """The standard deviation of what regression took out of the scatter of the difference of error and model.

        It leaves ``1 - h`` of the variance at an element that has the share h of the direction's square (its leverage),
        and nothing at the only element that is not 0, as behind a clamp. By the model's error, and the share of it that
        the difference has elsewhere; without an elsewhere, like errors that have no rounding in common.

        Args:
            residual: the difference without its component.
        """
        direction, model = self._direction, self._nearest
        if direction.max_abs**2 <= _LEVERAGE * direction.total:
            return 0.0
        leverage = direction.values.square() / direction.total
        squares = model.values.square()
        left = ((1.0 - leverage) * squares).sum().item()
        share = _norm(residual) / math.sqrt(left) if left > _LEVERAGE * model.total else math.sqrt(2.0)
        taken_out = math.sqrt((leverage.square() * squares).sum().item()) * direction.norm
        return min(share, math.sqrt(2.0)) * taken_out

    def _drawn_leaning(self, difference: float) -> float:
        """The standard deviation of a difference's component, from how errors lean whose roundings are independent.

        Elements do not show it where few numbers scale them all, as a loss's few scores scale gradients. Two errors
        without a rounding in common differ by the root of 2 times what one varies by; if they have some, by less, and
        their components with them.

        Args:
            difference: the norm of what candidate and model differ by, but for their components.
        """
        values = torch.stack([model.values for model in self._drawn])
        varies = _norm(values - values.mean(0)) / math.sqrt(len(self._drawn) - 1)
        leans = float(np.std([model.dot(self._direction) for model in self._drawn], ddof=1))
        beside = varies**2 - (leans / self._direction.norm) ** 2
        return leans * min(difference / math.sqrt(beside), math.sqrt(2.0)) if beside > 0 else 0.0

    def _in_deviations(self, deviation: float) -> float:
        if self._outside == 0.0:
            return 0.0
        return self._outside / deviation if deviation > 0 else math.copysign(math.inf, self._outside)


def _times_for_few(runs: int) -> float:
    """Times a deviation that so many runs tell, beyond which errors are as rare as beyond a limit of a known one."""
    probability = FALSE_ALARMS_A_RUN / STATISTICS_A_RUN / 2
    return float(special.stdtrit(runs - 1, probability) / special.ndtri(probability))


def _scatter(products: Tensor) -> float:
    """The standard deviation of the sum of products whose signs are random: singly, by rows, by first or last index.

    A norm's rounded root scales a whole row, and a rounded input spoils a column of a weight's gradient, so that errors
    are no independent ones: where such sums scatter more than elements do, they count (the variance of a sum over
    clusters: Liang and Zeger, Biometrika 73(1), 1986). Few clusters do not tell how their sums scatter.
    """
    scatter = _norm(products)
    if products.dim() > 1:
        rows = products.sum(-1)
        first = rows.flatten(1).sum(1) if rows.dim() > 1 else rows
        for sums in (rows, first, over_rows(products)):
            if sums.numel() >= _FEWEST_CLUSTERS:
                scatter = max(scatter, _norm(sums))
    return scatter


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
