"""Compute the reference's outputs and gradients with mistakes in it.

If a recorded pass can be replayed, only the calls that the mistakes reach are made again, without the module's code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case.case import Rng
from parity.mistakes.hypothesis import Hypothesis, ModuleCall, together
from parity.numerics.formats import Rounding
from parity.numerics.freedom import FUSED, UNFUSED, Choice, Choices, Freedom, KinkSides
from parity.numerics.golden import all_in_fp64, attention_in_blocks, in_blocks, in_fp64, in_fp64_if_needed
from parity.passes.all_passes import Tensors, following, tensors_of, under_model
from parity.passes.draws import ScaledLookups, is_lookup
from parity.passes.nominal_clock import OutOfTime
from parity.passes.one_pass import named_inputs, named_outputs, or_zero, outputs_of, run
from parity.passes.prepare import Prepared, cast, cast_module, size_in_bytes
from parity.result import Kind
from parity.trace.calls import Misfit, edited, is_in_place, mapped, tensors_in, tracing, without_gradient
from parity.trace.trace import Call, Edit, Site, Trace, Value, grouped

if TYPE_CHECKING:
    from parity.te import Precision

# The cost, in forward passes in FP64, of a pass in FP32, of a backward pass, and of any pass under a rounding model.
_IN_FP32 = 0.5
BACKWARD = 2.0
_ROUNDED = 2.0
_MOVED = 1e-3  # parameters are moved by about this share of themselves to check that a replay is faithful


def outputs_with(
    prepared: Prepared, hypotheses: Sequence[Hypothesis], dtype: torch.dtype, rows: slice | None = None
) -> dict[str, Tensor] | None:
    """Return the reference's outputs if the hypotheses were true; None if they cannot be computed.

    Args:
        prepared: the pair that was compared.
        hypotheses: the mistakes, all made at once.
        dtype: the dtype in which to compute.
        rows: the rows of each input's first dimension to compute; None for all.
    """
    _cast_if_other(prepared.reference, dtype)
    inputs = cast(prepared.inputs, dtype)
    prepared.clock.advance(1.0, _share(inputs, rows) * (1.0 if dtype is torch.float64 else _IN_FP32))
    if rows is not None:
        inputs = tree_map_only(Tensor, lambda x: x[rows], inputs)
    try:
        with torch.no_grad(), in_fp64() if dtype is torch.float64 else attention_in_blocks():
            return outputs_of(prepared.reference, call_with(prepared, hypotheses), inputs)
    except Exception:  # the user's code may raise anything if it gets values that it does not expect
        return None


def differentiable_outputs(
    prepared: Prepared, hypotheses: Sequence[Hypothesis], inputs: Any = None
) -> dict[str, Tensor] | None:
    """Return all rows of the outputs as ``outputs_with`` does, in FP64, with the graph that autograd needs.

    Args:
        prepared, hypotheses: as for ``outputs_with``.
        inputs: inputs in FP64 to use instead of the pair's own, as leaves of the graph.
    """
    _cast_if_other(prepared.reference, torch.float64)
    inputs = cast(prepared.inputs, torch.float64) if inputs is None else inputs
    prepared.clock.advance(1.0)
    try:
        with torch.enable_grad(), in_fp64():
            return outputs_of(prepared.reference, call_with(prepared, hypotheses), inputs)
    except Exception:  # as above
        return None


class Outputs:
    """The reference's outputs under hypotheses, computing again only the part that these change.

    If a replay may not give the reference's results, the whole reference is computed.

    Attributes:
        leaves: the parameters and floating-point inputs that a differentiable pass was recorded with, by kind of
            gradient and name.
    """

    def __init__(
        self, prepared: Prepared, dtype: torch.dtype, rows: slice | None = None, differentiable: bool = False
    ) -> None:
        """Record a pass.

        Args:
            prepared, dtype, rows: as for ``outputs_with``.
            differentiable: whether to return outputs as ``differentiable_outputs`` does, with a graph back to
                ``leaves`` and to the values that the hypotheses change, for all rows and in FP64.
        """
        self._given = prepared, dtype, rows
        self._differentiable = differentiable
        self._share = _share(prepared.inputs, rows) * (1.0 if dtype is torch.float64 else _IN_FP32)
        self._parameters: dict[str, Tensor] = {}
        self._places: list[Place] = []  # where the module holds its parameters, which edits may read from it
        self.leaves: dict[tuple[Kind, str], Tensor] = {}
        self._scaled: set[Site] = set()  # lookups whose rows are scaled
        self._last: tuple[Hypothesis, ...] = ()
        self._beside: tuple[Hypothesis | None, Change | None] = None, None  # a hypothesis tried with many others
        recorded = self._recorded()
        self._replay = recorded if recorded is not None and self._is_faithful(recorded) else None

    def under(self, hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor] | None:
        """Return all outputs under these hypotheses; None if they cannot be computed."""
        with suppress(Misfit):
            return self.again(hypotheses)
        if self._differentiable:
            return differentiable_outputs(self._given[0], hypotheses)
        prepared, dtype, rows = self._given
        return outputs_with(prepared, hypotheses, dtype, rows)

    def again(self, hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor] | None:
        """Return all outputs from the recorded pass; None if they cannot be computed.

        Raises:
            Misfit: if the module itself has to run.
        """
        if self._replay is None or any(one.around is not None for one in hypotheses):
            raise Misfit("the module may make other calls")
        try:
            return self._replayed(self._replay, hypotheses)
        except (Misfit, OutOfTime):
            raise
        except Exception:  # as in ``outputs_with``, which would run into it again
            return None

    def _replayed(self, replay: Replay, hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor]:
        prepared = self._given[0]
        prepared.clock.check()
        if any(edit.site in self._scaled for one in hypotheses for edit in one.edits):
            raise Misfit("rows are scaled after what a lookup returns is edited")
        before = replay.made
        try:
            with torch.set_grad_enabled(self._differentiable):
                repeated = [one for one in hypotheses if any(one is other for other in self._last)]
                self._last = tuple(hypotheses)
                if len(hypotheses) > 1 and len(repeated) == 1 and repeated[0] is not self._beside[0]:
                    self._beside = repeated[0], self._changed(replay, repeated, None)
                outputs = replay.outputs(self._changed(replay, hypotheses, self._beside[1]))
                with replay.exactly():
                    return {name: _as_returned(x, hypotheses) for name, x in outputs.items()}
        finally:
            prepared.clock.advance((replay.made - before) / max(replay.calls, 1), self._share)

    def _changed(self, replay: Replay, hypotheses: Sequence[Hypothesis], beside: Change | None) -> Change:
        with replay.exactly():
            parameters = _read(self._parameters, hypotheses)
        with _exchanged(self._places):
            return replay.changed(_all_edits(hypotheses), parameters, beside)

    def _recorded(self) -> Replay | None:
        """Return a recorded pass; None if it cannot be made."""
        prepared, dtype, rows = self._given
        found: list[tuple[Trace, list[str]]] = []
        _cast_if_other(prepared.reference, dtype)
        self._parameters = {
            name: nn.Parameter(x.detach(), x.requires_grad and self._differentiable)
            for name, x in prepared.reference.named_parameters()
        }
        self._places = _places(prepared.reference, self._parameters)
        inputs = self._with_leaves(prepared) if self._differentiable else None

        def around(call: ModuleCall) -> ModuleCall:
            def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                with _exchanged(self._places), tracing(module, self._differentiable) as trace:
                    returned = call(module, *args, **kwargs)
                    outputs = named_outputs(returned)
                    for x in outputs.values():
                        x.clone()  # traced as a call, which tells the outputs from other values
                found.append((trace, list(outputs)))
                return returned

            return recorded

        recording = (Hypothesis("", "", "", around=around),)
        if self._differentiable:
            ran = differentiable_outputs(prepared, recording, inputs)
        else:
            ran = outputs_with(prepared, recording, dtype, rows)
        if ran is None:
            return None
        ((trace, names),) = found
        for number in trace.buffers:  # a call may write to them, as a BatchNorm's does
            trace.tensors[number] = trace.tensors[number].clone()
        returned = [trace.calls.pop().inputs[0] for _ in names]
        if prepared.scales_lookups:
            scaled = ScaledLookups(prepared.dtype, prepared.evaluation)
            self._scaled = {call.site for call in trace.calls if is_lookup(call.function)}
            trace.calls = [
                replace(call, function=scaled.around(call.function)) if call.site in self._scaled else call
                for call in trace.calls
            ]
        trace.calls = [self._by_itself(call, trace) for call in trace.calls]
        exactly = all_in_fp64 if dtype is torch.float64 else nullcontext
        return Replay(trace, dict(zip(reversed(names), returned, strict=True)), exactly)

    def _with_leaves(self, prepared: Prepared) -> Any:
        """Return the inputs as leaves of a graph, and add them and the parameters to ``leaves``."""
        self.leaves |= {("weight gradient", name): x for name, x in self._parameters.items() if x.requires_grad}

        def leaf(x: Tensor) -> Tensor:
            return x.detach().requires_grad_() if x.is_floating_point() else x

        inputs = tree_map_only(Tensor, leaf, cast(prepared.inputs, torch.float64))
        for name, x in named_inputs(inputs, prepared.input_names).items():
            if x.requires_grad:
                self.leaves["input gradient", name] = x
        return inputs

    def _by_itself(self, call: Call, trace: Trace) -> Call:
        """Return a call that computes as in the pass, but without the mode around it, which costs time at each call."""
        if self._given[1] is not torch.float64:
            return replace(call, function=in_blocks(call.function))
        given, returned = tree_map_only(Value, trace.tensor, (tree_leaves((call.args, call.kwargs)), call.outputs))
        function = in_fp64_if_needed(call.function, given, returned)
        differentiated = any(isinstance(x, Tensor) and x.requires_grad for x in given)
        if differentiated and not any(x.requires_grad for x in returned):
            function = torch.no_grad()(function)
        return replace(call, function=function)

    def _is_faithful(self, replay: Replay) -> bool:
        """Return whether a replay agrees with the reference when all parameters are slightly different."""
        prepared, dtype, rows = self._given
        rng = Rng(0, "replay")
        moved = {
            name: x.detach() * (1.0 + _MOVED * rng.normal(*x.shape).to(x))
            for name, x in self._parameters.items()
            if x.is_floating_point()
        }
        under = (Hypothesis("", "", "", read=lambda parameters: moved),)
        right = outputs_with(prepared, under, dtype, rows) if moved else None
        try:
            replayed = self._replayed(replay, under)
        except OutOfTime:
            raise
        except Exception:
            return False
        return right is not None and all(torch.allclose(replayed[name], x, equal_nan=True) for name, x in right.items())


class Passes:
    """The reference's outputs and gradients in FP64 under hypotheses, as ``tensors_with`` returns them.

    The forward pass is replayed by ``Outputs`` if possible, which computes again only the part that changes.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._outputs = None if prepared.evaluation else Outputs(prepared, torch.float64, differentiable=True)
        if not self._is_faithful():
            self._outputs = None

    def under(
        self,
        hypotheses: Sequence[Hypothesis],
        only_if: Callable[[dict[str, Tensor]], bool] = lambda outputs: True,
        wanted: Container[tuple[Kind, str]] | None = None,
    ) -> Tensors | None:
        """Return the outputs and gradients; None if they cannot be computed.

        Args:
            hypotheses, only_if: as for ``tensors_with``.
            wanted: the gradients that are needed, by kind and name; others may be left out. None for all.
        """
        with suppress(Misfit):
            return self._again(hypotheses, only_if, wanted)
        return tensors_with(self._prepared, hypotheses, only_if=only_if)

    def _again(
        self,
        hypotheses: Sequence[Hypothesis],
        only_if: Callable[[dict[str, Tensor]], bool] = lambda outputs: True,
        wanted: Container[tuple[Kind, str]] | None = None,
    ) -> Tensors | None:
        if self._outputs is None:
            raise Misfit("gradients are not what they were recorded as")
        outputs = self._outputs.again(hypotheses)
        leaves = {key: x for key, x in self._outputs.leaves.items() if wanted is None or key in wanted}
        if outputs is None or not only_if({name: x.detach() for name, x in outputs.items()}):
            return None
        tensors: Tensors = {("output", name): x.detach() for name, x in outputs.items()}
        if not leaves:
            return tensors
        self._prepared.clock.advance(BACKWARD)
        reached = {name: x for name, x in outputs.items() if x.requires_grad}
        cotangents = [self._prepared.cotangents[name].to(x.dtype) for name, x in reached.items()]
        try:
            found = torch.autograd.grad(
                list(reached.values()), list(leaves.values()), cotangents, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            raise Misfit("the module may keep other tensors for its gradients") from error
        return tensors | {key: or_zero(x, leaves[key]) for key, x in zip(leaves, found, strict=True)}

    def _is_faithful(self) -> bool:
        """Return whether gradients agree with the reference's when all parameters are slightly different."""
        if self._outputs is None:
            return False
        rng = Rng(0, "gradients")
        factors = {name: 1.0 + _MOVED * rng.normal(*x.shape) for (_, name), x in self._outputs.leaves.items()}

        def moved(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: x * factors[name].to(x) for name, x in parameters.items() if name in factors}

        under = (Hypothesis("", "", "", read=moved),)
        right = tensors_with(self._prepared, under)
        try:
            again = self._again(under)
        except Misfit:
            return False
        if right is None or again is None or right.keys() != again.keys():
            return False
        return all(torch.allclose(again[key], x, equal_nan=True) for key, x in right.items())


def tensors_with(
    prepared: Prepared,
    hypotheses: Sequence[Hypothesis],
    precision: Precision | None = None,
    cotangents: Mapping[str, Tensor] | None = None,
    freedom: Freedom = UNFUSED,
    only_if: Callable[[dict[str, Tensor]], bool] = lambda outputs: True,
    kinks: KinkSides | None = None,
    choices: Choices | None = None,
) -> Tensors | None:
    """Return the reference's outputs and gradients if the hypotheses were true; None if they cannot be computed.

    Args:
        prepared: the pair that was compared.
        hypotheses: the mistakes, all made at once.
        precision: the precision under whose rounding model to compute, in FP32; None computes in FP64.
        cotangents: the gradient with respect to each output; None for the comparison's own.
        freedom: the freedom of the kernels that the rounding model stands for.
        only_if: decides from the outputs whether gradients are of interest; if not, None is returned.
        kinks, choices: passed to the rounding model; without choices, it follows the port's where it would make them
            under the hypotheses.
    """
    dtype = torch.float64 if precision is None else torch.float32
    _cast_if_other(prepared.reference, dtype)
    given = prepared.cotangents if cotangents is None else cotangents
    if precision is not None and choices is None and prepared.made:
        choices = following(prepared, precision.rounding, _unrounded_choices(prepared, hypotheses, precision))
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
                call_with(prepared, hypotheses),
                cast(prepared.inputs, dtype),
                prepared.input_names,
                backward,
                before_backward=phase.begin_backward if phase else lambda: None,
                differentiated=not prepared.evaluation,
            )
    except OutOfTime:  # this says nothing about the hypotheses
        raise
    except Exception:
        return None
    tensors = tensors_of(ran)
    if precision is not None:
        store, wide = precision.rounding.store_part, prepared.wide
        tensors = {key: tensor if key in wide else store(tensor) for key, tensor in tensors.items()}
    return tensors


def _unrounded_choices(prepared: Prepared, hypotheses: Sequence[Hypothesis], precision: Precision) -> Sequence[Choice]:
    """Return the choices of a run under hypotheses without rounding, kept until a run under others."""

    def exact() -> list[Choice]:
        choices = Choices()
        unrounded = replace(precision, replaced=Rounding(torch.float32))
        tensors_with(prepared, hypotheses, unrounded, freedom=FUSED, choices=choices)
        return choices.own

    kept = prepared.cache.group("choices under", (id(prepared.inputs), *hypotheses))
    return kept.get("exact", exact, size_in_bytes)


def _cast_if_other(module: nn.Module, dtype: torch.dtype) -> None:
    tensors = chain(module.parameters(), module.buffers())
    if any(tensor.is_floating_point() and tensor.dtype is not dtype for tensor in tensors):
        cast_module(module, dtype)


def _share(inputs: Any, rows: slice | None) -> float:
    """Return the share of the batch that these rows are."""
    batches = [x.shape[0] for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()]
    return 1.0 if rows is None or not batches else len(range(*rows.indices(batches[0]))) / max(batches[0], 1)


def call_with(prepared: Prepared, hypotheses: Sequence[Hypothesis]) -> ModuleCall:
    """Return a function that calls the reference with the mistakes of the hypotheses."""

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
    """Return a tensor that the reference returns after the hypotheses' changes to it."""
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
    """Make the module compute, within the context, with these tensors as parameters, tied ones included."""
    with _exchanged(_places(module, tensors) if tensors else []):
        yield


Place = tuple[dict[str, Any], str, Tensor]  # the parameters of a submodule, the name of one, and its new value


def _places(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[Place]:
    """Return the places where a module holds these parameters."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for submodule in module.modules():
        for leaf, parameter in submodule._parameters.items():
            found[id(parameter)].append((submodule._parameters, leaf))
    parameters = dict(module.named_parameters())
    return [(*place, tensor) for name, tensor in tensors.items() for place in found[id(parameters[name])]]


@contextmanager
def _exchanged(places: Sequence[Place]) -> Iterator[None]:
    """Put these tensors in their places within the context."""
    before = [(holder, leaf, holder[leaf]) for holder, leaf, _ in places]
    try:
        for holder, leaf, tensor in places:
            holder[leaf] = tensor
        yield
    finally:
        for holder, leaf, parameter in before:
            holder[leaf] = parameter


# A recorded forward pass, replayed with a change.


@dataclass(frozen=True)
class Change:
    """A change of a recorded pass, and the values that it reaches.

    Attributes:
        edits: change what calls return.
        parameters: other tensors, by the parameters' names.
        values: the new tensors of the values that it reaches, by number.
    """

    edits: Sequence[Edit]
    parameters: Mapping[str, Tensor]
    values: Mapping[int, Tensor]

    def is_part_of(self, edits: Sequence[Edit], parameters: Mapping[str, Tensor]) -> bool:
        """Return whether another change has all of this one's edits and changes all of its parameters."""
        return set(self.edits) <= set(edits) and self.parameters.keys() <= parameters.keys()


class Replay:
    """A recorded forward pass, parts of which can be computed again.

    A module may pass tensors on in ways that no call shows, such as through NumPy. So users of this class first compare
    a replay with the module itself, under a change that reaches everything.

    Attributes:
        made: how many calls have been made again.
        calls: how many were recorded.
        exactly: the context in which edits and readings of parameters are computed.
    """

    def __init__(
        self,
        trace: Trace,
        outputs: Mapping[str, Value],
        exactly: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.made = 0
        self.exactly = exactly
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
        """Return the values of a pass under these edits, with other tensors for some parameters.

        Args:
            edits: change what calls return.
            parameters: the other tensors, by the parameters' names.
            beside: a change that is part of this one; only the effect of the rest is computed again.

        Raises:
            Misfit: if the module itself has to run, because the change reaches a shape or a number that its code reads.
        """
        known = beside if beside is not None and beside.is_part_of(edits, parameters) else Change((), {}, {})
        now = list(self._trace.tensors)
        for number, tensor in known.values.items():
            now[number] = tensor
        found: dict[int, Tensor] = {}
        to_make = bytearray(self.calls)
        given_others = {self._place(one.site) for one in known.edits}

        def put(number: int, tensor: Tensor) -> None:
            if number in self._trace.read or tensor.shape != self._shapes[number]:
                raise Misfit("the module may make other calls")
            found[number] = now[number] = tensor
            for reader in self._readers.get(number, ()):
                to_make[reader] = True
                given_others.add(reader)

        for name, tensor in parameters.items():
            if name not in known.parameters or not torch.equal(known.parameters[name], tensor):
                for number in self._parameters.get(name, ()):
                    put(number, tensor)
        edits_at = grouped(edits, lambda one: self._place(one.site))
        for one in edits:
            if one not in known.edits:
                to_make[self._place(one.site)] = True
        at = to_make.find(True)
        while at >= 0:
            results = self._made(at, edits_at.get(at, ()), now, at in given_others)
            for number, tensor in zip(self._steps[at].outputs, results, strict=True):
                put(number, tensor)
            at = to_make.find(True, at + 1)
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
        """Return the results of a call for the current values."""
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
            needed = [now[self._needed(value, i)] for value in one.needs]
            if one.detached is not None and torch.is_grad_enabled():
                result = step.made(now, one.detached)
            with self.exactly():
                result = one.compute(result, *needed)
        return (result,) if isinstance(result, Tensor) else tensors_in(result)

    def _needed(self, value: Value, at: int) -> int:
        """Return the number of this pass's value at the place of another recording's, not after ``at``."""
        place = self._place(value.site)
        if place > at:
            raise Misfit(f"no call at {value.site} came before")
        call = self._trace.calls[place]
        return (call.outputs if value.returned else call.inputs)[value.position].number


class _Step:
    """A call, prepared for being made often.

    Attributes:
        call: the call.
        inputs, outputs: the numbers of the values that it reads and returns.
        writes_unseen: whether it changes a tensor that it neither reads nor returns.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.inputs = {value.number for value in call.inputs}
        self.outputs = [value.number for value in call.outputs]
        self.writes_unseen = False
        self._given = list(call.args)
        self._places = [(i, x.number) for i, x in enumerate(call.args) if isinstance(x, Value)]
        self._lists = [i for i, x in enumerate(call.args) if not isinstance(x, Value) and _holds_values(x)]
        self._names_values = _holds_values(call.kwargs)
        self._may_write = is_in_place(call)

    def made(self, now: Sequence[Tensor], detached: int | None = None) -> Any:
        """Return the call's result for the current values, one of which may be detached.

        A call that changes its first argument works on a copy, which is returned.
        """
        given, named = list(self._given), self.call.kwargs
        for i, number in self._places:
            given[i] = now[number]
        for i in self._lists:
            given[i] = mapped(given[i], lambda value: now[value.number], Value)
        if self._names_values:
            named = mapped(named, lambda value: now[value.number], Value)
        if detached is not None:
            given, named = without_gradient((given, named), detached)
        if not self._may_write:
            return self.call.function(*given, **named)
        if "out" in named or not isinstance(given[0], Tensor):
            raise Misfit("a call writes to a tensor of its own, or to several")
        given[0] = given[0].clone()
        self.call.function(*given, **named)
        return given[0]


def _holds_values(tree: Any) -> bool:
    return any(isinstance(leaf, Value) for leaf in tree_leaves(tree))
