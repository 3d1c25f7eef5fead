"""Find outputs that are right but in the wrong place: exchanged, or with rows in another order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parity.case.case import Rng
from parity.mistakes.codes import repairable
from parity.numerics.errors import Tolerance, margin, measure
from parity.result import Finding, TensorResult
from parity.search.failure import Failure

# An output in the place of another one.


def exchange_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if every failed output equals another output of the reference, within its tolerance."""
    failed = [result for result in failure.outputs if not result.passed]
    if len(failed) < 2:
        return
    stands_for = {one.label: [other.label for other in failed if _is(failure, one, other)] for one in failed}
    if all(len(labels) == 1 for labels in stands_for.values()):
        told = ", ".join(f"{label} is the reference's {labels[0]}" for label, labels in stands_for.items())
        if len({labels[0] for labels in stands_for.values()}) == len(failed):
            yield repairable("outputs-exchanged", told, "return them in the reference's order")


def _is(failure: Failure, one: TensorResult, other: TensorResult) -> bool:
    """Return whether the candidate's output equals another output of the reference."""
    candidate = failure.candidate[one.key]
    right = failure.golden[other.key]
    if one is other or candidate.shape != right.shape:
        return False
    bound = Tolerance(other.tolerance_relative_l2, other.tolerance_max_abs)
    return margin(measure(candidate, right, failure.precision.dtype), bound) <= 1.0


# Rows in another order: those of a batch, or the positions of a sequence.


_MOST = 2048  # rows, since each is compared with each
_LEAST = 8  # elements that a row must have: fewer are near to those of some other row by chance
_FEW = 4096  # elements of a row by which rows are told apart
_HELPS = 0.3  # of the error may be left; otherwise rows are only alike, for example all near zero


def order_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if every failed output is the reference's with rows, along one dimension, in another order."""
    failed = [result for result in failure.outputs if not result.passed]
    told: dict[str, list[str]] = {}
    for result in failed:
        found = _moved(failure.candidate[result.key], failure.golden[result.key], result.tolerance_relative_l2)
        if not found:
            return
        told.setdefault(found, []).append(result.label)
    for text, labels in told.items():
        yield repairable("rows-exchanged", f"{' and '.join(labels)}: {text}", "return rows in the reference's order")


def _moved(candidate: Tensor, golden: Tensor, limit: float) -> str:
    """Say which rows are in the place of which, if that leaves no more than the limit; else return an empty text.

    Rows are exchanged, or all but those at an end are shifted. If several have what belongs to one row, none is told,
    unless the reference's own rows are equal: wrong rows are often near to one that is small or like many others.
    """
    if candidate.shape != golden.shape:
        return ""
    for dim in range(golden.dim()):
        count = golden.shape[dim]
        if not 2 <= count <= _MOST or golden.numel() < _LEAST * count:
            continue
        own, right = (x.double().movedim(dim, 0).reshape(count, -1) for x in (candidate, golden))
        if own.shape[1] > _FEW:
            some = Rng(0, "elements of a row").integers(_FEW, high=own.shape[1]).to(own.device)
            own, right = own[:, some], right[:, some]
        of, equal = (torch.cdist(x, right).argmin(1) for x in (own, right))
        by = _shift(of)
        if not by and not torch.equal(equal[of].sort().values, equal.sort().values):
            continue
        kept = slice(max(-by, 0), count - max(by, 0)) if by else slice(None)
        off = (own - right[of])[kept].norm() / right[of][kept].norm()
        if bool(off <= limit) and bool(off <= _HELPS * (own - right)[kept].norm() / right[kept].norm()):
            return _in_words(of.tolist(), dim, by)
    return ""


def _shift(of: Tensor) -> int:
    """Return the shift that all rows share, except those at the end that it leaves without a source; 0 if none."""
    by = of - torch.arange(len(of), device=of.device)
    shift = int(by.median())
    kept = by[max(-shift, 0) : len(of) - max(shift, 0)]
    return shift if abs(shift) < len(of) // 2 and bool((kept == shift).all()) else 0


def _in_words(of: list[int], dim: int, by: int) -> str:
    count = len(of)
    if by:
        at = max(-by, 0)
        return f"dimension {dim} is shifted by {abs(by)}: index {at} has what belongs to index {at + by}, and so on"
    if of == list(range(count))[::-1]:
        return f"dimension {dim} is in reverse"
    wrong = [(i, j) for i, j in enumerate(of) if i != j]
    some = ", ".join(f"index {i} has what belongs to index {j}" for i, j in wrong[:3])
    return f"along dimension {dim}, {some}{f' and so on, {len(wrong)} of {count}' if len(wrong) > 3 else ''}"
