"""Judge tensors: compare the statistics of each with their limits.

Errors that some faithful kernels make in one direction are subtracted first. Single numbers, such as a loss next to
logits, are judged separately from other outputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parity.case.case import Case, Pair
from parity.case.validate import CheckedSize
from parity.judge.limits import Table
from parity.judge.statistics import (
    Statistic,
    allowance,
    least_error,
    resemblance,
    scatters,
    slices_scatter,
    statistics,
)
from parity.mistakes.codes import UNEXPLAINED, finding, repairable
from parity.numerics.errors import CachedTensor, Deviations, GoldenTensor, GoldenTensors
from parity.passes.all_passes import Tensors, model_numbers, returned_dtype
from parity.passes.one_pass import Pass, selecting
from parity.passes.prepare import Prepared
from parity.passes.refusals import overflows_within
from parity.result import Check, Determinism, Finding, Kind, ProvesNothing, Result, Status, TensorResult
from parity.shown import few_of

if TYPE_CHECKING:
    from parity.judge.directions import Direction
    from parity.te import Precision

# The allowance for kernels whose errors all point in one direction. It holds along that direction and nowhere else.
#
# Some faithful kernels change all results in one direction: those that truncate TF32 operands shrink every product, and
# a tensor core's short sums lose the low bits of terms of one sign (``parity.numerics.kernel_choices``). Expecting an
# error of that size in every direction would hide mistakes of that size. So the rounding model runs once more the way
# such a kernel computes. The difference between the two runs is a direction, and the candidate's error component along
# it is subtracted before the rest is judged.


# A kernel may lean in some products and not in others, and somewhat more than its model does.
_MOST_OF_CHANGE = 1.25
# Such kernels did not make an error that contains more than this many times the change.
_NOT_THE_CHANGE = 2.0
# The model may be off by this share of the change in each element: instructions may add fewer products at a time, or
# promote sums at other lengths.
_UNSURE_OF_CHANGE = 0.25
# Fewer elements tell neither whether kernels lean nor the change from the model's own error.
_FEWEST_ELEMENTS = 32
# A kernel leans in a whole product. So unless some tensor contains much of the change, tensors contain it only by
# chance, for example because a mistake happens to lean the same way. If only one of several successive products leans,
# this share of the change is left.
_SHOWS_BIAS = 0.3
# Granting less than this share of the expected error is as good as granting nothing.
_WORTH_ALLOWING = 0.05


@dataclass(frozen=True)
class Allowance:
    """The part of one tensor's error that is granted to kernels that lean.

    Attributes:
        index: which run of the kernels explains most of the error.
        coefficient: how much of that run's change the error contains, 0 to 1.25.
        norm: the norm of the granted part.
        max_abs: the largest element of the granted part.
        left: the error without the granted part.
        models: errors to expect in addition to the models' own, because the change is not known exactly.
    """

    index: int
    coefficient: float
    norm: float
    max_abs: float
    left: CachedTensor
    models: tuple[CachedTensor, CachedTensor]

    @property
    def is_evidence(self) -> bool:
        """Return whether kernels that lean are the likely cause."""
        return self.coefficient >= _SHOWS_BIAS and self.left.values.numel() >= _FEWEST_ELEMENTS


def allow_for_kernels(error: CachedTensor, base: CachedTensor, kernels: Sequence[CachedTensor]) -> Allowance | None:
    """Return the part of an error that the best of several kinds of leaning kernels explains.

    Args:
        error: candidate minus golden.
        base: the rounding model's tensor, with kernels that do not lean.
        kernels: the rounding model's tensor with each kind of leaning kernel, otherwise as ``base``.

    Returns:
        None if next to nothing would be granted, or if a tensor is not finite.
    """
    if not all(x.is_finite for x in (error, base, *kernels)):
        return None
    found = [_granted_share(index, error, base, one) for index, one in enumerate(kernels)]
    told = [one for one in found if one is not None]
    return min(told, key=lambda one: one.left.norm, default=None)


def _granted_share(index: int, error: CachedTensor, base: CachedTensor, kernel: CachedTensor) -> Allowance | None:
    dtype = torch.promote_types(error.values.dtype, kernel.values.dtype)
    change = kernel.values.to(dtype) - base.values
    norm = torch.linalg.vector_norm(change).item()
    if norm == 0.0 or not math.isfinite(norm):
        return None
    contained = _estimate_change_share(error.values.to(dtype), base.values.to(dtype), change)
    if not 0.0 < contained <= _NOT_THE_CHANGE or contained * norm <= _WORTH_ALLOWING * base.norm:
        return None
    coefficient = min(contained, _MOST_OF_CHANGE)
    change *= coefficient
    # If only some of several products lean, their share is known, but not which ones they are. Each is a coin toss with
    # this standard deviation.
    unsure = max(_UNSURE_OF_CHANGE, math.sqrt(max(1.0 - coefficient, 0.0) / coefficient)) * change
    left = CachedTensor(error.values - change)
    own = error.values - base.values  # of which the model makes nothing, such as a lean against one that both share
    if left.norm >= error.norm and (own - change).norm() >= own.norm():
        return None
    models = CachedTensor(base.values + unsure), CachedTensor(base.values - unsure)
    return Allowance(index, coefficient, coefficient * norm, change.abs().max().item(), left, models)


def _estimate_change_share(error: Tensor, base: Tensor, change: Tensor) -> float:
    """Return how much of the change an error contains, although the change shares a part with the model's error.

    Regressing on both at once tells them apart. The change starts from roundings that the model made, and an error
    without these contains as little of the one as of the other.
    """
    if change.numel() < _FEWEST_ELEMENTS:  # there are too few elements to tell the two apart
        return float(torch.dot((error - base).flatten(), change.flatten()) / change.square().sum())
    known = torch.stack([change.flatten(), base.flatten()])
    known = known[known.square().sum(-1) > 0]
    products, with_error = known @ known.T, known @ error.flatten()
    return float(torch.linalg.lstsq(products.double(), with_error.double()[:, None]).solution[0])


# The verdicts: every statistic of every tensor is compared with its limit.


# A gradient whose root mean square is below this share of the largest is the FP64 residue of terms that cancel.
_VANISHING = 1e-12


@dataclass(frozen=True)
class Drawn:
    """Models that round independently.

    Attributes:
        count: how many of the models round independently; they are the last ones.
        of_outputs: whether all outputs are judged by them as well. Gradients always are, since a loss's few numbers
            scale them all, and so are outputs that a few roundings decide.
    """

    count: int = 0
    of_outputs: bool = False


NONE_DRAWN = Drawn()


def judge(
    golden: GoldenTensors,
    models: Sequence[Tensors],
    candidate: Tensors,
    precision: Precision,
    table: Table,
    known: Sequence[Direction],
    drawn: Drawn = NONE_DRAWN,
    biased_runs: Sequence[Tensors] = (),
    by_average: bool = False,
) -> tuple[TensorResult, ...]:
    """Return the verdict on every tensor.

    Args:
        golden: by kind and name of the tensor.
        models: the rounding model's tensors, one for each way in which faithful kernels compute.
        candidate: the candidate's tensors, in the reference's layout.
        precision: the precision at which they were computed.
        table: the limits that faithful ports have set.
        known: the directions of subtle mistakes.
        drawn: which of the models round independently.
        leaning: the first model's tensors with each kind of leaning kernel, whose error is granted along its change.
        by_average: whether no slice is expected to have a smaller error than its tensor's average. True if no second
            look follows, since two models may be lucky in a slice that a few roundings decide.
    """
    floors = _compute_error_floors(golden, models)
    granted = _collect_grants(golden, candidate, models[0], biased_runs) if biased_runs else {}
    return tuple(
        _judge_tensor(
            key, golden, models, candidate, precision, table, known, floors, drawn, granted.get(key), by_average
        )
        for key in golden
    )


def _compute_error_floors(golden: GoldenTensors, models: Sequence[Tensors]) -> dict[tuple[Kind, str], float]:
    """Return, for each gradient that is 0 but for rounding, the largest root mean square error expected in the others.

    If terms cancel, as in the gradient of a bias before a softmax or of queries that see one key, only their rounding
    is left. They may cancel in the model and not in the candidate, or the other way round.
    """
    sizes = {key: truth.root_mean_square for key, truth in golden.items() if key[0].endswith("gradient")}
    largest = max(sizes.values(), default=0.0)
    vanishing = [key for key, size in sizes.items() if size < _VANISHING * largest]
    if not vanishing:
        return {}
    errors = (
        error.root_mean_square
        for key in sizes
        if key not in vanishing
        for error in golden[key].deviations([model[key] for model in models]).errors
    )
    return dict.fromkeys(vanishing, max((error for error in errors if math.isfinite(error)), default=0.0))


def observe(
    key: tuple[Kind, str],
    golden: GoldenTensors,
    models: Sequence[Tensors],
    candidate: Tensors,
    dtype: torch.dtype,
    known: Sequence[Direction],
) -> list[Statistic]:
    """Return the statistics of one tensor for a law; none if candidate, golden or every model has a NaN or an infinity.

    In a slice that a few roundings decide, the two models of a first look may be lucky by any factor, and a law that
    covered this would bound nothing. The second look handles such slices, so here no slice is expected to have a
    smaller error than average.

    Args:
        key: kind and name of the tensor.
        golden, models, candidate, known: as for ``judge``.
        dtype: the dtype in which the candidate returns the tensor.
    """
    truth, (error, *model_errors) = _compute_deviations(
        key, golden, candidate, models, _compute_error_floors(golden, models)
    )
    least = least_error(dtype, summed_terms(key[0], truth.values, golden))
    return _compute_statistics(key, error, model_errors, truth, least, known, terms=math.inf)


def _estimate_term_error(kind: Kind, precision: Precision, least: float) -> float:
    """Return the relative error of terms that may nearly cancel in a slice.

    A gradient behind a softmax is a difference of such terms. A kernel may store a value that the model holds in FP32,
    such as the output of attention, from which flash kernels compute the sum that they subtract. If gradients are
    quantized, these terms lose as much as the tensor does.
    """
    if not kind.endswith("gradient"):
        return 0.0
    return least if precision.recipe is None else math.inf


def _compute_deviations(
    key: tuple[Kind, str],
    golden: GoldenTensors,
    candidate: Tensors,
    models: Sequence[Tensors],
    floors: Mapping[tuple[Kind, str], float],
    drawn: Drawn = NONE_DRAWN,
) -> Deviations:
    """Return the deviations of the candidate and of each model; a vanishing gradient's floor counts as a model, too."""
    found = golden[key].deviations([tensors[key] for tensors in (candidate, *models)])
    first_drawn = len(found.errors) - drawn.count
    of_drawn = found.errors[first_drawn:]
    leans = key[0].endswith("gradient") or scatters(of_drawn)
    if not leans and not drawn.of_outputs and not slices_scatter(of_drawn):
        del found.errors[first_drawn:]
    for error in of_drawn:
        error.is_drawn, error.leans = True, leans
    if key in floors:
        found.errors.append(CachedTensor(torch.full_like(found.golden.values, floors[key])))
    return found


def _compute_statistics(
    key: tuple[Kind, str],
    error: CachedTensor,
    model_errors: Sequence[CachedTensor],
    truth: CachedTensor,
    least: float,
    known: Sequence[Direction],
    terms: float,
) -> list[Statistic]:
    finite = [model_error for model_error in model_errors if model_error.is_finite]
    if not finite or not error.is_finite:
        return []
    kind, name = key
    found = list(statistics(error, finite, truth, least, kind == "weight gradient", terms))
    if kind == "output":
        expected = max(*(model_error.norm for model_error in finite), least * truth.norm)
        mistake = resemblance(name, error, finite, truth, expected, known)
        found += [mistake] if mistake else []
    return found


def summed_terms(kind: Kind, tensor: Tensor, golden: GoldenTensors) -> int:
    """Return about how many terms one element sums: all tokens for a parameter's gradient, else a row's width."""
    if kind != "weight gradient":
        return tensor.shape[-1] if tensor.dim() else 1
    outputs = [output.exact for (k, _), output in golden.items() if k == "output"]
    return max(output.numel() // max(1, output.shape[-1]) if output.dim() else 1 for output in outputs)


def _judge_tensor(
    key: tuple[Kind, str],
    golden: GoldenTensors,
    models: Sequence[Tensors],
    candidate: Tensors,
    precision: Precision,
    table: Table,
    known: Sequence[Direction],
    floors: Mapping[tuple[Kind, str], float],
    drawn: Drawn,
    granted: Allowance | None,
    by_average: bool,
) -> TensorResult:
    kind, name = key
    truth, (error, *model_errors) = _compute_deviations(key, golden, candidate, models, floors, drawn)
    measures = golden[key].measures(truth, precision.dtype)
    returned = returned_dtype(kind, candidate[key], precision.dtype)
    least = least_error(returned, summed_terms(kind, truth.values, golden))
    errors = measures.of(candidate[key], error)
    if granted is not None:
        error, model_errors = granted.left, [*model_errors, *granted.models]
    most = _find_expected_error(error, model_errors)
    loses_most = models[most][key] if most < len(models) else truth.values + model_errors[most].values
    expected = measures.of(loses_most, model_errors[most])
    terms = math.inf if by_average else _estimate_term_error(kind, precision, least)
    found = _compute_statistics(key, error, model_errors, truth, least, known, terms)
    limits = {one.name: table.limit(precision.name, kind, one.name, precision.families[-1]) for one in found}
    if found and kind.endswith("gradient"):
        allowed = allowance(truth, [x for x in model_errors if x.is_finite], limits["norm"])
        limits = {name: allowed * limit for name, limit in limits.items()}
    checks = tuple(Check(one.name, one.value, limits[one.name], one.where, one.coefficient) for one in found)
    nothing_to_judge = 0.0 if errors.finite and not truth.values.numel() else math.inf
    return TensorResult(
        name=name,
        kind=kind,
        shape=tuple(truth.values.shape),
        errors=errors,
        expected=expected,
        tolerance_relative_l2=limits.get("norm", 0.0) * max(expected.relative_l2, least)
        + (granted.norm / truth.norm if granted and truth.norm else 0.0),
        tolerance_max_abs=limits.get("largest", 0.0) * max(expected.max_abs, least * expected.golden_rms)
        + (granted.max_abs if granted else 0.0),
        checks=checks,
        margin=max((check.margin for check in checks), default=nothing_to_judge),
    )


def _collect_grants(
    golden: GoldenTensors, candidate: Tensors, base: Tensors, biased_runs: Sequence[Tensors]
) -> dict[tuple[Kind, str], Allowance]:
    """Return each tensor's allowance for kernels that lean; empty if no tensor gives evidence of such kernels."""
    found = {}
    for key, truth in golden.items():
        error, first, *others = truth.deviations([tensors[key] for tensors in (candidate, base, *biased_runs)]).errors
        one = allow_for_kernels(error, first, others)
        if one is not None:
            found[key] = one
    return found if any(one.is_evidence for one in found.values()) else {}


def _find_expected_error(error: CachedTensor, model_errors: Sequence[CachedTensor]) -> int:
    """Return the index of the expected error: the largest finite one, since a faithful port may compute like any model.

    If the candidate overflows, it is the error of a model that overflows there, too, if there is one.
    """
    finite = [model_error.is_finite for model_error in model_errors]
    if not error.is_finite:
        for m, model_error in enumerate(model_errors):
            if not finite[m] and overflows_within(error.values, model_error.values):
                return m
    return max(range(len(model_errors)), key=lambda m: model_errors[m].norm if finite[m] else -1.0)


# A number that is returned next to other outputs, such as a loss next to logits, is judged separately.
#
# A pass differentiates all outputs at once, each with a random output gradient. Logits are a million numbers and a loss
# is one, so the loss's share of the summed gradients vanishes. Labels that are not shifted, or a wrong average, would
# not show. So each such number is a part of its own, and all other outputs form another part. Each part is compared as
# if the pair returned nothing else, on the same weights and inputs.


_KINDS: tuple[Kind, ...] = ("output", "input gradient", "weight gradient", "probed output", "reweighed output")
MOST_PICTURES = 4  # in a comparison that failed
# Messages name at most this many outputs.
_MOST_NAMED = 3
# The parts of the case and size that were compared last.
_LATEST: dict[tuple[Case, CheckedSize], list[Case]] = {}


def parts(case: Case, checked: CheckedSize, golden: Pass) -> list[Case]:
    """Return the parts in which a case is compared (the case itself if it has one part); keep them until the next case.

    Args:
        case, checked: what is compared.
        golden: a pass of the reference. Numbers without a gradient, such as an accuracy, need no part of their own.
    """
    outputs = golden.outputs
    alone = [name for name, x in outputs.items() if x.numel() == 1 and name not in golden.detached_outputs]
    others = tuple(name for name in outputs if name not in alone)
    groups = [*((name,) for name in alone), *([others] if others else [])]
    _LATEST.clear()
    _LATEST[case, checked] = (
        [_restrict_to_outputs(case, group) for group in groups] if alone and len(groups) > 1 else [case]
    )
    return _LATEST[case, checked]


def parts_known(case: Case, checked: CheckedSize) -> list[Case] | None:
    """Return the latest result of ``parts`` if it was for this case and size, else None."""
    return _LATEST.get((case, checked))


def _restrict_to_outputs(case: Case, names: tuple[str, ...]) -> Case:
    """Return the case as if both modules returned only these outputs."""

    def factory(te: ModuleType, **size: Any) -> Pair:
        pair = case.factory(te, **size)
        return dataclasses.replace(
            pair,
            call_reference=selecting(pair.reference, pair.call_reference, names),
            call_candidate=selecting(pair.candidate, pair.call_candidate, names),
        )

    return dataclasses.replace(case, factory=factory, part_of=case, outputs=names)


def gradients_of(case: Case, tensors: Sequence[TensorResult]) -> tuple[TensorResult, ...]:
    """Return the verdicts, with the names of the differentiated outputs added to those on a part's gradients."""
    if not case.outputs:
        return tuple(tensors)
    of = ", ".join(case.outputs) if len(case.outputs) <= _MOST_NAMED else "the other outputs"
    return tuple(dataclasses.replace(x, of=of) if x.kind.endswith("gradient") else x for x in tensors)


def merged(results: Sequence[Result]) -> Result:
    """Merge the results of all parts into one for the case: the worst status, all tensors, all findings."""
    if len(results) == 1:
        return results[0]
    worst: tuple[Status, ...] = ("error", "failed", "skipped", "passed")
    told = min(results, key=lambda result: worst.index(result.status))
    tensors: dict[str, TensorResult] = {}
    for tensor in chain.from_iterable(result.tensors for result in results):
        if tensor.label not in tensors or tensors[tensor.label].margin < tensor.margin:
            tensors[tensor.label] = tensor
    return dataclasses.replace(
        told,
        tensors=thinned(sorted(tensors.values(), key=lambda tensor: _KINDS.index(tensor.kind))),
        findings=_merge_findings(results),
        notes=tuple(
            note
            for note in dict.fromkeys(chain.from_iterable(result.notes for result in results))
            if not isinstance(note, ProvesNothing) or all(note in result.notes for result in results)
        ),
        attention=", ".join(dict.fromkeys(filter(None, (result.attention for result in results)))),
        determinism=_merge_determinism([result.determinism for result in results if result.determinism is not None]),
        device_error=next((result.device_error for result in results if result.device_error), ""),
    )


def thinned(tensors: Sequence[TensorResult]) -> tuple[TensorResult, ...]:
    """Return the verdicts of several passes, such as a training's steps, with no more pictures than one pass has."""
    worth = {tensor.label for tensor in worth_a_picture(tensors)}
    return tuple(tensor if tensor.label in worth else dataclasses.replace(tensor, picture=None) for tensor in tensors)


def worth_a_picture(tensors: Sequence[TensorResult]) -> list[TensorResult]:
    """Return the verdicts that failed by most, including an output if one failed; if none failed, the worst one."""
    by_margin = sorted(tensors, key=lambda tensor: tensor.margin, reverse=True)
    failed = [tensor for tensor in by_margin if not tensor.passed]
    outputs = [tensor for tensor in failed if tensor.kind == "output"][:1]
    others = [tensor for tensor in failed if tensor not in outputs]
    return outputs + others[: MOST_PICTURES - len(outputs)] or by_margin[:1]


def _merge_findings(results: Sequence[Result]) -> tuple[Finding, ...]:
    """Return the findings of all parts, the worst part's first; if a part has a cause, unexplained ones are left out.

    Parts share all but their last steps, so the cause of one is the likeliest cause of another's unexplained failure.
    """
    failed = sorted((one for one in results if one.findings), key=lambda one: one.margin, reverse=True)
    explained = [one for one in failed if is_explained(one)]
    found: list[Finding] = []
    for one in explained or failed:
        told = {(finding.code, finding.title) for finding in found}
        found += [finding for finding in one.findings if (finding.code, finding.title) not in told]
    return tuple(found)


def is_explained(result: Result) -> bool:
    """Return whether a failure has a named cause."""
    return any(finding.code not in UNEXPLAINED for finding in result.findings)


def _merge_determinism(seen: Sequence[Determinism]) -> Determinism | None:
    """Return the differences seen in any of the parts; None if none was checked."""
    if not seen:
        return None
    differing = dict.fromkeys(label for one in seen for label in one.differing)
    drawn = dict.fromkeys(label for one in seen for label in one.drawn)
    return Determinism(tuple(differing), next((one.first for one in seen if one.first), ""), tuple(drawn))


# Python numbers that a module returns next to tensors, such as results of ``.item()``. They have no gradient.


# A single number's error depends more on chance than a tensor's, and there is no allowance for roundings in a port's
# own lines. So an error of up to this many times the limit is only noted. Beyond that, no rounding explains it.
_GROSS = 10.0


def judged_numbers(
    prepared: Prepared, returned: Mapping[str, float], precision: Precision, table: Table
) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """Judge a candidate's Python numbers against the reference's: floats as outputs of one element, others exactly.

    Integers and booleans may depend on rounding, as a count of tokens does. If they differ, a note says so.

    Args:
        prepared: holds golden and the results of the rounding model's passes.
        returned: the numbers that the candidate returned.
        precision: the precision at which it ran.
        table: the limits that faithful ports have set.

    Returns:
        Notes of one sentence each, and a finding for each number that no rounding explains.
    """
    notes: list[str] = []
    found: list[Finding] = []
    exact = prepared.golden.numbers
    for place, one in exact.items():
        if place not in returned:
            notes.append(f"the reference returns a number at {place}, but the candidate does not")
            continue
        other = returned[place]
        if one == other or (one != one and other != other):
            continue
        told = f"the candidate returns {_show_number(other)} at {place} where the reference returns {_show_number(one)}"
        if not (_is_float(one) and _is_float(other)):
            notes.append(f"{told}; whole numbers and booleans are not judged")
            continue
        runs = model_numbers(prepared, precision.rounding).values()
        modelled = [float(run[place]) for run in runs if place in run]
        margin = _compute_number_margin(one, other, modelled, precision, table)
        if margin > _GROSS:
            found.append(finding("number", f"{told}, which no rounding at {precision.name} explains"))
        elif margin > 1.0:
            notes.append(f"{told}; the difference is {margin:.2g} times as large as {precision.name} explains")
    return tuple(notes), tuple(found)


def _is_float(number: float) -> bool:
    return isinstance(number, float)


def _show_number(number: float) -> str:
    return f"{number:.6g}" if _is_float(number) else str(number)


def _compute_number_margin(
    one: float, other: float, modelled: list[float], precision: Precision, table: Table
) -> float:
    """Return the margin of one number, judged as an output of one element; infinite if either value is not finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    models = [_as_output(x) for x in modelled or [one]]
    truths = {key: GoldenTensor(x) for key, x in _as_output(one).items()}
    (result,) = judge(truths, models, _as_output(other), precision, table, ())
    return result.margin


def _as_output(number: float) -> Tensors:
    return {("output", "number"): torch.tensor(number, dtype=torch.float64)}


# Gradients that are zero in many places where neither the reference nor the rounding model is.


# Of a gradient's squares. Right ports lose at most 0.4 % of the elements that the model keeps, one of a bias's 256, in
# 1,176 gradients of the built-in cases at seven precisions; behind a tanh in FP16, 20 %, which hold next to nothing.
_ZEROED = 0.05
_FROM_TERMS = 1e-6  # of a root mean square: what is smaller may be left of terms that cancel


def zeroed_gradients(
    tensors: Sequence[TensorResult], golden: Tensors, models: Sequence[Tensors], candidate: Tensors
) -> tuple[Finding, ...]:
    """Return a finding if elements of gradients are zero in the candidate alone, as where a scale underflows.

    Args:
        tensors: the verdicts.
        golden, models, candidate: the tensors of golden, of the rounding models and of the candidate.
    """
    told = []
    gradients = [one for one in tensors if one.kind.endswith("gradient") and one.numel >= _FEWEST_ELEMENTS]
    least = _FROM_TERMS * max((one.errors.golden_rms for one in gradients), default=0.0)
    for tensor in gradients:
        key, size = tensor.key, tensor.errors.golden_rms
        zero = candidate[key] == 0.0
        if not tensor.passed and bool(zero.all()):  # it is told that nothing flows back, or that an output is detached
            continue
        lost = zero & (golden[key].abs() > max(least, _FROM_TERMS * size))
        for model in models:
            lost &= model[key] != 0.0
        # Elements that hold hardly anything may be 0, as behind a tanh that is 1 in 16 bits.
        squares = golden[key].double().square()
        share = float((squares * lost).sum() / squares.sum().clamp_min(torch.finfo(squares.dtype).tiny))
        if share > _ZEROED:
            told.append(f"those that hold {share:.0%} of {tensor.label}'s squares")
    if not told:
        return ()
    evidence = f"gradients are 0 where those of the reference and of the rounding model are not: {few_of(told, 3)}"
    return (repairable("gradient-zeroed", evidence, "look for a scale that is too small for them, or a mask"),)
