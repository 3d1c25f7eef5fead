"""From the expected error of a faithful port to the error that is still accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from parity.errors import Errors

# A faithful kernel may order its sums and place its roundings differently from the rounding model. Measured on emulated
# kernels (TE 2.20.2, 222 items of the default suite, 20 seeds): the norm of an output's error was 0.51 to 1.08 times
# the expected one, of a gradient's 0.25 to 1.8 times; single elements reached 2.6 times.
FACTOR_L2 = 3.0
FACTOR_MAX = 5.0


@dataclass(frozen=True)
class Tolerance:
    """The largest errors that pass.

    Attributes:
        relative_l2: bound on ``Errors.relative_l2``.
        max_abs: bound on ``Errors.max_abs``, in the tensor's units.
    """

    relative_l2: float
    max_abs: float


def describe() -> str:
    """How tolerances are set, in one sentence."""
    return (
        f"A tensor passes if its relative L2 error is at most {FACTOR_L2:g} times, and its largest error at most "
        f"{FACTOR_MAX:g} times, what the reference itself loses under the precision's rounding model; that is never "
        "taken for less than the rounding of the result and the order of FP32 sums can cost."
    )


def tolerance(expected: Errors, dtype: torch.dtype, summed_terms: int) -> Tolerance:
    """The tolerance for a tensor whose faithful port has the expected errors.

    The expected error never counts for less than what the rounding model leaves to chance: the rounding of the result,
    and the order of FP32 accumulation. Adding n terms of random sign one after the other loses about ``u sqrt(n / 6)``
    relative to the sum, with u the unit roundoff: each of the n roundings is at most u times a partial sum that grows
    with the square root of its length, and they add up as a random walk (Higham and Mary, SIAM J. Sci. Comput. 41(5),
    2019). The rounding model adds pairwise and loses less.

    Args:
        expected: the rounding model's errors against golden.
        dtype: in which the candidate returns the tensor.
        summed_terms: how many terms a kernel accumulates for one element.
    """
    floor = max(_unit_roundoff(dtype), _unit_roundoff(torch.float32) * math.sqrt(summed_terms / 6))
    return Tolerance(
        relative_l2=FACTOR_L2 * max(expected.relative_l2, floor),
        max_abs=FACTOR_MAX * max(expected.max_abs, floor * expected.golden_rms),
    )


def _unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def margin(errors: Errors, bound: Tolerance) -> float:
    """The largest error divided by its tolerance: below 1 passes.

    Infinite where the candidate or the golden value has a NaN or an infinity: nothing that cannot be compared passes.
    """
    if not errors.finite:
        return math.inf
    return max(_ratio(errors.relative_l2, bound.relative_l2), _ratio(errors.max_abs, bound.max_abs))


def _ratio(error: float, bound: float) -> float:
    if error == 0.0:
        return 0.0
    return error / bound if bound > 0.0 else math.inf
