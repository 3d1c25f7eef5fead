"""Finds which hypotheses explain a failure, at a bounded cost.

Every hypothesis is screened on one row of the batch, forward only, in FP32 where that is exact enough. What brings the
outputs nearest to the candidate's is then computed in full: outputs and gradients in FP64, and what they cost at the
precision. If none explains the failure, a second is looked for on top of the best partial explanations.

A diagnosis may cost 20 times what the failed check did, where a check counts for a tenth of a second at least; a budget
of processor time ends each part of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis, Scope
from parity.diagnosis.trial import outputs_under, tensors_under
from parity.freedom import FUSED, UNFUSED
from parity.passes import Tensors, tensors_of
from parity.precision import Precision
from parity.prepare import Prepared
from parity.result import Kind, TensorResult
from parity.tolerance import Tolerance

CHECKS_FOR_SEARCH = 9.0
"""Times the failed check's own cost that the search for hypotheses may take, of the 20 that a diagnosis may."""

CHECKS_FOR_THE_REST = 4.0
"""Ditto for gradients, and for roundings."""

_VERIFIED = 5  # hypotheses that are computed in full, the best first
_PARTIAL = 3  # partial explanations on which a second hypothesis is tried
_HELPS = 0.9  # of the error before, which a partial explanation must go below
_HELPS_LITTLE = 0.999  # ditto where the norm of no output's error is too large: what is wrong is below its noise
_HELPS_MUCH = 0.5  # of the error before, of a gradient, which may be wrong in a way of its own, or on probing inputs
_EVIDENT = 0.3  # of the outputs' error, below which they explain enough whatever gradients do
_NEARLY_NOTHING = 0.1  # of a tensor's error: what is left then is not what failed
_FEW = 32  # elements of all outputs, which many a mistake would explain by chance
_FAITHFUL = 1.2  # times the expected error, which ends the search
_FAITHFUL_AT_LEAST = 0.4  # of the tolerance: as good where the rounding model says too little
_EXACT = 0.5  # of the error, which a hypothesis must bring down to that
_TUNED = 4  # mistakes whose constant is looked for
_TUNING_RANGE = math.log(8.0)  # by which the constant may be off, either way
_FAR = math.log(1000.0)  # ditto where a known constant points the right way, but explains little
_TUNING_STEPS = 30
_FINE = 0.02  # in logarithms: constants that are so near are one, where one of them is exact enough
_TUNING_WINDOWS = 3  # that are searched, one beyond the other
_AS_GOOD = 1.05  # times the error that the best constant leaves
_AT_THE_EDGE = 0.9  # of the range, beyond which the best constant is taken to lie outside of it
_PROMISING_STEPS = 10  # after which a constant that explains has brought the error down by as much as ``_EXACT``
_CHANGES = 1e-6  # of the error, by which a hypothesis that changes anything changes it
_TINY = 1e-300
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_FP32_IS_EXACT = 0.02  # of the candidate's error, which FP32's own must stay below to screen in it


@dataclass(frozen=True)
class Failure:
    """A comparison that failed.

    Attributes:
        results: of all compared tensors.
        candidate: its tensors, in the reference's layout.
        prepared: what was compared.
        precision: at which.
        seconds: of processor time that the comparison took.
        judge: judges the candidate against another golden, whose rounding models are given with it.
        rerun: runs the candidate again, after a change to its newly built module; None where that cannot be done.
        on_probe: the same failure as the probing inputs show it; None where they show none.
    """

    results: Sequence[TensorResult]
    candidate: Tensors
    prepared: Prepared
    precision: Precision
    seconds: float
    judge: Callable[[Tensors, Sequence[Tensors]], Sequence[TensorResult]]
    rerun: Callable[[Callable[[nn.Module], None]], Tensors] | None = None
    on_probe: Failure | None = None

    @property
    def golden(self) -> Tensors:
        """The reference's tensors in FP64."""
        return tensors_of(self.prepared.golden)

    @property
    def outputs(self) -> list[TensorResult]:
        """The outputs' results."""
        return [result for result in self.results if result.kind == "output"]


def tolerance_of(failure: Failure, key: tuple[Kind, str]) -> Tolerance:
    """The tolerance of a compared tensor."""
    result = next(result for result in failure.results if (result.kind, result.name) == key)
    return Tolerance(result.tolerance_relative_l2, result.tolerance_max_abs)


@dataclass(frozen=True)
class Explanation:
    """Hypotheses under which the reference computes what the candidate does, gradients included.

    Attributes:
        hypotheses: one, or two that hold at once.
        complete: whether every tensor passes under the hypotheses; else some gradients are wrong in a way of their own.
        misfit: the tensors' errors under the hypotheses, in units of what the precision costs, their root mean square.
        worst: the label of the failed tensor with the largest margin, an output if one failed.
        before: its relative L2 error.
        after: ditto under the hypotheses.
    """

    hypotheses: tuple[Hypothesis, ...]
    complete: bool
    misfit: float
    worst: str
    before: float
    after: float


@dataclass
class Budget:
    """Seconds of processor time that may be spent; other processes on the machine do not shorten a diagnosis."""

    seconds: float
    began: float = field(default_factory=time.process_time)
    exceeded: bool = False

    def spent(self) -> bool:
        """Whether they are; remembered in ``exceeded``."""
        self.exceeded = self.exceeded or time.process_time() - self.began > self.seconds
        return self.exceeded


def explanations(failure: Failure, hypotheses: Iterable[Hypothesis], budget: Budget) -> list[Explanation]:
    """What explains the candidate's outputs, the best first; empty if nothing does.

    Known constants are tried before others, mistakes at several places before those at one, one mistake before two.

    Args:
        failure: the outputs of the candidate are finite.
        hypotheses: to try, the likeliest first.
        budget: of the search.
    """
    known = list(hypotheses)
    screen = _Screen(failure)
    ranked: list[Ranked] = []
    for at_one_place in (False, True):
        some: list[Ranked] = []
        places = [(one,) for one in known if (one.scope == "one") == at_one_place]
        found = _screened(failure, screen, places, some, budget)
        found = found or _verified(failure, _tuned(screen, some, budget), budget)
        if found:
            return found
        ranked += some
    ranked.sort(key=lambda entry: entry[0])
    pairs: list[Ranked] = []
    for share, (first,) in ranked[:_PARTIAL]:
        if share < _HELPS and not budget.spent():
            together = [(first, second) for second in known if _go_together(first, second)]
            found = _screened(failure, screen, together, pairs, budget)
            if found:
                return found
    return []


def _screened(
    failure: Failure,
    screen: _Screen,
    combinations: Sequence[tuple[Hypothesis, ...]],
    ranked: list[Ranked],
    budget: Budget,
) -> list[Explanation]:
    """The explanations among combinations; the search ends at one that leaves no more than the precision costs.

    ``ranked`` gets every combination that changes anything, the best first.
    """
    for entry in screen.shares(combinations, budget):
        ranked.append(entry)
        if screen.is_exact(entry):
            explanation = verified(failure, entry[1])
            if explanation is not None and explanation.complete:
                return [explanation]
    ranked.sort(key=lambda entry: entry[0])
    return _verified(failure, ranked, budget)


def _tuned(screen: _Screen, ranked: Sequence[Ranked], budget: Budget) -> list[Ranked]:
    """The mistakes that help most and are about a constant, with the constant that leaves the smallest error."""
    best: dict[tuple[str, Scope], tuple[Hypothesis, float]] = {}
    for share, (one,) in ranked:
        if one.tuned is not None and one.value is not None and share < _HELPS_LITTLE:
            best.setdefault((one.title, one.scope), (one, _TUNING_RANGE if share < _HELPS else _FAR))
    return [entry for one in list(best.values())[:_TUNED] for entry in _line_search(screen, *one, budget)]


def _line_search(screen: _Screen, one: Hypothesis, reach: float, budget: Budget) -> list[Ranked]:
    """With the best constant, at most ``reach`` from the known one in logarithms, further where it is at that edge."""
    if one.tuned is None or one.value is None:
        return []
    tried: dict[float, Ranked] = {}

    def share(exponent: float) -> float:
        if exponent not in tried and one.tuned is not None:
            of_one = (one.tuned(math.exp(exponent)),)
            tried[exponent] = next(screen.shares([of_one], budget), (math.inf, of_one))
        return tried[exponent][0]

    center = math.log(one.value)
    for _ in range(_TUNING_WINDOWS):
        low, high = center - reach, center + reach
        for step in range(_TUNING_STEPS):
            promising = step < _PROMISING_STEPS or any(left < _EXACT for left, _ in tried.values())
            fine = high - low < _FINE and any(map(screen.is_exact, tried.values()))
            if not promising or fine or budget.spent():
                break
            left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            low, high = (low, right) if share(left) < share(right) else (left, high)
        best = min(tried, key=share, default=center)
        if abs(best - center) < _AT_THE_EDGE * reach:
            break
        center = best
    if not tried:
        return []
    best = min(tried, key=share)
    plain = math.log(float(f"{math.exp(best):.0e}"))  # people write 1e-4 where the search ends at 1.04e-4
    chosen = plain if share(plain) < _AS_GOOD * share(best) else best
    return [tried[chosen]] if math.isfinite(share(chosen)) else []


def _go_together(first: Hypothesis, second: Hypothesis) -> bool:
    """Whether both can hold at once: they change different calls."""
    changed = {edit.site for edit in first.edits} & {edit.site for edit in second.edits}
    return first is not second and not changed


Ranked = tuple[float, tuple[Hypothesis, ...]]  # the share of the error that is left, and what leaves it


class _Screen:
    """Ranks hypotheses by the share of the error that they leave in the row where the candidate's is largest."""

    def __init__(self, failure: Failure) -> None:
        self._prepared = failure.prepared
        self._golden = failure.prepared.golden.outputs
        self._candidate = {name: x.double() for (kind, name), x in failure.candidate.items() if kind == "output"}
        self._tolerances = {result.name: result.tolerance_relative_l2 for result in failure.outputs}
        self._rows = self._worst_row()
        self._before = {rows: self._error(self._golden, rows) for rows in (True, False)}
        self._faithful = max(
            max(_FAITHFUL * result.expected.relative_l2 / result.tolerance_relative_l2, _FAITHFUL_AT_LEAST)
            for result in failure.outputs
        )
        plain = outputs_under(self._prepared, (), torch.float32)
        exact = plain is not None and self._error(plain, False, self._golden) < _FP32_IS_EXACT * self._before[False]
        self._dtype = torch.float32 if exact else torch.float64

    def shares(self, combinations: Sequence[tuple[Hypothesis, ...]], budget: Budget) -> Iterator[Ranked]:
        """Combinations with the share of the error that each leaves; those that change nothing are left out."""
        for combination in combinations:
            if budget.spent():
                return
            alone = self._rows is not None and not any(one.around for one in combination)
            outputs = outputs_under(self._prepared, combination, self._dtype, self._rows if alone else None)
            if outputs is not None and self._same_shapes(outputs, alone):
                share = self._error(outputs, alone, cut=False) / self._before[alone]
                if math.isfinite(share) and abs(share - 1.0) > _CHANGES:
                    yield share, combination

    def is_exact(self, entry: Ranked) -> bool:
        """Whether what is left is no more than a faithful port at the precision has."""
        share, combination = entry
        alone = self._rows is not None and not any(one.around for one in combination)
        return share < _EXACT and share * self._before[alone] <= self._faithful

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
        independent = alone is not None and all(
            alone[name].shape == x[rows].shape and torch.allclose(alone[name], x[rows], rtol=1e-5, atol=1e-7)
            for name, x in self._golden.items()
        )
        return rows if independent else None

    def _of_rows(self, tensors: dict[str, Tensor], alone: bool) -> dict[str, Tensor]:
        return {name: x[self._rows] for name, x in tensors.items()} if alone and self._rows else tensors

    def _same_shapes(self, outputs: dict[str, Tensor], alone: bool) -> bool:
        expected = self._of_rows(self._golden, alone)
        return all(name in outputs and outputs[name].shape == x.shape for name, x in expected.items())

    def _error(
        self, outputs: dict[str, Tensor], alone: bool, truth: dict[str, Tensor] | None = None, cut: bool = True
    ) -> float:
        """The largest relative error of an output, in units of its tolerance.

        Args:
            outputs: whose error it is.
            alone: whether in the screened row alone.
            truth: what they should be; None for the candidate's.
            cut: whether ``outputs`` are of all rows, also where one row counts alone.
        """
        truth = self._of_rows(self._candidate if truth is None else truth, alone)
        golden = self._of_rows(self._golden, alone)
        outputs = self._of_rows(outputs, alone) if cut else outputs
        return max(
            _norm(outputs[name].double() - x) / (max(_norm(golden[name]), _TINY) * self._tolerances[name])
            for name, x in truth.items()
        )


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()


def _verified(failure: Failure, ranked: Sequence[Ranked], budget: Budget) -> list[Explanation]:
    """The explanations among the best of the screened, those that fit best first."""
    found: list[Explanation] = []
    enough = _HELPS if _is_loud(failure) else _HELPS_LITTLE
    helping = [combination for share, combination in ranked if share < enough]
    for combination in _one_of_each_name(helping)[:_VERIFIED]:
        if found and budget.spent():
            break
        explanation = verified(failure, combination)
        if explanation is not None:
            found.append(explanation)
    return sorted(found, key=lambda one: (not one.complete, one.misfit))


def _is_loud(failure: Failure) -> bool:
    """Whether the norm of an output's error alone is too large."""
    return any(result.errors.relative_l2 > result.tolerance_relative_l2 for result in failure.outputs)


def _one_of_each_name(combinations: Sequence[tuple[Hypothesis, ...]]) -> list[tuple[Hypothesis, ...]]:
    by_name = {tuple(one.name for one in combination): combination for combination in reversed(combinations)}
    return list(by_name.values())[::-1]


def verified(failure: Failure, combination: tuple[Hypothesis, ...]) -> Explanation | None:
    """The explanation that a combination is.

    Returns:
        None if an output still fails, or a gradient that is about as wrong as before where outputs do not tell enough.
    """
    golden = tensors_under(failure.prepared, combination)
    models = [
        tensors_under(failure.prepared, combination, failure.precision, freedom=freedom) for freedom in (FUSED, UNFUSED)
    ]
    if golden is None or any(golden[key].shape != x.shape for key, x in failure.golden.items()):
        return None
    judged = failure.judge(golden, [model for model in models if model is not None])
    before = {(result.kind, result.name): result for result in failure.results}
    if not _is_explained(failure, before, judged) or not _helps_on_probe(failure.on_probe, combination):
        return None
    shown = max(judged, key=lambda result: _shows(before[result.kind, result.name]))
    misfits = [result.errors.relative_l2 / max(result.expected.relative_l2, _TINY) for result in judged]
    return Explanation(
        combination,
        all(result.passed for result in judged),
        math.sqrt(sum(misfit**2 for misfit in misfits) / len(misfits)),
        shown.label,
        before[shown.kind, shown.name].errors.relative_l2,
        shown.errors.relative_l2,
    )


def _is_explained(
    failure: Failure, before: Mapping[tuple[Kind, str], TensorResult], judged: Sequence[TensorResult]
) -> bool:
    """Whether every output passes, and gradients pass, or got better, or outputs are evidence enough without them."""
    share = {
        key: result.errors.relative_l2 / max(before[key].errors.relative_l2, _TINY)
        for result in judged
        for key in [(result.kind, result.name)]
    }
    tells = sum(x.numel() for (kind, _), x in failure.golden.items() if kind == "output") >= _FEW
    evident = tells and _is_loud(failure) and all(s < _EVIDENT for (kind, _), s in share.items() if kind == "output")

    def explained(result: TensorResult) -> bool:
        left = share[result.kind, result.name]
        if result.passed or (result.errors.relative_l2 <= result.tolerance_relative_l2 and left < _NEARLY_NOTHING):
            return True
        return result.kind != "output" and (evident or left < _HELPS_MUCH)

    return all(map(explained, judged))


def _helps_on_probe(failure: Failure | None, combination: tuple[Hypothesis, ...]) -> bool:
    """Whether the hypotheses explain what fails on the probing inputs too: much of it, or all but rounding."""
    if failure is None:
        return True
    outputs = outputs_under(failure.prepared, combination, torch.float64)
    if outputs is None:
        return False
    for result in failure.outputs:
        key = (result.kind, result.name)
        if not result.passed:
            candidate, right = failure.candidate[key].double(), outputs[result.name]
            left = _row_by_row(right, candidate)
            if left > _HELPS_MUCH * _row_by_row(failure.golden[key], candidate):
                model = tensors_under(failure.prepared, combination, failure.precision)
                if model is None or left > _FAITHFUL * _row_by_row(right, model[key]):
                    return False
    return True


def _row_by_row(one: Tensor, other: Tensor) -> float:
    """How far the rows of two tensors are apart on average, at most 1 each: a row that meets another expert is one."""
    norms = (
        torch.linalg.vector_norm(x.flatten(0, -2) if x.dim() > 1 else x, dim=-1) for x in (one - other, one, other)
    )
    apart, of_one, of_other = norms
    return (apart / torch.maximum(of_one, of_other).clamp(min=_TINY)).clamp(max=1.0).mean().item()


def _shows(result: TensorResult) -> tuple[bool, bool, float]:
    """How well a tensor shows what is wrong: a failed output best."""
    return not result.passed, result.kind == "output", result.margin
