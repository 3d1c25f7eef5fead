"""Outputs that are right but for one factor."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.errors import measure
from parity.result import Finding, TensorResult
from parity.tolerance import Tolerance, margin

_MOST = 1e6  # a factor beyond is no scale but another magnitude altogether


def output_scale_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if every failed output is the right one times one factor; of a single number nothing can be said."""
    for result in failure.outputs:
        if not result.passed:
            factor = factor_of(failure, result)
            if factor is None or failure.golden[result.kind, result.name].numel() < 2:
                return
            yield finding(
                "output-scale",
                f"{result.label} is {readable(factor)} times what it should be, and right but for that; look for a "
                "scale that is applied twice or not at all",
            )


def factor_of(failure: Failure, result: TensorResult) -> float | None:
    """By what a tensor is multiplied; None if it is not the right one but for a factor."""
    key = result.kind, result.name
    right, candidate = failure.golden[key], failure.candidate[key].double()
    square = right.square().sum().item()
    factor = (candidate * right).sum().item() / square if square else math.nan
    if not math.isfinite(factor) or abs(factor) > _MOST or abs(factor - 1.0) <= result.tolerance_relative_l2:
        return None
    if factor == 0.0:
        return factor if not bool(candidate.any()) else None
    errors = measure(candidate / factor, right, failure.precision.dtype)
    bound = Tolerance(result.tolerance_relative_l2, result.tolerance_max_abs)
    return factor if margin(errors, bound) <= 1.0 else None


def readable(factor: float) -> str:
    """``1/128`` for what is one over a whole number, else four digits."""
    inverse = 1.0 / factor if factor else 0.0
    if abs(inverse) > 1.1 and abs(inverse - round(inverse)) < 1e-3 * abs(inverse):
        return f"1/{round(inverse)}"
    return f"{factor:.4g}"
