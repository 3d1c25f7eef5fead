"""Compute the reference as if mistakes had been made with it: its outputs, its gradients, and the calls it makes.

Where a recorded pass can be made again, only the calls that the mistakes reach are, without the module's code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case.case import Rng
from parity.mistakes.hypothesis import Hypothesis, ModuleCall, together
from parity.numerics.freedom import UNFUSED, Choices, Freedom, Kinks
from parity.numerics.golden import attention_in_blocks, in_blocks, in_fp64
from parity.passes.all_passes import Tensors, tensors_of, under_model
from parity.passes.draws import ScaledLookups, is_lookup
from parity.passes.nominal_clock import OutOfTime
from parity.passes.one_pass import named_outputs, outputs_of, run
from parity.passes.prepare import Prepared, cast, cast_module
from parity.trace.calls import Misfit, changed_in_place, edited, mapped, tensors_in, tracing
from parity.trace.trace import Call, Edit, Site, Trace, Value, grouped

if TYPE_CHECKING:
    from parity.te import Precision

# What each takes, in forward passes in FP64: a pass in FP32, a backward pass, and any pass under a rounding model.
_IN_FP32 = 0.5
BACKWARD = 2.0
_ROUNDED = 2.0
_MOVED = 1e-3  # by about this share of it each element of a parameter is moved, to see whether a replay is faithful


def outputs_under(
    prepared: Prepared, hypotheses: Sequence[Hypothesis], dtype: torch.dtype, rows: slice | None = None
) -> dict[str, Tensor] | None:
    """Return the reference's outputs if the hypotheses were true; None if they cannot be computed.

    Args:
        prepared: what was compared.
        hypotheses: that hold at once.
        dtype: in which to compute.
        rows: of each input's first dimension; None for all.
    """
    _cast_if_other(prepared.reference, dtype)
    inputs = cast(prepared.inputs, dtype)
    prepared.clock.advance(1.0, _share(inputs, rows) * (1.0 if dtype is torch.float64 else _IN_FP32))
    if rows is not None:
        inputs = tree_map_only(Tensor, lambda x: x[rows], inputs)
    try:
        with torch.no_grad(), in_fp64() if dtype is torch.float64 else attention_in_blocks():
            return outputs_of(prepared.reference, _call_under(prepared, hypotheses), inputs)
    except Exception:  # the user's code may raise anything, given what it does not expect
        return None


def differentiable_outputs(prepared: Prepared, hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor] | None:
    """Return all rows of the outputs as ``outputs_under``, in FP64, with the graph that autograd needs."""
    _cast_if_other(prepared.reference, torch.float64)
    inputs = cast(prepared.inputs, torch.float64)
    prepared.clock.advance(1.0)
    try:
        with torch.enable_grad(), in_fp64():
            return outputs_of(prepared.reference, _call_under(prepared, hypotheses), inputs)
    except Exception:  # as above
        return None


class Outputs:
    """The reference's outputs under hypotheses, of which only what these change is computed again.

    Where that may not be what the reference computes, all of it is.
    """

    def __init__(
        self, prepared: Prepared, dtype: torch.dtype, rows: slice | None = None, differentiable: bool = False
    ) -> None:
        """Record a pass.

        Args:
            prepared, dtype, rows: as for ``outputs_under``.
            differentiable: whether outputs come as from ``differentiable_outputs``, with a graph back to what the
                hypotheses change; then they are of all rows and in FP64.
        """
        self._given = prepared, dtype, rows
        self._differentiable = differentiable
        self._share = _share(prepared.inputs, rows) * (1.0 if dtype is torch.float64 else _IN_FP32)
        self._parameters: dict[str, Tensor] = {}
        self._scaled: set[Site] = set()  # calls that look up rows of tables, where these are scaled
        self._last: tuple[Hypothesis, ...] = ()
        self._beside: tuple[Hypothesis | None, Change | None] = None, None  # one that is tried with many others
        recorded = self._recorded()
        self._replay = recorded if recorded is not None and self._is_faithful(recorded) else None

    def under(self, hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor] | None:
        """Return all outputs; None if they cannot be computed."""
        if self._replay is not None and all(one.around is None for one in hypotheses):
            try:
                return self._replayed(self._replay, hypotheses)
            except Misfit:
                pass
            except OutOfTime:
                raise
            except Exception:  # as in ``outputs_under``, which would raise it again
                return None
        if self._differentiable:
            return differentiable_outputs(self._given[0], hypotheses)
        prepared, dtype, rows = self._given
        return outputs_under(prepared, hypotheses, dtype, rows)

    def _replayed(self, replay: Replay, hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor]:
        prepared, dtype, _ = self._given
        prepared.clock.check()
        if any(edit.site in self._scaled for one in hypotheses for edit in one.edits):
            raise Misfit("rows are scaled after what a lookup returns is edited")
        before = replay.made
        try:
            exactly = in_fp64() if dtype is torch.float64 else nullcontext()
            with torch.set_grad_enabled(self._differentiable), exactly:
                repeated = [one for one in hypotheses if any(one is other for other in self._last)]
                self._last = tuple(hypotheses)
                if len(hypotheses) > 1 and len(repeated) == 1 and repeated[0] is not self._beside[0]:
                    self._beside = repeated[0], self._changed(replay, repeated, None)
                outputs = replay.outputs(self._changed(replay, hypotheses, self._beside[1]))
                return {name: _as_returned(x, hypotheses) for name, x in outputs.items()}
        finally:
            prepared.clock.advance((replay.made - before) / max(replay.calls, 1), self._share)

    def _changed(self, replay: Replay, hypotheses: Sequence[Hypothesis], beside: Change | None) -> Change:
        return replay.changed(_all_edits(hypotheses), _read(self._parameters, hypotheses), beside)

    def _recorded(self) -> Replay | None:
        """Record a pass; return None if it cannot be made."""
        prepared, dtype, rows = self._given
        found: list[tuple[Trace, list[str]]] = []

        def around(call: ModuleCall) -> ModuleCall:
            def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                with tracing(module) as trace:
                    returned = call(module, *args, **kwargs)
                    outputs = named_outputs(returned)
                    for x in outputs.values():
                        x.clone()  # which tells the outputs among all values
                found.append((trace, list(outputs)))
                return returned

            return recorded

        if outputs_under(prepared, (Hypothesis("", "", "", around=around),), dtype, rows) is None:
            return None
        ((trace, names),) = found
        for number in trace.buffers:  # a call may write to them, as that of a BatchNorm does
            trace.tensors[number] = trace.tensors[number].clone()
        self._parameters = {name: x.detach() for name, x in prepared.reference.named_parameters()}
        returned = [trace.calls.pop().inputs[0] for _ in names]
        if dtype is not torch.float64:  # a mode around all calls would take its time at each
            trace.calls = [replace(call, function=in_blocks(call.function)) for call in trace.calls]
        if prepared.scales_lookups:
            scaled = ScaledLookups(prepared.dtype, prepared.evaluation)
            self._scaled = {call.site for call in trace.calls if is_lookup(call.function)}
            trace.calls = [
                replace(call, function=scaled.around(call.function)) if call.site in self._scaled else call
                for call in trace.calls
            ]
        return Replay(trace, dict(zip(reversed(names), returned, strict=True)))

    def _is_faithful(self, replay: Replay) -> bool:
        """Return whether a replay computes what the reference does with parameters that all are a little different."""
        prepared, dtype, rows = self._given
        rng = Rng(0, "replay")
        moved = {
            name: x * (1.0 + _MOVED * rng.normal(*x.shape).to(x))
            for name, x in self._parameters.items()
            if x.is_floating_point()
        }
        under = (Hypothesis("", "", "", read=lambda parameters: moved),)
        right = outputs_under(prepared, under, dtype, rows) if moved else None
        try:
            replayed = self._replayed(replay, under)
        except OutOfTime:
            raise
        except Exception:
            return False
        return right is not None and all(torch.allclose(replayed[name], x, equal_nan=True) for name, x in right.items())


def tensors_under(
    prepared: Prepared,
    hypotheses: Sequence[Hypothesis],
    precision: Precision | None = None,
    cotangents: Mapping[str, Tensor] | None = None,
    freedom: Freedom = UNFUSED,
    only_if: Callable[[dict[str, Tensor]], bool] = lambda outputs: True,
    kinks: Kinks | None = None,
    choices: Choices | None = None,
) -> Tensors | None:
    """Return the reference's outputs and gradients if the hypotheses were true; None if they cannot be computed.

    Args:
        prepared: what was compared.
        hypotheses: that hold at once.
        precision: whose rounding model to compute under, in FP32; None computes in FP64.
        cotangents: the gradient with respect to each output; None for the comparison's own.
        freedom: of the kernels that the rounding model stands for.
        only_if: tells from the outputs whether gradients are of interest; else None is returned.
        kinks, choices: of the rounding model.
    """
    dtype = torch.float64 if precision is None else torch.float32
    _cast_if_other(prepared.reference, dtype)
    given = prepared.cotangents if cotangents is None else cotangents
    model = under_model(prepared, precision.rounding, freedom, kinks, choices) if precision else in_fp64()
    passes = _ROUNDED if precision else 1.0
    prepared.clock.advance(passes)

    def backward(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if not only_if({name: output.detach() for name, output in outputs.items()}):
            raise Misfit("its outputs are others")
        prepared.clock.advance(0.0 if prepared.evaluation else BACKWARD * passes)
        return {name: given[name].to(output.dtype) for name, output in outputs.items()}

    try:
        with model as phase:
            ran = run(
                prepared.reference,
                _call_under(prepared, hypotheses),
                cast(prepared.inputs, dtype),
                prepared.input_names,
                backward,
                before_backward=phase.begin_backward if phase else lambda: None,
                differentiated=not prepared.evaluation,
            )
    except OutOfTime:  # it says nothing about the hypotheses
        raise
    except Exception:
        return None
    tensors = tensors_of(ran)
    if precision is not None:
        store, wide = precision.rounding.store_part, prepared.wide
        tensors = {key: tensor if key in wide else store(tensor) for key, tensor in tensors.items()}
    return tensors


def _cast_if_other(module: nn.Module, dtype: torch.dtype) -> None:
    tensors = chain(module.parameters(), module.buffers())
    if any(tensor.is_floating_point() and tensor.dtype is not dtype for tensor in tensors):
        cast_module(module, dtype)


def _share(inputs: Any, rows: slice | None) -> float:
    """Return what share of the batch some rows are."""
    batches = [x.shape[0] for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()]
    return 1.0 if rows is None or not batches else len(range(*rows.indices(batches[0]))) / max(batches[0], 1)


def _call_under(prepared: Prepared, hypotheses: Sequence[Hypothesis]) -> ModuleCall:
    """Return how to call the reference so that it computes what the hypotheses say."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        edits = _all_edits(hypotheses)
        parameters = dict(module.named_parameters()) if any(one.read for one in hypotheses) else {}
        change = edited(module, edits) if edits else nullcontext()
        with _holding(module, _read(parameters, hypotheses)), change:
            returned = prepared.call(module, *args, **kwargs) if prepared.call else module(*args, **kwargs)
        if not any(one.returned for one in hypotheses):
            return returned
        return tree_map_only(Tensor, lambda x: _as_returned(x, hypotheses), returned)

    under: ModuleCall = call
    for hypothesis in hypotheses:
        if hypothesis.around is not None:
            under = hypothesis.around(under)
    return under


def _as_returned(x: Tensor, hypotheses: Sequence[Hypothesis]) -> Tensor:
    """Return what the hypotheses make of a tensor that the reference returns."""
    for one in hypotheses if x.is_floating_point() else ():
        x = x if one.returned is None else one.returned(x)
    return x


def _all_edits(hypotheses: Sequence[Hypothesis]) -> tuple[Edit, ...]:
    """Return the edits of all hypotheses.

    Raises:
        Misfit: if two change the same thing.
    """
    edits: tuple[Edit, ...] = ()
    for hypothesis in hypotheses:
        both = together(edits, hypothesis.edits)
        if both is None:
            raise Misfit(f"{hypothesis.name} changes what another mistake does")
        edits = both
    return edits


def _read(parameters: Mapping[str, Tensor], hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor]:
    """Return the parameters that the hypotheses change."""
    others: dict[str, Tensor] = {}
    for hypothesis in hypotheses:
        if hypothesis.read is not None:
            others.update(hypothesis.read({**parameters, **others}))
    return others


@contextmanager
def _holding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the context, the module computes with these tensors for its parameters, wherever they are tied."""
    if not tensors:
        yield
        return
    places: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for submodule in module.modules():
        for leaf, parameter in submodule._parameters.items():
            places[id(parameter)].append((submodule._parameters, leaf))
    parameters = dict(module.named_parameters())
    try:
        for name, tensor in tensors.items():
            for holder, leaf in places[id(parameters[name])]:
                holder[leaf] = tensor
        yield
    finally:
        for name in tensors:
            for holder, leaf in places[id(parameters[name])]:
                holder[leaf] = parameters[name]


# A recorded forward pass, computed again under a change.


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
        self._shapes = [tensor.shape for tensor in trace.tensors]
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
        now = list(self._trace.tensors)
        for number, tensor in known.values.items():
            now[number] = tensor
        found: dict[int, Tensor] = {}
        reached = bytearray(self.calls)

        def put(number: int, tensor: Tensor) -> None:
            if number in self._trace.read or tensor.shape != self._shapes[number]:
                raise Misfit("the module may make other calls")
            found[number] = now[number] = tensor
            for reader in self._readers.get(number, ()):
                reached[reader] = True

        for name, tensor in parameters.items():
            if name not in known.parameters or not torch.equal(known.parameters[name], tensor):
                for number in self._parameters.get(name, ()):
                    put(number, tensor)
        edits_at = grouped(edits, lambda one: self._place(one.site))
        known_at = {self._place(one.site) for one in known.edits}
        begins = {self._place(one.site) for one in edits if one not in known.edits}
        for i, step in enumerate(self._steps):
            if reached[i] or i in begins:
                is_given_others = bool(reached[i]) or i in known_at
                results = self._made(i, edits_at.get(i, ()), now, is_given_others)
                for number, tensor in zip(step.outputs, results, strict=True):
                    put(number, tensor)
        return Change(edits, parameters, {**known.values, **found})

    def outputs(self, change: Change) -> dict[str, Tensor]:
        """Return the outputs under a change, by name."""
        numbers = {name: value.number for name, value in self._outputs.items()}
        return {name: change.values.get(number, self._trace.tensors[number]) for name, number in numbers.items()}

    def _place(self, site: Site) -> int:
        if site not in self._order:
            raise Misfit(f"no call at {site}")
        return self._order[site]

    def _made(self, i: int, edits: Sequence[Edit], now: Sequence[Tensor], is_given_others: bool) -> Sequence[Tensor]:
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

    def made(self, now: Sequence[Tensor]) -> Any:
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
