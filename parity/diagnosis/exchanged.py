"""Outputs that a port returns in another order."""

from __future__ import annotations

from collections.abc import Iterator

from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.errors import measure
from parity.result import Finding, TensorResult
from parity.tolerance import Tolerance, margin


def exchange_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if every output that failed is another one of the reference's, within what is allowed of that one."""
    failed = [result for result in failure.outputs if not result.passed]
    if len(failed) < 2:
        return
    stands_for = {one.label: [other.label for other in failed if _is(failure, one, other)] for one in failed}
    if all(len(labels) == 1 for labels in stands_for.values()):
        told = ", ".join(f"{label} is the reference's {labels[0]}" for label, labels in stands_for.items())
        if len({labels[0] for labels in stands_for.values()}) == len(failed):
            yield finding("outputs-exchanged", f"{told}; return them in the reference's order")


def _is(failure: Failure, one: TensorResult, other: TensorResult) -> bool:
    """Whether the candidate's output is another one of the reference's."""
    candidate = failure.candidate[one.kind, one.name]
    right = failure.golden[other.kind, other.name]
    if one is other or candidate.shape != right.shape:
        return False
    bound = Tolerance(other.tolerance_relative_l2, other.tolerance_max_abs)
    return margin(measure(candidate, right, failure.precision.dtype), bound) <= 1.0
