"""Say where an error is that nothing explains: in which tensors, rows, columns and heads, or in a factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.mistakes.codes import finding
from parity.mistakes.hypothesis import Hypothesis, ModuleCall
from parity.numerics.errors import Tolerance, margin, measure
from parity.result import Finding, TensorResult
from parity.search.failure import Failure, few_outputs

# Outputs that are right except for one factor.


_SAME_FACTOR = 0.02
"""How much the factors of tensors that are scaled together may differ, beyond what rounding moves each of them."""

_MOST = 1e6  # a larger factor is not a scale but another magnitude altogether


def scaled_outputs(factor: float) -> Hypothesis:
    """Return the mistake that one number multiplies all outputs, for a search for two mistakes; alone
    it needs no search.
    """

    def around(call: ModuleCall) -> ModuleCall:
        def scaled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            returned = call(module, *args, **kwargs)
            return tree_map_only(Tensor, lambda x: x * factor if x.is_floating_point() else x, returned)

        return scaled

    return Hypothesis(
        "output-scale",
        f"outputs times {factor:.4g}",
        f"leave the outputs as large as the reference's; they are {readable(factor)} times that",
        around=around,
        value=factor,
        tuned=scaled_outputs,
    )


def output_scale_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if every failed output is the right one times one factor; a single number tells nothing."""
    for result in failure.outputs:
        if not result.passed:
            factor = factor_of(failure, result)
            if factor is None or failure.golden[result.key].numel() < 2:
                return
            yield finding(
                "output-scale",
                f"{result.label} is {readable(factor)} times what it should be, and otherwise right; look for a "
                "scale that is applied twice or not at all",
            )


def whole_scale_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if few outputs, and every gradient with them, are the right ones times one factor.

    A factor alone would explain a single number; the gradients must share it.
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
    yield finding(
        "loss-scale",
        f"{', '.join(one.label for one in outputs)} and every gradient are {readable(factor)} times what they should "
        "be, and otherwise right; look for a sum in the place of a mean, or for a number of tokens, sequences, "
        "microbatches or ranks by which the loss is divided on one side alone",
    )


def factor_of(failure: Failure, result: TensorResult) -> float | None:
    """Return the number that multiplies a tensor; None if the tensor is not right except for a factor."""
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
    return factor if margin(errors, bound) <= 1.0 else None


def shared_factor(failure: Failure, failed: Sequence[TensorResult]) -> float | None:
    """Return the number that multiplies all of the tensors, as the most exact shows it; None if one of
    them has another.

    Rounding moves a tensor's factor by no more than the relative error that is expected of it.
    """
    factors = [factor_of(failure, result) for result in failed]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(failed):
        return None
    expected = [result.expected.relative_l2 for result in failed]
    shared = known[expected.index(min(expected))]
    are_same = (
        abs(factor - shared) <= (_SAME_FACTOR + error) * abs(shared)
        for factor, error in zip(known, expected, strict=True)
    )
    return shared if all(are_same) else None


def readable(factor: float) -> str:
    """Return ``1/128`` for one over a whole number, else four digits, or as many as it takes to tell
    the factor from 1.
    """
    inverse = 1.0 / factor if factor else 0.0
    if abs(inverse) > 1.1 and abs(inverse - round(inverse)) < 1e-3 * abs(inverse):
        return f"1/{round(inverse)}"
    from_one = abs(factor - 1.0)
    return f"{factor:.{max(4, 2 - math.floor(math.log10(from_one))) if from_one else 1}g}"


# Say where an error is that nothing explains: in which tensors, and in which of their rows, columns and heads.


_MOST_TENSORS = 3
_MOST_RIGHT = 6  # a message names at most so many tensors that pass
_MOSTLY = 0.9  # the error is in a part that has this share of its square
_SMALL = 0.5  # such a part is at most this share of a dimension
_PERIODS = (2, 4, 8, 16, 32, 64, 128)


def where_the_error_is(failure: Failure) -> Iterator[Finding]:
    """Yield one finding for each of the worst tensors, the outputs first."""
    known = "known mistake that was tried" if failure.prepared.clock.ended else "known mistake"
    failed = [result for result in failure.results if not result.passed and result.finite]
    failed.sort(key=lambda result: (result.kind != "output", -result.margin))
    # A single number, such as a loss, may be right by chance.
    tells = [result for result in failure.results if result.kind != "output" or result.numel != 1]
    passed = [result.label for result in tells if result.passed]
    for result in failed[:_MOST_TENSORS]:
        key = result.key
        error = failure.candidate[key].double() - failure.golden[key]
        places = list(_places(error, failure.golden[key]))
        where = "; ".join(places) if places else "spread evenly over all its elements"
        more = f" and {len(passed) - _MOST_RIGHT} more" if len(passed) > _MOST_RIGHT else ""
        others = f". Right are {', '.join(passed[:_MOST_RIGHT])}{more}" if passed else ""
        yield finding(
            "unexplained",
            f"no {known} explains {result.label}, {_size(result)}. The error is {where}{others}",
        )


def _size(result: TensorResult) -> str:
    """Describe how large a tensor's error is; there is no relative one where golden is 0."""
    errors, expected = result.errors, result.expected
    if not math.isfinite(errors.relative_l2):
        return f"which is 0 in golden and up to {errors.max_abs:.2g} in the candidate"
    return f"whose relative error is {errors.relative_l2:.2g} where {expected.relative_l2:.2g} is expected"


def _places(error: Tensor, golden: Tensor) -> Iterator[str]:
    """Yield the indices of each dimension that hold most of the error, if they are few."""
    if error.dim() == 0 or not bool(error.any()):
        return
    square = error.square()
    whole = square.sum()
    for dim in range(error.dim()):
        size = error.shape[dim]
        if size < 2:
            continue
        by_index = square.movedim(dim, 0).reshape(size, -1).sum(1) / whole
        described = _concentrated(by_index) or _periodic(by_index)
        if described:
            yield f"in {_name(dim, error.dim())} {described}"
    projection = (error * golden).sum() / golden.square().sum()
    if projection.square() * golden.square().sum() > _MOSTLY * whole:
        yield f"along the right values, which are multiplied by {readable(1 + projection.item())}"


def _concentrated(share: Tensor) -> str | None:
    """Return the indices that hold most of the error, if they are few: ``0 (95% of it)`` or ``120 to
    127 (91% of it)``.
    """
    size = len(share)
    order = share.argsort(descending=True)
    count = int((share[order].cumsum(0) < _MOSTLY).sum()) + 1
    if count > max(1, int(_SMALL * size)):
        return None
    chosen = order[:count].sort().values
    first, last = int(chosen[0]), int(chosen[-1])
    held = f"({float(share[chosen].sum()):.0%} of it, of {size})"
    if count == 1:
        return f"{first} {held}"
    if last - first + 1 <= max(count + 1, int(1.25 * count)):
        return f"{first} to {last} {held}"
    if count <= 6:
        return f"{', '.join(str(int(i)) for i in chosen)} {held}"
    return f"{count} of them, among {first} to {last} {held}" if last - first + 1 <= _SMALL * size else None


def _periodic(share: Tensor) -> str | None:
    """Return ``1 of each 2`` if the error recurs with a period."""
    for period in _PERIODS:
        if len(share) % period == 0 and len(share) > period:
            by_phase = share.unflatten(0, (-1, period)).sum(0)
            if float(by_phase.max()) > _MOSTLY:
                return f"{int(by_phase.argmax())} of each {period} ({float(by_phase.max()):.0%} of it)"
    return None


def _name(dim: int, dims: int) -> str:
    """Return what a dimension of ``[batch, seq, ..., channels]`` or of a weight ``[out, in]`` is called."""
    if dims == 1:
        return "elements"
    if dims == 2:
        return ("rows", "columns")[dim]
    return {0: "rows of the batch", 1: "positions", dims - 1: "channels"}.get(dim, f"dimension {dim}")
