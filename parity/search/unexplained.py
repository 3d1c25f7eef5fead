"""Say which tensors an unexplained error is in, in which of their rows, columns and heads, and what is right."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from parity.mistakes.codes import finding
from parity.result import Finding, TensorResult
from parity.search.factors import readable
from parity.search.failure import Failure, few_outputs
from parity.shown import few_of

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
