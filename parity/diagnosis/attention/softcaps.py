"""Caps of activations by ``tanh``, such as Gemma's of its logits, and ports that have another, none, or one more.

Caps of attention's scores are told by ``parity.diagnosis.attention.attention_mistakes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.diagnosis.attention.attention import attentions
from parity.diagnosis.attention.attention_mistakes import USUAL_CAPS
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.walk import CASTS, LINEAR, users, with_number
from parity.watching.trace import Call, Edit, Trace, Value, edit


@dataclass(frozen=True, eq=False)
class Cap:
    """``call`` returns ``cap * tanh(x / cap)``; or ``x`` where ``cap`` is infinite."""

    call: Call
    x: Value
    cap: float

    def edits(self, cap: float) -> tuple[Edit, ...]:
        """Capped otherwise; none where that is the same."""
        if math.isclose(cap, self.cap):
            return ()
        if self.x in self.call.outputs:
            return (edit(self.call, (), lambda was: _capped(was, cap)),)
        return (edit(self.call, (self.x,), lambda was, x: _capped(x, cap).to(was.dtype)),)


def softcap_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Other caps than the reference's, or one of the last linear layer's result, the logits, where it has none."""
    found = caps(trace)
    by_cap: dict[float, list[Cap]] = {}
    for one in found or _uncapped(trace):
        by_cap.setdefault(one.cap, []).append(one)
    for right, alike in by_cap.items():
        others = (math.inf, *(0.9 * right, 1.1 * right)) if math.isfinite(right) else USUAL_CAPS
        yield from everywhere_and_somewhere(
            map(_cap_instead_of(right), others), alike, module, lambda one: one.call.module
        )


def caps(trace: Trace) -> list[Cap]:
    """Every cap but those of attention's scores, in order."""
    of_scores = {one.softcap for one in attentions(trace)}
    found = [cap for call in trace.calls if (cap := _cap(trace, call)) is not None]
    return [one for one in found if one.cap not in of_scores or not _meets_softmax(trace, one.call.outputs[0])]


def _cap(trace: Trace, call: Call) -> Cap | None:
    """The cap whose ``tanh`` is this call."""
    if call.name != "tanh" or len(call.inputs) != 1:
        return None
    match with_number(trace.producer(call.inputs[0])):
        case ("div", x, cap):
            pass
        case ("mul", x, inverse) if inverse > 0.0:
            cap = 1.0 / inverse
        case _:
            return None
    for user, _ in users(trace, call.outputs[0]):
        match with_number(user):
            case ("mul", _, factor) if math.isclose(factor, cap, rel_tol=1e-6) and cap > 0.0:
                return Cap(user, x, cap)
    return None


def _meets_softmax(trace: Trace, value: Value) -> bool:
    """Whether a softmax is the next function of a value that is more than a mask's."""
    through = CASTS | {"add", "masked_fill", "where", "view", "reshape"}
    return any(user.name == "softmax" for user, _ in users(trace, value, through))


def _uncapped(trace: Trace) -> list[Cap]:
    """The last product with a parameter."""
    made = [call for call in trace.calls if call.name in LINEAR and len(call.outputs) == 1]
    made = [call for call in made if any(trace.parameter(value) for value in call.inputs)]
    return [Cap(call, call.outputs[0], math.inf) for call in made[-1:]]


def _capped(x: Tensor, cap: float) -> Tensor:
    return x if math.isinf(cap) else cap * torch.tanh(x / cap)


def _cap_instead_of(right: float) -> Callable[[float], Mistake[Cap]]:
    should = "leave activations uncapped" if math.isinf(right) else f"cap activations at {right:g} by tanh"

    def with_cap(cap: float) -> Mistake[Cap]:
        return Mistake(
            "softcap",
            "cap missing" if math.isinf(cap) else f"cap {cap:.4g}",
            f"{should}, as the reference does; "
            + ("none are capped" if math.isinf(cap) else f"they are capped at {cap:.4g}"),
            lambda one: one.edits(cap),
            value=cap if math.isfinite(cap) else None,
            tuned=with_cap,
        )

    return with_cap
