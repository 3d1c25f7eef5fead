"""Say where an unexplained error is, and find outputs that are right except for one factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from parity.mistakes.alternatives import is_written, unusual, written_near
from parity.mistakes.codes import finding
from parity.mistakes.hypothesis import Hypothesis
from parity.numerics.errors import Tolerance, margin, measure
from parity.numerics.factors import Uneven, uneven
from parity.result import Finding, TensorResult
from parity.search.failure import Failure, few_outputs
from parity.shown import few_of

if TYPE_CHECKING:
    pass

# Outputs that are right except for one factor.


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


# The place of an unexplained error: which tensors it is in, and which of their rows, columns and heads.


_MOST_TENSORS = 3
_MOST_RIGHT = 6  # a message names at most this many tensors that pass, or runs of rows that do not
_MOSTLY = 0.9  # the error is in a part that has this share of its square
_SMALL = 0.5  # such a part is at most this share of a dimension
_PERIODS = (2, 4, 8, 16, 32, 64, 128)
_RIGHT = 2.0  # a row is right up to this many tolerances, as small parts have larger limits than the whole
_CLEARLY = 4.0  # and if the squared error of each wrong row is this many times as large, in these tolerances


def where_the_error_is(failure: Failure, untried: int = 0) -> Iterator[Finding]:
    """Yield one finding for each of the worst tensors, the outputs first; the first says what to do.

    Args:
        failure: the comparison.
        untried: how many known mistakes the search's budget did not last for.
    """
    clock = failure.prepared.clock
    known = "known mistake that was tried" if clock.ended or untried or failure.broken else "known mistake"
    failed = [result for result in failure.results if not result.passed and result.finite]
    failed.sort(key=lambda result: (result.kind != "output", -result.margin))
    # A single number, such as a loss, may be right by chance, and zeros prove nothing.
    tells = [result for result in failure.results if result.kind != "output" or result.numel != 1]
    passed = [result.label for result in tells if result.passed and bool(failure.golden[result.key].any())]
    step = _next_step(failure)
    others = f". These are right: {few_of(passed, _MOST_RIGHT)}" if passed else ""
    if clock.ended:
        others += f". The search for the cause {ended_early(clock.limit)}"
    elif untried:
        others += f". The search ended before it had tried {untried} known mistakes"
    for number, result in enumerate(failed[:_MOST_TENSORS]):
        where = "; ".join(_places(failure, result))
        either = " either" if number else ""
        told = f"no {known} explains the error of {result.label}{either}, {_size(result)}. The error is {where}"
        yield finding("unexplained", told if number else f"{told}{others}; {step}", repair=step)


def ended_early(seconds: float) -> str:
    """Return the end of a sentence on a search that a limit of this many seconds has ended."""
    return (
        f"was stopped after {seconds:g} s; give it more time with --parity-diagnosis=SECONDS, --diagnosis of parity "
        "run, or diagnosis_seconds of parity.compare"
    )


def _next_step(failure: Failure) -> str:
    """Say how to narrow down an error that nothing explains."""
    smaller = (
        "compare parts of it as pairs of their own, or with fewer layers: the smallest that still fails has the mistake"
    )
    if all(result.passed for result in failure.outputs) and not few_outputs(failure):
        return (
            "each output is within its limits, so look for what the backward pass alone does, such as detach(), hooks "
            f"or recomputation, and for a function that differs too little to show in outputs; {smaller}"
        )
    if failure.precision.recipe is not None:
        return f"compare it at bf16: if it passes there, look at recipes, casts and cached weights; if not, {smaller}"
    return smaller


def _size(result: TensorResult) -> str:
    """Describe how large a tensor's error is; there is no relative error if golden is 0."""
    errors, expected = result.errors, result.expected
    if not math.isfinite(errors.relative_l2):
        return f"which is 0 in golden and up to {errors.max_abs:.2g} in the candidate"
    return f"whose relative error is {errors.relative_l2:.2g} where {expected.relative_l2:.2g} is expected"


def _places(failure: Failure, result: TensorResult) -> Iterator[str]:
    """Yield which indices of a tensor are wrong, by dimension and by sequence, or else which have most of the error."""
    golden = failure.golden[result.key]
    error = failure.candidate[result.key].double() - golden
    if error.numel() < 2 or not bool(error.any()):
        yield f"{float(error.sum()):.2g}"
        return
    whole = error.square().sum()

    def along(*dims: int) -> tuple[Tensor, Tensor, bool]:
        """Return each index's share of the error along some dimensions, which are wrong, and whether that is clear."""
        rest = [dim for dim in range(error.dim()) if dim not in dims]
        own, right = (x.square().sum(rest) if rest else x.square() for x in (error, golden))
        times = own / ((_RIGHT * result.tolerance_relative_l2) ** 2 * right.clamp(min=float(right.mean())))
        wrong = times > 1.0
        is_part = bool(wrong.any()) and not bool(wrong.all())
        return own / whole, wrong, is_part and bool(times[wrong].min() > _CLEARLY * times[~wrong].max())

    told: dict[int, str] = {}
    every = []
    for dim in (dim for dim in range(error.dim()) if error.shape[dim] > 1):
        (share, wrong, is_clear), name = along(dim), _name(dim, result)
        if is_clear:
            told[dim] = (
                f"in {name} {_describe_ranges(wrong)} ({int(wrong.sum())} of {len(wrong)}; the others are right)"
            )
        elif described := _concentrated(share) or _periodic(share):
            told[dim] = f"in {name} {described}"
        elif bool(wrong.all()):
            every.append(f"each of its {len(wrong)} {name}")
    if _name(1, result) == "positions":
        _, wrong, is_clear = along(0, 1)
        if is_clear and wrong.sum() < wrong.any(1).sum() * wrong.any(0).sum():
            rows = [f"{_describe_ranges(some)} of row {number}" for number, some in enumerate(wrong) if some.any()]
            right = f"the other {int((~wrong).sum())} of {wrong.numel()} are right"
            both = f"in positions {few_of(rows, _MOST_RIGHT)} of the batch ({right})"
            told = {0: both} | {dim: each for dim, each in told.items() if dim > 1}
    yield from told.values() or [f"in {' and '.join(every)}" if every else "in no row or column alone"]
    projection = (error * golden).sum() / golden.square().sum()
    along_right = projection.square() * golden.square().sum() / whole
    if along_right > _MOSTLY:
        yield f"{along_right:.0%} of it is as if the right values were multiplied by {readable(1 + projection.item())}"


def _describe_ranges(chosen: Tensor) -> str:
    """Return where a boolean vector is true: ``3 to 7, 12``."""
    edges = nn.functional.pad(chosen.int(), (1, 1)).diff()
    ends = zip((edges > 0).nonzero().flatten().tolist(), (edges < 0).nonzero().flatten().tolist(), strict=True)
    runs = [f"{first} to {last - 1}" if last - first > 1 else f"{first}" for first, last in ends]
    return few_of(runs, _MOST_RIGHT)


def _concentrated(share: Tensor) -> str | None:
    """Return the indices with most of the error, if they are few: ``0 (95% of it, of 16)``."""
    order = share.argsort(descending=True)
    count = int((share[order].cumsum(0) < _MOSTLY).sum()) + 1
    if count > max(1, int(_SMALL * len(share))):
        return None
    chosen = torch.zeros_like(share).index_fill(0, order[:count], 1.0)
    return f"{_describe_ranges(chosen)} ({float(share @ chosen):.0%} of it, of {len(share)})"


def _periodic(share: Tensor) -> str | None:
    """Return ``1 of each 2`` if the error recurs with a period."""
    for period in _PERIODS:
        if len(share) % period == 0 and len(share) > period:
            by_phase = share.unflatten(0, (-1, period)).sum(0)
            if float(by_phase.max()) > _MOSTLY:
                return f"{int(by_phase.argmax())} of each {period} ({float(by_phase.max()):.0%} of it)"
    return None


def _name(dim: int, result: TensorResult) -> str:
    """Return what a dimension of ``[batch, seq, ..., channels]`` or of a weight ``[out, in]`` is called."""
    dims = len(result.shape)
    if dims == 1:
        return "elements"
    if dims == 2:
        return ("rows", "columns")[dim]
    if result.kind == "weight gradient":
        return f"dimension {dim}, at"
    return {0: "rows of the batch", 1: "positions", dims - 1: "channels"}.get(dim, f"dimension {dim}, at")
