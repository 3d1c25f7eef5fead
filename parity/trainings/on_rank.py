"""Run a candidate's pass or training steps on one of several ranks, with its parts of weights, inputs and gradients."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map_only

from parity import te
from parity.case.case import Pair, signed_as_call
from parity.case.patterns import expanded_names
from parity.case.recipes import find_precision
from parity.case.source import AsItIs, FromFile
from parity.case.training import distance_of_part, distance_to_targets
from parity.case.validate import CheckedSize
from parity.case.weight_map import WeightMap
from parity.numerics.formats import LayerFormats
from parity.passes.modes import usual_modes
from parity.passes.one_pass import Pass, named_inputs, named_outputs, run, with_inputs
from parity.passes.prepare import build_as_declared
from parity.ranks.launch import IMPORTED_BEFORE
from parity.ranks.layout import (
    AXES,
    AxisName,
    Degrees,
    Held,
    Pipeline,
    Ranks,
    Split,
    Stage,
    held_by,
    joined,
    part,
    summed_product,
    whole_shape,
)
from parity.result import Switch
from parity.te import Backend, Kernels, Precision
from parity.te.attention_backend import AttentionBackend, attention_backends
from parity.te.debug_features import SeenFeatures
from parity.te.state import Kept, check, fresh_caches, fresh_quantization, moved, settled
from parity.trace.digests import Drop, Switched, recorded, switched_off
from parity.trace.effects import RandomState, kept
from parity.trainings.optimized import Named, gather_whole, is_rounded
from parity.trainings.steps import Batch, Resumption, Stepped, Trainee, is_interrupted
from parity.trainings.watched import Clipping
from parity.user_error import UserError

FOR_PASSES = (*IMPORTED_BEFORE, __name__)
"""Modules to import before ranks are forked: importing them takes a rank ten times as long as a small pass."""


@dataclass(frozen=True, eq=False)
class Given:
    """The data that every rank is given, and from which it takes its part.

    Attributes:
        source: where the case comes from.
        made: how many ranks there are, by axis.
        checked: the size.
        precision: the precision's name, or its source if a file of a user's declares it.
        seed: the seed.
        backend: TE's kernels.
        attention: the attention backend that TE is to run; None for its own choice.
        inputs: the whole inputs as the pair returns them, rounded.
        input_names: names of the positional inputs.
        weights: the whole candidate's weights, by name, rounded.
        cotangents: the gradient with respect to each whole output.
        tied: for pipelines, maps each tied parameter of the whole candidate to the name of the one it is tied to.
    """

    source: FromFile | AsItIs
    made: Degrees
    checked: CheckedSize
    precision: str
    seed: int
    backend: Backend
    attention: AttentionBackend | None
    inputs: Any
    input_names: tuple[str, ...]
    weights: Mapping[str, Tensor]
    cotangents: Mapping[str, Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class OnRank:
    """The tensors that one rank computed, and which parts of the whole they are.

    Attributes:
        outputs, input_gradients, weight_gradients: by name, on the CPU.
        weights: the weights that the rank holds, by name, if the pair gives its candidate weights itself; else none.
        splits: how inputs and outputs are divided, by name.
        held: which parts of which whole parameters the rank's parameters are.
        unreached: the rank's parameters that no gradient reached.
        attention: the attention backends that TE ran.
        changed: by whole parameters, what debug features changed of their layers' formats.
        norm: the norm of all gradients, as the port computes it; None if it does not.
        pipeline: how the rank's stage ran, without functions, which cannot be sent.
        drops: what the rank dropped in an additional pass with dropout, if the pair has dropout.
        dropped: what the rank computed in that pass.
    """

    outputs: dict[str, Tensor]
    input_gradients: dict[str, Tensor]
    weight_gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    splits: dict[str, Split]
    held: dict[str, Held]
    unreached: tuple[str, ...]
    attention: str
    changed: Mapping[str, LayerFormats] = field(default_factory=dict)
    norm: float | None = None
    pipeline: Pipeline = field(default_factory=Pipeline)
    drops: tuple[Drop, ...] = ()
    dropped: OnRank | None = None


@fresh_caches()
@fresh_quantization()
def pass_on_rank(given: Given) -> OnRank:
    """Build this rank's candidate, run its pass, and return what it computed.

    Raises:
        UserError: if the candidate's parameters or outputs are not the parts that the pair says.
    """
    kernels, precision, made = te.kernels(given.backend), find_precision(given.precision), given.made
    ranks = joined(made)
    place = made.place(ranks.world.rank)
    with usual_modes(), attention_backends(given.attention) as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each rank would repeat the same warnings
        built = built_on_rank(given, ranks, kernels, precision)
        pair, candidate = built.pair, built.pair.candidate
        parameters = dict(candidate.named_parameters())
        pair.parallel.check([*named_inputs(given.inputs, given.input_names), *given.cotangents])
        inputs = parts_of_inputs(given.inputs, given.input_names, pair, made, place, kernels.device)
        scale = float(made.dp) if pair.parallel.averages else 1.0

        def cotangents(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
            if not outputs and ranks.pp.rank < ranks.pp.size - 1:
                return {}
            if outputs.keys() != given.cotangents.keys():
                own, whole = ", ".join(outputs), ", ".join(given.cotangents)
                raise UserError(f"on this rank the candidate returns {own}, but the reference returns {whole}")
            return {name: cotangent(name, output) for name, output in outputs.items()}

        def cotangent(name: str, output: Tensor) -> Tensor:
            own = part(given.cotangents[name], pair.parallel.split(name), made, place)
            if own.shape != output.shape and own.numel() != output.numel():
                raise UserError(
                    f"{name} has the shape {tuple(output.shape)} on this rank, but by the pair it should have "
                    f"{tuple(own.shape)}; say how it is divided, for example with "
                    "parity.Parallel(splits={'output': [parity.over('tp', dim=0)]})"
                )
            return (scale * own).to(output.device, output.dtype).view(output.shape)

        stages: list[Stage] = []

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            step = pair.parallel.pipeline.step
            if step is None:
                stages.append(Stage(pair.parallel.pipeline, ranks.pp))
                return stages[-1].forward(pair.call_candidate, module, *args, **kwargs)
            ((name, whole),) = given.cotangents.items()
            target = scale * part(whole, pair.parallel.split(name), made, place).to(kernels.device, precision.dtype)
            returned = step(module, *args, target=target, loss=summed_product, **kwargs)
            return tree_map_only(Tensor, Tensor.detach, returned)  # the step has already run its backward passes

        def finish() -> None:
            if stages:
                stages.pop().backward()
            if pair.parallel.finish is not None:
                pair.parallel.finish(candidate)

        def once() -> Pass:
            return run(
                candidate,
                pair.call_candidate if made.pp == 1 else signed_as_call(call, candidate, pair.call_candidate),
                inputs,
                given.input_names,
                cotangents,
                forward_context=precision.autocast(kernels, pair.parallel.amax_group or ranks.stage.group),
                after_backward=finish,
            )

        features = SeenFeatures()

        def as_result(ran: Pass) -> OnRank:
            return OnRank(
                _on_cpu(ran.outputs),
                {name: x / scale for name, x in _on_cpu(ran.input_gradients).items()},
                _on_cpu(ran.weight_gradients),
                _on_cpu(parameters) if pair.fill is False else {},
                {name: pair.parallel.split(name) for name in (*ran.outputs, *ran.input_gradients)},
                built.held,
                ran.unreached,
                ", ".join(seen),
                of_wholes(features.formats, built.held),
                pipeline=dataclasses.replace(pair.parallel.pipeline, names=None, step=None),
            )

        with features.watched(candidate):
            ran = settled(once, precision.warmup_passes, is_so_on_all)
        result = as_result(ran)
        norm = pair.parallel.gradient_norm
        if norm is not None:
            result = dataclasses.replace(result, norm=float(norm(candidate)))
        if not pair.parallel.dropout:
            return result
        with built.dropping(kernels.device), recorded(candidate) as drops:
            dropped = as_result(once())
        return dataclasses.replace(result, drops=tuple(drops.made), dropped=dropped)


@dataclass(frozen=True, eq=False)
class BuiltOnRank:
    """The pair that one rank built.

    Attributes:
        pair: the pair, whose candidate has the rank's part of the whole weights.
        held: which parts these are, by the names of the rank's parameters.
        dropout: the dropout that was switched off.
        random: the state of the random generators when the pair's function returned.
    """

    pair: Pair
    held: dict[str, Held]
    dropout: tuple[Switched, ...]
    random: RandomState

    @contextmanager
    def dropping(self, device: torch.device) -> Iterator[None]:
        """Switch dropout on, with the random generators as the pair's function left them, within the context."""
        for one in self.dropout:
            one.restore()
        try:
            with kept(device):
                self.random.restore(device)
                yield
        finally:
            switched_off(self.pair.candidate)


def built_on_rank(given: Given, ranks: Ranks, kernels: Kernels, precision: Precision) -> BuiltOnRank:
    """Return this rank's pair, whose candidate holds the rank's part of the whole weights.

    Raises:
        UserError: if the candidate's parameters are not the parts that the pair says.
    """
    made = given.made
    place = made.place(ranks.world.rank)
    case = dataclasses.replace(given.source.case(), at=ranks, ranks=(made,))
    pair, random = build_as_declared(case, given.checked, given.seed, kernels)
    dropout = tuple(switched_off(pair.candidate)) if pair.parallel.dropout else ()
    check(moved(pair.candidate, dtype=precision.dtype), precision)
    shapes = {name: tuple(x.shape) for name, x in given.weights.items()}
    declared: dict[str, Split] = {}
    for name, split in pair.parallel.weights.items():
        found = {one: tuple(split) for one in expanded_names({name: split}, shapes) if one in shapes}
        if not found:
            raise UserError(_no_parameter(name, shapes))
        declared |= found
    renamed = _names_in_whole(pair, given.tied) if made.pp > 1 else {}
    held = held_by(pair.candidate, shapes, declared, made, place, renamed)
    if pair.fill is not False:
        with torch.no_grad():
            for name, parameter in pair.candidate.named_parameters():
                whole = given.weights[held[name].whole].to(parameter.device)
                parameter.copy_(_as_held(parameter, part(whole, held[name].split, made, place)))
    return BuiltOnRank(pair, held, dropout, random)


def of_wholes(formats: Mapping[str, LayerFormats], held: Mapping[str, Held]) -> dict[str, LayerFormats]:
    """Return what debug features changed of a rank's layers, by whole parameters."""
    return {held[name].whole: changed for name, changed in formats.items()}


def _no_parameter(name: str, names: Iterable[str]) -> str:
    """Return a message that the candidate has no parameter of this name, with the closest name that it has."""
    close = get_close_matches(name, names, 1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"parity.Parallel(weights=...) names {name!r}, which is not a parameter of the candidate{meant}"


def _names_in_whole(pair: Pair, tied: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a stage's parameters in the whole candidate; tied parameters share the first one's name."""
    of_stage = pair.parallel.pipeline.names
    own = {name: of_stage(name) if of_stage else name for name, _ in pair.candidate.named_parameters()}
    return {name: tied.get(other, other) for name, other in own.items()}


def parts_of_inputs(
    inputs: Any, names: tuple[str, ...], pair: Pair, made: Degrees, place: Mapping[AxisName, int], device: torch.device
) -> Any:
    """Return a rank's parts of whole inputs, on its device."""
    whole = named_inputs(inputs, names)
    parts = {name: part(x, pair.parallel.split(name), made, place) for name, x in whole.items()}
    return tree_map_only(Tensor, lambda x: x.to(device), with_inputs(inputs, names, parts))


def _as_held(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a whole value distributed as FSDP holds the parameter, or unchanged if FSDP does not hold it."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.dtype), mesh, parameter.placements)  # type: ignore[attr-defined]


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of whole tensors on the CPU. Every rank must call this with the same names."""
    return {name: gather_whole(x).detach().cpu().clone() for name, x in tensors.items()}


def is_so_on_all(here: bool) -> bool:
    """Return whether ``here`` is true on every rank."""
    here_and_there = torch.tensor(int(here))
    distributed.all_reduce(here_and_there, distributed.ReduceOp.MIN)
    return bool(here_and_there)


# Train a candidate on one of several ranks, with its parts of weights and batches, and return its steps.


@dataclass(frozen=True, eq=False)
class GivenSteps:
    """The data of a training that every rank is given.

    Attributes:
        given: as for a single pass; its inputs are those of the first step.
        batches: the whole inputs of each step, rounded.
        switch: how each rank's part is trained, one of ``parity.case.case.SWITCHES_OVER_RANKS``.
    """

    given: Given
    batches: tuple[Any, ...]
    switch: Switch = ""


@dataclass(frozen=True, eq=False)
class StepOnRank:
    """One rank's part of one training step.

    Attributes:
        ran: the rank's loss, as the output, and its gradients, before they are clipped.
        loss_over: axes over which ranks have parts of the loss, and whether these are means.
        weights: the weights that the rank's module held before the step, by name.
        after: the weights that it holds afterwards.
        clipping: what was done to its gradients before its optimizer saw them.
        followed: the weights that its optimizer steps, before and after, and the gradients that it was given, by name.
        owned: which elements of each parameter this rank's optimizer steps, as its state or its copies show.
        apart: parameters that are not the rounded values of the optimizer's copies.
        kept_in: the dtypes of its optimizer's state.
        settings: its optimizer's settings for each parameter.
        scaling: the state of delayed scaling for each tensor, before and after the step.
        summed: noise of the size of the error that sums over micro-batches make.
        resumed: how the step differs from the same step without interruption, if the training was loaded before it.
        buffers: its module's buffers before the step.
    """

    ran: OnRank
    loss_over: Mapping[AxisName, bool]
    weights: Named
    after: Named
    clipping: Clipping
    followed: Mapping[str, tuple[Tensor, Tensor, Tensor]]
    owned: Named
    apart: tuple[str, ...]
    kept_in: Mapping[str, torch.dtype]
    settings: Mapping[str, Mapping[str, Any]]
    scaling: tuple[tuple[Kept, Kept], ...]
    summed: Named
    resumed: Resumption | None = None
    buffers: Named = field(default_factory=dict)


@fresh_caches()
@fresh_quantization()
def steps_on_rank(given: GivenSteps) -> list[StepOnRank]:
    """Build this rank's candidate and its optimizer, run all steps, and return what each computed.

    Raises:
        UserError: if the candidate's parameters are not the parts that the pair says, or a training step does not do
            what ``Trainee.step`` requires.
    """
    one = given.given
    kernels, precision = te.kernels(one.backend), find_precision(one.precision)
    ranks = joined(one.made)
    with usual_modes(), attention_backends(one.attention), warnings.catch_warnings(), ExitStack() as resuming:
        warnings.simplefilter("ignore")  # each rank would repeat the same warnings

        def anew() -> TraineeOnRank:
            resuming.enter_context(fresh_quantization())
            return TraineeOnRank(one, ranks, kernels, precision)

        trainee = TraineeOnRank(one, ranks, kernels, precision, given.switch)
        trainee.settle()
        steps = []
        for number, whole in enumerate(given.batches, 1):
            before = _on_cpu(trainee.weights), trainee.settings
            buffers = _on_cpu(trainee.buffers)
            batch = trainee.part_of(whole)
            if is_interrupted(given.switch, number, len(given.batches)):
                trainee, stepped, resumed = trainee.resumed(given.switch, anew, batch)
                made = trainee.of_rank(*before, stepped, resumed)
            else:
                made = trainee.of_rank(*before, trainee.step(batch))
            steps.append(dataclasses.replace(made, buffers=buffers))
        return steps


class TraineeOnRank(Trainee):
    """A rank's part of a candidate in training. It uses its own parameters' names, and its own parts as wholes."""

    _fits = staticmethod(is_so_on_all)
    _follows_all = True

    def __init__(self, given: Given, ranks: Ranks, kernels: Kernels, precision: Precision, switch: Switch = "") -> None:
        """Build the candidate and its optimizer. Every rank must do so."""
        built = built_on_rank(given, ranks, kernels, precision)
        pair, held = built.pair, built.held
        own: WeightMap = {name: name for name, _ in pair.candidate.named_parameters()}
        training = pair.training
        if training.loss is None:
            training = dataclasses.replace(training, loss=_loss_of_part(pair, given.made, ranks.world.rank))
        self._of_pair, self._held, self._given, self._ranks = pair, held, given, ranks
        self._norm: float | None = None  # the norm of all gradients that the port computed last
        norm = pair.parallel.gradient_norm and self._wrap_norm(pair.parallel.gradient_norm)
        self._between_ranks = dataclasses.replace(pair.parallel, gradient_norm=norm)
        self._device = kernels.device
        first = self.part_of(given.inputs)
        mapped = dataclasses.replace(pair, weights=own, training=training, reference=pair.candidate)
        group = pair.parallel.amax_group or ranks.stage.group
        self._begin_training(mapped, given.checked, first, precision, given.seed, kernels, switch, group=group)
        self._places = {name: torch.arange(parameter.numel()) for name, parameter in pair.candidate.named_parameters()}
        self._slices = self._found_slices()

    def _wrap_norm(self, norm: Callable[[nn.Module], Tensor | float]) -> Callable[[nn.Module], Tensor | float]:
        def noted(module: nn.Module) -> Tensor | float:
            found = norm(module)
            self._norm = float(found)
            return found

        return noted

    def part_of(self, whole: Any) -> Batch:
        """Return this rank's part of a batch."""
        made, names = self._given.made, self._given.input_names
        place = made.place(self._ranks.world.rank)
        return Batch(parts_of_inputs(whole, names, self._of_pair, made, place, self._device), names)

    def of_rank(
        self,
        weights: Named,
        settings: Mapping[str, Mapping[str, Any]],
        stepped: Stepped,
        resumed: Resumption | None = None,
    ) -> StepOnRank:
        """Return a step in the form that is sent to other processes.

        Args:
            weights: the weights before the step.
            settings: the optimizer's settings before the step.
            stepped: the step, which has just been made.
            resumed: how it differs from the same step without interruption.
        """
        kept_by = {name for name, one in self._optimized.stepped.items() if self.optimizer.state.get(one)}
        owned = {name: self._places[name] for name in kept_by} | {name: at for name, (_, at) in self._slices.items()}
        scale = float(self._given.made.dp) if self._of_pair.parallel.averages else 1.0
        tensors = {kind: {n: x for (k, n), x in stepped.tensors.items() if k == kind} for kind, _ in stepped.tensors}
        inputs = {name: x / scale for name, x in _on_cpu(tensors.get("input gradient", {})).items()}
        given = named_inputs(self._given.inputs, self._given.input_names)
        splits = {name: self._of_pair.parallel.split(name) for name in given}
        ran = OnRank(
            _on_cpu(tensors["output"]),
            inputs,
            _on_cpu(tensors["weight gradient"]),
            {},
            splits | {"output": ()},
            self._held,
            stepped.unreached,
            "",
            of_wholes(stepped.changed, self._held),
            self._norm,
        )
        update = stepped.update
        followed = {
            name: (before.cpu(), update.after[name].cpu(), update.gradients[name].cpu())
            for name, before in update.before.items()
        }
        return StepOnRank(
            ran,
            self._loss_over(),
            weights,
            _on_cpu(self.weights),
            stepped.clipping,
            followed,
            owned,
            stepped.apart,
            update.kept_in,
            settings,
            stepped.scaling,
            _on_cpu({name: x for (_, name), x in stepped.summed.items()}),
            resumed,
        )

    def _found_slices(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Return the optimizer's copies of parts of parameters, and which elements of the parameter each copy holds.

        Ranks that divide an optimizer's state divide each parameter, as a vector, into as many parts as there are data
        parallel ranks. A copy is recognised by its size and values.
        """
        parameters, count = dict(self._of_pair.candidate.named_parameters()), self._given.made.dp
        known = {id(one) for one in (*parameters.values(), *self._optimized.stepped.values())}
        copies = [one for group in self.optimizer.param_groups for one in group["params"] if id(one) not in known]
        found: dict[str, tuple[nn.Parameter, Tensor]] = {}
        for name, parameter in parameters.items() if copies else ():
            for own, at in zip(
                parameter.detach().flatten().chunk(count), self._places[name].chunk(count), strict=False
            ):
                for copy in copies:
                    if name not in found and torch.equal(copy.detach().flatten().to(own.dtype), own):
                        found[name] = copy, at
        return found

    def _followed_weights(self) -> Named:
        found = super()._followed_weights()
        for name, (copy, at) in getattr(self, "_slices", {}).items():
            found[name][at] = copy.detach().flatten().double()
        return found

    def _optimizer_copies(self) -> Named:
        return {**super()._optimizer_copies(), **{name: copy for name, (copy, _) in self._slices.items()}}

    def _find_diverged_parameters(self) -> tuple[str, ...]:
        found, parameters = list(super()._find_diverged_parameters()), dict(self._of_pair.candidate.named_parameters())
        for name, (copy, at) in self._slices.items():
            if not is_rounded(parameters[name].detach().flatten()[at], copy.detach().flatten()):
                found.append(name)
        return tuple(found)

    def _loss_over(self) -> dict[AxisName, bool]:
        parallel = self._of_pair.parallel
        outputs = (split for name, split in parallel.splits.items() if name.startswith("output"))
        divided = {over.axis for split in outputs for over in split} | {"cp", "dp"}
        return {axis: axis == "dp" and parallel.averages for axis in AXES if axis in divided}

    def _followed_moments(self) -> dict[str, Named]:
        return {}

    def _to_reference(self, tensors: Mapping[str, Tensor]) -> Named:
        return {name: gather_whole(x) for name, x in tensors.items()}

    _map_gradients = _to_reference


def _loss_of_part(pair: Pair, made: Degrees, rank: int) -> Callable[..., Tensor]:
    """Return a function for a rank's share of the whole loss, times the data parallel size if the port averages."""

    def loss(returned: Any, *_: Any, **__: Any) -> Tensor:
        outputs = named_outputs(returned)
        if not outputs or (len(outputs) == 1 and next(iter(outputs.values())).numel() == 1):
            return distance_to_targets(returned)
        losses = []
        for number, (name, output) in enumerate(outputs.items()):
            split = pair.parallel.split(name)
            own = partial(part, split=split, made=made, place=made.place(rank))
            losses.append(distance_of_part(number, output, whole_shape(output.shape, split, made), own))
        return (float(made.dp) if pair.parallel.averages else 1.0) * torch.stack(losses).sum()

    return loss
