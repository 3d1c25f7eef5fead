"""Train a candidate on one of several ranks, with its parts of weights and batches, and hand out its steps."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parity import te
from parity.case.case import Pair
from parity.case.training import distance_of_part, distance_to_targets
from parity.case.weight_map import WeightMap
from parity.passes.modes import usual_modes
from parity.passes.on_rank import Given, OnRank, built_on_rank, is_so_on_all, parts_of_inputs
from parity.passes.one_pass import named_inputs, named_outputs
from parity.passes.steps import Batch, Named, Resumption, Stepped, Trainee, gathered, is_interrupted, is_rounded
from parity.ranks.layout import AXES, AxisName, Degrees, Ranks, joined, part, whole_shape
from parity.result import Switch
from parity.te import Kernels
from parity.te.attention_backend import attention_backends
from parity.te.precision import PRECISIONS, Precision
from parity.te.scaling import Kept
from parity.te.state import fresh_caches, fresh_quantization


@dataclass(frozen=True, eq=False)
class GivenSteps:
    """Hold what every rank is given of a training.

    Attributes:
        given: as for a single pass; its inputs are those of the first step.
        batches: the inputs of each step, whole, rounded.
        switch: how each rank's part is trained, one of ``parity.case.registry.SWITCHES_OVER_RANKS``.
    """

    given: Given
    batches: tuple[Any, ...]
    switch: Switch = ""


@dataclass(frozen=True, eq=False)
class StepOnRank:
    """Hold what one rank has of one step.

    Attributes:
        ran: its loss, as the output, and gradients, before they are clipped.
        loss_over: axes over which ranks have parts of the loss, and whether these are means.
        weights: those that its module held before the step, by name.
        after: those that it holds afterwards.
        clipped: by what its gradients were multiplied before its optimizer saw them.
        followed: what its optimizer steps: the weights before and after, and the gradients that it was given, by name.
        owned: which elements of each parameter it keeps something of, as an optimizer does that steps them.
        apart: parameters that are not what the optimizer's copies of them are, rounded.
        kept_in: the dtypes in which its optimizer keeps what it keeps.
        settings: its optimizer's, for each parameter.
        scaling: what delayed scaling kept of each tensor before and after.
        summed: noise as large as what sums over micro-batches lose.
        resumed: how the step differs from the same without interruption, if the training was loaded before it.
    """

    ran: OnRank
    loss_over: Mapping[AxisName, bool]
    weights: Named
    after: Named
    clipped: float
    followed: Mapping[str, tuple[Tensor, Tensor, Tensor]]
    owned: Named
    apart: tuple[str, ...]
    kept_in: Mapping[str, torch.dtype]
    settings: Mapping[str, Mapping[str, Any]]
    scaling: tuple[tuple[Kept, Kept], ...]
    summed: Named
    resumed: Resumption | None = None


@fresh_caches()
@fresh_quantization()
def steps_on_rank(given: GivenSteps) -> list[StepOnRank]:
    """Build this rank's candidate and its optimizer, make all steps, and return what each computed.

    Raises:
        UserError: if the candidate's parameters are not the parts that the pair says, or a step is none.
    """
    one = given.given
    kernels, precision = te.kernels(one.backend), PRECISIONS[one.precision]
    ranks = joined(one.made)
    with usual_modes(), attention_backends(one.attention), warnings.catch_warnings(), ExitStack() as resuming:
        warnings.simplefilter("ignore")  # the same in each rank and each comparison

        def anew() -> TraineeOnRank:
            resuming.enter_context(fresh_quantization())
            return TraineeOnRank(one, ranks, kernels, precision)

        trainee = TraineeOnRank(one, ranks, kernels, precision, given.switch)
        trainee.settle()
        steps = []
        for number, whole in enumerate(given.batches, 1):
            before = _on_cpu(trainee.weights), trainee.settings
            batch = trainee.part_of(whole)
            if is_interrupted(given.switch, number, len(given.batches)):
                trainee, stepped, resumed = trainee.resumed(given.switch, anew, batch)
                steps.append(trainee.of_rank(*before, stepped, resumed))
            else:
                steps.append(trainee.of_rank(*before, trainee.step(batch)))
        return steps


class TraineeOnRank(Trainee):
    """A rank's part of a candidate in training: parameters are told by their own names, and whole as it holds them."""

    _fits = staticmethod(is_so_on_all)
    _follows_all = True

    def __init__(self, given: Given, ranks: Ranks, kernels: Kernels, precision: Precision, switch: Switch = "") -> None:
        """Build the candidate and its optimizer; every rank has to do so."""
        built = built_on_rank(given, ranks, kernels, precision)
        pair, held = built.pair, built.held
        own: WeightMap = {name: name for name, _ in pair.candidate.named_parameters()}
        training = pair.training
        if training.loss is None:
            training = dataclasses.replace(training, loss=_loss_of_part(pair, given.made, ranks.world.rank))
        self._of_pair, self._held, self._given, self._ranks = pair, held, given, ranks
        self._norm: float | None = None  # of all gradients, as the port has computed it last
        norm = pair.parallel.gradient_norm and self._noting(pair.parallel.gradient_norm)
        self._between_ranks = dataclasses.replace(pair.parallel, gradient_norm=norm)
        self._device = kernels.device
        first = self.part_of(given.inputs)
        mapped = dataclasses.replace(pair, weights=own, training=training, reference=pair.candidate)
        group = pair.parallel.amax_group or ranks.stage.group
        self._begin(mapped, given.checked, first, precision, given.seed, kernels, switch, group=group)
        self._places = {name: torch.arange(parameter.numel()) for name, parameter in pair.candidate.named_parameters()}
        self._slices = self._found_slices()

    def _noting(self, norm: Callable[[nn.Module], Tensor | float]) -> Callable[[nn.Module], Tensor | float]:
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
        """Return a step as other processes read it.

        Args:
            weights: those before it.
            settings: its optimizer's before it.
            stepped: the step, which has just been made.
            resumed: how it differs from the same without interruption.
        """
        kept_by = {name for name, one in self._stepped.items() if self.optimizer.state.get(one)}
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
            stepped.clipped,
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
        """Return copies that the optimizer steps of a part of a parameter alone, and which of its elements they are.

        Ranks that divide an optimizer's state divide each parameter, as a vector, in as many parts as there are data
        parallel ranks. A copy is told by its size and values.
        """
        parameters, count = dict(self._of_pair.candidate.named_parameters()), self._given.made.dp
        known = {id(one) for one in (*parameters.values(), *self._stepped.values())}
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

    def _copies(self) -> Named:
        return {**super()._copies(), **{name: copy for name, (copy, _) in self._slices.items()}}

    def _apart(self) -> tuple[str, ...]:
        found, parameters = list(super()._apart()), dict(self._of_pair.candidate.named_parameters())
        for name, (copy, at) in self._slices.items():
            if not is_rounded(parameters[name].detach().flatten()[at], copy.detach().flatten()):
                found.append(name)
        return tuple(found)

    def _loss_over(self) -> dict[AxisName, bool]:
        parallel = self._of_pair.parallel
        outputs = (split for name, split in parallel.splits.items() if name.startswith("output"))
        divided = {over.axis for split in outputs for over in split} | {"cp", "dp"}
        return {axis: axis == "dp" and parallel.averages for axis in AXES if axis in divided}

    def _moments(self) -> dict[str, Named]:
        return {}

    def _to_reference(self, tensors: Mapping[str, Tensor]) -> Named:
        return {name: gathered(x) for name, x in tensors.items()}

    _gradients = _to_reference


def _loss_of_part(pair: Pair, made: Degrees, rank: int) -> Callable[..., Tensor]:
    """Return the loss of a rank's outputs: its share of the whole's, times the data parallel ranks if it averages."""

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


def _on_cpu(tensors: Mapping[str, Tensor]) -> Named:
    return {name: gathered(x).detach().cpu().clone() for name, x in tensors.items()}
