"""Store a pass's tensors in the precision's dtype, with the noise of its freedom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from parity.numerics.formats import Format, Part, Rounding, largest, spacing
from parity.numerics.freedom import JITTER, Freedom, Steps, stepped_by

# Which tensors of a pass already hold numbers of the storage dtype, since a rounding returned them.


class Stored:
    """Tensors that were rounded, as long as they live and nothing is written to them.

    Views count as well, except those made below autograd, as in a dispatch mode: they do not tell what
    is written to them.
    """

    def __init__(self) -> None:
        # By the storage's address, which another tensor may get once this one is gone.
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, x: Tensor) -> None:
        """Note that ``x`` was rounded."""
        if not _is_watched(x):
            return
        storage = x.untyped_storage()
        self._kept[storage.data_ptr()] = StorageWeakRef(storage), x._version

    def __contains__(self, x: Tensor) -> bool:
        if not _is_watched(x):
            return False
        storage, version = self._kept.get(x.untyped_storage().data_ptr(), (None, 0))
        return storage is not None and not storage.expired() and version == x._version


def _is_watched(x: Tensor) -> bool:
    """Return whether writes to its memory are counted, if it has memory of its own at all."""
    return x.layout is torch.strided and not x.is_inference()


# How a pass stores tensors: rounded to the precision's dtype, with the noise of its freedom.


_FP32_JITTER = torch.finfo(torch.float32).eps
_HALF = 0.4999  # a little less than half, so that FP32 sums of it and a number of the dtype stay below the next one


class Storing:
    """Hold what one pass stores.

    Args:
        rounding: what is rounded.
        freedom: the choices of the kernels that are modelled.
        stored: what is stored already; what this pass stores is added.
    """

    def __init__(self, rounding: Rounding, freedom: Freedom, stored: Stored) -> None:
        self.rounding = rounding
        self.freedom = freedom
        self._roundoff = torch.finfo(rounding.storage).eps / 2
        self._noise: torch.Generator | None = None
        self._stored = stored

    def store(self, x: Tensor, part: Part = "storage") -> Tensor:
        """Store as ``Rounding.store_part`` does, with the freedom's noise; weights are stored already."""
        if self.freedom.jitter is not None and part != "weights" and x.is_floating_point():
            is_dithered = self.freedom.dithers
            x = self._dithered(x) if is_dithered else self._jittered(x, max(_FP32_JITTER, JITTER * self._roundoff))
        rounded = self.rounding.store_part(x, part)
        if rounded is not x:
            self._stored.add(rounded)
        return rounded

    def operand(self, x: Tensor, part: Part) -> Tensor:
        """Store as ``store`` does, unless the tensor is stored already."""
        return x if self.is_stored(x) else self.store(x, part)

    def is_stored(self, x: Tensor) -> bool:
        """Return whether storing a tensor would not change it."""
        return self.freedom.jitter is None and x in self._stored

    def see_copy(self, sources: Any, copy: Tensor) -> None:
        """Take note that a copy of nothing but stored tensors is stored as well."""
        if all(self.is_stored(x) for x in tree_leaves(sources) if isinstance(x, Tensor)):
            self._stored.add(copy)

    def jittered_amax(self, x: Tensor) -> Tensor:
        """Return the largest magnitude, moved as the value that has it may be moved."""
        return self._jittered(largest(x), self._roundoff)

    def dithered_operand(self, x: Tensor, to_format: Format, dim: int, amax: Tensor | None) -> Tensor:
        """Return an operand with an error of the format that is independent of other runs', and of twice the variance.

        The error is the one that the format makes of the number times a factor between a half and 1,
        drawn anew for each element, scaled up again. So it is the error of another mantissa, wherever
        this number happens to lie between the format's. A port may round a multiple of the number, for
        example if it scales tokens before a layer and not after it.

        Args:
            x: FP32, a matrix.
            to_format: the operand's format, which takes ``dim`` and ``amax``.
        """
        smaller = self._uniform(x).add_(1.0).mul_(-0.5).exp2_()
        scaled = x * smaller
        error = to_format(scaled, dim, largest(x) if amax is None else amax) - scaled
        return error.mul_(math.sqrt(2.0)).div_(smaller).add_(x)

    def _jittered(self, x: Tensor, step: float) -> Tensor:
        return x * self._uniform(x).mul_(step).add_(1.0)

    def _dithered(self, x: Tensor) -> Tensor:
        if self.rounding.storage is torch.float32:
            return self._jittered(x, self._roundoff)
        wide = x if x.dtype is torch.float64 else x.float()
        step = spacing(wide, self.rounding.storage)
        return (wide / step).add_(0.5).add_(self._uniform(x).mul_(_HALF)).floor_().mul_(step).to(x.dtype)

    def _uniform(self, x: Tensor) -> Tensor:
        """Draw numbers between -1 and 1."""
        if self._noise is None:
            self._noise = torch.Generator(x.device).manual_seed(self.freedom.jitter or 0)
        return torch.rand(x.shape, generator=self._noise, device=x.device).mul_(2.0).sub_(1.0)


# Round what steps of an optimizer write in one pass of the reference, as a port's optimizer does.


# TE scales moments and master weights in FP16 to this (``dtype_to_range_map`` of ``pytorch/optimizers/fused_adam.py``).
_LARGEST_FP16 = torch.finfo(torch.float16).max / 2.0


class StepsRounded:
    """The steps of one pass.

    Args:
        storing: how the pass stores tensors.
        alone: makes a context in which the pass rounds nothing else.
    """

    def __init__(self, storing: Storing, alone: Callable[[], AbstractContextManager[None]]) -> None:
        self._storing = storing
        self._alone = alone
        self._inside = False

    @property
    def each_call(self) -> bool:
        """Return whether a step is being made in which each call rounds."""
        freedom = self._storing.freedom
        return self._inside and freedom.stores_pointwise and freedom.steps is not None and freedom.steps.each_call

    @property
    def are_calls(self) -> bool:
        """Return whether each write to a weight outside an optimizer's steps is a step, as of an optimizer by hand."""
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
        """Round the gradients to the dtype of the weights."""
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
    """Yield the floating-point tensors that a call of an ATen function writes to, without counts of steps."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for x in tree_leaves(given.get(argument.name)):
                if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
                    yield x


def _held_in(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return ``x`` as it reads after it was held in a dtype; in FP16 with a scale."""
    scale = x.abs().amax() / _LARGEST_FP16 if dtype is torch.float16 else x.new_ones(())
    return torch.where(scale > 0, (x / scale).to(dtype).to(x.dtype) * scale, x)
