"""Find the values that calls read, and replace them for one reader or for all."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from parity.trace.calls import is_in_place
from parity.trace.trace import RESHAPES, Call, Edit, Trace, Value, ancestors, binary, edit, unnumbered

_NUMBER = re.compile(r"\d+")
_NEAR = 8  # a learned number's parameter is looked for among this many of its ancestors


@dataclass(frozen=True, eq=False)
class Place:
    """A place of a value: the input of a call, where another value may replace it, or the call that makes it.

    Attributes:
        value: a value of the reference.
        call: the call that reads the value or makes it.
        position: the value's position among the call's inputs; None if the call makes it.
    """

    value: Value
    call: Call
    position: int | None = None

    @property
    def role(self) -> tuple[object, ...]:
        """The place, without the numbers of layers."""
        path, *others = self.call.site
        return (unnumbered(path), *others, self.value.position if self.position is None else self.position)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the layers that the place is in."""
        return tuple(map(int, _NUMBER.findall(self.call.site[0])))

    @property
    def before(self) -> int:
        """The number of the first value that does not exist yet at this place."""
        return min(value.number for value in self.call.outputs)


def places(trace: Trace) -> list[Place]:
    """Return a place for each activation that a computing call reads."""
    found = []
    for call in trace.calls:
        if call.name not in RESHAPES and _can_be_made_again(call):
            given = enumerate(call.inputs)
            found += [Place(value, call, position) for position, value in given if is_activation(trace, value)]
    return found


def is_activation(trace: Trace, value: Value) -> bool:
    """Return whether a value has channels and is not a parameter, or is a number or a vector made of parameters."""
    tensor = trace.tensor(value)
    if not tensor.is_floating_point() or trace.parameter(value) is not None:
        return False
    return tensor.dim() > 1 or any(trace.parameter(x) is not None for x in ancestors(trace, value, _NEAR))


def edits_at(others: Sequence[tuple[Place, Value]], trace: Trace) -> tuple[Edit, ...]:
    """Return the edits that put another value in each place, flattened to rows if the call reads a matrix."""
    by_call: dict[int, tuple[Call, dict[int | None, Value]]] = {}
    edits = []
    for place, other in others:
        by_call.setdefault(id(place.call), (place.call, {}))[1][place.position] = other
    for call, instead in by_call.values():
        given = [instead.get(position, value) for position, value in enumerate(call.inputs)]
        read_instead = ((position, value) for position, value in enumerate(call.inputs) if position in instead)
        as_rows = {position for position, value in read_instead if trace.tensor(value).dim() == 2}
        edits.append(edit(call, given, _given(call, as_rows)))
    return tuple(edits)


def made_again(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Return the result of a call for other tensors, given in the order of its own."""
    tensors = iter(inputs)
    function = binary(call) if is_in_place(call) else None
    if function is not None:
        name, *operands = function
        return getattr(torch, name)(*(next(tensors) if isinstance(one, Value) else one for one in operands))
    leaves, structure = tree_flatten((call.args, call.kwargs))
    args, kwargs = tree_unflatten([next(tensors) if isinstance(one, Value) else one for one in leaves], structure)
    return call.function(*args, **kwargs)


def reading_instead(call: Call, value: Value, instead: Callable[..., Tensor], given: Sequence[Value]) -> Edit:
    """Return the edit that makes a call read ``instead(*given)`` wherever it reads this value."""
    others = [one for one in call.inputs if one != value]

    def compute(was: Any, *values: Tensor) -> Any:
        read, rest = instead(*values[: len(given)]), iter(values[len(given) :])
        return made_again(call, [read.to(was.dtype) if one == value else next(rest) for one in call.inputs])

    return edit(call, (*given, *others), compute)


def _given(call: Call, as_rows: Container[int]) -> Callable[..., Any]:
    def compute(was: Any, *others: Tensor) -> Any:
        inputs = [x.flatten(0, -2) if position in as_rows else x for position, x in enumerate(others)]
        before = iter([x for x in tree_leaves(was) if isinstance(x, Tensor)])
        return tree_map_only(Tensor, lambda x: x.to(next(before).dtype), made_again(call, inputs))

    return compute


def _can_be_made_again(call: Call) -> bool:
    return not is_in_place(call) or (binary(call) is not None and "out" not in call.kwargs)


def described(value: Value, trace: Trace) -> str:
    """Return a description of a value by the call that makes it, or by the first one that reads it."""
    call = trace.producer(value)
    if call is None:
        return f"the input of the module that the {trace.users(value)[0].described} is given"
    is_part = len(call.outputs) > 1 and value in call.outputs
    part = f"part {call.outputs.index(value) + 1} of " if is_part else ""
    return f"{part}the result of the {call.described}"


class Layers:
    """Find the values of other layers that correspond to a value of one layer."""

    def __init__(self, trace: Trace) -> None:
        self._made: dict[object, dict[tuple[int, ...], Value]] = defaultdict(dict)
        self._read: dict[object, dict[tuple[int, ...], Value]] = defaultdict(dict)
        self._readers: dict[int, list[Place]] = defaultdict(list)
        for call in trace.calls:
            for value in call.outputs:
                place = Place(value, call)
                self._made[place.role].setdefault(place.numbers, value)
            for position, value in enumerate(call.inputs):
                place = Place(value, call, position)
                self._read[place.role].setdefault(place.numbers, value)
                self._readers[value.number].append(place)
        self._trace = trace

    def elsewhere(self, value: Value, here: tuple[int, ...], there: tuple[int, ...]) -> Value | None:
        """Return the value in layer ``there`` that corresponds to ``value`` in layer ``here``; None without one."""
        producer = self._trace.producer(value)
        made = None if producer is None else Place(value, producer)
        if made is not None and made.numbers == here:
            return self._made[made.role].get(there)
        for place in self._readers[value.number]:
            if place.numbers == here and there in self._read[place.role]:
                return self._read[place.role][there]
        if made is None or not made.numbers:
            return value
        if len(made.numbers) != len(here) or len(here) != len(there):
            return None
        moved = tuple(m + t - h for m, h, t in zip(made.numbers, here, there, strict=True))
        return self._made[made.role].get(moved)
