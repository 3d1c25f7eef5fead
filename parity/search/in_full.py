"""Compute mistakes in full, and say whether they explain outputs, gradients and probing inputs up to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parity.judge.second_look import LOOKS, is_hopeless
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.replay import outputs_with, tensors_with
from parity.numerics.errors import TINY, norm_of
from parity.numerics.formats import Rounding
from parity.numerics.freedom import FUSED, KinkSides
from parity.numerics.kernel_choices import biased_kernels
from parity.passes.all_passes import Tensors
from parity.result import Kind, TensorResult
from parity.search.failure import Failure, few_outputs
from parity.search.screen import FAITHFUL

if TYPE_CHECKING:
    from parity.te import Precision

# The share of its error that may be left in a gradient, which may have a mistake of its own, or on probing inputs.
_HELPS_MUCH = 0.5
_HOPELESS = 0.9  # if more than this share is left in an output that is far off, no kernel's choices make up for it
_EVIDENT = 0.3  # if less than this share is left in outputs, that is enough, whatever gradients show
_HARDLY_LESS, _DEARER = 0.9, 1.5  # an error that is hardly less may pass only because rounding costs this much more
_NEARLY_NOTHING = 0.1  # if less than this share of a tensor's error is left, the rest did not make it fail
_MOST = 0.5  # the share of the square of an output's error, beyond what the precision costs, that must be explained
_LITTLE = 0.2  # of the largest margin: single roundings may leave this much
_NEARLY_PASSES = 5.0  # differences between kernels may be this many times the tolerance
_SAME = 1e-9
_FEW = 16  # the rounding of a gradient of fewer numbers may be as large as a mistake's error was
_MANY, _WORSE = 64, 1.2  # no right explanation makes the error of this many elements this many times as large
_LOUD = 2.0  # an error beyond this many times the tolerance is far too large


@dataclass(frozen=True)
class Explanation:
    """Hypotheses under which the reference computes what the candidate does, gradients included.

    Attributes:
        hypotheses: one, or two that hold at once.
        left: the tensor that fails by most under the hypotheses, such as a gradient that has a mistake of its own; None
            if every tensor passes, also on the inputs as they were drawn.
        misfit: the root mean square of the tensors' errors under the hypotheses, in units of what the precision costs.
        worst: the label of the failed tensor with the largest margin, an output if one failed.
        before: its relative L2 error.
        after: its relative L2 error under the hypotheses.
        results: every tensor, judged under the hypotheses.
        against: what a stage shows against the hypotheses, as the end of a sentence; empty if nothing.
    """

    hypotheses: tuple[Hypothesis, ...]
    left: TensorResult | None
    misfit: float
    worst: str
    before: float
    after: float
    results: Sequence[TensorResult]
    against: str = ""

    @property
    def complete(self) -> bool:
        """Return whether every tensor passes under the hypotheses."""
        return self.left is None


def exceeds_norm_limit(failure: Failure, among: Sequence[TensorResult] = ()) -> bool:
    """Return whether the norm of an error is too large in an output or, if tensors are given, in one of these."""
    return any(result.errors.relative_l2 > result.tolerance_relative_l2 for result in among or failure.outputs)


def verified(failure: Failure, combination: tuple[Hypothesis, ...]) -> Explanation | None:
    """Return the explanation that a combination of hypotheses gives, if it explains the failure.

    Returns:
        None if an output still fails, or if outputs do not tell enough and a gradient is about as wrong as before.
    """
    golden = tensors_with(failure.prepared, combination, only_if=partial(_may_explain, failure))
    if golden is None or any(golden[key].shape != x.shape for key, x in failure.golden.items()):
        return None
    if not all(bool(x.isfinite().all()) for x in golden.values()):  # a port that is judged computes finite values
        return None
    if any(_is_worse(failure, result, golden[result.key]) for result in failure.results if result.passed):
        return None
    before = {(result.kind, result.name): result for result in failure.results}
    computed = _models(failure, combination, partial(_may_pass, failure, golden))
    if not computed:  # it cannot be computed in FP32
        return None
    judged = _judged(failure, combination, golden, computed)
    if not _is_explained(failure, before, judged, golden):
        return None
    if not _helps_on_probe(failure.on_probe, combination):
        return None
    drawn: Sequence[TensorResult] = ()
    if failure.on_drawn is not None:
        golden_as_drawn = tensors_with(failure.on_drawn.prepared, combination)
        if not _helps_as_drawn(failure.on_drawn, golden_as_drawn):
            return None
        drawn = _as_drawn(failure.on_drawn, combination, golden_as_drawn)
    shown = max(judged, key=lambda result: _shows(before[result.kind, result.name]))
    # A tensor that is 0 under the hypotheses has no relative error.
    known = [result for result in judged if math.isfinite(result.expected.relative_l2)]
    misfits = [result.errors.relative_l2 / max(result.expected.relative_l2, TINY) for result in known] or [math.inf]
    return Explanation(
        combination,
        max((one for one in (*judged, *drawn) if not one.passed), key=lambda one: one.margin, default=None),
        math.hypot(*misfits) / math.sqrt(len(misfits)),  # hypot, since a misfit may be too large to be squared
        shown.label,
        before[shown.kind, shown.name].errors.relative_l2,
        shown.errors.relative_l2,
        (*judged, *drawn),
        failure.against(combination),
    )


def _may_explain(failure: Failure, outputs: Mapping[str, Tensor]) -> bool:
    """Return whether enough of the error is explained of each output whose error is far too large.

    This is checked before gradients and rounding models are computed, which take most of the time.
    """
    most = _HOPELESS if few_outputs(failure) else _HELPS_MUCH
    for result in filter(is_far_off, failure.outputs):
        right, was = outputs.get(result.name), failure.golden[result.key]
        if right is None or right.shape != was.shape:
            return False
        larger = max(norm_of(right) / max(norm_of(was), TINY), 1.0)  # the relative error is then that of a larger norm
        if _share_left(failure, result.key, right) > most * larger:
            return False
    return True


def _is_worse(failure: Failure, result: TensorResult, right: Tensor) -> bool:
    """Return whether hypotheses under which ``right`` is the truth make a tensor that passed worse than by chance.

    If the port has these mistakes, the tensor's error was its rounding n plus a change d, and n is left. The error
    grows only if n points along -d. For k independent roundings this component is hardly more than 5 standard
    deviations, so the error grows by at most sqrt(1 + 25 / k), which is 1.18 for the fewest elements that are checked.
    It grew by 1.013 at most in 607 right explanations of te-parity's tests. A tensor that failed may have a mistake of
    its own, which is hidden by the other one.
    """
    left = norm_of(failure.candidate[result.key].double() - right.double())
    is_rounding = left <= FAITHFUL * result.expected.relative_l2 * norm_of(right)
    return right.numel() >= _MANY and not is_rounding and _share_left(failure, result.key, right) > _WORSE


def _may_pass(failure: Failure, golden: Tensors, outputs: Mapping[str, Tensor]) -> bool:
    """Return whether no output is much farther from the candidate's than rounding allows, as modelled by ``outputs``.

    A tolerance is about the same multiple of the expected error under hypotheses as without them.
    """
    for result in failure.outputs:
        right, size = golden[result.key], max(norm_of(golden[result.key]), TINY)
        costs = norm_of(outputs[result.name].double() - right) / size
        allowed = result.tolerance_relative_l2 * max(1.0, costs / max(result.expected.relative_l2, TINY))
        off = norm_of(failure.candidate[result.key].double() - right) / size
        if result.numel > 1 and off > _NEARLY_PASSES * allowed:
            return False
    return True


def _models(
    failure: Failure,
    combination: tuple[Hypothesis, ...],
    only_if: Callable[[dict[str, Tensor]], bool] = lambda outputs: True,
) -> list[Tensors]:
    """Return the rounding model's tensors under hypotheses, for each kind of kernels.

    The list ends before a kind whose outputs ``only_if`` rejects, or that cannot be computed.
    """
    models: list[Tensors] = []
    for freedom in failure.freedoms:
        model = tensors_with(failure.prepared, combination, failure.precision, freedom=freedom, only_if=only_if)
        if model is None:
            break
        models.append(model)
    return models


def _unrounded(failure: Failure) -> Precision:
    return replace(failure.precision, replaced=Rounding(torch.float32))


def _as_drawn(failure: Failure, combination: tuple[Hypothesis, ...], golden: Tensors | None) -> Sequence[TensorResult]:
    """Judge the candidate on the inputs as they were drawn, under hypotheses that explain the probing inputs."""
    computed = [] if golden is None else _models(failure, combination)
    return [] if golden is None or not computed else _judged(failure, combination, golden, computed)


def _judged(
    failure: Failure, combination: tuple[Hypothesis, ...], golden: Tensors, models: Sequence[Tensors]
) -> Sequence[TensorResult]:
    """Judge the candidate under hypotheses, with the allowances of a second look if it nearly passes.

    Errors are granted that other kernels may make, or that depend on the side of a kink on which rounding puts a value.
    If little is left, so is bad luck with single roundings, as at a port's second look. An error that is hardly less
    than before has had that look already, unless the port failed by so much elsewhere that it was cut short.
    """
    judged, names = failure.judge(golden, models), biased_kernels(failure.precision.rounding)
    results = {result.key: result for result in failure.results}
    for now in judged:
        was = results[now.key]
        elsewhere = max((one.margin for key, one in results.items() if key != now.key), default=0.0)
        if not now.passed and not was.passed and hardly_less(now, was) and now.margin > _LITTLE * elsewhere:
            return judged
        # The side of a kink may change a gradient by far more than rounding does, but not by most of its error before.
        is_little = now.kind != "output" and now.errors.relative_l2 < _NEARLY_NOTHING * was.errors.relative_l2
        if now.errors.relative_l2 > _NEARLY_PASSES * now.tolerance_relative_l2 and not is_little:
            return judged
    granted: list[Tensors] = []
    if names and not all(result.passed for result in judged):
        first = failure.freedoms[0]
        leaned = (
            tensors_with(failure.prepared, combination, failure.precision, freedom=replace(first, kernels=(name,)))
            for name in names
        )
        granted = [tensors for tensors in leaned if tensors is not None]
        judged = failure.judge(golden, models, None, granted)
    if not all(result.passed for result in judged):
        models = [*models, *_beside_kinks(failure, combination)]
        judged = failure.judge(golden, models, None, granted)
    worst, before = (max(result.margin for result in some) for some in (judged, failure.results))
    for seed in range(LOOKS) if worst <= _LITTLE * before else ():
        if all(result.passed for result in judged) or is_hopeless(judged, seed, False, failure.precision.rounding):
            break
        freedom = replace(failure.freedoms[seed % len(failure.freedoms)], jitter=seed)
        noisy = tensors_with(failure.prepared, combination, failure.precision, freedom=freedom)
        models = [*models, noisy] if noisy is not None else models
        judged = failure.judge(golden, models, None, granted)
    return judged


def _beside_kinks(failure: Failure, combination: tuple[Hypothesis, ...]) -> list[Tensors]:
    """Return the rounding model's tensors with all values next to kinks above them, and with all below.

    The list is empty if there are no kinks.
    """
    exact, given = KinkSides(), (failure.prepared, combination)
    tensors_with(*given, _unrounded(failure), freedom=FUSED, kinks=exact)
    freedom, sides = failure.freedoms[-1], exact.on_both_sides()
    moved = (tensors_with(*given, failure.precision, freedom=freedom, kinks=kinks) for kinks in sides)
    return [tensors for tensors in moved if tensors is not None]


def _is_explained(
    failure: Failure,
    before: Mapping[tuple[Kind, str], TensorResult],
    judged: Sequence[TensorResult],
    golden: Mapping[tuple[Kind, str], Tensor],
) -> bool:
    """Return whether every output passes and gradients pass or improve, or outputs are evidence enough without them.

    If a tensor's error is far too large, an explanation must remove at least half of it. An output that is one of few
    numbers need only pass if gradients tell more, since its rounding may be as large by chance. An explanation must
    also remove most of an output's error beyond rounding: moving only the one element that failed, as a cap far above
    nearly all values does, says nothing about the rest.

    If some tensor was far off, a gradient need not pass if the norm of its error is no larger than rounding. A second
    look may put anything else that is unlikely about it down to chance. A gradient that passes may be 0 under the
    hypotheses, like that of a key's bias. Its error is then small in itself, but not relative to it. If all other
    gradients are explained, a gradient that passes may have a large error left in two cases: the hypotheses change only
    its rounding, as for a bias before a mean in the place of one token, or it has only a few numbers, such as a
    temperature of each head. An error that is as large as before, and passes because rounding costs more under the
    hypotheses, is not explained.
    """
    share = {
        key: result.errors.relative_l2 / max(before[key].errors.relative_l2, TINY)
        for result in judged
        for key in [(result.kind, result.name)]
    }
    tells = not few_outputs(failure)
    evident = (
        tells
        and exceeds_norm_limit(failure)
        and all(s < _EVIDENT for (kind, _), s in share.items() if kind == "output")
    )

    some_far_off = any(is_far_off(one) for one in before.values() if tells or one.kind != "output")
    gradients = [one for one in before.values() if one.kind.endswith("gradient")]
    if not tells and gradients and all(one.passed for one in gradients):  # many mistakes change a single number
        return False
    by_gradients = not tells and any(not one.passed and one.kind != "output" for one in before.values())
    only_rounds = {key for key in before if key[0] != "output" and _is_same(golden[key], failure.golden[key])}
    by_chance = only_rounds | {key for key, was in before.items() if key[0] != "output" and was.numel < _FEW}
    moved = [key for key, was in before.items() if key not in by_chance and is_far_off(was)]
    others_explained = bool(moved) and all(share[key] < _EVIDENT for key in moved)

    def explained(result: TensorResult) -> bool:
        key = (result.kind, result.name)
        left, was = share[key], before[key]
        if result.passed and left > _HELPS_MUCH:
            left = min(left, _share_left(failure, key, golden[key]))
        if result.kind == "output" and by_gradients:
            return result.passed
        if result.kind == "output" and not was.passed and not _takes_most(was, result):
            return False
        if not was.passed and left > _HARDLY_LESS and _costs_more(result, was):
            return False
        if is_far_off(was) and left > _HELPS_MUCH:
            return result.passed and key in by_chance and others_explained
        if result.passed or (
            _is_small(result) and (left < _NEARLY_NOTHING or (result.kind != "output" and some_far_off))
        ):
            return True
        return result.kind != "output" and tells and (evident or left < _HELPS_MUCH)

    return all(map(explained, judged))


def hardly_less(now: TensorResult, was: TensorResult) -> bool:
    """Return whether a tensor's error is hardly less than it was."""
    return now.errors.relative_l2 > _HARDLY_LESS * was.errors.relative_l2


def _costs_more(now: TensorResult, was: TensorResult) -> bool:
    """Return whether rounding costs so much more under hypotheses that an error may pass for this reason alone.

    Hypotheses under which angles of thousands of radians become random numbers are an example.
    """
    return now.expected.relative_l2 > _DEARER * was.expected.relative_l2


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two goldens of a tensor are the same except for the order of their sums in FP64."""
    return torch.allclose(one, other, rtol=_SAME, atol=_SAME * float(other.abs().max())) if other.numel() else True


def is_far_off(result: TensorResult) -> bool:
    """Return whether a failed error is far too large. A single number may pass beyond its tolerance in norm."""
    return not result.passed and result.errors.relative_l2 > _LOUD * result.tolerance_relative_l2


def _is_small(result: TensorResult) -> bool:
    """Return whether the norm of the error is within its tolerance."""
    return result.errors.relative_l2 <= result.tolerance_relative_l2


def _takes_most(was: TensorResult, result: TensorResult) -> bool:
    """Return whether the hypotheses explain most of an error beyond a faithful port's; True if nothing is beyond."""
    before, after, costs = was.errors.relative_l2, result.errors.relative_l2, result.expected.relative_l2
    return min(before, after) <= FAITHFUL * costs or after**2 - costs**2 <= (1.0 - _MOST) * (before**2 - costs**2)


def _helps_as_drawn(failure: Failure, golden: Tensors | None) -> bool:
    """Return whether hypotheses that explain probing inputs halve all errors that are far too large on other inputs."""
    far_off = [(one.kind, one.name) for one in failure.results if is_far_off(one)]
    if golden is None:
        return not far_off
    return all(_share_left(failure, key, golden[key]) <= _HELPS_MUCH for key in far_off)


def _share_left(failure: Failure, key: tuple[Kind, str], right: Tensor) -> float:
    """Return the share of a tensor's error that is left if ``right`` is the truth; infinite if its shape differs."""
    candidate, was = failure.candidate[key].double(), failure.golden[key]
    if right.shape != was.shape:
        return math.inf
    return norm_of(candidate - right.double()) / max(norm_of(candidate - was), TINY)


def _helps_on_probe(failure: Failure | None, combination: tuple[Hypothesis, ...]) -> bool:
    """Return whether the hypotheses also explain failures on the probing inputs: much of them, or all but rounding."""
    if failure is None:
        return True
    outputs = outputs_with(failure.prepared, combination, torch.float64)
    if outputs is None:
        return False
    for result in failure.outputs:
        key = (result.kind, result.name)
        if not result.passed:
            candidate, right = failure.candidate[key].double(), outputs[result.name]
            left = row_by_row(right, candidate)
            if left > _HELPS_MUCH * row_by_row(failure.golden[key], candidate):
                model = tensors_with(failure.prepared, combination, failure.precision)
                if model is None or left > FAITHFUL * row_by_row(right, model[key]):
                    return False
    return True


def row_by_row(one: Tensor, other: Tensor) -> float:
    """Return the average distance of two tensors' rows, at most 1 each, as for a row that another expert gets."""
    norms = (
        torch.linalg.vector_norm(x.flatten(0, -2) if x.dim() > 1 else x, dim=-1) for x in (one - other, one, other)
    )
    apart, of_one, of_other = norms
    return (apart / torch.maximum(of_one, of_other).clamp(min=TINY)).clamp(max=1.0).mean().item()


def _shows(result: TensorResult) -> tuple[bool, bool, float]:
    """Return how well a tensor shows what is wrong: a failed output does best."""
    return not result.passed, result.kind == "output", result.margin
