"""Matched filters: how each subtle mistake would change golden, and whether the error points in that direction.

Rounding errors point in all directions; a mistake's error points in the direction of its change. The component along
that direction averages out the noise of all elements, so it shows mistakes far smaller than the noise of each element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.judge.statistics import coefficient, has_enough
from parity.mistakes import activations, attention_mistakes, mixture, norms, optimizers, rope
from parity.mistakes.codes import finding
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.replay import outputs_with
from parity.numerics.errors import CachedTensor, difference, in_fp32
from parity.passes.prepare import Prepared, calls_of, size_in_bytes
from parity.result import Check, Finding, TensorResult
from parity.trace.trace import Trace

# Changes of golden below this share do not count: in FP64, sums in another order already change as much.
_FP64 = 1e-12
# A coefficient within this distance of 1 says that the mistake was made, and not something that resembles it.
PRESENT = 0.5


def subtle_hypotheses(prepared: Prepared, trace: Trace) -> tuple[Hypothesis, ...]:
    """Return the mistakes that change the reference's results so little that the norm of the error may not show it.

    Each is made in all operations of its kind at once.
    """
    return tuple(one for one in subtle_hypotheses_anywhere(prepared, trace) if one.subtle and one.scope == "all")


def subtle_hypotheses_anywhere(prepared: Prepared, trace: Trace) -> tuple[Hypothesis, ...]:
    """Return the subtle mistakes, including those made in only some of the operations or with other constants."""
    candidates = (
        *norms.norm_hypotheses(trace, prepared.stored_dtype),
        *activations.activation_hypotheses(trace),
        *rope.rope_hypotheses(trace, prepared.stored_dtype),
        *optimizers.optimizer_step_hypotheses(trace),
        *attention_mistakes.softmax_scale_hypotheses(trace),
        *mixture.routing_hypotheses(trace),
    )
    constants = {one.title for one in candidates if one.subtle and one.tuned is not None}
    return tuple(one for one in candidates if one.subtle or (one.tuned is not None and one.title in constants))


@dataclass(frozen=True, eq=False)
class Direction:
    """The changes of golden that one mistake would make.

    Attributes:
        mistake: the hypothesis.
        changes: golden under the hypothesis minus golden, for the outputs that it changes; FP32 if that can hold it.
    """

    mistake: Hypothesis
    changes: Mapping[str, CachedTensor]


def directions(prepared: Prepared) -> tuple[Direction, ...]:
    """Return the direction of each subtle mistake that the reference allows, and keep it for the next precision."""
    return prepared.cache.get("directions", lambda: tuple(_find_directions(prepared)), _bytes_of)


def _bytes_of(found: Sequence[Direction]) -> int:
    """Return the memory of all changes, whose squares are kept as well."""
    return 2 * size_in_bytes([change.values for direction in found for change in direction.changes.values()])


def _find_directions(prepared: Prepared) -> Iterator[Direction]:
    judged = {name: golden for name, golden in prepared.golden.outputs.items() if has_enough(golden)}
    if not judged:  # as in the steps of a training, which return a loss
        prepared.cache.take("calls", lambda: None)
        return
    calls = prepared.cache.take("calls", lambda: calls_of(prepared))
    norms = {name: torch.linalg.vector_norm(golden).item() for name, golden in judged.items()}
    for mistake in subtle_hypotheses(prepared, calls.trace):
        with calls.products.reused():
            outputs = outputs_with(prepared, (mistake,), torch.float64)
        if outputs is None:
            continue
        changes = {name: in_fp32(outputs[name] - golden) for name, golden in judged.items()}
        changes = {name: x for name, x in changes.items() if x.is_finite and x.norm > _FP64 * norms[name]}
        if changes:
            yield Direction(mistake, changes)


def share_of(change: CachedTensor, computed: Tensor, golden: Tensor) -> float:
    """Return how much of a mistake's change the error of a computation contains.

    Args:
        change: the mistake's change of an output.
        computed: the output.
        golden: the output in FP64.
    """
    return coefficient(CachedTensor(difference(computed, golden).to(change.values.dtype)), change)


def found_by_filter(
    tensors: Sequence[TensorResult], known: Sequence[Direction]
) -> Iterator[tuple[TensorResult, Check, Direction]]:
    """Yield the mistakes that failed checks have found and no output rules out, each with the tensor and the check."""
    by_name = {direction.mistake.name: direction for direction in known}
    checks = [(tensor, check) for tensor in tensors for check in tensor.checks if check.statistic == "mistake"]
    lacked = {check.where for _, check in checks if _is_lacking(check)}
    for tensor, check in checks:
        if check.margin > 1 and abs(check.coefficient - 1.0) <= PRESENT and check.where not in lacked:
            yield tensor, check, by_name[check.where]


def _is_lacking(check: Check) -> bool:
    """Return whether an output's error contains so little of a mistake that it cannot have been made.

    The statistic is the coefficient in units of its standard deviation, so it tells how far the coefficient is from 1.
    """
    return abs(check.value) * (1.0 - check.coefficient) > check.limit * abs(check.coefficient)


def findings(tensors: Sequence[TensorResult], known: Sequence[Direction]) -> list[Finding]:
    """Return the mistakes that failed checks have found, each once; of several, none is a fact."""
    found: dict[str, Finding] = {}
    shown = list(found_by_filter(tensors, known))
    for tensor, check, direction in shown:
        mistake = direction.mistake
        found[mistake.name] = finding(
            mistake.title,
            f"the error of {tensor.label} contains {check.coefficient:.2g} times the change that "
            f"{mistake.name} would make, "
            f"{abs(check.value):.2g} standard deviations beyond rounding (limit {check.limit:.2g}); "
            f"{mistake.repair}",
            sure=len({one.mistake.title for _, _, one in shown}) == 1,
            repair=mistake.repair,
            code=mistake.code,
        )
    return list(found.values())
