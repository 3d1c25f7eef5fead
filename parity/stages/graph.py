"""The reference's calls as a graph, of which any part can be computed again in FP64 from values that are given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.numerics.golden import in_fp64
from parity.passes.all_passes import as_activation
from parity.passes.one_pass import named_outputs, outputs_of
from parity.passes.prepare import Prepared, cast
from parity.stages.watch import SMALLEST
from parity.trace.calls import Misfit, is_in_place, mapped, tensors_in, tracing
from parity.trace.trace import JOINS, RESHAPES, Call, Edit, Site, Trace, Value, grouped

_PARTS = ("getitem", "setitem", "chunk", "split", "tensor_split", "split_with_sizes", "te.SplitAlongDim", "unbind")
_CHOICES = ("select", "narrow", "index", "index_select", "masked_select", "stack", "pad", "detach", "requires_grad")
_ORDERS = ("expand", "expand_as", "repeat", "repeat_interleave", "roll", "flip", "movedim", "swapaxes")
MOVES = RESHAPES | JOINS | {*_PARTS, *_CHOICES, *_ORDERS, "view_as", "reshape_as"}
"""Calls that move elements and compute nothing."""

PICKS = MOVES | {"topk", "sort", "max", "min", "amax", "amin", "gather", "kthvalue", "where", "masked_fill"}
"""Calls that return elements of what they are given, which ones may depend on its numbers."""


class Graph:
    """A reference's trace in FP64.

    Attributes:
        trace: the calls.
        outputs: the values that the pair's call of the reference returns, by name.
        order: each call's place.
        computed: the floating-point values that calls compute, in order, without those that only move all elements.
        read: by a value's number, which of its rows any output depends on, ``[..., 1]``; values all of whose rows are
            read, or where this is not known, are left out.
    """

    def __init__(self, trace: Trace, outputs: Mapping[str, Value]) -> None:
        self.read: dict[int, Tensor] = {}
        self.trace = trace
        self.outputs = outputs
        self.order: dict[Site, int] = {call.site: i for i, call in enumerate(trace.calls)}
        self._bits = {name: 1 << i for i, name in enumerate(sorted(set(trace.parameters.values())))}
        # By a value's number: its parameters as bits, and the values it depends on as bits of their numbers.
        self._lineages: dict[int, int] = {number: self._bits[name] for number, name in trace.parameters.items()}
        self._from_input: set[int] = set()
        self.above: dict[int, int] = defaultdict(int)
        self.computed: list[Value] = []
        self._follow_calls()

    def _follow_calls(self) -> None:
        fixed = self.trace.parameters.keys() | self.trace.buffers.keys()
        for call in self.trace.calls:
            lineage, above, from_input = 0, 0, False
            for value in call.inputs:
                is_given = self.trace.producer(value) is None and value.number not in fixed
                if is_given and self.trace.tensor(value).is_floating_point():
                    self._from_input.add(value.number)
                lineage |= self._lineages.get(value.number, 0)
                above |= self.above[value.number] | 1 << value.number
                from_input |= value.number in self._from_input
            for value in call.outputs:
                if self.trace.producer(value) is not call:
                    continue
                self._lineages[value.number] = lineage
                self.above[value.number] = above
                if from_input:
                    self._from_input.add(value.number)
                tensor = self.trace.tensor(value)
                is_large = tensor.is_floating_point() and tensor.numel() >= SMALLEST
                if is_large and not (call.name in RESHAPES and call.inputs):
                    self.computed.append(value)

    def bits(self, names: Collection[str]) -> int:
        """Return parameters, by name, as bits of one number."""
        return sum(self._bits.get(name, 0) for name in set(names))

    def names(self, bits: int) -> list[str]:
        """Return the parameters whose bits are set."""
        return [name for name, bit in self._bits.items() if bits & bit]

    def lineage(self, value: Value) -> int:
        """Return the parameters that a value is computed from, as bits."""
        return self._lineages.get(value.number, 0)

    def rows_read(self, value: Value, x: Tensor) -> Tensor | None:
        """Return which rows of a tensor, which has a value's place, are read; None for all.

        An expert may have other tokens in the candidate, of which nothing is known.
        """
        rows = self.read.get(value.number)
        return rows if rows is not None and rows.shape[:-1] == x.shape[:-1] else None

    def is_activation(self, value: Value) -> bool:
        """Return whether a value depends on a weight or an input, unlike tables and masks."""
        return bool(self.lineage(value)) or value.number in self._from_input

    def needs_gradient(self, value: Value, trained: Collection[str], has_inputs: bool) -> bool:
        """Return whether a value depends on one of these parameters, or on an input if inputs get gradients."""
        return bool(self.lineage(value) & self.bits(trained)) or (has_inputs and value.number in self._from_input)

    def is_above(self, first: Value, second: Value) -> bool:
        """Return whether the second value is computed from the first."""
        return bool(self.above[second.number] >> first.number & 1)

    def same_value(self, value: Value) -> Value:
        """Return the value at the place that another trace of the same reference has it.

        Raises:
            Misfit: if there is none.
        """
        if value.site not in self.order:
            raise Misfit(f"no call at {value.site}")
        call = self.trace.calls[self.order[value.site]]
        return (call.outputs if value.returned else call.inputs)[value.position]

    @cached_property
    def by_lineage(self) -> dict[int, list[Value]]:
        """The computed values that are activations, by their lineage."""
        found: dict[int, list[Value]] = defaultdict(list)
        for value in self.computed:
            if self.is_activation(value):
                found[self.lineage(value)].append(value)
        return found

    def between(self, end: Value, begins: Collection[int]) -> tuple[list[Call], set[int]]:
        """Return the calls that compute a value from others, in order, and which of the others these calls read.

        Args:
            end: the value.
            begins: the others' numbers; a value that depends on none of them is computed from the pass's inputs.
        """
        calls: dict[Site, Call] = {}
        read: set[int] = set()
        todo = [end]
        while todo:
            call = self.trace.producer(todo.pop())
            if call is None or call.site in calls:
                continue
            calls[call.site] = call
            for value in call.inputs:
                if value.number in begins and value.number != end.number:
                    read.add(value.number)
                else:
                    todo.append(value)
        return sorted(calls.values(), key=lambda call: self.order[call.site]), read


def traced_graph(prepared: Prepared) -> Graph:
    """Run the reference once in FP64, and return its graph."""
    with torch.no_grad(), in_fp64():
        return _run_and_trace(prepared, cast(prepared.inputs, torch.float64), with_graph=False)


def find_rows_read(prepared: Prepared, graph: Graph) -> None:
    """Fill in ``graph.read``: a row is read if golden has a gradient there, unlike those of padding tokens."""
    inputs = tree_map_only(Tensor, as_activation, cast(prepared.inputs, torch.float64))
    with torch.enable_grad(), in_fp64():
        again = _run_and_trace(prepared, inputs, with_graph=True)
        tensors = {value.number: again.trace.tensor(value) for value in again.computed}
        tensors = {number: x for number, x in tensors.items() if x.requires_grad and x.dim() > 1}
        outputs = [(again.trace.tensor(value), prepared.cotangents[name]) for name, value in again.outputs.items()]
        outputs = [(x, gradient) for x, gradient in outputs if x.requires_grad]
        if not outputs:  # a reference in evaluation may switch gradients off itself
            return
        gradients = torch.autograd.grad(
            [x for x, _ in outputs],
            list(tensors.values()),
            [gradient.to(x) for x, gradient in outputs],
            allow_unused=True,
        )
    for number, gradient in zip(tensors, gradients, strict=True):
        rows = None if gradient is None else gradient.ne(0.0).any(-1, keepdim=True)
        if rows is not None and bool(rows.any()) and not bool(rows.all()):
            graph.read[number] = rows


def _run_and_trace(prepared: Prepared, inputs: Any, with_graph: bool) -> Graph:
    prepared.reference.double()
    found: list[Graph] = []

    def traced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with tracing(module, with_graph) as trace:
            returned = (prepared.call or nn.Module.__call__)(module, *args, **kwargs)
            outputs = named_outputs(returned)
            for x in outputs.values():
                x.clone()  # traced as a call, which tells the outputs from other values
        values = [trace.calls.pop().inputs[0] for _ in outputs]
        found.append(Graph(trace, dict(zip(reversed(outputs), values, strict=True))))
        return returned

    outputs_of(prepared.reference, traced, inputs)
    return found[0]


class Values:
    """Values of a graph in FP64, computed when they are asked for, with some of them given, and calls edited.

    Args:
        graph: the reference's.
        given: tensors to use, by the value's number.
        edits: changes to what calls return; those that only detach a gradient change nothing here.
    """

    def __init__(self, graph: Graph, given: Mapping[int, Tensor] | None = None, edits: Sequence[Edit] = ()) -> None:
        self.given: dict[int, Tensor] = dict(given or {})
        self._edits = grouped(edits, lambda one: one.site)
        self._graph = graph
        self._kept: dict[int, Tensor] = {}

    def get(self, value: Value) -> Tensor:
        """Return a value.

        Raises:
            Misfit: if a call on the way cannot be made again.
        """
        number = value.number
        if number not in self.given and number not in self._kept:
            calls, _ = self._graph.between(value, self.given.keys() | self._kept.keys())
            with torch.no_grad(), in_fp64():
                for call in calls:
                    self._make_call(call)
        return self._find_tensor(value)

    def _find_tensor(self, value: Value) -> Tensor:
        for known in (self.given, self._kept):
            if value.number in known:
                return known[value.number]
        return self._graph.trace.tensor(value)

    def _make_call(self, call: Call) -> None:
        args, kwargs = mapped((call.args, call.kwargs), self._find_tensor, Value)
        try:
            if is_in_place(call):
                args = (args[0].clone(), *args[1:])
                call.function(*args, **kwargs)
                made: Any = args[0]
            else:
                made = call.function(*args, **kwargs)
            for edit in self._edits.get(call.site, ()):
                made = edit.compute(made, *(self.get(self._graph.same_value(value)) for value in edit.needs))
        except Exception as error:  # a call may raise anything on values that its code does not expect
            raise Misfit(f"{call.described} cannot be computed again") from error
        results = tensors_in(made)
        if len(results) != len(call.outputs) or "out" in kwargs:
            raise Misfit(f"{call.described} writes to a tensor of its own, or to several")
        for value, x in zip(call.outputs, results, strict=True):
            if value.number not in self.given:
                self._kept[value.number] = x

    def give(self, value: Value, x: Tensor) -> None:
        """Use another tensor for a value from now on; it is laid out in memory as the value is."""
        self.given[value.number] = laid_out_as(x, self._graph.trace.tensor(value))
        self._kept.pop(value.number, None)
        for number in [n for n in self._kept if self._graph.above[n] >> value.number & 1]:
            del self._kept[number]

    def assuming(self, others: Mapping[Value, Tensor]) -> Values:
        """Return a copy in which more values are given."""
        copy = Values(self._graph, self.given)
        copy._kept = dict(self._kept)
        for value, x in others.items():
            copy.give(value, x)
        return copy

    def without(self, value: Value) -> Values:
        """Return a copy in which one value is computed instead of given."""
        return Values(self._graph, {number: x for number, x in self.given.items() if number != value.number})


def laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """Return a copy of a tensor whose elements lie in memory as another's do, so that the same views can be taken.

    An expert's tokens may be more or fewer in the candidate, since its router is off by roundings.
    """
    if x.numel() != like.numel():
        return x.clone()
    return torch.empty_like(like, dtype=x.dtype, device=x.device).copy_(x.reshape(like.shape))
