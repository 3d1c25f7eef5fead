"""Compute a recorded forward pass again under a change: only the calls that it reaches, without the module's code."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from parity.trace.calls import Misfit, changed_in_place, mapped, tensors_in
from parity.trace.trace import Call, Edit, Site, Trace, Value, grouped


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

    def under(self, edits: Sequence[Edit], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name under these edits, with other tensors for some parameters.

        Raises:
            Misfit: if the module itself has to run, since the change reaches a shape, or a number that its code reads.
        """
        of_site = grouped(edits, lambda one: one.site)
        found: dict[int, Tensor] = {}
        ahead = [self._place(site) for site in of_site]
        for name, tensor in parameters.items():
            for number in self._parameters.get(name, ()):
                ahead += self._put(found, number, tensor)
        heapq.heapify(ahead)
        before = -1
        while ahead:
            i = heapq.heappop(ahead)
            if i > before:
                before, step = i, self._steps[i]
                results = self._made(i, step, of_site.get(step.call.site, ()), found)
                for number, tensor in zip(step.outputs, results, strict=True):
                    for reader in self._put(found, number, tensor):
                        heapq.heappush(ahead, reader)
        return {name: self._now(found, value.number) for name, value in self._outputs.items()}

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

    def _now(self, found: Mapping[int, Tensor], number: int) -> Tensor:
        return found[number] if number in found else self._trace.tensors[number]

    def _made(self, i: int, step: _Step, edits: Iterable[Edit], found: Mapping[int, Tensor]) -> Sequence[Tensor]:
        """Return what a call returns, from what has been found."""
        if step.writes_unseen:
            raise Misfit("a call writes to what another tensor shares")
        if not found.keys().isdisjoint(step.inputs):
            result = step.made(lambda number: self._now(found, number))
            self.made += 1
        else:
            result = mapped(step.call.result, self._trace.tensor, Value)
        if edits and (step.call.name == "setitem" or not step.inputs.isdisjoint(step.outputs)):
            raise Misfit("a call returns what it is given")
        for one in edits:
            result = one.compute(result, *(self._now(found, self._needed(value, i)) for value in one.needs))
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

    def made(self, now: Any) -> Any:
        """Make the call again, given what values are now; return the changed tensor if it changes one."""
        given, named = list(self._given), self.call.kwargs
        if self._is_plain:
            for i, number in self._places:
                given[i] = now(number)
        else:
            given, named = mapped((given, named), lambda value: now(value.number), Value)
        if not self._may_write:
            return self.call.function(*given, **named)
        if "out" in named:
            raise Misfit("a call writes to a tensor of its own")
        given[0] = given[0].clone()
        self.call.function(*given, **named)
        return given[0]
