"""Train a candidate step by step, and hand out what each step computed, in the reference's layout."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from parity.case.case import Case, MakeOptimizer, Pair, Rng, draw_inputs
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
from parity.case.weight_map import names
from parity.cpu.float8 import fp8_dtype, is_float8_tensor
from parity.passes import switches
from parity.passes.all_passes import Tensors, with_weights
from parity.passes.micro_batches import micro_batches
from parity.passes.one_pass import Arguments, as_arguments, named_inputs, or_zero, restored_buffers
from parity.passes.prepare import Prepared, build, rounded_inputs
from parity.ranks.layout import Parallel
from parity.result import Switch, label_of
from parity.te import state
from parity.te.attention_backend import te_variables
from parity.te.state import Kept, kept, slots
from parity.trace.private_functions import CLIP, exchanged
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.te import Kernels, Precision

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Buffers:
    """Hold buffers before a step, as a new pair is to have them.

    Attributes:
        candidate: all of the candidate's, by name.
        reference: those that a forward pass changes, such as running statistics, as the candidate has them.
        by_step: whether the training step changes some by itself, such as averages of weights.
    """

    candidate: Mapping[str, Tensor] = field(default_factory=dict)
    reference: Mapping[str, Tensor] = field(default_factory=dict)
    by_step: bool = False

    def give(self, pair: Pair) -> None:
        """Copy them into a pair's buffers of these names."""
        for module, some in ((pair.candidate, self.candidate), (pair.reference, self.reference)):
            held = dict(module.named_buffers())
            with torch.no_grad():
                for name, x in some.items():
                    if name in held and held[name].shape == x.shape:
                        held[name].copy_(x)


# The comparison of one step: the pair with the weights that the candidate has before it, and the loss as its output.


def step_case(
    case: Case,
    number: int,
    weights: Named | None,
    seed: int,
    held: Mapping[str, Tensor] = MappingProxyType({}),
    buffers: Buffers = Buffers(),
) -> Case:
    """Return the case of one training step, which is compared like any other: its output is the loss.

    Args:
        case: the pair that is trained.
        number: of the step, from 1; each has a batch of its own.
        weights: the reference's parameters before the step, as the candidate has them; None for those of its build.
        seed: the run's seed.
        held: the candidate's quantized parameters before the step.
        buffers: those of both before the step.
    """

    def factory(te: ModuleType, **size: Any) -> Pair:
        pair = case.factory(te, **size)
        if pair.evaluation:
            raise UserError(
                f"{case.name} is in evaluation mode, without gradients, and cannot be trained: leave out "
                "evaluation=True, or compare a single pass of it, without steps"
            )
        if weights is not None:
            transfer.fill(pair.reference, weights)
        buffers.give(pair)
        call_reference, call_candidate = losses(pair)
        drawn = _with_inputs_of(pair, size, number, seed)
        fill = True if number > 1 else pair.fill  # a new candidate has the weights with which the training began
        return dataclasses.replace(drawn, call_reference=call_reference, call_candidate=call_candidate, fill=fill)

    varied = case.vary_constants and weights is None
    return dataclasses.replace(case, factory=factory, vary_constants=varied, probe=False, is_step=True, held=held)


def _with_inputs_of(pair: Pair, size: Mapping[str, Any], number: int, seed: int) -> Pair:
    """Return the pair with the batch of one step as its inputs."""
    size = {name: value for name, value in size.items() if name != "ranks"}

    def inputs(rng: Rng) -> Any:
        return draw_inputs(pair, size, rng if number == 1 else Rng(seed, f"inputs of step {number}"))

    return dataclasses.replace(pair, inputs=inputs)


class Batch(NamedTuple):
    """Hold the inputs of one step.

    Attributes:
        inputs: as the pair returns them, rounded.
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
    """Return the inputs of one step of a pair, counted from 1, as ``prepare`` has them."""
    drawn = _with_inputs_of(pair, checked.size, number, seed)
    return Batch(rounded_inputs(drawn, checked, dtype, seed, device), input_names)


# The candidate, which keeps its weights, its optimizer and TE's state from one step to the next.


# How much more than one quantization costs a parameter may be off: a cast to BF16 before it adds 0.2 % (E4M3).
_QUANTIZED_TWICE = 1.02
# Of so many elements of each parameter the optimizer's steps are followed.
FOLLOWED = 1024
# Of so many of these it is remembered what earlier steps did: 1.5 kB a parameter and step.
REMEMBERED = 64


@dataclass(frozen=True)
class Update:
    """Hold what an optimizer did in one step to some elements of each parameter, by its name in the reference, in FP64.

    Attributes:
        before: the weights, in FP32 where the optimizer holds them so.
        gradients: as the optimizer was given them.
        after: the weights after the step.
        moments: what the optimizer keeps for each element, by its name there.
        kept_in: the dtypes in which it keeps them.
        is_whole: whether it has all elements, as an optimizer's that does not step each by itself.
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
        """Return what the failure of a later step is explained by: a few of the elements, without moments."""
        before, gradients, after = (
            {name: x[: None if self.is_whole else REMEMBERED].clone() for name, x in named.items()}
            for named in (self.before, self.gradients, self.after)
        )
        return Update(before, gradients, after, {}, self.kept_in, self.is_whole, self.rates)


@dataclass(frozen=True)
class Clipping:
    """Tell how the gradients that an optimizer got differ from those that backward passes have added up.

    Attributes:
        factor: by what all were multiplied, by least squares.
        lowest, highest: the least and the largest such factor of any parameter by itself.
        is_early: whether backward passes were added to gradients that had been clipped, or changed in another way.
        is_seen: whether ``clip_grad_norm_`` has changed them: of gradients that are clipped in another way, only the
            result is known.
        of_added: their norm, in relation to that of what backward passes have left, in a step of the port's own.
        added: the norm of what backward passes have left, in such a step; else 0.
        is_changed_after: whether gradients that ``clip_grad_norm_`` has changed were changed again before the optimizer
            got them, as by ranks that add them up.
        after: their norm when the optimizer got them, in relation to that after the clipping.
    """

    factor: float
    lowest: float
    highest: float
    is_early: bool = False
    is_seen: bool = True
    of_added: float = 1.0
    added: float = 0.0
    is_changed_after: bool = False
    after: float = 1.0


@dataclass(frozen=True, eq=False)
class Stepped:
    """One training step of the candidate.

    Attributes:
        tensors: the loss and all gradients, before they are clipped, in the reference's layout.
        unreached: TE's parameters that got no gradient.
        clipping: what was done to them before the optimizer saw them.
        update: what the optimizer did.
        scaling: what delayed scaling kept of each tensor before and after the step.
        summed: noise as large as what sums over micro-batches lose of gradients that are held in 16 bits.
        moved: TE's parameters whose gradients the optimizer does not read where a captured step writes them.
        calls: the arguments of each call of the candidate.
        apart: TE's parameters that are not what the optimizer's copies of them are, rounded.
        stale: TE's FP8 parameters whose transposed copy was another tensor's before the step.
        unmade: TE's FP8 parameters whose transposed copy was so, whether TE knows it or not, and was not made again by
            the graphs of a captured step.
        buffers: the candidate's buffers after the step.
        written: TE's parameters that something wrote to after the optimizer's step.
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


Own = TypeVar("Own", bound="Trainee")
# What a training keeps, by what it is and by name, as digests of its bytes.
State = dict[str, dict[str, bytes]]
SCALES, HISTORIES = "FP8 scales", "amax histories"
BUFFERS, UNSAVED_BUFFERS = "buffers", "buffers that no state_dict holds"
COPIES = "the copies of weights that the optimizer steps"


@dataclass(frozen=True, eq=False)
class Saved:
    """Hold a training that was written to a file.

    Attributes:
        way: how it was written.
        file: what was written.
        schedule: the state of its learning rate's schedule.
        state: what the training kept then.
    """

    way: str
    file: BytesIO
    schedule: Any
    state: State


@dataclass(frozen=True)
class Resumption:
    """Tell a step that a training made after it was saved and loaded from the same step without interruption.

    Attributes:
        saved: what the training kept when it was saved.
        restored: what it kept when it was loaded.
        differing: labels of the loss and gradients that are not the same to the bit.
        moments: what its optimizer keeps of gradients that is not, by the optimizer's names.
        is_same: whether these and the weights after the step are the same to the bit.
        caches_weights: whether one of its modules keeps quantized copies of weights.
    """

    saved: State
    restored: State
    differing: tuple[str, ...]
    moments: tuple[str, ...]
    is_same: bool
    caches_weights: bool


def is_interrupted(switch: Switch, number: int, steps: int) -> bool:
    """Return whether a training of so many steps is saved and loaded before a step, counted from 1: in the middle."""
    return (switch in WAYS or switch == "rollback") and number == steps // 2 + 1


class Trainee:
    """A candidate in training.

    Attributes:
        training: how its pair is trained.
        optimizer: its optimizer.
        is_plain: whether its steps are parity's own, without any trick.
        journal: what TE's offloading does, once the candidate is told to offload.
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
        """Build the candidate, with the weights of the prepared step, and its optimizer.

        With the switch ``recompute``, each call is made by ``te.checkpoint``, which computes it again in the backward
        pass; with ``micro-batches``, each step splits its batch; with ``compile``, calls are compiled, by this backend
        if one is given.
        """
        pair = with_weights(build(case, checked, seed, kernels), prepared, precision)
        self._begin(pair, checked, prepared, precision, seed, kernels, switch, backend)

    def _begin(
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
        """Make the optimizer of a pair that is built; ``group`` is that over which amaxes are reduced."""
        self._prepared = prepared
        self._pair, self._shapes = pair, transfer.parameter_shapes(pair.reference)
        self.training = training = pair.training
        self._module = pair.candidate
        self.moved_in_calls: set[str] = set()
        autocast = partial(precision.autocast, kernels, group)
        around = partial(_called, pair.candidate, self.moved_in_calls, autocast)
        call = _recomputed(kernels.te, pair.call_candidate) if switch == "recompute" else pair.call_candidate
        self._model = Model(
            pair.candidate, call, training.loss, around, precision.new_recipe(), switches.cuda_of(kernels)
        )
        self._in_micro_batches = switch == "micro-batches"
        if self._in_micro_batches and training.candidate_step is not None:
            raise UserError(
                "the switch micro-batches splits the batch of a plain step, but this pair has a candidate_step of its "
                "own: split the batch there"
            )
        self.is_plain = training.candidate_step is None and not self._in_micro_batches
        self._capture = training.graph or partial(switches.captured_by_te, kernels.te)
        self._te, self.journal = kernels.te, switches.Journal()
        self._is_captured = False
        self._replayed: Callable[..., Tensor] | None = None  # a step that is captured
        self._written: Named = {}  # gradients in the memory that it writes
        self._at = checked, precision.dtype, seed, kernels.device
        if switch == "compile":
            own = None if backend else training.compile
            (own or switches.compiled_by_torch(backend or switches.backends(kernels)[-1]))(pair.candidate)
        self.optimizer = candidate_optimizer(training, kernels.te)(pair.candidate)
        if not isinstance(self.optimizer, Optimizer):
            own = "candidate_optimizer" if training.candidate_optimizer else "optimizer"
            raise UserError(f"{own} must return a torch.optim.Optimizer, not {type(self.optimizer).__name__}")
        self._optimizers = list(_with_inner(self.optimizer))
        self._parameters = dict(pair.candidate.named_parameters())
        self._stepped = _stepped(pair.candidate, self.optimizer)
        self._scheduler = schedule_of(training, self.optimizer)
        if isinstance(self.optimizer, LBFGS):
            raise UserError(
                "torch.optim.LBFGS computes the loss several times in a step, which is not compared: give the pair "
                "another optimizer, training=parity.Training(optimizer=...)"
            )
        self._are_whole = self._follows_all or not steps_elements(pair.reference, reference_optimizer(training))
        self._places = {name: followed_places(name, shape, self._are_whole) for name, shape in self._shapes.items()}
        self._warmup_passes = precision.warmup_passes

    def _step_on(self, prepared: Prepared | Batch) -> Callable[..., Tensor]:
        split = micro_batches(prepared) if self._in_micro_batches and isinstance(prepared, Prepared) else None
        plain = plain_step(self.training.clip, split, self._between_ranks)
        return self._replayed or self.training.candidate_step or plain

    def settle(self) -> None:
        """Let delayed scaling find its scales, as a training that goes on has them.

        The first step is made again and again, but for the optimizer.
        """

        step = self._step_on(self._prepared)

        def once() -> None:
            args, kwargs = as_arguments(_leaves(self._prepared.inputs))
            with restored_buffers(self._module):
                step(self._model, self.optimizer, *args, **kwargs)
            self._module.zero_grad(set_to_none=True)
            state.clear(self._module)

        if self._warmup_passes:
            with _standing_still(self.optimizer):
                state.settled(once, self._warmup_passes, self._fits)

    def capture(self) -> None:
        """Capture the candidate in CUDA graphs, which later steps replay.

        Raises:
            switches.NotCaptured: if it cannot be captured.
        """
        args, kwargs = as_arguments(_leaves(self._prepared.inputs))
        with restored_buffers(self._module):
            step = switches.captured(self._capture, self._model, self.optimizer, args, kwargs)
        self._is_captured = True
        if step is not None:
            self._replayed, self.is_plain = step, False
            self._written = {name: one.grad for name, one in self._module.named_parameters() if one.grad is not None}

    def offload(self) -> None:
        """Offload what later calls save for their backward passes, as the pair says, or as TE does."""
        call = (self.training.offload or partial(switches.offloaded_by_te, self._te, self.journal))(self._module)
        if call is not None:
            self._model = self._model.called_by(call)
        self.journal.watch(self._te, self._module)

    def reading_back(
        self, exchange: switches.Exchange, seen: list[Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Within the context, exchange what calls of the candidate save for their backward passes."""
        return switches.reading_back(self._model, exchange, seen)

    def saved(self, way: str = "resume") -> Saved:
        """Return what the training writes where it is interrupted.

        Args:
            way: a key of ``checkpoints.WAYS``; a pair's own ``save`` and ``load`` are for ``resume``.
        """
        if self._scheduler is not None and not hasattr(self._scheduler, "state_dict"):
            raise UserError(
                f"the schedule that scheduler= returns, {type(self._scheduler).__name__}, has no state_dict, so that "
                "its training cannot be resumed: give it state_dict and load_state_dict, as PyTorch's schedules have"
            )
        file = BytesIO()
        own = self.training.save if way == "resume" else None
        (own or WAYS[way].save)(self._module, self.optimizer, file)
        if file.closed:
            raise UserError("save= closed the file that it was given, which load= is to read: leave it open")
        schedule = copy.deepcopy(self._scheduler.state_dict()) if self._scheduler else None
        return Saved(way, file, schedule, self.state)

    def load(self, saved: Saved) -> None:
        """Read that into weights that are wrong before, so that none can be left out."""
        with torch.no_grad():
            for one in self._module.parameters():
                if one.is_floating_point():
                    one.copy_(2.0 * state.dequantized_tensor(one.detach()))
        saved.file.seek(0)
        own = self.training.load if saved.way == "resume" else None
        # TE pickles the scales of delayed scaling, and reads them if it is told to trust the file, as this one, which
        # this process wrote (``pytorch/_extra_state.py`` of TE 2.20.2).
        with te_variables({"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}):
            (own or WAYS[saved.way].load)(self._module, self.optimizer, saved.file)
        self._find_replaced()
        if self._scheduler is not None:
            self._scheduler.load_state_dict(saved.schedule)

    def _find_replaced(self) -> None:
        """Follow parameters that ``load`` has put in the place of others.

        Raises:
            UserError: if the optimizer still steps the others, or the module has not the same names of parameters any
                more, as where it has untied some.
        """
        parameters, before = dict(self._module.named_parameters()), self._parameters
        steps = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        replaced = {name: one for name, one in parameters.items() if one is not before.get(name)}
        left = [name for name, one in replaced.items() if id(before.get(name)) in steps and id(one) not in steps]
        wrong = [*(before.keys() - parameters.keys()), *(parameters.keys() - before.keys()), *left]
        if wrong:
            raise UserError(
                f"load= replaces the module's parameters, so that its optimizer steps others, or tied ones are no "
                f"longer one: {', '.join(sorted(wrong)[:3])}{' and more' if len(wrong) > 3 else ''}; load values into "
                "the parameters that are there, as load_state_dict does without assign=True"
            )
        self._stepped |= {name: one for name, one in replaced.items() if self._stepped[name] is before[name]}
        self._parameters = parameters

    @property
    def state(self) -> State:
        """Return what the module and its optimizer keep, as digests of its bytes."""
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
        found[COPIES] = {name: digest(one) for name, one in self._copies().items()}
        for name, parameter in self._stepped.items():
            for key, value in self._kept_of(parameter).items():
                found.setdefault(f"the optimizer's {key}", {})[name] = digest(value)
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    found.setdefault(f"the optimizer's {key}", {})[f"its group {number}"] = digest(value)
        return found

    def _copies(self) -> Named:
        """Return what the optimizer steps in place of the module's parameters, by their names."""
        own = dict(self._module.named_parameters())
        return {name: one for name, one in self._stepped.items() if one is not own[name]}

    @property
    def owners(self) -> dict[str, Any]:
        """Return what may hold numbers and tensors that a step reads."""
        own = {"candidate_step": self.training.candidate_step, "call_candidate": self._pair.call_candidate}
        return {"": self._module, "the optimizer": self.optimizer, **own, "loss": self.training.loss}

    def leave_recipe(self) -> None:
        """Make all later calls without the precision's recipe."""
        self._model = self._model.without_recipe()

    @property
    def caches_weights(self) -> bool:
        """Return whether a TE module keeps quantized copies of its weights from one call to the next."""
        return any(getattr(one, "_fp8_workspaces", None) for one in self._module.modules())

    @property
    def weights(self) -> Named:
        """The weights as the module holds them, in the reference's layout, in FP64."""
        return {name: x.clone() for name, x in self._to_reference(_held(self._module)).items()}

    @property
    def buffers(self) -> Named:
        """Return copies of the module's buffers."""
        return {name: one.detach().clone() for name, one in self._module.named_buffers()}

    @property
    def quantized(self) -> Named:
        """Return copies of the parameters that the module holds quantized, by their names there."""
        return {name: one.detach().clone() for name, one in self._module.named_parameters() if state.is_quantized(one)}

    def batch(self, number: int) -> Batch:
        """Return the inputs of one step, counted from 1, as ``prepare`` has them."""
        checked, dtype, seed, device = self._at
        return batch_of(self._pair, number, checked, dtype, seed, device, self._prepared.input_names)

    def resumed(
        self: Own, switch: Switch, new: Callable[[], Own], prepared: Prepared | Batch
    ) -> tuple[Own, Stepped, Resumption]:
        """Save the training, let it go on by a step, load what was saved, and make that step again.

        Args:
            switch: a key of ``checkpoints.WAYS``, which is loaded into a new training; or ``rollback``, into this one.
            new: returns a new training.
            prepared: the step's batch.

        Returns:
            The training that was loaded, its step, and how that differs from the one without interruption.
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
            if not torch.equal(gathered(x), gathered(stepped.tensors[kind, name]))
        )
        moments = tuple(key for key, some in one.moments.items() if not _are_same(some, other.moments.get(key, {})))
        is_same = not differing and not moments and _are_same(one.after, other.after)
        return trainee, stepped, Resumption(saved.state, restored, differing, moments, is_same, caches_weights)

    def step(self, prepared: Prepared | Batch) -> Stepped:
        """Make one step with a prepared batch.

        Raises:
            UserError: if the step does not step its optimizer once.
        """
        args, kwargs = as_arguments(_leaves(prepared.inputs))
        before, step = self._followed_weights(), self._step_on(prepared)
        scaling, stale = kept(self._module, self._quantized_from), tuple(state.stale_transposes(self._module))
        copies = self._stale_copies()
        self._model.calls.clear()
        with self._watched() as seen, sums_in_16_bits(self._module) as lost:
            loss = step(self._model, self.optimizer, *args, **kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"a training step must return its loss, a tensor that holds one number, such as model.loss(*inputs) "
                f"is, not {shape}"
            )
        calls = tuple(tree_map_only(Tensor, Tensor.detach, self._model.calls))
        self._model.calls.clear()
        if self._replayed and not seen.used:  # the graph has stepped the optimizer, and its gradients are still there
            seen.used.append(_copied(self._stepped))
            seen.moved = self._moved()
        if len(seen.used) != 1:
            raise UserError(
                "a training step must call optimizer.step() once, with a closure that is called once if it has any, "
                f"and this one called it {len(seen.used)} times; compare that many steps, with one batch each"
            )
        if self._scheduler is not None:
            self._scheduler.step()
        used = seen.used[0]
        raw = used | seen.raw
        inputs = named_inputs(kwargs or args, prepared.input_names)
        tensors: Tensors = {("output", "output"): loss.detach().reshape(())}
        leaves = {name: x for name, x in inputs.items() if x.is_floating_point()}
        if not (self.training.candidate_step or self._replayed):  # which may scale the loss, and undo that at its use
            tensors |= {("input gradient", name): x.grad for name, x in leaves.items() if x.grad is not None}
        gradients = {name: or_zero(raw.get(name), one) for name, one in self._module.named_parameters()}
        tensors |= {("weight gradient", name): x for name, x in self._gradients(gradients).items()}
        given = {name: or_zero(used.get(name), one) for name, one in self._module.named_parameters()}
        update = Update(
            before,
            self._sampled(self._gradients(given)),
            self._followed_weights(),
            self._moments(),
            self._kept_in(),
            self._are_whole,
            seen.rates,
        )
        frozen = (name for name, one in self._module.named_parameters() if not one.requires_grad or name not in raw)
        now = kept(self._module)
        moves = tuple((one, now[key]) for key, one in scaling.items() if key in now)
        noise, later = self._noise(lost), self._stale_copies()
        unmade = tuple(name for name, one in copies.items() if later.get(name) == one)
        return Stepped(
            *(
                tensors,
                tuple(frozen),
                _clipping(used, raw, seen),
                update,
                moves,
                noise,
                seen.moved,
                calls,
                self._apart(),
                stale,
            ),
            unmade,
            self.buffers,
            tuple(name for name, one in self._stepped.items() if seen.versions.get(name, one._version) != one._version),
        )

    def _stale_copies(self) -> dict[str, bytes]:
        """Return digests of the transposed copies that are stale, in a training that is captured."""
        found = state.stale_transposes(self._module, in_a_graph=True) if self._is_captured else {}
        return {name: digest(one) for name, one in found.items()}

    def _moved(self) -> tuple[str, ...]:
        now = {name: one.grad for name, one in self._module.named_parameters()}
        return tuple(name for name, one in self._written.items() if not _are_one(one, now[name]))

    def _noise(self, lost: Mapping[str, Lost]) -> Tensors:
        """Return noise of the size of what sums lose, by the gradients' names in the reference."""
        if not any(one.additions > 1 for one in lost.values()):
            return {}
        noise = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in self._module.named_parameters()}
        for name, one in lost.items():
            if one.additions > 1:
                drawn = Rng(0, f"sums of {name}").normal(*one.variance.shape).to(one.variance)
                noise[name] = one.variance.sqrt() * drawn
        return {("weight gradient", name): x for name, x in self._gradients(noise).items() if bool(x.any())}

    @contextmanager
    def _watched(self) -> Iterator[_Seen]:
        """Within the context, keep the gradients that the optimizer sees, and what they would be without clipping."""
        seen = _Seen([])
        within = 0  # a class's step may call that of the class below it, and PyTorch calls hooks for both

        def take() -> None:
            now = _copied(self._stepped)
            seen.rates = rates(self.settings)
            seen.add_later(now)
            seen.used.append(now)
            seen.moved = self._moved()

        def keep(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal within
            within += 1
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if within > 1:
                return None
            if closure is None:
                take()
                return None

            def closed() -> Any:  # the gradients are made in it
                loss = closure()
                take()
                return loss

            return ((args[0], closed, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": closed})

        def leave(*_: Any) -> None:
            nonlocal within
            within -= 1
            seen.versions = {name: one._version for name, one in self._stepped.items()}

        def clip(original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            own = {id(one) for one in parameters}
            clipped = {name: one for name, one in self._stepped.items() if id(one) in own}
            before = _copied(clipped)
            seen.add_later(before)
            result = original(parameters, *args, **kwargs)
            for name in seen.clip(before, _copied(clipped)):
                hooks.append(self._module.get_parameter(name).register_hook(partial(add, name)))
            return result

        def add(name: str, _: Tensor) -> None:
            gradient = state.gradient(self._stepped[name])
            seen.later.add(name)
            if gradient is None or not bool(gradient.any()):  # set to zero since it was clipped
                seen.raw.pop(name, None)

        def begin(name: str, parameter: nn.Parameter, _: Tensor) -> None:
            if name in seen.sizes and parameter.grad is not None:
                seen.between.append((seen.sizes[name], _size(parameter.grad)))

        def end(name: str, parameter: nn.Parameter) -> None:
            if (gradient := state.gradient(parameter)) is not None:
                seen.sizes[name] = _size(gradient)

        hooks = [self.optimizer.register_step_pre_hook(keep), self.optimizer.register_step_post_hook(leave)]
        for name, one in self._module.named_parameters() if self.training.candidate_step else ():
            if one.requires_grad and one.is_leaf:
                hooks.append(one.register_post_accumulate_grad_hook(partial(end, name)))
                if not hasattr(one, "main_grad"):  # to which TE has added by then
                    hooks.append(one.register_hook(partial(begin, name, one)))
        try:
            with exchanged(CLIP, clip):
                yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _followed_weights(self) -> Named:
        """Return the weights that the optimizer steps, which may be FP32 copies of the module's."""
        held = _held(self._module)
        for name, parameter in self._stepped.items():
            master = self._master(parameter)
            if master is not None:
                held[name] = master[1].detach().reshape(parameter.shape).double()
            elif not state.is_quantized(parameter):
                held[name] = parameter.detach().double()
        return self._sampled(self._to_reference(held))

    def _master(self, parameter: nn.Parameter) -> tuple[str, Tensor] | None:
        """Return what the optimizer keeps of a parameter in FP32, with its name there; None if it keeps no such copy.

        TE's FusedAdam calls it ``master_param``, and may keep only the bits that BF16 leaves out. Another optimizer's
        copy is told by its values, which are the parameter's once they are rounded.
        """
        kept = self._kept_of(parameter)
        own = kept.get("master_param")
        if isinstance(own, Tensor):
            if own.dtype is torch.int16:  # ``AdamFunctorMasterParamRemainder`` in ``multi_tensor/adam.cu`` of TE 2.20.2
                upper = parameter.detach().view(torch.int16).int() << 16
                return "master_param", (upper + own.reshape(parameter.shape).int()).view(torch.float32)
            return "master_param", self._unscaled(parameter, "master_param", own)
        if state.is_quantized(parameter) or parameter.dtype.itemsize >= 4:
            return None
        for key, value in kept.items():
            is_wider = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
            if is_wider and value.shape == parameter.shape and torch.equal(value.to(parameter.dtype), parameter):
                return key, value
        return None

    def _quantized_from(self, name: str) -> Tensor | None:
        """Return the numbers of which TE quantizes a weight; None where it is held quantized without a wider copy."""
        parameter = self._module.get_parameter(name)
        if not state.is_quantized(parameter):
            return parameter
        stepped = self._stepped[name]
        master = self._master(stepped)
        return master[1] if master else None if stepped is parameter else stepped

    def _kept_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """Return what the optimizer keeps of a parameter, which may be None where another rank steps it."""
        return next((one.state[parameter] for one in self._optimizers if one.state.get(parameter)), {})

    def _apart(self) -> tuple[str, ...]:
        """Return the parameters that are not what the optimizer's copies of them are, to an ulp.

        Which way a copy is rounded is the port's. Of a quantized parameter, all elements together count.
        """
        found = []
        for name, one in self._module.named_parameters():
            master = self._master(self._stepped[name])
            copy = master[1] if master else self._stepped[name]
            if copy is one:
                continue
            if state.is_quantized(one):
                if state.over_quantization(one, copy.detach().double()) > _QUANTIZED_TWICE:
                    found.append(name)
                continue
            step = max(one.numel() // FOLLOWED, 1) | 1
            if not is_rounded(*(gathered(x.detach()).reshape(-1)[::step] for x in (one, copy))):
                found.append(name)
        return tuple(found)

    def _kept_in(self) -> dict[str, torch.dtype]:
        """Return the dtypes of what the optimizer keeps of each element, by its name there."""
        return {
            key: fp8_dtype(value) if is_float8_tensor(value) else value.dtype
            for parameter in self._stepped.values()
            for key, value in self._kept_of(parameter).items()
            if isinstance(value, Tensor) and value.dim() and value.dtype is not torch.int16  # bits of master weights
        }

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's settings for each parameter, by its name in the reference."""
        groups: dict[int, dict[str, Any]] = {}
        for group in (group for one in reversed(self._optimizers) for group in one.param_groups):
            groups |= {id(one): {**groups.get(id(one), {}), **group} for one in group["params"]}
        found = {}
        for left, right in self._pair.weights.items():
            own = next((self._stepped[name] for name in names(right) if name in self._stepped), None)
            for name in names(left):
                group = groups.get(id(own), {})
                found[name] = {key: x for key, x in group.items() if isinstance(x, (bool, int, float, tuple))}
        return found

    def _moments(self) -> dict[str, Named]:
        """Return what the optimizer keeps of each element's gradients."""
        found: dict[str, Named] = {}
        for name, parameter in self._stepped.items():
            master = self._master(parameter)
            for key, value in self._kept_of(parameter).items():
                if master and key == master[0]:
                    continue
                if isinstance(value, Tensor) and value.numel() == parameter.numel():
                    found.setdefault(key, {})[name] = self._unscaled(parameter, key, value)
        parameters = dict(self._module.named_parameters())
        return {
            key: self._sampled(self._gradients({**{n: torch.zeros_like(x) for n, x in parameters.items()}, **some}))
            for key, some in found.items()
        }

    def _unscaled(self, parameter: nn.Parameter, key: str, value: Tensor) -> Tensor:
        owner = next((one for one in self._optimizers if one.state.get(parameter)), self.optimizer)
        read = getattr(owner, "get_unscaled_state", None)  # TE's FusedAdam may hold it in FP8
        own = (read(parameter, key) if read else value).detach()
        return _divided_as(parameter, own).reshape(parameter.shape).double()

    def _sampled(self, tensors: Mapping[str, Tensor]) -> Named:
        return {name: x.detach().reshape(-1)[self._places[name]].double() for name, x in tensors.items()}

    def _to_reference(self, tensors: Mapping[str, Tensor]) -> Named:
        return transfer.to_reference(self._pair.weights, tensors, self._shapes)

    def _gradients(self, tensors: Mapping[str, Tensor]) -> Named:
        return transfer.gradients_to_reference(self._pair.weights, tensors, self._shapes)


def rates(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the learning rates among an optimizer's settings for each parameter."""
    return {name: float(some["lr"]) for name, some in settings.items() if "lr" in some}


def _are_same(some: Named, others: Named) -> bool:
    return some.keys() == others.keys() and all(torch.equal(x, others[name]) for name, x in some.items())


def is_rounded(held: Tensor, right: Tensor) -> bool:
    """Return whether these numbers are the others in their own dtype, rounded either way: to an ulp of that."""
    numbers = torch.finfo(held.dtype)
    ulp = numbers.eps * right.double().abs().clamp(min=numbers.smallest_normal)  # below that, the grid of FP16 is even
    return bool(((held.double() - right.double()).abs() <= ulp).all())


@dataclass(eq=False)
class Lost:
    """Tell what a gradient that is held in 16 bits has lost as backward passes were added to it.

    Attributes:
        variance: of each element.
        additions: how many passes were added.
    """

    variance: Tensor
    additions: int = 0


@contextmanager
def sums_in_16_bits(module: nn.Module) -> Iterator[dict[str, Lost]]:
    """Within the context, note what the gradients of 16 bits lose whenever a backward pass adds to them.

    A sum is rounded to its own grid, by up to half a step either way: the variance is a twelfth of the step's square.
    As what is added has been rounded, too, the first pass counts as well; the rounding of one pass's gradient is the
    rounding model's. Gradients in ``main_grad`` are held in FP32, and lose nothing.
    """
    found: dict[str, Lost] = {}

    def note(name: str, parameter: Tensor) -> None:
        if parameter.grad is None or torch.finfo(parameter.grad.dtype).bits != 16:
            return
        exponent = torch.frexp(parameter.grad.detach().float()).exponent - 1
        step = torch.finfo(parameter.grad.dtype).eps * torch.exp2(exponent.float())
        one = found.setdefault(name, Lost(torch.zeros_like(step)))
        one.variance += torch.where(parameter.grad == 0.0, 0.0, step.square() / 12.0)
        one.additions += 1

    with ExitStack() as stack:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(partial(note, name))
                stack.callback(hook.remove)
        yield found


@dataclass
class _Seen:
    """Hold what a step did to the gradients that the optimizer steps.

    Attributes:
        used: those that the optimizer saw, in each of its steps.
        raw: those that were clipped, as they would be without.
        left: what the last clipping left of them.
        later: names of those to which a backward pass was added since.
        is_early: whether a backward pass was added to gradients that had been clipped by ``clip_grad_norm_``.
        sizes: norms of what backward passes have left, in a step of the port's own.
        between: pairs of such a norm and that of the same gradient before another backward pass is added to it.
        moved: as in ``Stepped``.
        rates: the learning rate of each parameter, by the reference's names.
        versions: how often each parameter has been written to when the optimizer has stepped it.
    """

    used: list[Named]
    raw: Named = field(default_factory=dict)
    left: Named = field(default_factory=dict)
    later: set[str] = field(default_factory=set)
    is_early: bool = False
    sizes: Named = field(default_factory=dict)
    between: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    moved: tuple[str, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    def add_later(self, now: Named) -> None:
        """Add what backward passes have added since the last clipping to what gradients would be without any."""
        for name in self.later & self.raw.keys() & now.keys():
            self.raw[name] += (now[name] - self.left[name]).to(self.raw[name])
            self.left[name], self.is_early = now[name], True
        self.later.clear()

    def clip(self, before: Named, after: Named) -> list[str]:
        """Keep what a clipping has changed, and return what it is the first to change.

        One to infinity, which logs the norm, changes nothing.
        """
        changed = [name for name, x in after.items() if name in self.raw or not torch.equal(x, before[name])]
        self.left |= {name: after[name] for name in changed}
        new = [name for name in changed if name not in self.raw]
        self.raw |= {name: before[name].clone() for name in new}
        return new


def _are_one(x: Tensor, y: Tensor | None) -> bool:
    return y is not None and x.data_ptr() == y.data_ptr()


@contextmanager
def _standing_still(optimizer: Optimizer) -> Iterator[None]:
    """Within the context, the optimizer makes no steps; afterwards it has the settings that it had."""
    own, attributes = [dict(group) for group in optimizer.param_groups], vars(optimizer)
    step = attributes.get("step")  # a schedule replaces the class's own
    attributes["step"] = lambda closure=None, *_, **__: closure() if closure is not None else None
    try:
        yield
    finally:
        del attributes["step"]
        if step is not None:
            attributes["step"] = step
        for group, before in zip(optimizer.param_groups, own, strict=True):
            group.update(before)


@contextmanager
def _called(module: nn.Module, moved: set[str], around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Within the context, a call of the module, note in ``moved`` which buffers it changes."""
    before = {name: (one, one._version) for name, one in module.named_buffers()}
    with around():
        yield
    for name, one in module.named_buffers():
        if name not in before or before[name][0] is not one or before[name][1] != one._version:
            moved.add(name)


def _with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield an optimizer, and those that it holds and lets make its steps."""
    yield optimizer
    for value in vars(optimizer).values():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, Optimizer) and one is not optimizer:
                yield from _with_inner(one)


def _stepped(module: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return what the optimizer steps for each of the module's parameters: itself, or a copy in FP32 of a port's own.

    A copy is told by its shape and values. A parameter that the optimizer does not step stands for itself.
    """
    parameters = dict(module.named_parameters())
    own = {id(one) for one in parameters.values()}
    copies = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in own]
    found = {}
    for name, one in parameters.items():
        alike = (x for x in copies if x.shape == one.shape and torch.equal(x.detach().to(one.dtype), one.detach()))
        found[name] = next(alike, one) if copies else one
        copies = [x for x in copies if x is not found[name]]
    return found


def _copied(parameters: Mapping[str, nn.Parameter]) -> Named:
    """Return copies of the gradients that there are."""
    found = {name: state.gradient(parameter) for name, parameter in parameters.items()}
    return {name: gathered(x.detach()).clone() for name, x in found.items() if x is not None}


def _divided_as(parameter: Any, value: Tensor) -> Tensor:
    """Return what TE's FusedAdam keeps of a rank's part of a parameter that FSDP divides, divided likewise."""
    if not hasattr(parameter, "to_local") or hasattr(value, "to_local"):
        return value
    from torch.distributed.tensor import DTensor

    own, how = value.reshape(parameter.to_local().shape), (parameter.device_mesh, parameter.placements)
    return DTensor.from_local(own, *how, shape=parameter.shape, stride=parameter.stride())


def gathered(x: Any) -> Tensor:
    """Return the whole of a tensor that FSDP divides, for which every rank has to call it; any other as it is."""
    whole: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole


def _held(module: nn.Module) -> Named:
    """Return the weights as the module computes with them; quantized ones to FP32, as optimizers read them."""
    held = {name: one.detach() for name, one in module.named_parameters()}
    return {name: state.dequantized_tensor(x, torch.float32).double() for name, x in held.items()}


def digest(value: Any) -> bytes:
    """Return a digest of a value's bytes; of a quantized tensor's, as optimizers read it."""
    if not isinstance(value, Tensor):
        return repr(value).encode()
    plain = state.dequantized_tensor(own_part(value).detach(), torch.float32).reshape(-1).contiguous().cpu()
    return hashlib.blake2b(plain.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def _leaves(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), inputs)


def steps_elements(reference: nn.Module, make: MakeOptimizer) -> bool:
    """Return whether an optimizer steps each element of a parameter by its own numbers alone, as Adam does.

    Muon, Adafactor, LAMB and the like step matrices. A copy of the reference tells, whose parameters have at most 8
    elements along each dimension: it is stepped whole, and once more with some elements of each as a vector.
    """
    small = {
        id(one): nn.Parameter(Rng(0, name).normal(*(min(size, 8) for size in one.shape)).double(), one.requires_grad)
        for name, one in reference.named_parameters()
    }
    whole = copy.deepcopy(reference, dict(small))
    some = copy.deepcopy(whole)
    try:
        optimizers = make(whole), make(some)
        for step in range(3):
            for (name, one), other in zip(whole.named_parameters(), some.parameters(), strict=True):
                if one.requires_grad:
                    one.grad = Rng(step, name).normal(*one.shape).double()
                    other.grad = None  # of the shape that the parameter had
                    other.data = one.detach().reshape(-1)[::2].clone()
                    other.grad = one.grad.reshape(-1)[::2].clone()
            for optimizer in optimizers:
                optimizer.step()
            for one, other in zip(whole.parameters(), some.parameters(), strict=True):
                if one.requires_grad and not torch.allclose(one.detach().reshape(-1)[::2], other.detach(), 1e-9, 1e-12):
                    return False
    except Exception:  # of an optimizer that keeps something of the parameter's shape, or takes matrices alone
        return False
    return True


def followed_places(name: str, shape: tuple[int, ...], all_of_them: bool = False) -> Tensor:
    """Return which elements of a parameter are followed, seen as a vector."""
    count = torch.Size(shape).numel()
    if count <= FOLLOWED or all_of_them:
        return torch.arange(count)
    return Rng(0, f"elements of {name}").integers(FOLLOWED, high=count)


def _clipping(used: Named, raw: Named, seen: _Seen) -> Clipping:
    """Return by what gradients were multiplied."""
    along = {name: float((x.double() * raw[name].double()).sum()) for name, x in used.items() if name in raw}
    own = {name: float(x.double().square().sum()) for name, x in raw.items()}
    factors = [along.get(name, 0.0) / size for name, size in own.items() if size]
    factor = sum(along.values()) / sum(own.values()) if factors else 1.0
    lowest, highest = min(factors, default=1.0), max(factors, default=1.0)
    added = norm_together(seen.sizes.values())
    got = norm_together(used.values()) if added else 1.0
    is_early = seen.is_early or any(now > 0.0 and abs(now - left) > 1e-3 * left for left, now in seen.between)
    is_changed_after = any(name in used and not torch.equal(x, used[name]) for name, x in seen.left.items())
    of_added = got / (added or 1.0) or 1.0
    left = norm_together(seen.left.values())
    after = norm_together(used[name] for name in seen.left if name in used) / left if left else 1.0
    return Clipping(factor, lowest, highest, is_early, bool(seen.raw), of_added, added, is_changed_after, after or 1.0)


def norm_together(tensors: Iterable[Tensor], order: float = 2.0) -> float:
    """Return the norm of all tensors together."""
    norms = [float(torch.linalg.vector_norm(x.double(), order)) for x in tensors]
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), order)) if norms else 0.0


def _size(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(own_part(gradient.detach()), dtype=torch.float64)


def _recomputed(te: ModuleType, call: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the same call, made by ``te.checkpoint``."""

    def recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return te.checkpoint(call or nn.Module.__call__, module, *args, use_reentrant=False, **kwargs)

    return recomputed
