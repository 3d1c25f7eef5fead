"""Walk through a trace: from a value back to what it was computed from, and on to what is computed from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from parity.trace.trace import Call, Trace, Value

CASTS = frozenset({"to", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"})
"""Calls that change at most a tensor's dtype or memory."""

RESHAPES = CASTS | {
    "view",
    "reshape",
    "transpose",
    "permute",
    "flatten",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "T",
    "mT",
}
"""Calls that at most move elements."""

JOINS = frozenset({"cat", "concat", "concatenate"})
"""Calls that put tensors behind one another."""

LINEAR = frozenset({"linear", "addmm", "matmul", "mm", "einsum"})
"""Calls that multiply by a weight, or by another activation."""

_REVERSED = {"rsub": "sub", "rdiv": "div", "rtruediv": "div", "rpow": "pow", "radd": "add", "rmul": "mul"}
_SPELLINGS = {
    "true_divide": "div",
    "divide": "div",
    "truediv": "div",
    "multiply": "mul",
    "subtract": "sub",
    "mm": "matmul",
    "bmm": "matmul",
    "rmatmul": "matmul",
    "iadd": "add",
    "imul": "mul",
    "isub": "sub",
    "itruediv": "div",
}


_NUMBER = re.compile(r"\d+")

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def unnumbered(path: str) -> str:
    """Return a path without the numbers of its layers, the same for all layers that are alike: ``layers.#.mlp``."""
    return _NUMBER.sub("#", path)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by their key, in order of appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def binary(call: Call | None) -> tuple[str, Any, Any] | None:
    """Return a function of two operands as its name in ``torch`` and the two in order; None for anything else."""
    if call is None or len(call.args) < 2:
        return None
    name, (left, right) = call.name, call.args[:2]
    if name in _REVERSED:
        return _REVERSED[name], right, left
    name = _SPELLINGS.get(name, name)
    return (name, left, right) if name in ("add", "sub", "mul", "div", "pow", "matmul") else None


def with_number(call: Call | None) -> tuple[str, Value, float] | None:
    """Return a function of a tensor and a number, the tensor first; None for anything else, such as a
    number over a tensor.
    """
    match binary(call):
        case (name, Value() as value, int() | float() as number):
            return name, value, float(number)
        case ("add" | "mul" as name, int() | float() as number, Value() as value):
            return name, value, float(number)
    return None


def other(call: Call, value: Value) -> Any:
    """Return the other operand of a function of two."""
    _, left, right = binary(call) or ("", value, value)
    return right if left == value else left


def back(trace: Trace, value: Any, names: Collection[str] = CASTS) -> Any:
    """Return the value from which only calls with these names made this one."""
    call = trace.producer(value)
    while call is not None and call.name in names and call.inputs:
        value = call.inputs[0]
        call = trace.producer(value)
    return value


def back_along(trace: Trace, value: Value, names: Collection[str]) -> Value:
    """Go back as ``back`` does; of two operands, take the one as large as the result, since a gate may
    be on either side.
    """
    call = trace.producer(value)
    while call is not None and call.inputs and ((binary(call) or (call.name,))[0] in names or call.name in names):
        size = trace.tensor(value).numel()
        given = next((given for given in call.inputs if trace.tensor(given).numel() == size), call.inputs[0])
        if given == value:  # the call writes in place
            break
        value, call = given, trace.producer(given)
    return value


def chain(trace: Trace, value: Value, names: Collection[str] = CASTS) -> Iterator[Value]:
    """Yield ``value``, and what is made from it by calls with these names alone."""
    yield value
    for call in trace.users(value):
        if call.name in names and call.outputs and call.outputs[0] != value:
            yield from chain(trace, call.outputs[0], names)


def users(trace: Trace, value: Value, names: Collection[str] = CASTS) -> list[tuple[Call, Value]]:
    """Return the calls that use a value, directly or after calls with these names, each with what it is given."""
    return [(call, made) for made in chain(trace, value, names) for call in trace.users(made) if call.name not in names]


def ancestors(trace: Trace, value: Value, most: int) -> list[Value]:
    """Return what a value is computed from, the nearest first, at most so many."""
    found: dict[int, Value] = {}
    queue = [value]
    while queue and len(found) < most:
        call = trace.producer(queue.pop(0))
        for given in call.inputs if call is not None else ():
            if given.number not in found:
                found[given.number] = given
                queue.append(given)
    return list(found.values())


def agree(computed: Tensor, traced: Tensor, relative: float = 1e-5) -> bool:
    """Return whether two tensors are the same up to roundings of FP32, which a reference may use inside."""
    if computed.shape != traced.shape or not computed.is_floating_point() or not traced.is_floating_point():
        return False
    computed, traced = computed.double(), traced.double()
    return bool(torch.linalg.vector_norm(computed - traced) <= relative * torch.linalg.vector_norm(traced))
