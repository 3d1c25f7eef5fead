"""The factors of a sum's two terms, each on the other term: a gate or a LayerScale on the stream, not on the branch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from torch import Tensor, nn

from parity.diagnosis.functions.operations import alike, ordinal
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.walk import CASTS, back, binary
from parity.watching.trace import Call, Edit, Trace, Value, edit

_BETWEEN = CASTS | {"dropout"}  # from a product to the sum


@dataclass(frozen=True)
class _Term:
    """``x``, times ``factor`` where it has one: a value, or a number."""

    x: Value
    factor: Any = 1.0


@dataclass(frozen=True)
class _Sum:
    """``call`` adds two terms, one of which has a factor at least."""

    call: Call
    terms: tuple[_Term, _Term]

    def exchanged(self) -> Edit:
        """Each term is to have the other's factor."""
        first, second = self.terms
        factors = (second.factor, first.factor)
        values = [factor for factor in factors if isinstance(factor, Value)]

        def compute(was: Tensor, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
            tensors = iter(given)
            of_x, of_y = (next(tensors) if isinstance(factor, Value) else factor for factor in factors)
            return (x * of_x + y * of_y).to(was.dtype)

        return edit(self.call, (first.x, second.x, *values), compute)


def exchanged_factor_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Of every sum, in all layers at once; and of all sums whose terms are scaled alike."""
    by_call = [[_sums(trace, call) for call in calls] for calls in alike(trace)]
    groups = [list(sums) for ways in by_call for sums in zip(*ways, strict=False)]
    by_scaled: dict[tuple[bool, ...], list[list[_Sum]]] = defaultdict(list)
    for sums in groups:
        by_scaled[tuple(term.factor != 1.0 for term in sums[0].terms)].append(sums)
    several = [list(chain.from_iterable(some)) for some in by_scaled.values() if len(some) > 1]
    yield from (_exchanged(sums, module) for sums in (*groups, *several))


def _exchanged(sums: Sequence[_Sum], module: nn.Module) -> Hypothesis:
    first = sums[0].call
    which = f"the {ordinal(first.site[3] + 1)} {first.name!r} of {first.module}"
    others = f" and of {len(sums) - 1} more like it" if len(sums) > 1 else ""
    return Hypothesis(
        "operation",
        f"factors of {which}{others} exchanged",
        f"multiply the terms that {which}{others} adds as the reference does; each has the other's factor",
        module,
        tuple(one.exchanged() for one in sums),
        scope="call",
    )


def _sums(trace: Trace, call: Call) -> list[_Sum]:
    """What a call adds, in every way to tell factors from what they multiply."""
    match binary(call):
        case ("add", Value() as left, Value() as right) if "alpha" not in call.kwargs:
            shape = trace.tensor(call.outputs[0]).shape
            ways = product(_terms(trace, left, shape), _terms(trace, right, shape))
            return [_Sum(call, way) for way in ways if way[0].factor != way[1].factor]
    return []


def _terms(trace: Trace, value: Value, shape: Sequence[int]) -> list[_Term]:
    """A term with its factor, which may be smaller than what it multiplies; of two that are as large, with either."""
    match binary(trace.producer(back(trace, value, _BETWEEN))):
        case ("mul", left, right):
            ways = [_Term(x, factor) for x, factor in ((left, right), (right, left)) if isinstance(x, Value)]
        case _:
            ways = [_Term(value)]
    return [one for one in ways if trace.tensor(one.x).shape == shape and trace.tensor(one.x).dim() > 1]
