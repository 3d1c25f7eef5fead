"""Gradients that a reference clips before its optimizer's step, and ports that do not, or clip them elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from parity.diagnosis.hypothesis import Hypothesis, ModuleCall
from parity.watching.clipped_gradients import clipping_at
from parity.watching.trace import Trace

_NEAR = (1.1, 0.9, 10.0, 0.1)  # times the reference's own largest norm


def clipping_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """No clipping, and another largest norm, where the reference calls ``clip_grad_norm_``."""
    for own in trace.clips[:1]:
        yield Hypothesis(
            "optimizer",
            "optimizer: no clipping",
            f"clip gradients, clip_grad_norm_(parameters, {own:.4g}), before each step; the port clips none",
            module,
            around=_clipping(lambda norm: math.inf),
        )
        yield from (_clipping_at(own, near * own, module) for near in _NEAR)


def _clipping_at(own: float, other: float, module: nn.Module) -> Hypothesis:
    return Hypothesis(
        "optimizer",
        f"optimizer: clipping at {other:.4g}",
        f"clip gradients at the norm {own:.4g}, as the reference does; the port clips at {other:.4g}",
        module,
        around=_clipping(lambda norm: norm * other / own),
        value=other,
        tuned=lambda value: _clipping_at(own, value, module),
    )


def _clipping(norm: Callable[[float], float]) -> Callable[[ModuleCall], ModuleCall]:
    def around(call: ModuleCall) -> ModuleCall:
        def under(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with clipping_at(norm):
                return call(module, *args, **kwargs)

        return under

    return around
