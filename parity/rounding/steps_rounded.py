"""Rounds what steps of an optimizer write in one pass of the reference, as a port's do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from parity.rounding.steps import Steps, stepped_by
from parity.rounding.storing import Storing

# To what TE scales moments and master weights in FP16 (``dtype_to_range_map`` of ``pytorch/optimizers/fused_adam.py``).
_LARGEST_FP16 = torch.finfo(torch.float16).max / 2.0


class StepsRounded:
    """The steps of one pass.

    Args:
        storing: of the pass.
        alone: within it the pass rounds nothing else.
    """

    def __init__(self, storing: Storing, alone: Callable[[], AbstractContextManager[None]]) -> None:
        self._storing = storing
        self._alone = alone
        self._inside = False

    @property
    def each_call(self) -> bool:
        """Whether a step is being made in which each call rounds."""
        freedom = self._storing.freedom
        return self._inside and freedom.stores_pointwise and freedom.steps is not None and freedom.steps.each_call

    @property
    def are_calls(self) -> bool:
        """Whether outside of an optimizer's steps each write to a weight is one, as of an optimizer by hand."""
        steps = self._storing.freedom.steps
        return steps is not None and steps.weights is self._storing.rounding.storage and not self._inside

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the context, steps of optimizers round."""
        steps = self._storing.freedom.steps
        if steps is None or "storage" not in self._storing.rounding.parts:
            yield
            return
        before = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._before(optimizer))
        after = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._after(optimizer, steps))
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        """Gradients are held in the dtype of the weights."""
        with self._alone():
            for gradient in (parameter.grad for parameter in stepped_by(optimizer)):
                if gradient is not None:
                    gradient.copy_(self._storing.store(gradient))
        self._inside = True

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, steps: Steps) -> None:
        self._inside = False
        with self._alone():
            for parameter in stepped_by(optimizer):
                if steps.weights is self._storing.rounding.storage:
                    parameter.copy_(self._storing.store(parameter))
                elif steps.weights is not None:
                    parameter.copy_(_held_in(steps.weights, parameter))
                for name, dtype in steps.moments:
                    moment = optimizer.state[parameter].get(name)
                    if moment is not None:
                        moment.copy_(_held_in(dtype, moment))


def written(func: Any, args: tuple[Any, ...], kwargs: Any) -> Iterator[Tensor]:
    """The tensors of floating-point numbers that a call of an ATen function writes to; counts of steps left out."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for x in tree_leaves(given.get(argument.name)):
                if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
                    yield x


def _held_in(dtype: torch.dtype, x: Tensor) -> Tensor:
    """As it reads after it was held in a dtype; in FP16 with a scale."""
    scale = x.abs().amax() / _LARGEST_FP16 if dtype is torch.float16 else x.new_ones(())
    return torch.where(scale > 0, (x / scale).to(dtype).to(x.dtype) * scale, x)
