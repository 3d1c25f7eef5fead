"""Follow whole trainings: the reference's, exact or rounded, and the candidate's, with and without a switch.

Steps of the reference are not compared with those of another training here; ``training`` judges single steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from parity.case.case import Case, mixed
from parity.case.training import reference_optimizer, schedule_of
from parity.case.validate import CheckedSize
from parity.passes.all_passes import Tensors, golden_tensors
from parity.passes.prepare import Prepared
from parity.passes.prepare import prepare as prepared_step
from parity.result import label_of
from parity.te.attention_backend import BACKENDS, AttentionBackend, attention_backends
from parity.te.state import fresh_caches, fresh_quantization
from parity.trainings.optimized import followed_places
from parity.trainings.steps import SCALES, Batch, Buffers, Named, Stepped, Trainee, digest, step_case

if TYPE_CHECKING:
    from parity.te import Kernels, Precision

# Train a candidate with a switch, such as CUDA graphs, and once more without it, to compare the two bit by bit.


@dataclass(frozen=True)
class Computed:
    """The results of a step as digests, so that a long training needs little memory.

    Attributes:
        tensors: the loss and the gradients, by their labels.
        weights: after the step, by the candidate's names.
        unreached: the weights that got no gradient.
    """

    tensors: dict[str, bytes]
    weights: dict[str, bytes]
    unreached: tuple[str, ...]

    def differs_in(self, other: Computed) -> list[str]:
        """Return the labels of the tensors that both have and that differ."""
        tensors = [label for label, one in self.tensors.items() if other.tensors.get(label, one) != one]
        weights = [f"{name} after the step" for name, one in self.weights.items() if other.weights.get(name) != one]
        return tensors + weights


@dataclass
class BaselineTraining:
    """The training of the candidate without the switch, which can be repeated any number of times.

    Attributes:
        make: builds the candidate.
        seed: the run's seed.
        attention: the attention backend that it must use; None for TE's choice.
        steps: what each step computed.
        notes: remarks on the comparison, for the user.
        changed_before: the weights and FP8 scales that the training with the switch changed before its first step.
    """

    make: Callable[[], Trainee]
    seed: int
    attention: AttentionBackend | None = None
    steps: list[Computed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    changed_before: list[str] = field(default_factory=list)

    @contextmanager
    def begun(self) -> Iterator[Trainee]:
        """Hand out a new candidate, with its own state of TE within the context."""
        with fresh_caches(), fresh_quantization(), attention_backends(self.attention):
            trainee = self.make()
            trainee.settle()
            yield trainee

    def made(self, trainee: Trainee, number: int, batch: Prepared | Batch | None = None) -> tuple[Stepped, Computed]:
        """Make a step with the random numbers of its number, and with its batch unless another is given."""
        seed = mixed(self.seed, f"random numbers of step {number}")
        (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(seed)
        stepped = trainee.step(batch or trainee.batch(number))
        tensors = {
            label_of(kind, "loss" if kind == "output" else name): digest(x)
            for (kind, name), x in stepped.tensors.items()
        }
        return stepped, Computed(tensors, trainee.state["weights"], stepped.unreached)


@dataclass(frozen=True)
class PairedStep:
    """A step with the switch, beside the same step without it.

    Attributes:
        number: the step's number, from 1.
        stepped: the step with the switch.
        computed: what it computed.
        without: the training without the switch.
    """

    number: int
    stepped: Stepped
    computed: Computed
    without: BaselineTraining

    @property
    def differing(self) -> list[str]:
        """Return the labels of the tensors that differ from those of the step without the switch."""
        return self.without.steps[self.number - 1].differs_in(self.computed)

    def made_again(
        self, change: Callable[[Trainee], Batch | None], begin: Callable[[Trainee], object] = lambda trainee: None
    ) -> Computed:
        """Return what the step without the switch computes if the candidate is changed before it.

        Args:
            change: is called with the candidate before the step, and may return another batch.
            begin: is called with it before the first step.
        """
        with self.without.begun() as trainee:
            begin(trainee)
            for number in range(1, self.number):
                self.without.made(trainee, number)
            return self.without.made(trainee, self.number, change(trainee))[1]

    @property
    def is_reproducible(self) -> bool:
        """Return whether the training without the switch gives the same bits when it is repeated."""
        again = self.made_again(lambda trainee: None)
        return not again.differs_in(self.without.steps[self.number - 1])


def side_by_side(
    make: Callable[[], Trainee],
    steps: int,
    seed: int,
    stack: ExitStack,
    begin: Callable[[Trainee], object],
    words: str = "in another way",
) -> tuple[Trainee, BaselineTraining]:
    """Return a candidate that is trained with a switch from now on, and its training without the switch.

    In a CUDA graph, TE may choose another attention kernel, which rounds differently, because cuDNN up to 9.15.0
    requires multiples of 128 keys there. Then both trainings use that kernel.

    Args:
        stack: keeps TE's state and its choice of kernels as long as the candidate is trained.
        begin: switches the candidate over; may raise anything.
        words: describe the switch in a note, such as "in a graph".
    """
    without = BaselineTraining(make, seed)
    trainee, chosen = _begin_with_switch(without, begin, stack)
    usual = _train_without_switch(without, steps)
    backends = [one for one in BACKENDS if any(ran.startswith(one) for ran in chosen)]
    if chosen != usual and len(backends) == 1:
        without.attention = backends[0]
        without.notes.append(
            f"attention uses the backend {', '.join(chosen)} {words}, and {', '.join(usual)} otherwise; here both "
            f"trainings use {backends[0]}"
        )
        trainee, _ = _begin_with_switch(without, begin, stack)
        _train_without_switch(without, steps)
    return trainee, without


def _begin_with_switch(
    without: BaselineTraining, begin: Callable[[Trainee], object], stack: ExitStack
) -> tuple[Trainee, list[str]]:
    """Return a candidate with the switch, and the attention kernels that ran while it was switched over."""
    trainee = stack.enter_context(without.begun())
    before = trainee.state
    with attention_backends(without.attention) as ran:
        begin(trainee)
    after = trainee.state
    without.changed_before = [
        name if what == "weights" else f"the scale of {name}"
        for what in ("weights", SCALES)
        for name, one in before[what].items()
        if after[what].get(name) != one
    ]
    return trainee, list(ran)


def _train_without_switch(without: BaselineTraining, steps: int) -> list[str]:
    """Make and keep the steps without the switch, and return the attention kernels that ran."""
    with without.begun() as trainee, attention_backends(without.attention) as ran:
        without.steps = [without.made(trainee, number)[1] for number in range(1, steps + 1)]
    return list(ran)


@dataclass
class Course:
    """A training from its beginning to its end.

    Attributes:
        losses: the loss of each step.
        weights: the weights before the first step and after each step, as the optimizer holds them, in FP64: up to
            1,024 elements of each of the reference's parameters.
        dtype: the dtype of the losses.
    """

    losses: list[float] = field(default_factory=list)
    weights: list[Named] = field(default_factory=list)
    dtype: torch.dtype = torch.float64


def of_reference(
    case: Case,
    checked: CheckedSize,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    steps: int,
    computed: Callable[[Prepared, int], Tensors] | None = None,
) -> Course:
    """Return the reference's own training, from the weights with which the candidate begins.

    Args:
        computed: returns the rounded loss and gradients of a prepared step, given the step and its number; then the
            optimizer computes in FP32. By default everything is in FP64.

    Raises:
        NothingToJudge: if nothing can be compared with the loss of a step or its gradients.
    """
    first = prepared_step(step_case(case, 1, None, seed), checked, precision.dtype, seed, kernels)
    module, training = copy.deepcopy(first.reference), case.build(kernels.te, checked.size).training
    module.to(torch.float64 if computed is None else torch.float32)
    optimizer = reference_optimizer(training)(module)
    schedule = schedule_of(training, optimizer)
    course, amaxes, buffers = Course(weights=[_read_followed_elements(module)]), first.past.before, dict[str, Tensor]()
    for number in range(1, steps + 1):
        weights = {name: one.detach().clone() for name, one in module.named_parameters()}
        own = Buffers(reference=buffers)
        step = step_case(case, number, None if number == 1 else weights, seed, buffers=own)
        prepared = prepared_step(step, checked, precision.dtype, seed, kernels)
        if computed is not None and precision.warmup_passes:
            prepared.past.follow(amaxes, precision.scaled_by_history)
        tensors = golden_tensors(prepared) if computed is None else computed(prepared, number)
        amaxes = prepared.past.after_step()
        buffers = {**buffers, **prepared.golden.buffers}
        for name, one in module.named_parameters():
            gradient = tensors.get(("weight gradient", name))
            one.grad = None if gradient is None else gradient.to(one)
        if training.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        course.losses.append(float(tensors["output", "output"]))
        course.weights.append(_read_followed_elements(module))
    return course


def of_candidate(
    case: Case, checked: CheckedSize, precision: Precision, seed: int, kernels: Kernels, steps: int
) -> Course:
    """Train the candidate once more from the beginning, and return that training."""
    first = prepared_step(step_case(case, 1, None, seed), checked, precision.dtype, seed, kernels)
    course = Course()
    with BaselineTraining(lambda: Trainee(case, checked, first, precision, seed, kernels), seed).begun() as trainee:
        for number in range(1, steps + 1):
            stepped = trainee.step(trainee.batch(number))
            loss = stepped.tensors["output", "output"]
            course.losses.append(float(loss))
            course.dtype = loss.dtype
            course.weights += (
                [stepped.update.after] if course.weights else [stepped.update.before, stepped.update.after]
            )
    return course


def _read_followed_elements(module: nn.Module) -> Named:
    found = {}
    for name, one in module.named_parameters():
        places = followed_places(name, tuple(one.shape)).to(one.device)
        found[name] = one.detach().reshape(-1)[places].double()
    return found
