"""Measure what a compared model and its pass have, so that no finding speaks of anything else."""

from __future__ import annotations

from collections.abc import Callable

import torch

from parity.mistakes.activations import gated_units
from parity.mistakes.attention import weighings
from parity.mistakes.layers import has_experts
from parity.mistakes.lookups import additions, lookups
from parity.mistakes.losses import cross_entropies, log_softmaxes
from parity.mistakes.mixture import routers
from parity.mistakes.norms import norms
from parity.mistakes.optimizers import optimizers_of
from parity.mistakes.rotation import rotations
from parity.search.failure import Failure, few_outputs
from parity.search.reruns import kept_rows

_ANGLES = {"cos", "sin", "polar"}  # functions of which tables of angles are made
_MEASURES: dict[str, Callable[[Failure], object]] = {
    "nothing": lambda failure: True,
    "attention": lambda failure: weighings(failure.trace),
    "rotations": lambda failure: rotations(failure.trace) or _ANGLES & {call.name for call in failure.trace.calls},
    "norms": lambda failure: norms(failure.trace),
    "gated units": lambda failure: gated_units(failure.trace),
    "experts": lambda failure: routers(failure.trace) or has_experts(failure.prepared.weights),
    "lookups": lambda failure: lookups(failure.trace) or additions(failure.trace),
    "labels": lambda failure: cross_entropies(failure.trace) or log_softmaxes(failure.trace),
    "log-probabilities": lambda failure: log_softmaxes(failure.trace),
    "an optimizer": lambda failure: optimizers_of(failure.trace) or failure.trace.clips,
    "FP8": lambda failure: failure.precision.recipe is not None,
    "FP32": lambda failure: failure.precision.dtype is torch.float32,
    "gradients": lambda failure: not failure.prepared.evaluation,
    "decoding": lambda failure: failure.prepared.evaluation,
    "few outputs": lambda failure: few_outputs(failure) or any(one.numel == 1 for one in failure.outputs),
    "masked tokens": lambda failure: any(True for _ in kept_rows(failure)),
}
"""How the needs of ``parity.mistakes.codes.NEEDS`` are measured; one pass in one process has no training or ranks."""


def has(failure: Failure, need: str) -> bool:
    """Return whether the model of a failed pass, or the pass itself, has what a finding needs to be told.

    Args:
        failure: the failed comparison.
        need: one of the values of ``parity.mistakes.codes.NEEDS``.

    Raises:
        OutOfTime: if the candidate has to run again for that, and the limit of real time is reached.
    """
    return need in _MEASURES and bool(_MEASURES[need](failure))
