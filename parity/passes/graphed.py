"""Train a candidate without CUDA graphs beside one that trains through them, to compare the two to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from parity.case.case import mixed
from parity.passes.prepare import Prepared
from parity.passes.steps import SCALES, Batch, Stepped, Trainee, digest
from parity.result import label_of
from parity.te.attention_backend import BACKENDS, AttentionBackend, attention_backends
from parity.te.state import fresh_caches, fresh_quantization


@dataclass(frozen=True)
class Computed:
    """What a step computed, as digests, so that a training of many steps keeps little.

    Attributes:
        tensors: the loss and the gradients, by their labels.
        weights: after the step, by the candidate's names.
        unreached: the weights that got no gradient.
    """

    tensors: dict[str, bytes]
    weights: dict[str, bytes]
    unreached: tuple[str, ...]

    def differs_in(self, other: Computed) -> list[str]:
        """Return the labels of what is another, in what both have."""
        tensors = [label for label, one in self.tensors.items() if other.tensors.get(label, one) != one]
        weights = [f"{name} after the step" for name, one in self.weights.items() if other.weights.get(name) != one]
        return tensors + weights


@dataclass
class Ungraphed:
    """Train the candidate without graphs, as often as it is asked for.

    Attributes:
        make: builds the candidate.
        seed: of the run.
        attention: the attention backend that it is to take.
        steps: what each step computed.
        notes: what is to be said of the comparison.
        changed_by_capture: the weights and FP8 scales that the capture has changed.
    """

    make: Callable[[], Trainee]
    seed: int
    attention: AttentionBackend | None = None
    steps: list[Computed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    changed_by_capture: list[str] = field(default_factory=list)

    @contextmanager
    def begun(self) -> Iterator[Trainee]:
        """Within the context, hand out a new candidate in a state of TE of its own."""
        with fresh_caches(), fresh_quantization(), attention_backends(self.attention):
            trainee = self.make()
            trainee.settle()
            yield trainee

    def made(self, trainee: Trainee, number: int, batch: Prepared | Batch | None = None) -> tuple[Stepped, Computed]:
        """Make one step, with the batch of its number unless another is given, and with that step's random numbers."""
        seed = mixed(self.seed, f"random numbers of step {number}")
        (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(seed)
        stepped = trainee.step(batch or trainee.batch(number))
        tensors = {
            label_of(kind, "loss" if kind == "output" else name): digest(x)
            for (kind, name), x in stepped.tensors.items()
        }
        return stepped, Computed(tensors, trainee.state["weights"], stepped.unreached)


def side_by_side(make: Callable[[], Trainee], steps: int, seed: int, stack: ExitStack) -> tuple[Trainee, Ungraphed]:
    """Return a candidate that replays graphs from now on, and the same training without.

    For a graph, TE may choose another attention kernel, which rounds otherwise: cuDNN up to 9.15.0 wants keys in
    multiples of 128 there. Then both take that kernel.

    Args:
        stack: keeps TE's state and its choice of kernels as long as the candidate is trained.

    Raises:
        parity.passes.capture.NotCaptured: if the candidate cannot be captured.
    """
    ungraphed = Ungraphed(make, seed)
    trainee, in_graphs = _captured(ungraphed, stack)
    without = _train(ungraphed, steps)
    backends = [one for one in BACKENDS if any(ran.startswith(one) for ran in in_graphs)]
    if in_graphs != without and len(backends) == 1:
        ungraphed.attention = backends[0]
        ungraphed.notes.append(
            f"attention takes the backend {', '.join(in_graphs)} in a graph, and {', '.join(without)} without one; "
            f"here both trainings take {backends[0]}"
        )
        trainee, _ = _captured(ungraphed, stack)
        _train(ungraphed, steps)
    return trainee, ungraphed


def _captured(ungraphed: Ungraphed, stack: ExitStack) -> tuple[Trainee, list[str]]:
    """Return a candidate that replays graphs, and which attention kernels ran as they were captured."""
    trainee = stack.enter_context(ungraphed.begun())
    before = trainee.state
    with attention_backends(ungraphed.attention) as ran:
        trainee.capture()
    after = trainee.state
    ungraphed.changed_by_capture = [
        name if what == "weights" else f"the scale of {name}"
        for what in ("weights", SCALES)
        for name, one in before[what].items()
        if after[what].get(name) != one
    ]
    return trainee, list(ran)


def _train(ungraphed: Ungraphed, steps: int) -> list[str]:
    """Keep what each step computes without graphs, and return which attention kernels ran."""
    with ungraphed.begun() as trainee, attention_backends(ungraphed.attention) as ran:
        ungraphed.steps = [ungraphed.made(trainee, number)[1] for number in range(1, steps + 1)]
    return list(ran)
