"""Compute a recorded forward pass again under a change: only the calls that it reaches, without the module's code."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.trace.calls import Misfit, changed_in_place, mapped, tensors_in
from parity.trace.trace import Call, Edit, Site, Trace, Value, grouped


@dataclass(frozen=True)
class Change:
    """Hold what a change of a recorded pass reaches.

    Attributes:
        edits: what calls return instead.
        parameters: other tensors, by the parameters' names.
        values: what has become of the values that it reaches, by number.
    """

    edits: Sequence[Edit]
    parameters: Mapping[str, Tensor]
    values: Mapping[int, Tensor]

    def is_part_of(self, edits: Sequence[Edit], parameters: Mapping[str, Tensor]) -> bool:
        """Return whether another change has all of this one's edits, and is about all of its parameters."""
        return set(self.edits) <= set(edits) and self.parameters.keys() <= parameters.keys()


class _Now:
    """Looks up what values are: found now, found before, or recorded."""

    def __init__(self, found: Mapping[int, Tensor], before: Mapping[int, Tensor], tensors: Sequence[Tensor]) -> None:
        self._found, self._before, self._tensors = found, before, tensors

    def __getitem__(self, number: int) -> Tensor:
        if number in self._found:
            return self._found[number]
        return self._before[number] if number in self._before else self._tensors[number]


class Replay:
    """A recorded forward pass, of which parts can be computed again.

    A module may hand tensors on where no call shows it, as through NumPy. So whoever replays it first compares what
    that gives with what the module computes, under a change that reaches everything.

    Attributes:
        made: how many calls have been made again.
        calls: how many were recorded.
    """

    def __init__(self, trace: Trace, outputs: Mapping[str, Value]) -> None:
        self.made = 0
        self.calls = len(trace.calls)
        self._trace = trace
        self._outputs = outputs
        self._order = {call.site: i for i, call in enumerate(trace.calls)}
        self._parameters = grouped(trace.parameters, trace.parameters.__getitem__)
        self._steps = [_Step(call) for call in trace.calls]
        self._readers: dict[int, list[int]] = defaultdict(list)
        for i, call in enumerate(trace.calls):
            for value in call.inputs:
                self._readers[value.number].append(i)
                made = trace.producer(value)
                if made is not None and value not in made.outputs:
                    self._steps[self._order[made.site]].writes_unseen = True

    def changed(self, edits: Sequence[Edit], parameters: Mapping[str, Tensor], beside: Change | None = None) -> Change:
        """Return what a pass computes under these edits, with other tensors for some parameters.

        Args:
            edits: what calls return instead.
            parameters: the other tensors, by the parameters' names.
            beside: a change of which these edits and tensors are more; only what they add is computed again.

        Raises:
            Misfit: if the module itself has to run, since the change reaches a shape, or a number that its code reads.
        """
        known = beside if beside is not None and beside.is_part_of(edits, parameters) else Change((), {}, {})
        found: dict[int, Tensor] = {}
        of_site = grouped(edits, lambda one: one.site)
        ahead = [self._place(one.site) for one in edits if one not in known.edits]
        for name, tensor in parameters.items():
            if name not in known.parameters or not torch.equal(known.parameters[name], tensor):
                for number in self._parameters.get(name, ()):
                    ahead += self._put(found, number, tensor)
        heapq.heapify(ahead)
        now = _Now(found, known.values, self._trace.tensors)
        before = -1
        while ahead:
            i = heapq.heappop(ahead)
            if i > before:
                before, step = i, self._steps[i]
                is_edited = any(one.site == step.call.site for one in known.edits)
                is_given_others = is_edited or not found.keys().isdisjoint(step.inputs)
                results = self._made(i, of_site.get(step.call.site, ()), now, is_given_others)
                for number, tensor in zip(step.outputs, results, strict=True):
                    for reader in self._put(found, number, tensor):
                        heapq.heappush(ahead, reader)
        return Change(edits, parameters, {**known.values, **found})

    def outputs(self, change: Change) -> dict[str, Tensor]:
        """Return the outputs under a change, by name."""
        now = _Now({}, change.values, self._trace.tensors)
        return {name: now[value.number] for name, value in self._outputs.items()}

    def _place(self, site: Site) -> int:
        if site not in self._order:
            raise Misfit(f"no call at {site}")
        return self._order[site]

    def _put(self, found: dict[int, Tensor], number: int, tensor: Tensor) -> Sequence[int]:
        """Note what a value is now, and return the calls that read it."""
        if number in self._trace.read or tensor.shape != self._trace.tensors[number].shape:
            raise Misfit("the module may make other calls")
        found[number] = tensor
        return self._readers.get(number, ())

    def _made(self, i: int, edits: Sequence[Edit], now: _Now, is_given_others: bool) -> Sequence[Tensor]:
        """Return what a call returns, from what values are now."""
        step = self._steps[i]
        if step.writes_unseen:
            raise Misfit("a call writes to what another tensor shares")
        if is_given_others:
            result = step.made(now)
            self.made += 1
        else:
            result = mapped(step.call.result, lambda value: now[value.number], Value)
        if edits and (step.call.name == "setitem" or not step.inputs.isdisjoint(step.outputs)):
            raise Misfit("a call returns what it is given")
        for one in edits:
            result = one.compute(result, *(now[self._needed(value, i)] for value in one.needs))
        return (result,) if isinstance(result, Tensor) else tensors_in(result)

    def _needed(self, value: Value, at: int) -> int:
        """Return the value of this pass that stands at the place of another recording's, before a call or at it."""
        place = self._place(value.site)
        if place > at:
            raise Misfit(f"no call at {value.site} came before")
        call = self._trace.calls[place]
        return (call.outputs if value.returned else call.inputs)[value.position].number


class _Step:
    """A call, such that it can be made often.

    Attributes:
        call: the call.
        inputs, outputs: the numbers of what it is given and returns.
        writes_unseen: whether it changes a tensor that it neither is given nor returns.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.inputs = {value.number for value in call.inputs}
        self.outputs = [value.number for value in call.outputs]
        self.writes_unseen = False
        self._given = list(call.args)
        self._places = [(i, x.number) for i, x in enumerate(call.args) if isinstance(x, Value)]
        self._is_plain = len(self._places) == len(call.inputs)
        self._may_write = "out" in call.kwargs or changed_in_place(call.function, (Tensor(),), {}) is not None

    def made(self, now: _Now) -> Any:
        """Make the call again, with what values are now; return the changed tensor if it changes one."""
        given, named = list(self._given), self.call.kwargs
        if self._is_plain:
            for i, number in self._places:
                given[i] = now[number]
        else:
            given, named = mapped((given, named), lambda value: now[value.number], Value)
        if not self._may_write:
            return self.call.function(*given, **named)
        if "out" in named:
            raise Misfit("a call writes to a tensor of its own")
        given[0] = given[0].clone()
        self.call.function(*given, **named)
        return given[0]
