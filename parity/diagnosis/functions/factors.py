"""Numbers by which a reference multiplies what it computes, and ports that have another or none.

A LoRA's ``alpha / rank``, a residual branch scaled by depth, embeddings times ``sqrt(hidden)``, scaled logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import MOST_PLACES, Mistake, everywhere_and_somewhere
from parity.diagnosis.walk import CASTS, LINEAR, RESHAPES, back, binary, users, with_number
from parity.watching.trace import Call, Edit, Site, Trace, Value, edit

_POINTWISE = CASTS | {"add", "sub", "mul", "div", "truediv", "tanh", "masked_fill", "where", "cat", "view", "reshape"}
_FUNCTIONS = frozenset({"sigmoid", "tanh", "erf", "exp"})  # an activation's own constants are told by its name
_NEAR = (0.9, 1.1)  # times the reference's own: from one of them another number is looked for


@dataclass(frozen=True, eq=False)
class Factor:
    """``call`` multiplies activations by ``value``, or divides them by its inverse."""

    call: Call
    value: float


def factors(trace: Trace) -> list[Factor]:
    """Every multiplication of activations by a positive number but 1, in order; not of scores, nor in a function."""
    of_attention = scales_of_attention(trace)
    found = [factor for call in trace.calls if (factor := _factor(trace, call)) is not None]
    return [factor for factor in found if factor.call.site not in of_attention]


def scales_of_attention(trace: Trace) -> set[Site]:
    """The calls that scale and mask scores, and those that make queries and keys."""
    softmaxes = (call for call in trace.calls if call.name == "softmax")
    return {call.site for softmax in softmaxes for call in _scales(trace, softmax)}


def factor_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the reference's factors."""
    found = factors(trace)
    by_value: dict[float, list[Factor]] = {}
    for factor in found:
        by_value.setdefault(factor.value, []).append(factor)
    for value, alike in by_value.items():
        mistakes = map(_instead_of(value), dict.fromkeys((1.0, *(near * value for near in _NEAR))))
        yield from everywhere_and_somewhere(mistakes, alike, module, lambda one: one.call.module, where=_where(alike))


def _where(alike: Sequence[Factor]) -> str:
    """The submodules that multiply, if they are few and not the whole."""
    modules = list(dict.fromkeys(factor.call.module for factor in alike if factor.call.site[0]))
    return f" in {', '.join(modules)}" if 0 < len(modules) <= MOST_PLACES else ""


def _scales(trace: Trace, softmax: Call) -> Iterator[Call]:
    """What is computed between a product of queries and keys and its softmax, and queries and keys last."""
    queue = list(softmax.inputs[:1])
    while queue:
        call = trace.producer(queue.pop())
        if call is None:
            continue
        yield call
        if call.name in _POINTWISE:
            queue += call.inputs
        elif call.name in LINEAR or call.name in ("bmm", "baddbmm"):
            yield from filter(None, (trace.producer(back(trace, x, RESHAPES)) for x in call.inputs))


def _factor(trace: Trace, call: Call) -> Factor | None:
    match with_number(call) or _with_buffer(trace, call):
        case ("mul", x, value) if value > 0.0:
            pass
        case ("div", x, divisor) if divisor > 0.0:
            value = 1.0 / divisor
        case _:
            return None
    tensor = trace.tensor(x)
    is_activation = tensor.dim() > 1 and tensor.is_floating_point() and trace.parameter(x) is None
    if not is_activation or value == 1.0 or len(call.outputs) != 1:
        return None
    is_of_function = any(user.name in _FUNCTIONS for user, _ in users(trace, call.outputs[0]))
    return None if is_of_function else Factor(call, value)


def _with_buffer(trace: Trace, call: Call) -> tuple[str, Value, float] | None:
    """A function of a tensor and a number that a tensor without a gradient holds, as Gemma's scale of embeddings."""
    match binary(call):
        case (name, Value() as x, Value() as number):
            holder = trace.tensor(number)
            is_number = holder.dim() == 0 and trace.producer(back(trace, number)) is None
            if is_number and trace.parameter(back(trace, number)) is None:
                return name, x, holder.item()
    return None


def _instead_of(right: float) -> Callable[[float], Mistake[Factor]]:
    def with_value(value: float) -> Mistake[Factor]:
        def edits(factor: Factor) -> tuple[Edit, ...]:
            if math.isclose(value, right, rel_tol=1e-4):
                return ()
            return (edit(factor.call, (), lambda was: was * (value / right)),)

        return Mistake(
            "factor",
            f"factor {value:.4g} for {right:.4g}",
            f"multiply by {right:.4g}, as the reference does; the factor is {value:.4g}",
            edits,
            value=value,
            tuned=with_value,
        )

    return with_value
