"""Calls that are about a number, and what a port computes that has another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from parity.diagnosis.walk import with_number
from parity.watching.trace import Call

Compute = Callable[..., Any]

_PARAMETERS = {"leaky_relu": ("negative_slope", 0.01), "elu": ("alpha", 1.0), "celu": ("alpha", 1.0)}
"""Of activations: their number and what it is where it is not given."""


@dataclass(frozen=True)
class Alternative:
    """What a call returns instead.

    Attributes:
        described: as the end of a sentence that begins with the call.
        compute: from what the call returned, and every tensor that it was given, in order.
        value: a number of the call that it is about, where it is about one; positive.
        tuned: the same with another number.
    """

    described: str
    compute: Compute
    value: float | None = None
    tuned: Callable[[float], Alternative] | None = None


def other_numbers(call: Call) -> Iterator[Alternative]:
    """The call with another number, which is looked for."""
    yield from _numbers(call)
    yield from _parameters(call)


def _numbers(call: Call) -> Iterator[Alternative]:
    """Another number in the place of a positive one."""
    match with_number(call):
        case (("add" | "sub" | "mul" | "div" | "pow") as name, _, number) if number > 0.0:
            pass
        case _:
            return
    functions: dict[str, Compute] = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": torch.div,
        "pow": torch.pow,
    }

    def with_another(value: float) -> Alternative:
        return Alternative(
            f"its number is {value:.4g} for {number:.4g}",
            lambda was, x: functions[name](x, value),
            value,
            with_another,
        )

    yield from map(with_another, (0.9 * number, 1.1 * number))


def _parameters(call: Call) -> Iterator[Alternative]:
    """Another number of an activation that has one, and the activation where it is 0: ReLU."""
    if call.name not in _PARAMETERS:
        return
    name, default = _PARAMETERS[call.name]
    number = float(call.args[1] if len(call.args) > 1 else call.kwargs.get(name, default))

    def with_another(value: float) -> Alternative:
        return Alternative(
            f"its {name} is {value:.4g} for {number:.4g}",
            lambda was, x: getattr(functional, call.name)(x, value),
            value,
            with_another,
        )

    yield Alternative("it is relu", lambda was, x: x.relu())
    if number > 0.0:
        yield from map(with_another, (0.9 * number, 1.1 * number))
