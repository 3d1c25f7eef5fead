"""Finds which hypotheses explain a failure, at a bounded cost.

Every hypothesis is screened on one row of the batch, forward only, in FP32 where that is exact enough. What brings the
outputs nearest to the candidate's is then computed in full: outputs and gradients in FP64, and what they cost at the
precision. If none explains the failure, a second is looked for on top of the best partial explanations.

The cost is bounded in forward passes: a failed check costs at least ``FORWARDS_OF_A_CHECK`` of them (FP64, the rounding
model and the candidate, each forward and backward), and a diagnosis may cost 20 checks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.trial import Tensors, outputs_under, tensors_under
from parity.errors import Errors, measure
from parity.precision import Precision
from parity.prepare import Prepared
from parity.result import TensorResult
from parity.tolerance import Tolerance, margin

MOST_CHECKS = 15.0
"""Times the failed check's own seconds that a search may take; the rest of 20 is for what comes after it."""

_VERIFIED = 4  # hypotheses that are computed in full, the best first
_PARTIAL = 3  # partial explanations on which a second hypothesis is tried
_HELPS = 0.9  # of the error before, which a partial explanation must go below
_FP32_IS_EXACT = 0.02  # of the candidate's error, which FP32's own must stay below to screen in it


@dataclass(frozen=True)
class Failure:
    """A comparison that failed.

    Attributes:
        results: of all compared tensors.
        candidate: its tensors, in the reference's layout.
        prepared: what was compared.
        precision: at which.
        seconds: that the comparison took.
    """

    results: Sequence[TensorResult]
    candidate: Tensors
    prepared: Prepared
    precision: Precision
    seconds: float

    @property
    def outputs(self) -> list[TensorResult]:
        """The outputs' results."""
        return [result for result in self.results if result.kind == "output"]


@dataclass(frozen=True)
class Explanation:
    """Hypotheses under which the reference computes what the candidate does.

    Attributes:
        hypotheses: one, or two that hold at once.
        margin: of the outputs, against what the precision costs under the hypotheses; at most 1.
        gradient_margin: ditto of the gradients.
        before: the largest relative L2 error of an output.
        after: ditto under the hypotheses.
    """

    hypotheses: tuple[Hypothesis, ...]
    margin: float
    gradient_margin: float
    before: float
    after: float


@dataclass
class Budget:
    """Seconds that may be spent."""

    seconds: float
    began: float = field(default_factory=time.perf_counter)
    exceeded: bool = False

    def spent(self) -> bool:
        """Whether they are; remembered in ``exceeded``."""
        self.exceeded = self.exceeded or time.perf_counter() - self.began > self.seconds
        return self.exceeded


def explanations(failure: Failure, hypotheses: Iterable[Hypothesis], budget: Budget) -> list[Explanation]:
    """What explains the candidate's outputs, the best first; empty if nothing does.

    Args:
        failure: the outputs of the candidate are finite.
        hypotheses: to try, the likeliest first.
        budget: of the search.
    """
    known = list(hypotheses)
    screen = _Screen(failure)
    ranked = screen.ranked([(one,) for one in known], budget)
    found = _verified(failure, ranked, screen.before, budget)
    if found:
        return found
    partial = [combination for error, combination in ranked[:_PARTIAL] if error < _HELPS * screen.before]
    pairs: list[tuple[float, tuple[Hypothesis, ...]]] = []
    for (first,) in partial:
        pairs += screen.ranked([(first, second) for second in known if _go_together(first, second)], budget)
    return _verified(failure, sorted(pairs, key=lambda entry: entry[0]), screen.before, budget)


def _go_together(first: Hypothesis, second: Hypothesis) -> bool:
    """Whether both can hold at once: they change different calls."""
    changed = {edit.site for edit in first.edits} & {edit.site for edit in second.edits}
    return first is not second and not changed


class _Screen:
    """Ranks hypotheses by the error that is left in the row where the candidate's is largest."""

    def __init__(self, failure: Failure) -> None:
        self._prepared = failure.prepared
        self._golden = failure.prepared.golden.outputs
        self._candidate = {name: x.double() for (kind, name), x in failure.candidate.items() if kind == "output"}
        self._tolerances = {result.name: result.tolerance_relative_l2 for result in failure.outputs}
        self._rows = self._worst_row()
        self.before = self._error(self._of_rows(self._golden, self._rows), self._rows)
        plain = outputs_under(self._prepared, (), torch.float32)
        exact = plain is not None and self._difference(plain, self._golden) < _FP32_IS_EXACT * self.before
        self._dtype = torch.float32 if exact else torch.float64

    def ranked(
        self, combinations: Sequence[tuple[Hypothesis, ...]], budget: Budget
    ) -> list[tuple[float, tuple[Hypothesis, ...]]]:
        """Combinations with the error that each leaves, the smallest first; those that change nothing left out."""
        errors = []
        for combination in combinations:
            if budget.spent():
                break
            rows = None if any(one.around for one in combination) else self._rows
            outputs = outputs_under(self._prepared, combination, self._dtype, rows)
            if outputs is not None and self._same_shapes(outputs, rows):
                errors.append((self._error(outputs, rows), combination))
        return sorted((entry for entry in errors if math.isfinite(entry[0])), key=lambda entry: entry[0])

    def _worst_row(self) -> slice | None:
        """The row of the batch with the largest error, if rows are computed independently; else None."""
        counts = {x.shape[0] for x in self._candidate.values() if x.dim() > 1}
        if len(counts) != 1 or counts == {1}:
            return None
        errors = [
            ((x - self._golden[name]) ** 2).flatten(1).sum(1) / self._golden[name].square().sum()
            for name, x in self._candidate.items()
        ]
        row = int(torch.stack(errors).sum(0).argmax())
        rows = slice(row, row + 1)
        alone = outputs_under(self._prepared, (), torch.float64, rows)
        expected = self._of_rows(self._golden, rows)
        independent = alone is not None and all(
            alone[name].shape == x.shape and torch.allclose(alone[name], x, rtol=1e-5, atol=1e-7)
            for name, x in expected.items()
        )
        return rows if independent else None

    def _of_rows(self, tensors: dict[str, Tensor], rows: slice | None) -> dict[str, Tensor]:
        return tensors if rows is None else {name: x[rows] for name, x in tensors.items()}

    def _same_shapes(self, outputs: dict[str, Tensor], rows: slice | None) -> bool:
        expected = self._of_rows(self._golden, rows)
        return all(name in outputs and outputs[name].shape == x.shape for name, x in expected.items())

    def _error(self, outputs: dict[str, Tensor], rows: slice | None) -> float:
        """The largest relative error of an output, in units of its tolerance."""
        candidate = self._of_rows(self._candidate, rows)
        return max(_relative(outputs[name].double(), x) / self._tolerances[name] for name, x in candidate.items())

    def _difference(self, outputs: dict[str, Tensor], others: dict[str, Tensor]) -> float:
        return max(_relative(outputs[name].double(), x) / self._tolerances[name] for name, x in others.items())


def _relative(x: Tensor, expected: Tensor) -> float:
    norm = torch.linalg.vector_norm(expected).item()
    return torch.linalg.vector_norm(x - expected).item() / norm if norm else math.inf


def _verified(
    failure: Failure, ranked: Sequence[tuple[float, tuple[Hypothesis, ...]]], before: float, budget: Budget
) -> list[Explanation]:
    """The explanations among the best of the screened, those that fit best first."""
    found: list[Explanation] = []
    helping = [combination for error, combination in ranked if error < _HELPS * before]
    for combination in _one_of_each_name(helping)[:_VERIFIED]:
        if found and budget.spent():
            break
        explanation = verified(failure, combination)
        if explanation is not None:
            found.append(explanation)
    return sorted(found, key=lambda one: (max(one.margin, one.gradient_margin), one.after))


def _one_of_each_name(combinations: Sequence[tuple[Hypothesis, ...]]) -> list[tuple[Hypothesis, ...]]:
    by_name = {tuple(one.name for one in combination): combination for combination in reversed(combinations)}
    return list(by_name.values())[::-1]


def verified(failure: Failure, combination: tuple[Hypothesis, ...]) -> Explanation | None:
    """The explanation that a combination is; None if the outputs still differ by more than the precision costs."""
    golden = tensors_under(failure.prepared, combination)
    model = tensors_under(failure.prepared, combination, failure.precision)
    if golden is None or model is None:
        return None
    margins: dict[str, float] = {"output": 0.0, "gradient": 0.0}
    after = 0.0
    for result in failure.results:
        key = result.kind, result.name
        if golden[key].shape != failure.candidate[key].shape:
            return None
        errors = measure(failure.candidate[key], golden[key], failure.precision.dtype)
        cost = measure(model[key], golden[key], failure.precision.dtype)
        kind = "output" if result.kind == "output" else "gradient"
        margins[kind] = max(margins[kind], margin(errors, _tolerance_under(result, cost)))
        if result.kind == "output":
            after = max(after, errors.relative_l2)
    if margins["output"] > 1.0:
        return None
    before = max(result.errors.relative_l2 for result in failure.outputs)
    return Explanation(combination, margins["output"], margins["gradient"], before, after)


def _tolerance_under(result: TensorResult, cost: Errors) -> Tolerance:
    """The tolerance of a tensor where the precision costs something else."""

    def ratio(now: float, then: float) -> float:
        return max(1.0, now / then) if then > 0.0 and math.isfinite(now) else 1.0

    return Tolerance(
        result.tolerance_relative_l2 * ratio(cost.relative_l2, result.expected.relative_l2),
        result.tolerance_max_abs * ratio(cost.max_abs, result.expected.max_abs),
    )
