"""Judge an optimizer's steps by themselves: the reference's optimizer, in FP64, is given the candidate's gradients.

What is compared so does not depend on how the gradients came about, nor does an error of one step go on into the next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parity.case.case import MakeOptimizer
from parity.passes.steps import Named, Update
from parity.user_error import UserError

# An optimizer that computes in FP32 rounds each of about ten operations to 6e-8, and TE's FusedAdam holds betas in
# FP32, which moves 1 - 0.999 by 5e-5 of itself. A share of 1e-3 is beyond all that, and below any setting that is
# changed.
ARITHMETIC = 1e-3
# About ten roundings to FP32, of which an optimizer's sum of its average and its gradient is made.
_ROUNDINGS = 10 * torch.finfo(torch.float32).eps

_State = dict[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Deviation:
    """Say how far the optimizer's step of one parameter is from the reference's.

    Attributes:
        name: of the reference's parameter.
        share: the norm of the difference over the norm of the reference's step.
        rounding: the same for weights that the reference's optimizer steps and the candidate's dtype rounds.
        along: how much of the reference's step the candidate's holds; 1 if it is right.
    """

    name: str
    share: float
    rounding: float
    along: float

    @property
    def is_right(self) -> bool:
        """Return whether arithmetic and the dtype of the weights explain it."""
        return self.share <= ARITHMETIC + self.rounding


class Replay:
    """The reference's optimizer over the followed elements of each parameter, step after step, in FP64.

    Attributes:
        parameters: what it steps, by name.
    """

    def __init__(
        self,
        reference: nn.Module,
        make: MakeOptimizer,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        edit: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer,
    ) -> None:
        """Make the optimizer of a copy of the reference; ``edit`` may change its settings.

        Raises:
            UserError: if ``make`` returns no optimizer.
        """
        self._module = copy.deepcopy(reference).double()
        self.parameters = dict(self._module.named_parameters())
        self._shapes = {name: one.shape for name, one in self.parameters.items()}
        made = make(self._module)
        if not isinstance(made, Optimizer):
            raise UserError(f"a training's optimizer must be a torch.optim.Optimizer, not {type(made).__name__}")
        self.optimizer = edit(made)
        self._scheduler = scheduler(self.optimizer) if scheduler else None

    def step(self, update: Update) -> Named:
        """Return the weights that this optimizer makes of the weights and gradients of a step.

        An optimizer may step by a sign, as Lion does, and FP32 arithmetic decides which where what it adds up nearly
        cancels. So where its step is not the candidate's, each element is the nearest to the candidate's of what it
        makes of these gradients and of gradients that are a few FP32 roundings larger or smaller.
        """
        before = self._state()
        right = self._made(update, 1.0)
        if not all(one.is_right for one in deviations(update, right, torch.float32)):
            chosen = self._state()
            for factor in (1.0 - _ROUNDINGS, 1.0 + _ROUNDINGS):
                self._restore(before)
                self._take_nearer(self._made(update, factor), update.after, right, chosen)
            self._restore(chosen)
        if self._scheduler is not None:
            self._scheduler.step()
        return right

    def _take_nearer(self, other: Named, made: Named, right: Named, chosen: _State) -> None:
        """Put each element of the last step that is nearer to ``made`` into ``right`` and into the state ``chosen``."""
        for name, parameter in self.parameters.items():
            if name not in right:
                continue
            target = made[name].to(parameter.device)
            nearer = (other[name] - target).abs() < (right[name] - target).abs()
            right[name] = torch.where(nearer, other[name], right[name])
            kept, others = chosen.get(parameter, {}), self.optimizer.state.get(parameter, {})
            for key, x in kept.items():
                if isinstance(x, Tensor) and x.numel() == nearer.numel():
                    kept[key] = torch.where(nearer.view(x.shape), others[key], x)

    def _state(self) -> _State:
        return {parameter: copy.deepcopy(kept) for parameter, kept in self.optimizer.state.items()}

    def _restore(self, state: _State) -> None:
        self.optimizer.state.clear()
        self.optimizer.state.update({parameter: copy.deepcopy(kept) for parameter, kept in state.items()})

    def _made(self, update: Update, factor: float) -> Named:
        """Return what the optimizer makes of the gradients times a factor."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                gradient = update.gradients[name].to(parameter.device)
                parameter.grad = None  # of the shape that the parameter had
                shape = self._shapes[name] if update.is_whole else gradient.shape
                parameter.data = update.before[name].to(parameter.device, copy=True).view(shape)
                parameter.grad = (factor * gradient).view(shape)
        self.optimizer.step()
        return {name: one.detach().flatten().clone() for name, one in self.parameters.items() if one.requires_grad}


def deviations(update: Update, expected: Named, dtype: torch.dtype) -> list[Deviation]:
    """Compare the weights after a step with those that the reference's optimizer makes.

    Args:
        update: what the candidate's optimizer did.
        expected: the reference's weights after the same step.
        dtype: in which the candidate's optimizer holds its weights.
    """
    return [_deviation(name, update, right, dtype) for name, right in expected.items()]


def _deviation(name: str, update: Update, right: Tensor, dtype: torch.dtype) -> Deviation:
    step, made = right - update.before[name], update.after[name] - update.before[name]
    size = float(step.norm())
    if not size:
        off = float(made.norm())
        return Deviation(name, float("inf") if off else 0.0, 0.0, 1.0)
    rounding = float((right.to(dtype).double() - right).norm()) / size
    along = float((made * step).sum()) / size**2
    return Deviation(name, float((made - step).norm()) / size, 1.01 * rounding, along)


def not_as(update: Update, expected: Named, name: str, dtype: torch.dtype) -> Tensor:
    """Return which elements of a parameter are not stepped as the reference's optimizer steps them.

    Of a single element, arithmetic may move much of a small step, and a rounding more than that: so a tenth of the
    parameter's largest step counts, and more than an ulp.
    """
    before, after, right = update.before[name], update.after[name], expected[name]
    ulp = torch.finfo(dtype).eps * right.abs()
    return (after - right).abs() > torch.maximum(0.1 * (right - before).abs().max(), ulp)


def holds(dtype: torch.dtype, update: Update) -> bool:
    """Return whether the dtype holds every weight that the optimizer made in this step."""
    return all(torch.equal(x.to(dtype).double(), x) for x in update.after.values())
