"""Explain a failure of a port that decodes: from the first wrong position on, the cache or the positions are wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parity.judge.pictures import FirstWrong, first_wrong
from parity.mistakes.decoding import decoding_hypotheses, later_in_rows, not_reset_hypothesis, positions_of
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.rotation import rotations
from parity.mistakes.trial import outputs_under
from parity.numerics.errors import norm_of
from parity.numerics.freedom import FUSED, UNFUSED
from parity.passes.all_passes import model_tensors
from parity.search.failure import Budget, Failure, while_it_lasts
from parity.search.screen import TINY
from parity.search.verify import Explanation, verified
from parity.trace.trace import Trace

_EARLIER = 2  # positions: the first tokens that are decoded may be right, or hardly wrong
_HELPS = 0.7  # of the error may be left at most
_VERIFIED = 4  # hypotheses are computed in full, the nearest first


def decoding_explanations(failure: Failure, trace: Trace, budget: Budget) -> list[Explanation]:
    """Return the mistakes of decoding that explain everything, for a pair in evaluation mode.

    Where a prompt ends is told by the first position that is wrong.

    Args:
        failure: one in which the outputs of the candidate are finite.
        trace: the reference's trace in FP64.
        budget: what the search may spend.
    """
    seq = positions_of(trace) if failure.prepared.evaluation else None
    if seq is None or failure.is_on_probes:
        return []
    tried = while_it_lasts(_known(failure, trace, seq), budget)
    # Where two do the same, behind prompts that differ by a token, the likelier mistake comes first.
    ranked = sorted(((round(_left(failure, one), 2), rank, one) for rank, one in tried), key=lambda entry: entry[:2])
    near = [one for left, _, one in ranked if left < _HELPS][:_VERIFIED]
    found = [explanation for one in near if (explanation := verified(failure, (one,))) is not None]
    complete = [one for one in found if one.complete]
    return complete[:1]


def _known(failure: Failure, trace: Trace, seq: int) -> Iterator[tuple[int, Hypothesis]]:
    """Yield mistakes, each with its rank among those behind one prompt."""
    firsts = [found.index for result in failure.outputs if (found := _first(failure, result.name)) is not None]
    at_once = not firsts
    prompts = range(1, seq) if at_once else range(min(firsts), max(min(firsts) - _EARLIER - 1, 0), -1)
    for prompt in prompts:
        known = enumerate(decoding_hypotheses(trace, prompt))
        # Where the first token is wrong, it is the prompt's own pass that is.
        yield from ((rank, one) for rank, one in known if not at_once or one.title == "mask")
    batch = _rows(failure)
    if batch is None:
        return
    if batch > 1:
        yield 0, not_reset_hypothesis(batch, seq)
    turned = [one for one in rotations(trace) if one.phases is not None]
    of_rows = {row: found.index for row in range(batch) if (found := _first_of_row(failure, row)) is not None}
    if turned and 0 < len(of_rows) < batch:
        for end in range(max(of_rows.values()) + 1, seq + 1):
            yield end, later_in_rows(turned, of_rows, end)


def _rows(failure: Failure) -> int | None:
    """Return how many rows all inputs and outputs have; None if they differ."""
    inputs = [x.shape[0] for x in tree_leaves(failure.prepared.inputs) if isinstance(x, Tensor) and x.dim() > 1]
    counts = {*inputs, *(result.shape[0] for result in failure.outputs if len(result.shape) > 1)}
    return counts.pop() if len(counts) == 1 else None


def _models(failure: Failure, name: str) -> list[Tensor]:
    models = (model_tensors(failure.prepared, failure.precision.rounding, freedom) for freedom in (FUSED, UNFUSED))
    return [model["output", name] for model in models]


def _first(failure: Failure, name: str, row: int | None = None) -> FirstWrong | None:
    result = next(one for one in failure.outputs if one.name == name)
    if result.passed:
        return None
    key = result.key
    found = first_wrong(result, failure.candidate[key], failure.golden[key], _models(failure, name), row)
    return found if found is not None and found.dim == 1 else None


def _first_of_row(failure: Failure, row: int) -> FirstWrong | None:
    found = [one for result in failure.outputs if (one := _first(failure, result.name, row)) is not None]
    return min(found, key=lambda one: one.index, default=None)


def _left(failure: Failure, one: Hypothesis) -> float:
    """Return the share of the error that a hypothesis leaves; infinite if it changes nothing or cannot be computed."""
    outputs = outputs_under(failure.prepared, (one,), torch.float32)
    if outputs is None:
        return math.inf
    left, was = 0.0, 0.0
    for result in failure.outputs:
        golden, candidate = failure.golden[result.key], failure.candidate[result.key].double()
        output = outputs.get(result.name)
        if output is None or output.shape != golden.shape or not bool(output.isfinite().all()):
            return math.inf
        size = max(norm_of(golden) * result.tolerance_relative_l2, TINY)
        left += (norm_of(output.double() - candidate) / size) ** 2
        was += (norm_of(golden - candidate) / size) ** 2
    return math.sqrt(left / max(was, TINY))
