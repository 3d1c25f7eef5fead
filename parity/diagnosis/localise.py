"""Says where an error sits that nothing explains: in which tensors, and in which of their rows, columns and heads."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.diagnosis.scale import readable
from parity.result import Finding, TensorResult

_MOST_TENSORS = 3
_MOST_RIGHT = 6  # tensors that pass, which a message names
_MOSTLY = 0.9  # of the squared error, which makes a part its place
_SMALL = 0.5  # of a dimension, which a place may be at most
_PERIODS = (2, 4, 8, 16, 32, 64, 128)


def where_the_error_is(failure: Failure) -> Iterator[Finding]:
    """One finding for each of the worst tensors, the outputs first."""
    known = "known mistake that was tried" if failure.prepared.clock.ended else "known mistake"
    failed = [result for result in failure.results if not result.passed and result.finite]
    failed.sort(key=lambda result: (result.kind != "output", -result.margin))
    passed = [result.label for result in failure.results if result.passed and not _may_be_wrong(result)]
    for result in failed[:_MOST_TENSORS]:
        key = result.kind, result.name
        error = failure.candidate[key].double() - failure.golden[key]
        places = list(_places(error, failure.golden[key]))
        where = "; ".join(places) if places else "spread evenly over all its elements"
        more = f" and {len(passed) - _MOST_RIGHT} more" if len(passed) > _MOST_RIGHT else ""
        others = f". Right are {', '.join(passed[:_MOST_RIGHT])}{more}" if passed else ""
        yield finding(
            "unexplained",
            f"no {known} explains {result.label}, whose relative error is {result.errors.relative_l2:.2g} where "
            f"{result.expected.relative_l2:.2g} is expected. The error is {where}{others}",
        )


def _may_be_wrong(result: TensorResult) -> bool:
    """Return whether a tensor is a single number, as a loss, which may agree with what it should be by chance."""
    return result.kind == "output" and result.numel == 1


def _places(error: Tensor, golden: Tensor) -> Iterator[str]:
    """In which indices of each dimension most of the error is, where those are few."""
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
    """Indices that hold most of the error, where they are few: ``0 (95% of it)`` or ``120 to 127 (91% of it)``."""
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
    """``1 of each 2``, where the error recurs with a period."""
    for period in _PERIODS:
        if len(share) % period == 0 and len(share) > period:
            by_phase = share.unflatten(0, (-1, period)).sum(0)
            if float(by_phase.max()) > _MOSTLY:
                return f"{int(by_phase.argmax())} of each {period} ({float(by_phase.max()):.0%} of it)"
    return None


def _name(dim: int, dims: int) -> str:
    """What a dimension of ``[batch, seq, ..., channels]`` or of a weight ``[out, in]`` is called."""
    if dims == 1:
        return "elements"
    if dims == 2:
        return ("rows", "columns")[dim]
    return {0: "rows of the batch", 1: "positions", dims - 1: "channels"}.get(dim, f"dimension {dim}")
