"""Find outputs and gradients that are right except for one factor, and say what may have multiplied them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from parity.mistakes.alternatives import is_written, unusual, written_near
from parity.mistakes.codes import finding
from parity.mistakes.hypothesis import Hypothesis
from parity.numerics.errors import Tolerance, margin, measure
from parity.numerics.factors import Uneven, uneven
from parity.result import Finding, TensorResult
from parity.search.failure import Failure, few_outputs

_FAR = 3.0  # rounding moves a factor by up to this many times what it does in the rounding models
_MOST = 1e6  # a larger factor is not a scale but another magnitude altogether


def scaled_outputs(factor: float) -> Hypothesis:
    """Return the mistake that a number multiplies all outputs, to be paired with another; alone it needs no search."""

    return Hypothesis(
        "output-scale",
        f"outputs times {factor:.4g}",
        f"leave the outputs as large as the reference's; they are {readable(factor)} times that",
        returned=lambda x: x * factor,
        value=factor,
        tuned=scaled_outputs,
    )


def scale_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding on each failed output if all are multiples of the right ones, in numbers that prove it.

    If outputs passed, the same of gradients whose slices have different factors.
    """
    found = []
    for result in failure.results if failure.outputs_passed else failure.outputs:
        if not result.passed:
            factor, several = factor_of(failure, result), _uneven(failure, result)
            in_slices = several is not None and several.left <= result.tolerance_relative_l2
            if result.numel < 2 or not (in_slices or (factor is not None and not failure.outputs_passed)):
                return
            told = "is 0 everywhere; look for equal terms that cancel, and for a part that is never computed"
            if several is not None:
                told = f"is {several.told}, and otherwise right; look for a mean, a count or a scale of each by itself"
            elif factor:
                told = (
                    f"is {readable(factor)} times what it should be, and otherwise right; look for a scale that is "
                    "applied twice or not at all"
                )
            found.append((f"{result.label} {told}", doubt_about(factor)))
    title = "gradient-scale" if failure.outputs_passed else "output-scale"
    yield from (finding(title, f"{told}{doubt}", sure=not doubt) for told, doubt in found)


def whole_scale_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if outputs of few numbers, and every gradient, are the right ones times one factor.

    A factor always explains a single number, so the gradients must share it.
    """
    failed = [result for result in failure.results if not result.passed and result.finite]
    outputs = [result for result in failed if result.kind == "output"]
    if not few_outputs(failure) or len(outputs) < len(failure.outputs) or len(failed) == len(outputs):
        return
    factor = factor_of(failure, outputs[0])
    if factor is None or shared_factor(failure, failed) is None:
        return
    hidden = [one for one in failure.results if one.passed and abs(factor - 1.0) > one.tolerance_relative_l2]
    if any(bool(failure.golden[one.key].any()) for one in hidden):
        return
    doubt = doubt_about(factor)
    yield finding(
        "loss-scale",
        f"{', '.join(one.label for one in outputs)} and every gradient are {readable(factor)} times what they should "
        "be, and otherwise right; look for a sum instead of a mean, or for a number of tokens, sequences, microbatches "
        f"or ranks by which only one side divides the loss{doubt}",
        sure=not doubt,
    )


def factor_of(failure: Failure, result: TensorResult, everywhere: bool = True) -> float | None:
    """Return the factor by which all of a tensor is multiplied; None if it is wrong in other ways, or right.

    If rounding may have moved it from a number that people write, it is that number. Unless it must be the same
    ``everywhere``, slices may have other factors, but no more than the tensor's tolerance allows.
    """
    key = result.key
    right, candidate = failure.golden[key], failure.candidate[key].double()
    square = right.square().sum().item()
    factor = (candidate * right).sum().item() / square if square else math.nan
    if not math.isfinite(factor) or abs(factor) > _MOST or abs(factor - 1.0) <= result.tolerance_relative_l2:
        return None
    if factor == 0.0:
        return factor if not bool(candidate.any()) else None
    errors = measure(candidate / factor, right, failure.precision.dtype)
    bound = Tolerance(result.tolerance_relative_l2, result.tolerance_max_abs)
    if margin(errors, bound) > 1.0 or (everywhere and _uneven(failure, result) is not None):
        return None
    moved = max(abs((model[key] * right).sum().item() / square - 1.0) for model in failure.models)
    written = written_near(abs(factor), _FAR * moved)
    return math.copysign(written, factor) if written > 0.0 and written != 1.0 else factor


def _uneven(failure: Failure, result: TensorResult) -> Uneven | None:
    rounded = [model[result.key] for model in failure.models]
    return uneven(failure.candidate[result.key], failure.golden[result.key], rounded)


def shared_factor(failure: Failure, failed: Sequence[TensorResult], everywhere: bool = True) -> float | None:
    """Return the factor that all tensors share, as the most exact one shows it; None if one of them has another.

    Rounding moves a tensor's factor by no more than its tolerance.
    """
    factors = [factor_of(failure, result, everywhere) for result in failed]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(failed):
        return None
    exact = [result.tolerance_relative_l2 for result in failed]
    shared = known[exact.index(min(exact))]
    are_same = (
        abs(factor - shared) <= (min(exact) + error) * abs(shared) for factor, error in zip(known, exact, strict=True)
    )
    return shared if all(are_same) else None


def doubt_about(factor: float | None) -> str:
    """Return the end of a message about a factor if it is neither a count, nor one over it, nor written by people."""
    is_count = not factor or any(readable(x).startswith("1/") for x in (factor, 1.0 / factor))
    return "" if not factor or is_count or is_written(abs(factor)) else unusual(factor)


def readable(factor: float) -> str:
    """Return a factor as ``1/128`` if it is one over a whole number, else with four digits, or more if it is near 1."""
    inverse = 1.0 / factor if factor else 0.0
    if abs(inverse) > 1.1 and abs(inverse - round(inverse)) < 1e-3 * abs(inverse):
        return f"1/{round(inverse)}"
    from_one = abs(factor - 1.0)
    return f"{factor:.{max(4, 2 - math.floor(math.log10(from_one))) if from_one else 1}g}"
