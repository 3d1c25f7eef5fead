"""Follow whole trainings, each by itself: the reference's, without any rounding or under one, and the candidate's.

No step of these is compared with a step of another training; ``parity.training`` judges single steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from parity.case.case import Case
from parity.case.training import reference_optimizer
from parity.case.validate import CheckedSize
from parity.passes.all_passes import Tensors, golden_tensors
from parity.passes.prepare import Prepared
from parity.passes.prepare import prepare as prepared_step
from parity.passes.side_by_side import Without
from parity.passes.steps import Named, Trainee, followed_places, step_case
from parity.te import Kernels
from parity.te.precision import Precision


@dataclass
class Course:
    """A training from its beginning to its end.

    Attributes:
        losses: of each step.
        weights: before the first step and after each, up to 1,024 elements of each of the reference's parameters, as
            the optimizer holds them, in FP64.
        dtype: of the losses.
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
        computed: returns the loss and the gradients of a prepared step with its number, under roundings; the optimizer
            computes in FP32 then. By default all is in FP64.

    Raises:
        NothingToJudge: if the loss of a step, or its gradients, are no numbers to compare with.
    """
    first = prepared_step(step_case(case, 1, None, seed), checked, precision.dtype, seed, kernels)
    module, training = copy.deepcopy(first.reference), case.build(kernels.te, checked.size).training
    module.to(torch.float64 if computed is None else torch.float32)
    optimizer = reference_optimizer(training)(module)
    schedule = training.scheduler(optimizer) if training.scheduler else None
    course, amaxes = Course(weights=[_followed(module)]), first.past.before
    for number in range(1, steps + 1):
        weights = {name: one.detach().clone() for name, one in module.named_parameters()}
        step = step_case(case, number, None if number == 1 else weights, seed)
        prepared = prepared_step(step, checked, precision.dtype, seed, kernels)
        if computed is not None and precision.warmup_passes:
            prepared.past.is_followed, prepared.past.before = True, amaxes
        tensors = golden_tensors(prepared) if computed is None else computed(prepared, number)
        amaxes = prepared.past.after_step()
        for name, one in module.named_parameters():
            gradient = tensors.get(("weight gradient", name))
            one.grad = None if gradient is None else gradient.to(one)
        if training.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        course.losses.append(float(tensors["output", "output"]))
        course.weights.append(_followed(module))
    return course


def of_candidate(
    case: Case, checked: CheckedSize, precision: Precision, seed: int, kernels: Kernels, steps: int
) -> Course:
    """Return the candidate's training, which is made again for this."""
    first = prepared_step(step_case(case, 1, None, seed), checked, precision.dtype, seed, kernels)
    course = Course()
    with Without(lambda: Trainee(case, checked, first, precision, seed, kernels), seed).begun() as trainee:
        for number in range(1, steps + 1):
            stepped = trainee.step(trainee.batch(number))
            loss = stepped.tensors["output", "output"]
            course.losses.append(float(loss))
            course.dtype = loss.dtype
            course.weights += (
                [stepped.update.after] if course.weights else [stepped.update.before, stepped.update.after]
            )
    return course


def _followed(module: nn.Module) -> Named:
    found = {}
    for name, one in module.named_parameters():
        places = followed_places(name, tuple(one.shape)).to(one.device)
        found[name] = one.detach().reshape(-1)[places].double()
    return found
