"""Whether a candidate's tensors are those of another golden, within tolerance."""

from __future__ import annotations

from parity.diagnosis.failure import Failure, tolerance_of
from parity.errors import measure
from parity.passes import Tensors
from parity.result import TensorResult
from parity.tolerance import margin


def explains(failure: Failure, golden: Tensors | None) -> bool:
    """Whether all of the candidate's tensors are."""
    return golden is not None and all(agrees(failure, result, golden) for result in failure.results)


def agrees(failure: Failure, result: TensorResult, golden: Tensors) -> bool:
    """Whether this one is."""
    key = result.kind, result.name
    errors = measure(failure.candidate[key], golden[key], failure.precision.dtype)
    return margin(errors, tolerance_of(failure, key)) <= 1.0
