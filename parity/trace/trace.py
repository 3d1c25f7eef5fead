"""Represent a reference's computation as the sequence of its calls of PyTorch's functions, edit it, and walk it.

A call is identified by the submodule that makes it, how often that submodule was called before, the function's name,
and how often this ``forward`` called the function before. Code around the module, such as a pair's ``call_reference``,
counts as one more submodule. ``parity.trace.calls`` records traces and applies edits. Steps of optimizers are recorded
as well.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

# Record the optimizers that a module steps in its forward pass, and their settings.


@dataclass
class Stepped:
    """An optimizer that made steps.

    Attributes:
        kind: its class.
        groups: the settings of each group of parameters at its first step.
        rates: the first group's learning rate at each step.
    """

    kind: type[Optimizer]
    groups: list[dict[str, Any]]
    rates: list[float]


@contextmanager
def optimizers_recorded() -> Iterator[list[Stepped]]:
    """Record the optimizers that make steps within the context."""
    seen: list[Stepped] = []
    known: list[Optimizer] = []

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        place = next((i for i, one in enumerate(known) if one is optimizer), len(known))
        if place == len(known):
            known.append(optimizer)
            seen.append(Stepped(type(optimizer), [settings_of(group) for group in optimizer.param_groups], []))
        seen[place].rates.append(float(optimizer.param_groups[0]["lr"]))

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield seen
    finally:
        handle.remove()
        known.clear()


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


# The sequence of a reference's calls of PyTorch's functions, and edits that change what calls return.


Site = tuple[str, int, str, int]


@dataclass(frozen=True)
class Value:
    """A tensor of a trace, and how to find it again in another run.

    Attributes:
        number: its number in order of appearance, from 0.
        site: the call that returned it, or the first call that it was passed to.
        position: its place among the tensors that this call returned or was given.
        returned: whether the call returned it.
    """

    number: int
    site: Site
    position: int
    returned: bool


@dataclass(frozen=True)
class Call:
    """A call of one of PyTorch's functions, with each tensor in its arguments and results as a ``Value``.

    Attributes:
        site: identifies the call.
        name: the function's name without underscores around it: ``mul`` for ``x * y``, ``x.mul_(y)``, ``torch.mul``.
        function: the function that was called.
        args: positional arguments.
        kwargs: keyword arguments.
        result: what it returned, or the tensor that it changed if it returned nothing.
    """

    site: Site
    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @functools.cached_property
    def inputs(self) -> list[Value]:
        """All tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)]

    @functools.cached_property
    def outputs(self) -> list[Value]:
        """All tensors that the call returned."""
        return [leaf for leaf in tree_leaves(self.result) if isinstance(leaf, Value)]

    @property
    def module(self) -> str:
        """The submodule that makes the call."""
        return self.site[0] or "the module"

    @property
    def described(self) -> str:
        """The words for the call in messages, such as ``2nd 'linear' of layers.0``."""
        return f"{ordinal(self.site[3] + 1)} {self.name!r} of {self.module}"


def ordinal(count: int) -> str:
    """Return ``1st``, ``2nd``, and so on."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{count}{'th' if 10 < count % 100 < 14 else endings.get(count % 10, 'th')}"


@dataclass
class Trace:
    """Every call of a module's forward pass, in order.

    Attributes:
        calls: the calls that return or change tensors.
        tensors: each value's tensor, detached unless it was recorded with its graph.
        parameters: names of the values that are parameters, by number.
        buffers: names of the values that are buffers, by number.
        optimizers: the optimizers of ``torch.optim`` that made steps.
        clips: the largest norm that each clipping of gradients allowed.
        read: the numbers of values whose elements Python code has read, so that its later calls may depend on them.
    """

    calls: list[Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)
    optimizers: list[Stepped] = field(default_factory=list)
    clips: list[float] = field(default_factory=list)
    read: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._producers: dict[int, Call] = {}
        self._users: dict[int, list[Call]] = {}
        self.found: dict[Any, Any] = {}  # see ``once_a_trace``

    def add(self, call: Call) -> None:
        """Append a call."""
        self.calls.append(call)
        for value in call.inputs:
            self._users.setdefault(value.number, []).append(call)
        given = {value.number for value in call.inputs}
        for value in call.outputs:
            if value.number not in given:  # a cast to a tensor's own dtype returns the tensor itself
                self.note_producer(value, call)

    def note_producer(self, value: Value, call: Call) -> None:
        """Note that this call produced the value, which it returned or wrote into its memory."""
        self._producers[value.number] = call

    def producer(self, value: Any) -> Call | None:
        """Return the call that produced a value, or None for inputs, parameters and anything that is not a value."""
        return self._producers.get(value.number) if isinstance(value, Value) else None

    def users(self, value: Value) -> list[Call]:
        """Return the calls that were given a value, in order."""
        return self._users.get(value.number, [])

    def tensor(self, value: Value) -> Tensor:
        """Return a value's tensor."""
        return self.tensors[value.number]

    def parameter(self, value: Any) -> str | None:
        """Return the parameter's name if a value is a parameter, or None."""
        return self.parameters.get(value.number) if isinstance(value, Value) else None


Found = TypeVar("Found")


def once_a_trace(find: Callable[[Trace], list[Found]]) -> Callable[[Trace], list[Found]]:
    """Return ``find`` with its result kept for each trace, which must be complete, so that it searches only once."""

    @functools.wraps(find)
    def kept(trace: Trace) -> list[Found]:
        if find not in trace.found:
            trace.found[find] = find(trace)
        found: list[Found] = trace.found[find]
        return found

    return kept


Substitute = Callable[..., Any]


class Changeable(Protocol):
    """An operation that was recognised in a trace, and can be computed with other attributes."""

    def edits(self, **changes: Any) -> Sequence[Edit]: ...


@dataclass(frozen=True, eq=False)
class Changed:
    """The attributes of an operation that an edit changes, by name."""

    operation: Changeable
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Edit:
    """A change to what a call returns.

    Attributes:
        site: the call.
        needs: values that appear at or before the call.
        compute: returns the call's new result, given its own result and the values of ``needs``.
        detached: the position of the tensor among the arguments that gets no gradient; None for none.
        of: the change to a recognised operation that the edit makes; None if it does not change a recognised one.
    """

    site: Site
    needs: tuple[Value, ...]
    compute: Substitute
    detached: int | None = None
    of: Changed | None = field(default=None, compare=False, repr=False)


def edit(call: Call, needs: Sequence[Value], compute: Substitute, of: Changed | None = None) -> Edit:
    """Return an edit under which ``call`` returns ``compute(result, *needs)`` instead of its result."""
    return Edit(call.site, tuple(needs), compute, of=of)


def instead(call: Call, needs: Sequence[Value], compute: Substitute, of: Changed | None = None) -> Edit:
    """Return an edit under which ``call`` returns ``compute(*needs)``, in the dtype of its own result."""
    return edit(call, needs, lambda was, *values: compute(*values).to(was.dtype), of)


def passing_on(call: Call, x: Value) -> Edit:
    """Return an edit under which ``call`` returns its argument ``x`` unchanged."""
    return instead(call, (x,), lambda x: x)


def added(call: Call | None) -> tuple[Value, Value] | None:
    """Return the two tensors whose sum a call returns, or None for any other call."""
    match binary(call):
        case ("add", Value() as left, Value() as right):
            return left, right
    return None


def detached(call: Call, value: Value) -> Edit:
    """Return an edit under which ``call`` passes no gradient to its argument ``value``."""
    return Edit(call.site, (), lambda result: result, call.inputs.index(value))


# Walk through a trace, from a value back to its sources and forward to its users.


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
"""Calls that concatenate tensors."""

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
    """Return a path with ``#`` for its numbers, such as ``layers.#.mlp``, which is the same for all similar layers."""
    return _NUMBER.sub("#", path)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items grouped by their key, in order of appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def binary(call: Call | None) -> tuple[str, Any, Any] | None:
    """Return the name in ``torch`` of a function of two operands, and the operands in order, or None for others."""
    if call is None or len(call.args) < 2:
        return None
    name, (left, right) = call.name, call.args[:2]
    if name in _REVERSED:
        return _REVERSED[name], right, left
    name = _SPELLINGS.get(name, name)
    return (name, left, right) if name in ("add", "sub", "mul", "div", "pow", "matmul") else None


def argument(call: Call, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, which may be passed by position or by name."""
    return call.args[position] if len(call.args) > position else call.kwargs.get(name, default)


def with_number(call: Call | None) -> tuple[str, Value, float] | None:
    """Return the name of a function of a tensor and a number, the tensor and the number, or None for any other call.

    The tensor must come first unless the order does not matter, so that ``1 / x`` does not count.
    """
    match binary(call):
        case (name, Value() as value, int() | float() as number):
            return name, value, float(number)
        case ("add" | "mul" as name, int() | float() as number, Value() as value):
            return name, value, float(number)
    return None


def other(call: Call, value: Value) -> Any:
    """Return the other operand of a function of two operands."""
    _, left, right = binary(call) or ("", value, value)
    return right if left == value else left


def back(trace: Trace, value: Any, names: Collection[str] = CASTS) -> Any:
    """Return the value from which this one was made only by calls with these names."""
    call = trace.producer(value)
    while call is not None and call.name in names and call.inputs:
        value = call.inputs[0]
        call = trace.producer(value)
    return value


def back_along(trace: Trace, value: Value, names: Collection[str]) -> Value:
    """Return the source of a value as ``back`` does, along the operand that is as large as the result.

    A gate, for example, may be either operand.
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
    """Yield ``value``, and the values that are made from it only by calls with these names."""
    yield value
    for call in trace.users(value):
        if call.name in names and call.outputs and call.outputs[0] != value:
            yield from chain(trace, call.outputs[0], names)


def users(trace: Trace, value: Value, names: Collection[str] = CASTS) -> list[tuple[Call, Value]]:
    """Return the calls that use a value, directly or after calls with these names, each with its argument."""
    return [(call, made) for made in chain(trace, value, names) for call in trace.users(made) if call.name not in names]


def ancestors(trace: Trace, value: Value, most: int) -> list[Value]:
    """Return at most ``most`` values that a value is computed from, the nearest first."""
    found: dict[int, Value] = {}
    queue = [value]
    while queue and len(found) < most:
        call = trace.producer(queue.pop(0))
        for given in call.inputs if call is not None else ():
            if given.number not in found:
                found[given.number] = given
                queue.append(given)
    return list(found.values())


def parameters_around(trace: Trace) -> list[tuple[Set[str], Set[str]]]:
    """Return for each call, in order, the names of the parameters before it and of those after it.

    The former are those that its arguments are computed from, the latter those that are used together with its result
    or with anything computed from that. An error of the call changes the gradients of all of them.
    """
    made_from: dict[int, Set[str]] = defaultdict(set, {number: {name} for number, name in trace.parameters.items()})
    before: list[Set[str]] = []
    for call in trace.calls:
        before.append(set().union(*(made_from[value.number] for value in call.inputs)))
        for value in call.outputs:
            made_from[value.number] = made_from[value.number] | before[-1]
    used_with: dict[int, Set[str]] = defaultdict(set)
    after: list[Set[str]] = []
    for call in reversed(trace.calls):
        after.append(set().union(*(used_with[value.number] for value in call.outputs)))
        own = {name for value in call.inputs if (name := trace.parameter(value)) is not None}
        for value in call.inputs:
            used_with[value.number] = used_with[value.number] | after[-1] | own
    return list(zip(before, reversed(after), strict=True))


def agree(computed: Tensor, traced: Tensor, relative: float = 1e-5) -> bool:
    """Return whether two tensors are equal up to FP32 rounding, because a reference may use FP32 inside."""
    if computed.shape != traced.shape or not computed.is_floating_point() or not traced.is_floating_point():
        return False
    computed, traced = computed.double(), traced.double()
    return bool(torch.linalg.vector_norm(computed - traced) <= relative * torch.linalg.vector_norm(traced))
