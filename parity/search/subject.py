"""Measure what a compared model and its pass have, so that no finding speaks of anything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from parity.trace.trace import Trace

_RECOGNISED: dict[str, Sequence[Callable[[Trace], object]]] = {
    "attention": (weighings,),
    "rotations": (rotations, lambda trace: any(call.name in ("cos", "sin", "polar") for call in trace.calls)),
    "norms": (norms,),
    "gated units": (gated_units,),
    "experts": (routers,),
    "lookups": (lookups, additions),
    "labels": (cross_entropies, log_softmaxes),
    "log-probabilities": (log_softmaxes,),
    "an optimizer": (optimizers_of, lambda trace: trace.clips),
}


def has(failure: Failure, need: str) -> bool:
    """Return whether the model of a failed pass, or the pass itself, has what a finding needs to be told.

    Args:
        failure: the failed comparison.
        need: one of the values of ``parity.mistakes.codes.NEEDS``.

    Raises:
        OutOfTime: if the candidate has to run again for that, and the limit of real time is reached.
    """
    if need == "experts" and has_experts(failure.prepared.weights):
        return True
    if need in _RECOGNISED:
        return any(recognised(failure.trace) for recognised in _RECOGNISED[need])
    match need:
        case "FP8":
            return failure.precision.recipe is not None
        case "FP32":
            return failure.precision.dtype is torch.float32
        case "gradients" | "decoding":
            return failure.prepared.evaluation == (need == "decoding")
        case "few outputs":
            return few_outputs(failure) or any(one.numel == 1 for one in failure.outputs)
        case "masked tokens":
            return any(True for _ in kept_rows(failure))
    return need == "nothing"  # one pass in one process is no training, and has no ranks
