"""A number that is returned beside other outputs, as a loss beside logits, is compared by itself.

A pass differentiates all outputs at once, each with a gradient drawn at random. Logits are a million numbers and a loss
is one, so that nothing of its gradient is left in their sum, neither a label that is not shifted nor a wrong average.
So each such number is a part of its own, and what else is returned is another: each part is compared as if the pair
returned nothing else, on the same weights and inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain
from types import ModuleType
from typing import Any

from parity.case import Case, Pair
from parity.declaring.validate import CheckedSize
from parity.diagnosis.codes import UNEXPLAINED
from parity.execute import Pass, selecting
from parity.result import Determinism, Finding, Kind, Result, Status, TensorResult

_KINDS: tuple[Kind, ...] = ("output", "input gradient", "weight gradient", "probed output")
# Names of so many outputs are told.
_FEW = 3
# Parts of the case and size that were compared last.
_LATEST: dict[tuple[Case, CheckedSize], list[Case]] = {}


def parts(case: Case, checked: CheckedSize, golden: Pass) -> list[Case]:
    """The parts in which a case is compared, the case itself where it is all at once; kept until another one's.

    Args:
        case, checked: what is compared.
        golden: a pass of the reference. A number that requires no gradient, such as an accuracy, drowns nowhere.
    """
    outputs = golden.outputs
    alone = [name for name, x in outputs.items() if x.numel() == 1 and name not in golden.detached_outputs]
    others = tuple(name for name in outputs if name not in alone)
    groups = [*((name,) for name in alone), *([others] if others else [])]
    _LATEST.clear()
    _LATEST[case, checked] = [_part(case, group) for group in groups] if alone and len(groups) > 1 else [case]
    return _LATEST[case, checked]


def parts_known(case: Case, checked: CheckedSize) -> list[Case] | None:
    """What ``parts`` returned last, if it was for this case and size."""
    return _LATEST.get((case, checked))


def _part(case: Case, names: tuple[str, ...]) -> Case:
    """The same case, as if both modules returned these outputs alone."""

    def factory(te: ModuleType, **size: Any) -> Pair:
        pair = case.factory(te, **size)
        return dataclasses.replace(
            pair,
            call_reference=selecting(pair.reference, pair.call_reference, names),
            call_candidate=selecting(pair.candidate, pair.call_candidate, names),
        )

    return dataclasses.replace(case, factory=factory, part_of=case, outputs=names)


def gradients_of(case: Case, tensors: Sequence[TensorResult]) -> tuple[TensorResult, ...]:
    """The verdicts, those on a part's gradients with the names of the outputs that were differentiated."""
    if not case.outputs:
        return tuple(tensors)
    of = ", ".join(case.outputs) if len(case.outputs) <= _FEW else "the other outputs"
    return tuple(dataclasses.replace(x, of=of) if x.kind.endswith("gradient") else x for x in tensors)


def merged(results: Sequence[Result]) -> Result:
    """Merge the results of all parts into the one of the case: the worst status, all tensors, what was found of any."""
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
        tensors=tuple(sorted(tensors.values(), key=lambda tensor: _KINDS.index(tensor.kind))),
        findings=_findings(results),
        notes=tuple(dict.fromkeys(chain.from_iterable(result.notes for result in results))),
        attention=", ".join(dict.fromkeys(filter(None, (result.attention for result in results)))),
        determinism=_determinism([result.determinism for result in results if result.determinism is not None]),
        device_error=next((result.device_error for result in results if result.device_error), ""),
    )


def _findings(results: Sequence[Result]) -> tuple[Finding, ...]:
    """Those of the worst part, then causes that others have beside; if any part has a cause, none of the unexplained.

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
    """What differed in any of the parts."""
    if not seen:
        return None
    differing = dict.fromkeys(label for one in seen for label in one.differing)
    drawn = dict.fromkeys(label for one in seen for label in one.drawn)
    return Determinism(tuple(differing), next((one.first for one in seen if one.first), ""), tuple(drawn))
