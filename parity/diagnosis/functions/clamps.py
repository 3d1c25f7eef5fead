"""Activations that are clamped to a range, such as queries, keys and values by OLMo's ``clip_qkv``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.watching.trace import Call, Edit, Trace, Value, edit

_NEAR = (0.9, 1.1)  # times the reference's limit: from one of them the port's own is looked for


@dataclass(frozen=True, eq=False)
class Clamp:
    """``call`` returns ``x`` between ``-limit`` and ``limit``."""

    call: Call
    x: Value
    limit: float

    def edits(self, limit: float) -> tuple[Edit, ...]:
        """Clamped otherwise; none where that is the same."""
        if math.isclose(limit, self.limit):
            return ()

        def compute(was: Tensor, x: Tensor) -> Tensor:
            return x.clone() if math.isinf(limit) else torch.clamp(x, -limit, limit)

        return (edit(self.call, (self.x,), compute),)


def clamp_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """That all activations which one limit clamps are clamped by another, or by none."""
    by_limit: dict[float, list[Clamp]] = {}
    for one in filter(None, (_clamp(trace, call) for call in trace.calls)):
        by_limit.setdefault(one.limit, []).append(one)
    for right, alike in by_limit.items():
        others = (math.inf, *(near * right for near in _NEAR))
        yield from everywhere_and_somewhere(map(_limit_instead_of(right), others), alike, module)


def _clamp(trace: Trace, call: Call) -> Clamp | None:
    """Of activations, to a range about 0."""
    if call.name not in ("clamp", "clip") or not call.args or not isinstance(call.args[0], Value):
        return None
    given = dict(zip(("min", "max"), call.args[1:], strict=False)) | call.kwargs
    low, high = given.get("min"), given.get("max")
    x = trace.tensor(call.args[0])
    if not isinstance(low, int | float) or not isinstance(high, int | float) or not x.is_floating_point():
        return None
    return Clamp(call, call.args[0], float(high)) if x.dim() > 1 and high > 0.0 and low == -high else None


def _limit_instead_of(right: float) -> Callable[[float], Mistake[Clamp]]:
    def with_limit(limit: float) -> Mistake[Clamp]:
        what = "none are clamped" if math.isinf(limit) else f"they are clamped to {limit:.4g}"
        return Mistake(
            "operation",
            "clamp missing" if math.isinf(limit) else f"clamp to {limit:.4g}",
            f"clamp activations between -{right:g} and {right:g}, as the reference does; {what}",
            lambda one: one.edits(limit),
            value=limit if math.isfinite(limit) else None,
            tuned=with_limit,
        )

    return with_limit
