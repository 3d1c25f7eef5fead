"""The two bounds that a person reads in a report, and errors against them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parity.result import Errors


@dataclass(frozen=True)
class Tolerance:
    """The largest errors that pass, whatever the other statistics say.

    Attributes:
        relative_l2: bound on ``Errors.relative_l2``.
        max_abs: bound on ``Errors.max_abs``, in the tensor's units.
    """

    relative_l2: float
    max_abs: float


def margin(errors: Errors, bound: Tolerance) -> float:
    """The largest error divided by its tolerance: up to 1 passes.

    Infinite where the candidate or the golden value has a NaN or an infinity: nothing that cannot be compared passes.
    """
    if not errors.finite:
        return math.inf
    return max(_ratio(errors.relative_l2, bound.relative_l2), _ratio(errors.max_abs, bound.max_abs))


def _ratio(error: float, bound: float) -> float:
    if error == 0.0:
        return 0.0
    return error / bound if bound > 0.0 else math.inf
