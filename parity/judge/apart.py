"""Compare some outputs by themselves, such as a loss beside logits, and join their results into one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from parity.case.case import Case, Pair
from parity.case.validate import CheckedSize
from parity.judge.judge import judge
from parity.judge.limits import Table
from parity.judge.pictures import thinned
from parity.mistakes.codes import UNEXPLAINED, finding
from parity.numerics.errors import Truth
from parity.passes.all_passes import Tensors, model_numbers
from parity.passes.one_pass import Pass, selecting
from parity.passes.prepare import Prepared
from parity.result import Determinism, Finding, Kind, Result, Status, TensorResult
from parity.te.precision import Precision

# A number that is returned beside other outputs, such as a loss beside logits, is compared by itself.
#
# A pass differentiates all outputs at once, each with a random output gradient. Logits are a million numbers and a loss
# is one, so the loss's share of the summed gradients vanishes, and with it a label that is not shifted or a wrong
# average. So each such number is a part of its own, and all other outputs are another part. Each part is compared as if
# the pair returned nothing else, on the same weights and inputs.


_KINDS: tuple[Kind, ...] = ("output", "input gradient", "weight gradient", "probed output")
# A message names at most so many outputs.
_FEW = 3
# The parts of the case and size that were compared last.
_LATEST: dict[tuple[Case, CheckedSize], list[Case]] = {}


def parts(case: Case, checked: CheckedSize, golden: Pass) -> list[Case]:
    """Return the parts in which a case is compared (the case itself if it has one part), and keep them
    until the next case.

    Args:
        case, checked: what is compared.
        golden: a pass of the reference. A number that requires no gradient, such as an accuracy, needs
            no part of its own.
    """
    outputs = golden.outputs
    alone = [name for name, x in outputs.items() if x.numel() == 1 and name not in golden.detached_outputs]
    others = tuple(name for name in outputs if name not in alone)
    groups = [*((name,) for name in alone), *([others] if others else [])]
    _LATEST.clear()
    _LATEST[case, checked] = [_part(case, group) for group in groups] if alone and len(groups) > 1 else [case]
    return _LATEST[case, checked]


def parts_known(case: Case, checked: CheckedSize) -> list[Case] | None:
    """Return what ``parts`` returned last, if it was for this case and size."""
    return _LATEST.get((case, checked))


def _part(case: Case, names: tuple[str, ...]) -> Case:
    """Return the same case, as if both modules returned these outputs alone."""

    def factory(te: ModuleType, **size: Any) -> Pair:
        pair = case.factory(te, **size)
        return dataclasses.replace(
            pair,
            call_reference=selecting(pair.reference, pair.call_reference, names),
            call_candidate=selecting(pair.candidate, pair.call_candidate, names),
        )

    return dataclasses.replace(case, factory=factory, part_of=case, outputs=names)


def gradients_of(case: Case, tensors: Sequence[TensorResult]) -> tuple[TensorResult, ...]:
    """Return the verdicts; those on a part's gradients get the names of the outputs that were differentiated."""
    if not case.outputs:
        return tuple(tensors)
    of = ", ".join(case.outputs) if len(case.outputs) <= _FEW else "the other outputs"
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
        findings=_findings(results),
        notes=tuple(dict.fromkeys(chain.from_iterable(result.notes for result in results))),
        attention=", ".join(dict.fromkeys(filter(None, (result.attention for result in results)))),
        determinism=_determinism([result.determinism for result in results if result.determinism is not None]),
        device_error=next((result.device_error for result in results if result.device_error), ""),
    )


def _findings(results: Sequence[Result]) -> tuple[Finding, ...]:
    """Return the worst part's findings, then the causes found for other parts; without the unexplained
    ones if any part has a cause.

    Parts share all but their last steps: what explains one is the likeliest cause of what is unexplained in another.
    """
    failed = sorted((one for one in results if one.findings), key=lambda one: one.margin, reverse=True)
    explained = [one for one in failed if is_explained(one)]
    found: list[Finding] = []
    for one in explained or failed:
        told = {(finding.code, finding.title) for finding in found}
        found += [finding for finding in one.findings if (finding.code, finding.title) not in told]
    return tuple(found)


def is_explained(result: Result) -> bool:
    """Return whether a failure has a cause with a name."""
    return any(finding.code not in UNEXPLAINED for finding in result.findings)


def _determinism(seen: Sequence[Determinism]) -> Determinism | None:
    """Return what differed in any of the parts."""
    if not seen:
        return None
    differing = dict.fromkeys(label for one in seen for label in one.differing)
    drawn = dict.fromkeys(label for one in seen for label in one.drawn)
    return Determinism(tuple(differing), next((one.first for one in seen if one.first), ""), tuple(drawn))


# Python's own numbers that a module returns beside tensors, such as results of ``.item()``: they have no gradient.


# A single number's error depends more on chance than a tensor's, and what a port's own lines round is not granted to
# it. So up to this many times the limit it is only noted; beyond that, no rounding explains it.
_GROSS = 10.0


def judged_numbers(
    prepared: Prepared, returned: Mapping[str, float], precision: Precision, table: Table
) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """Judge a candidate's Python numbers against the reference's: floats as outputs of one element, others exactly.

    Integers and booleans may depend on rounding, as a count of tokens does; if they differ, a note says so.

    Args:
        prepared: holds golden, and what the rounding model's passes returned.
        returned: the numbers that the candidate returned.
        precision: the precision at which it ran.
        table: what faithful ports show.

    Returns:
        Notes, a sentence each; and a finding for each number that no rounding explains.
    """
    notes: list[str] = []
    found: list[Finding] = []
    exact = prepared.golden.numbers
    for place, one in exact.items():
        if place not in returned:
            notes.append(f"the reference returns a number at {place}, which the candidate does not")
            continue
        other = returned[place]
        if one == other or (one != one and other != other):
            continue
        told = f"the candidate returns {_shown(other)} at {place} where the reference returns {_shown(one)}"
        if not (_is_float(one) and _is_float(other)):
            notes.append(f"{told}; whole numbers and booleans are not judged")
            continue
        runs = model_numbers(prepared, precision.rounding).values()
        modelled = [float(run[place]) for run in runs if place in run]
        margin = _margin(one, other, modelled, precision, table)
        if margin > _GROSS:
            found.append(finding("number", f"{told}, which no rounding at {precision.name} explains"))
        elif margin > 1.0:
            notes.append(f"{told}, {margin:.2g} times as far from it as {precision.name} explains")
    return tuple(notes), tuple(found)


def _is_float(number: float) -> bool:
    return isinstance(number, float)


def _shown(number: float) -> str:
    return f"{number:.6g}" if _is_float(number) else str(number)


def _margin(one: float, other: float, modelled: list[float], precision: Precision, table: Table) -> float:
    """Return the margin of one number, judged as an output of one element; infinite if only one of the
    two is not finite.
    """
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    models = [_as_output(x) for x in modelled or [one]]
    truths = {key: Truth(x) for key, x in _as_output(one).items()}
    (result,) = judge(truths, models, _as_output(other), precision, table, ())
    return result.margin


def _as_output(number: float) -> Tensors:
    return {("output", "number"): torch.tensor(number, dtype=torch.float64)}
