"""Explains failures of modules that return a loss: of one number many a mistake makes another, gradients tell more."""

from __future__ import annotations

import math

import torch
from torch import nn

from parity.diagnosis.budget import Budget
from parity.diagnosis.failure import Failure, few_outputs
from parity.diagnosis.functions.factors import factor_hypotheses
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.losses.cross_entropy import cross_entropy_hypotheses
from parity.diagnosis.losses.label_shifts import label_shift_hypotheses
from parity.diagnosis.losses.losses import loss_hypotheses
from parity.diagnosis.screen import TINY
from parity.diagnosis.trial import tensors_under
from parity.diagnosis.verify import Explanation, verified
from parity.passes import Tensors
from parity.watching.trace import Trace

_HELPS = 0.5  # of the error before, which a mistake must bring down to that, in the worst tensor
_VERIFIED = 3  # mistakes that are computed under the rounding model, the best first


def loss_explanations(failure: Failure, trace: Trace, budget: Budget) -> list[Explanation]:
    """The mistake with a loss that explains outputs and gradients best, if one explains all of them.

    Args:
        failure: the outputs of the candidate are finite.
        trace: of the reference in FP64.
        budget: of the search.
    """
    if not few_outputs(failure):
        return []
    ranked: list[tuple[float, Hypothesis]] = []
    for one in _known(trace, failure.prepared.reference):
        if budget.spent():
            break
        assumed = tensors_under(failure.prepared, (one,))
        if assumed is not None and (left := _share_left(failure, assumed)) < _HELPS:
            ranked.append((left, one))
    ranked.sort(key=lambda entry: entry[0])
    for _, one in ranked[:_VERIFIED]:
        explanation = verified(failure, (one,))
        if explanation is not None and explanation.complete:
            return [explanation]
    return []


def _known(trace: Trace, module: nn.Module) -> list[Hypothesis]:
    mistakes = (
        *loss_hypotheses(trace, module),
        *cross_entropy_hypotheses(trace, module),
        *label_shift_hypotheses(trace, module),
        *factor_hypotheses(trace, module),
    )
    return [one for one in mistakes if one.scope == "all"]


def _share_left(failure: Failure, assumed: Tensors) -> float:
    """The largest share of a failed tensor's error that is left, but for what passes; infinite where shapes differ."""
    shares = []
    for key, result in (((one.kind, one.name), one) for one in failure.results if not one.passed):
        golden, candidate = failure.golden[key], failure.candidate[key].double()
        if assumed[key].shape != golden.shape or not result.finite:
            return math.inf
        before = torch.linalg.vector_norm(candidate - golden).item()
        left = torch.linalg.vector_norm(candidate - assumed[key]).item()
        passes = left <= result.tolerance_relative_l2 * torch.linalg.vector_norm(assumed[key]).item()
        shares.append(0.0 if passes else left / max(before, TINY))
    return max(shares, default=math.inf)
