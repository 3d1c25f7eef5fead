"""Train a candidate step by step, and return what each step computed, in the reference's layout."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map_only

from parity.case import transfer
from parity.case.case import Case, Pair, Rng, draw_inputs
from parity.case.training import (
    WAYS,
    Model,
    candidate_optimizer,
    losses,
    own_part,
    plain_step,
    reference_optimizer,
    schedule_of,
)
from parity.case.validate import CheckedSize
from parity.case.weight_map import Constant, Copies, holds
from parity.judge.candidate import TeModules
from parity.numerics.formats import LayerFormats, Role
from parity.passes.all_passes import Tensors, with_weights
from parity.passes.one_pass import Arguments, as_arguments, named_inputs, or_zero, restored_buffers
from parity.passes.prepare import Prepared, build, rounded_inputs
from parity.ranks.layout import Parallel
from parity.result import ModuleFormats, Switch, label_of
from parity.te import state
from parity.te.attention_backend import NotOffered, te_variables
from parity.te.debug_features import SeenFeatures, keep_from_quantizer
from parity.te.seen_formats import SeenFormats
from parity.te.state import Kept, checkpointed, kept, slots
from parity.trainings import switches
from parity.trainings.micro_batches import micro_batches
from parity.trainings.optimized import (
    Named,
    Optimized,
    followed_places,
    gather_whole,
    held_by,
    standing_still,
    steps_elements,
)
from parity.trainings.watched import Clipping, Lost, clipping_of, copied_gradients, moved, sums_in_16_bits, watched
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.te import Kernels, Precision


@dataclass(frozen=True)
class Buffers:
    """The buffers that a new pair must have before a step.

    Attributes:
        candidate: all buffers of the candidate, by name.
        reference: buffers that a forward pass changes, such as running statistics, with the candidate's values.
        by_step: whether the training step itself changes some buffers, such as averages of weights.
    """

    candidate: Mapping[str, Tensor] = field(default_factory=dict)
    reference: Mapping[str, Tensor] = field(default_factory=dict)
    by_step: bool = False

    def give(self, pair: Pair) -> None:
        """Copy the buffers into those of a pair."""
        for module, some in ((pair.candidate, self.candidate), (pair.reference, self.reference)):
            held = dict(module.named_buffers())
            with torch.no_grad():
                for name, x in some.items():
                    if name in held and held[name].shape == x.shape:
                        held[name].copy_(x)


# Make a case of one step: the pair has the weights that the candidate has before the step, and its output is the loss.


def step_case(
    case: Case,
    number: int,
    weights: Named | None,
    seed: int,
    held: Mapping[str, Tensor] = MappingProxyType({}),
    buffers: Buffers = Buffers(),
) -> Case:
    """Return a case for one training step, which is compared like any other case: its output is the loss.

    Args:
        case: the case that is trained.
        number: the step's number, from 1; each step has its own batch.
        weights: the reference's parameters before the step, with the candidate's values; None for the initial ones.
        seed: the run's seed.
        held: the candidate's quantized parameters before the step.
        buffers: the buffers of both modules before the step.
    """

    def factory(te: ModuleType, **size: Any) -> Pair:
        pair = case.factory(te, **size)
        if why := _explain_untrainable(pair):
            wrong = UserError if case.steps else NotOffered  # what a run asks of all pairs is no mistake of this one
            raise wrong(f"the pair {why}, so it cannot be trained; compare a single pass, without steps")
        if weights is not None:
            transfer.fill(pair.reference, weights)
        buffers.give(pair)
        call_reference, call_candidate = losses(pair)
        drawn = _with_inputs_of(pair, size, number, seed)
        fill = True if number > 1 else pair.fill  # a new candidate has the weights with which the training began
        return dataclasses.replace(drawn, call_reference=call_reference, call_candidate=call_candidate, fill=fill)

    varied = case.vary_constants and weights is None
    return dataclasses.replace(case, factory=factory, vary_constants=varied, probe=False, is_step=True, held=held)


def _explain_untrainable(pair: Pair) -> str:
    """Return why a pair cannot be trained; empty if it can."""
    if pair.evaluation:
        return "is in evaluation mode, without gradients"
    is_trained = any(parameter.requires_grad for parameter in pair.candidate.parameters())
    return "" if is_trained else "has no parameter that gets a gradient"


def _with_inputs_of(pair: Pair, size: Mapping[str, Any], number: int, seed: int) -> Pair:
    """Return the pair with the batch of one step as its inputs."""
    size = {name: value for name, value in size.items() if name != "ranks"}

    def inputs(rng: Rng) -> Any:
        return draw_inputs(pair, size, rng if number == 1 else Rng(seed, f"inputs of step {number}"))

    return dataclasses.replace(pair, inputs=inputs)


class Batch(NamedTuple):
    """The inputs of one step.

    Attributes:
        inputs: the inputs as the pair returns them, rounded.
        input_names: names of the positional inputs.
    """

    inputs: Any
    input_names: tuple[str, ...]


def batch_of(
    pair: Pair,
    number: int,
    checked: CheckedSize,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
    input_names: tuple[str, ...],
) -> Batch:
    """Return the inputs of a step of this number, from 1, as ``prepare`` returns them."""
    drawn = _with_inputs_of(pair, checked.size, number, seed)
    return Batch(rounded_inputs(drawn, checked, dtype, seed, device), input_names)


# Train the candidate, which keeps its weights, its optimizer and TE's state from one step to the next.


# More than FP64 loses where a map adds a number, and less than any step in FP32.
_IN_FP64 = 1e-12
# The number of elements of each parameter whose earlier steps are kept: 1.5 kB per parameter and step.
REMEMBERED = 64


@dataclass(frozen=True)
class Update:
    """An optimizer's step on some elements of each parameter, by the parameter's name in the reference, in FP64.

    Attributes:
        before: the weights before the step, with the precision in which the optimizer holds them.
        gradients: the gradients that the optimizer was given.
        after: the weights after the step.
        moments: the optimizer's state for each element, by its name in the optimizer.
        kept_in: the dtypes of that state.
        is_whole: whether all elements are here, because the optimizer does not step each element independently.
        rates: the learning rate of each parameter.
    """

    before: Named
    gradients: Named
    after: Named
    moments: dict[str, Named]
    kept_in: dict[str, torch.dtype]
    is_whole: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)

    def remembered(self) -> Update:
        """Return the part that can explain the failure of a later step: a few elements, without moments."""
        before, gradients, after = (
            {name: x[: None if self.is_whole else REMEMBERED].clone() for name, x in named.items()}
            for named in (self.before, self.gradients, self.after)
        )
        return Update(before, gradients, after, {}, self.kept_in, self.is_whole, self.rates)


@dataclass(frozen=True, eq=False)
class Stepped:
    """One training step of the candidate.

    Attributes:
        tensors: the loss and all gradients, before they are clipped, in the reference's layout.
        unreached: TE's parameters that got no gradient.
        clipping: how the gradients were changed before the optimizer saw them.
        update: what the optimizer did.
        scaling: the state of delayed scaling for each tensor, before and after the step.
        summed: noise of the size of the error that sums over micro-batches make in gradients that are held in 16 bits.
        moved: TE's parameters whose gradients the optimizer reads from other memory than a captured step writes.
        calls: the arguments of each call of the candidate.
        apart: TE's parameters that are not the rounded values of the optimizer's copies.
        stale: TE's FP8 parameters whose transposed copy did not match them before the step, though TE trusted it.
        unmade: TE's FP8 parameters whose transposed copy did not match them, whether TE knows it or not, and which the
            graphs of a captured step did not transpose again.
        buffers: the candidate's buffers after the step.
        written: TE's parameters that something wrote to after the optimizer's step.
        strayed: how far TE's parameters are from what the map makes of the reference's, if the step has moved them
            away: from the copy of one, or from a constant.
        formats: what each module of TE's computed in, if the pair asks for formats or changes its recipe.
        roles: by module, the roles under which it asks a recipe for quantizers.
        changed: by weights of the candidate's, what debug features changed of its layers' formats.
    """

    tensors: Tensors
    unreached: tuple[str, ...]
    clipping: Clipping
    update: Update
    scaling: tuple[tuple[Kept, Kept], ...] = ()
    summed: Tensors = field(default_factory=dict)
    moved: tuple[str, ...] = ()
    calls: tuple[Arguments, ...] = ()
    apart: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    unmade: tuple[str, ...] = ()
    buffers: Named = field(default_factory=dict)
    written: tuple[str, ...] = ()
    strayed: Named = field(default_factory=dict)
    formats: tuple[ModuleFormats, ...] = ()
    roles: Mapping[str, Collection[Role]] = field(default_factory=dict)
    changed: Mapping[str, LayerFormats] = field(default_factory=dict)


Own = TypeVar("Own", bound="Trainee")
# The state of a training as digests of its bytes, by kind and by name.
State = dict[str, dict[str, bytes]]
SCALES, HISTORIES = "FP8 scales", "amax histories"
BUFFERS, UNSAVED_BUFFERS = "buffers", "non-persistent buffers"
COPIES = "the copies of weights that the optimizer steps"


@dataclass(frozen=True, eq=False)
class Saved:
    """A training that was saved to a file.

    Attributes:
        way: how it was saved.
        file: the file.
        schedule: the state of its learning rate schedule.
        state: the state of the training when it was saved.
    """

    way: str
    file: BytesIO
    schedule: Any
    state: State


@dataclass(frozen=True)
class Resumption:
    """How a step after saving and loading a training differs from the same step without interruption.

    Attributes:
        saved: the state of the training when it was saved.
        restored: its state after it was loaded.
        differing: labels of the loss and gradients that are not bitwise the same.
        moments: the optimizer's names of the moments that are not bitwise the same.
        is_same: whether loss, gradients, moments and the weights after the step are all bitwise the same.
        caches_weights: whether one of its modules keeps quantized copies of weights.
    """

    saved: State
    restored: State
    differing: tuple[str, ...]
    moments: tuple[str, ...]
    is_same: bool
    caches_weights: bool


def is_interrupted(switch: Switch, number: int, steps: int) -> bool:
    """Return whether a training is saved and loaded before this step, which is the one after the first half."""
    return (switch in WAYS or switch == "rollback") and number == steps // 2 + 1


class Trainee:
    """A candidate in training.

    Attributes:
        training: how its pair is trained.
        optimizer: its optimizer.
        is_plain: whether its steps are parity's own ones, without micro-batches or graphs.
        journal: records what TE's offloading does once the candidate is told to offload.
        moved_in_calls: the buffers that calls of the candidate have changed so far.
    """

    _between_ranks: Parallel | None = None  # what a plain step does between ranks
    _follows_all = False  # whether all elements are followed, whatever the optimizer
    _fits: Callable[[bool], bool] = staticmethod(lambda fits: fits)  # whether the scales of all ranks fit

    def __init__(
        self,
        case: Case,
        checked: CheckedSize,
        prepared: Prepared,
        precision: Precision,
        seed: int,
        kernels: Kernels,
        switch: Switch = "",
        backend: str = "",
    ) -> None:
        """Build the candidate with the weights of the prepared step, and its optimizer.

        With the switch ``recompute``, ``te.checkpoint`` makes each call, and computes it again in the backward pass.
        With ``micro-batches``, each step splits its batch. With ``compile``, calls are compiled, by this backend if one
        is given.
        """
        pair = with_weights(build(case, checked, seed, kernels), prepared, precision)
        self._begin_training(pair, checked, prepared, precision, seed, kernels, switch, backend)

    def _begin_training(
        self,
        pair: Pair,
        checked: CheckedSize,
        prepared: Prepared | Batch,
        precision: Precision,
        seed: int,
        kernels: Kernels,
        switch: Switch = "",
        backend: str = "",
        group: Any = None,
    ) -> None:
        """Make the optimizer of a built pair; amaxes are reduced over the process group ``group``."""
        self._prepared = prepared
        self._pair, self._shapes = pair, transfer.parameter_shapes(pair.reference)
        self.training = training = pair.training
        self._module = pair.candidate
        self.moved_in_calls = moved_in_calls = set[str]()
        call = (
            checkpointed(kernels.te.checkpoint, pair.call_candidate) if switch == "recompute" else pair.call_candidate
        )

        def model_under(precision: Precision) -> Model:
            autocast = partial(precision.autocast, kernels, group)
            around = partial(_note_moved_buffers, pair.candidate, moved_in_calls, autocast)
            cuda = switches.cuda_of(kernels)
            return Model(pair.candidate, call, training.loss, around, precision.new_recipe(), cuda)

        self._model_under = model_under
        self._use_precision(precision)
        self._watches_formats = switch != "compile" and bool(training.recipes or pair.formats)
        if self._watches_formats:
            TeModules().of(pair.candidate)
        self._in_micro_batches = switch == "micro-batches"
        if self._in_micro_batches and training.candidate_step is not None:
            raise UserError(
                "the switch micro-batches works only with parity's own training step, but this pair has a "
                "candidate_step: split the batch there"
            )
        self.is_plain = training.candidate_step is None and not self._in_micro_batches
        self._capture = training.graph or partial(switches.captured_by_te, kernels.te)
        self._te, self.journal = kernels.te, switches.Journal()
        self._is_captured = False
        self._replayed: Callable[..., Tensor] | None = None  # the captured step
        self._written: Named = {}  # gradients in the memory that the captured step writes
        self._at = checked, precision.dtype, seed, kernels.device
        if switch == "compile":
            own = None if backend else training.compile
            (own or switches.compiled_by_torch(backend or switches.backends(kernels)[-1]))(pair.candidate)
        self.optimizer = candidate_optimizer(training, kernels.te)(pair.candidate)
        if not isinstance(self.optimizer, Optimizer):
            own = "candidate_optimizer" if training.candidate_optimizer else "optimizer"
            raise UserError(f"{own} must return a torch.optim.Optimizer, not {type(self.optimizer).__name__}")
        self._optimized = Optimized(pair.candidate, self.optimizer, pair.weights)
        self._scheduler = schedule_of(training, self.optimizer)
        if isinstance(self.optimizer, LBFGS):
            raise UserError(
                "torch.optim.LBFGS computes the loss several times per step, which parity cannot compare: use another "
                "optimizer, training=parity.Training(optimizer=...)"
            )
        # Only the followed elements are stepped again, unless the optimizer steps whole matrices.
        self._are_whole = self._follows_all or not steps_elements(pair.reference, reference_optimizer(training))
        self._places = {name: followed_places(name, shape, self._are_whole) for name, shape in self._shapes.items()}

    def _use_precision(self, precision: Precision) -> None:
        self._model = self._model_under(precision)
        self._warmup_passes = precision.warmup_passes
        self._is_quantized = precision.recipe is not None

    def _step_on(self, prepared: Prepared | Batch) -> Callable[..., Tensor]:
        split = None
        if self._in_micro_batches and isinstance(prepared, Prepared):
            split = micro_batches(prepared, self._is_quantized)
        plain = plain_step(self.training.clip, split, self._between_ranks)
        return self._replayed or self.training.candidate_step or plain

    def change_recipe(self, precision: Precision, number: int) -> None:
        """Make the step of this number and later ones under another recipe."""
        self._use_precision(precision)
        self.settle(self.batch(number))

    def settle(self, batch: Prepared | Batch | None = None) -> None:
        """Let delayed scaling find scales like those of a training that has run for a while.

        A step on the batch, by default the first, is repeated without the optimizer.
        """
        given = batch or self._prepared
        step = self._step_on(given)

        def once() -> None:
            args, kwargs = as_arguments(_copy_as_leaves(given.inputs))
            with restored_buffers(self._module):
                step(self._model, self.optimizer, *args, **kwargs)
            self._module.zero_grad(set_to_none=True)
            state.clear(self._module)

        if self._warmup_passes:
            with standing_still(self.optimizer):
                state.settled(once, self._warmup_passes, self._fits)

    def capture(self) -> None:
        """Capture the candidate in CUDA graphs, which later steps replay.

        Raises:
            switches.NotCaptured: if it cannot be captured.
        """
        args, kwargs = as_arguments(_copy_as_leaves(self._prepared.inputs))
        with restored_buffers(self._module):
            step = switches.captured(self._capture, self._model, self.optimizer, args, kwargs)
        self._is_captured = True
        if step is not None:
            self._replayed, self.is_plain = step, False
            self._written = {name: one.grad for name, one in self._module.named_parameters() if one.grad is not None}

    def offload(self) -> None:
        """Make later calls offload what they save for their backward passes, in the pair's way or else in TE's."""
        call = (self.training.offload or partial(switches.offloaded_by_te, self._te, self.journal))(self._module)
        if call is not None:
            self._model = self._model.called_by(call)
        self.journal.watch(self._te, self._module)

    def reading_back(
        self, exchange: switches.Exchange, seen: list[Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Exchange what calls of the candidate save for their backward passes, within the context."""
        return switches.reading_back(self._model, exchange, seen)

    def saved(self, way: str = "resume") -> Saved:
        """Save the training, and return what was saved.

        Args:
            way: a key of ``parity.case.training.WAYS``; a pair's own ``save`` and ``load`` are for ``resume``.
        """
        if self._scheduler is not None and not hasattr(self._scheduler, "state_dict"):
            raise UserError(
                f"scheduler= returns a {type(self._scheduler).__name__}, which has no state_dict, so the training "
                "cannot be resumed: give it state_dict and load_state_dict, like PyTorch's schedulers"
            )
        file = BytesIO()
        own = self.training.save if way == "resume" else None
        (own or WAYS[way].save)(self._module, self.optimizer, file)
        if file.closed:
            raise UserError("save= closed the file, but load= has to read it: leave the file open")
        schedule = copy.deepcopy(self._scheduler.state_dict()) if self._scheduler else None
        return Saved(way, file, schedule, self.state)

    def load(self, saved: Saved) -> None:
        """Load a saved training, after making all weights wrong, so that a weight that is not loaded shows."""
        with torch.no_grad():
            for one in self._module.parameters():
                if one.is_floating_point():
                    one.copy_(2.0 * state.dequantized_tensor(one.detach()))
        saved.file.seek(0)
        own = self.training.load if saved.way == "resume" else None
        # TE pickles the scales of delayed scaling, and reads them only if it is told to trust the file
        # (``pytorch/_extra_state.py`` of TE 2.20.2). This process wrote the file.
        with te_variables({"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}):
            (own or WAYS[saved.way].load)(self._module, self.optimizer, saved.file)
        self._optimized.find_replaced()
        if self._scheduler is not None:
            self._scheduler.load_state_dict(saved.schedule)

    @property
    def state(self) -> State:
        """Return the state of the module and its optimizer, as digests."""
        found: State = {
            "weights": {name: digest(one) for name, one in self._module.named_parameters()},
            BUFFERS: {},
            UNSAVED_BUFFERS: {},
            SCALES: {},
            HISTORIES: {},
        }
        for name, one in self._module.named_buffers():
            path, _, last = name.rpartition(".")
            is_saved = last not in self._module.get_submodule(path)._non_persistent_buffers_set
            found[BUFFERS if is_saved else UNSAVED_BUFFERS][name] = digest(one)
        for slot in slots(self._module):
            found[SCALES][slot.name] = digest(slot.scale)
            found[HISTORIES][slot.name] = digest(slot.history)
        found[COPIES] = {name: digest(one) for name, one in self._optimizer_copies().items()}
        for name, parameter in self._optimized.stepped.items():
            for key, value in self._optimized.kept_of(parameter).items():
                found.setdefault(f"the optimizer's {key}", {})[name] = digest(value)
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    found.setdefault(f"the optimizer's {key}", {})[f"its group {number}"] = digest(value)
        return found

    @property
    def owners(self) -> dict[str, Any]:
        """Return the objects that may hold numbers and tensors that a step reads."""
        own = {"candidate_step": self.training.candidate_step, "call_candidate": self._pair.call_candidate}
        return {"": self._module, "the optimizer": self.optimizer, **own, "loss": self.training.loss}

    def leave_recipe(self) -> None:
        """Run all later calls without the precision's recipe."""
        self._model = self._model.without_recipe()

    @property
    def caches_weights(self) -> bool:
        """Return whether a TE module keeps quantized copies of its weights from one call to the next."""
        return any(getattr(one, "_fp8_workspaces", None) for one in self._module.modules())

    @property
    def weights(self) -> Named:
        """The weights as the module holds them, in the reference's layout, in FP64."""
        return {name: x.clone() for name, x in self._to_reference(held_by(self._module)).items()}

    @property
    def buffers(self) -> Named:
        """Return copies of the module's buffers."""
        return {name: one.detach().clone() for name, one in self._module.named_buffers()}

    @property
    def quantized(self) -> Named:
        """Return copies of the parameters that the module holds quantized, by their names there."""
        return {name: one.detach().clone() for name, one in self._module.named_parameters() if state.is_quantized(one)}

    def batch(self, number: int) -> Batch:
        """Return the inputs of the step of this number, from 1, as ``prepare`` returns them."""
        checked, dtype, seed, device = self._at
        return batch_of(self._pair, number, checked, dtype, seed, device, self._prepared.input_names)

    def resumed(
        self: Own, switch: Switch, new: Callable[[], Own], prepared: Prepared | Batch
    ) -> tuple[Own, Stepped, Resumption]:
        """Save the training, make a step, load what was saved, and make that step again.

        Args:
            switch: a key of ``parity.case.training.WAYS``, to load into a new training; or ``rollback``, to load into
                this one.
            new: returns a new training.
            prepared: the step's batch.

        Returns:
            The training that was loaded, its step, and how that step differs from the one without interruption.
        """
        saved = self.saved(switch if switch in WAYS else "resume")
        uninterrupted = self.step(prepared)
        trainee = new() if switch in WAYS else self
        trainee.load(saved)
        restored, caches_weights = trainee.state, trainee.caches_weights
        stepped = trainee.step(prepared)
        one, other = uninterrupted.update, stepped.update
        differing = tuple(
            label_of(kind, "loss" if kind == "output" else name)
            for (kind, name), x in uninterrupted.tensors.items()
            if not torch.equal(gather_whole(x), gather_whole(stepped.tensors[kind, name]))
        )
        moments = tuple(key for key, some in one.moments.items() if not _are_same(some, other.moments.get(key, {})))
        is_same = not differing and not moments and _are_same(one.after, other.after)
        return trainee, stepped, Resumption(saved.state, restored, differing, moments, is_same, caches_weights)

    def step(self, prepared: Prepared | Batch) -> Stepped:
        """Make one step with a prepared batch.

        Raises:
            UserError: if the step does not return a loss of one number, or does not step its optimizer exactly once.
        """
        args, kwargs = as_arguments(_copy_as_leaves(prepared.inputs))
        before, step = self._followed_weights(), self._step_on(prepared)
        scaling, stale = kept(self._module, self._optimized.quantized_from), tuple(state.stale_transposes(self._module))
        copies, astray = self._stale_copies(), self._measure_map_deviations()
        self._model.calls.clear()
        is_own = self.training.candidate_step is not None
        watching = watched(self._module, self.optimizer, self._optimized, self._written, is_own)
        formats, features = SeenFormats(), SeenFeatures()
        looking: AbstractContextManager[None] = nullcontext()
        if self._watches_formats:
            formats.of(self._module)
            looking = formats.watched()
        with watching as seen, sums_in_16_bits(self._module) as lost, looking, features.watched(self._module):
            loss = step(self._model, self.optimizer, *args, **kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"a training step must return its loss as a tensor that holds one number, such as model.loss(*inputs), "
                f"not {shape}"
            )
        calls = tuple(tree_map_only(Tensor, Tensor.detach, self._model.calls))
        self._model.calls.clear()
        if self._replayed and not seen.used:  # the graph stepped the optimizer, but its gradients are still in memory
            seen.used.append(copied_gradients(self._optimized.stepped))
            seen.moved = moved(self._module, self._written)
        if len(seen.used) != 1:
            advice = f"called {len(seen.used)} times; make that many steps, with one batch each"
            raise UserError(
                "a training step must call optimizer.step() exactly once, and a closure passed to it must be called "
                f"once, but here it was {advice if seen.used else 'not called'}"
            )
        if self._scheduler is not None:
            self._scheduler.step()
        used = seen.used[0]
        raw = used | seen.raw
        inputs = named_inputs(kwargs or args, prepared.input_names)
        tensors: Tensors = {("output", "output"): loss.detach().reshape(())}
        leaves = {name: x for name, x in inputs.items() if x.is_floating_point()}
        if not (self.training.candidate_step or self._replayed):  # these may scale the loss, and gradients back later
            tensors |= {("input gradient", name): x.grad for name, x in leaves.items() if x.grad is not None}
        gradients = {name: or_zero(raw.get(name), one) for name, one in self._module.named_parameters()}
        tensors |= {("weight gradient", name): x for name, x in self._map_gradients(gradients).items()}
        given = {name: or_zero(used.get(name), one) for name, one in self._module.named_parameters()}
        update = Update(
            before,
            self._select_followed_elements(self._map_gradients(given)),
            self._followed_weights(),
            self._followed_moments(),
            self._optimized.read_state_dtypes(),
            self._are_whole,
            seen.rates,
        )
        frozen = (name for name, one in self._module.named_parameters() if not one.requires_grad or name not in raw)
        now = kept(self._module)
        moves = tuple(
            (one, now[key])
            for key, one in scaling.items()
            if key in now and not keep_from_quantizer(features.formats, one.slot)
        )
        noise, later = self._draw_sum_noise(lost), self._stale_copies()
        unmade = tuple(name for name, one in copies.items() if later.get(name) == one)
        return Stepped(
            *(
                tensors,
                tuple(frozen),
                clipping_of(used, raw, seen),
                update,
                moves,
                noise,
                seen.moved,
                calls,
                self._find_diverged_parameters(),
                stale,
            ),
            unmade,
            self.buffers,
            tuple(seen.written_later(self._optimized.stepped)),
            {
                name: x
                for name, x in self._measure_map_deviations().items()
                if not torch.allclose(x, astray[name], 0.0, _IN_FP64)
            },
            formats.rows,
            formats.roles,
            features.formats,
        )

    def _measure_map_deviations(self) -> Named:
        """Return the distance of each copy of a parameter, and of each constant, from what the map makes them."""
        weights = {x: y for x, y in self._pair.weights.items() if holds(x, Constant) or holds(y, Copies)}
        held = self._optimized.read_stepped_weights() if weights else {}
        made = transfer.to_candidate(
            weights, transfer.to_reference(weights, held, self._shapes), transfer.parameter_shapes(self._module)
        )
        return {name: held[name] - x.to(held[name]) for name, x in made.items()}

    def _stale_copies(self) -> dict[str, bytes]:
        """Return digests of the stale transposed copies, if the candidate is captured."""
        found = state.stale_transposes(self._module, in_a_graph=True) if self._is_captured else {}
        return {name: digest(one) for name, one in found.items()}

    def _draw_sum_noise(self, lost: Mapping[str, Lost]) -> Tensors:
        """Return noise of the size of the errors of sums, by the gradients' names in the reference."""
        if not any(one.additions > 1 for one in lost.values()):
            return {}
        noise = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in self._module.named_parameters()}
        for name, one in lost.items():
            if one.additions > 1:
                drawn = Rng(0, f"sums of {name}").normal(*one.variance.shape).to(one.variance)
                noise[name] = one.variance.sqrt() * drawn
        return {("weight gradient", name): x for name, x in self._map_gradients(noise).items() if bool(x.any())}

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's settings for each parameter, by its name in the reference."""
        return self._optimized.settings

    def _optimizer_copies(self) -> Named:
        """Return the copies that the optimizer steps in place of the module's parameters, by the parameters' names."""
        return self._optimized.copies()

    def _find_diverged_parameters(self) -> tuple[str, ...]:
        """Return the parameters that differ from the optimizer's copies by more than an ulp."""
        return self._optimized.find_diverged_parameters()

    def _followed_weights(self) -> Named:
        """Return the followed elements of the weights that the optimizer steps, which may be FP32 copies."""
        return self._select_followed_elements(self._to_reference(self._optimized.read_stepped_weights()))

    def _followed_moments(self) -> dict[str, Named]:
        """Return the optimizer's moments of the followed elements."""
        return {
            key: self._select_followed_elements(self._map_gradients(some))
            for key, some in self._optimized.moments().items()
        }

    def _select_followed_elements(self, tensors: Mapping[str, Tensor]) -> Named:
        return {name: x.detach().reshape(-1)[self._places[name]].double() for name, x in tensors.items()}

    def _to_reference(self, tensors: Mapping[str, Tensor]) -> Named:
        return transfer.to_reference(self._pair.weights, tensors, self._shapes)

    def _map_gradients(self, tensors: Mapping[str, Tensor]) -> Named:
        return transfer.gradients_to_reference(self._pair.weights, tensors, self._shapes)


def _are_same(some: Named, others: Named) -> bool:
    return some.keys() == others.keys() and all(torch.equal(x, others[name]) for name, x in some.items())


@contextmanager
def _note_moved_buffers(
    module: nn.Module, moved: set[str], around: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Add the buffers that a call of the module changes within the context to ``moved``."""
    before = {name: (one, one._version) for name, one in module.named_buffers()}
    with around():
        yield
    for name, one in module.named_buffers():
        if name not in before or before[name][0] is not one or before[name][1] != one._version:
            moved.add(name)


def digest(value: Any) -> bytes:
    """Return a digest of a value's bytes; a quantized tensor is dequantized to FP32 first, as optimizers read it."""
    if not isinstance(value, Tensor):
        return repr(value).encode()
    plain = state.dequantized_tensor(own_part(value).detach(), torch.float32).reshape(-1).contiguous().cpu()
    return hashlib.blake2b(plain.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def _copy_as_leaves(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), inputs)
