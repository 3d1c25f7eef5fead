"""Run the stages of a pipeline: activations go forward from rank to rank, and their gradients back.

All micro-batches go forward, then all go back, as in GPipe. No backward pass depends on the order of micro-batches but
for the order in which their gradients are added up, so whatever schedule a port has, these are its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.ranks.layout import Axis


@dataclass(frozen=True)
class Pipeline:
    """Say how a pair is computed over ``pp`` ranks, each of which has a stage.

    Attributes:
        micro_batches: into how many micro-batches the batch is divided.
        dim: which dimension of inputs and outputs that is.
        names: called with the name of a stage's parameter, returns that of the whole candidate's; None if the stages
            keep these names.
        step: the port's own schedule, called as ``step(module, *inputs, target=, loss=)`` on each rank in place of
            parity's. It makes the forward and the backward passes of all micro-batches, of which each has the loss
            ``loss(output, target)``, with its part of ``target``, and these are added up. It returns the whole output
            on the last stage, and None on others.
    """

    micro_batches: int = 1
    dim: int = 0
    names: Callable[[str], str] | None = None
    step: Callable[..., Tensor | None] | None = None

    def parts(self, inputs: Any) -> list[Any]:
        """Return the micro-batches of inputs or outputs.

        Raises:
            UserError: if the batch does not divide.
        """

        def chunks(x: Tensor) -> tuple[Tensor, ...]:
            if not -x.dim() <= self.dim < x.dim():
                return (x,) * self.micro_batches
            if x.shape[self.dim] % self.micro_batches:
                raise UserError(
                    f"dimension {self.dim} of {tuple(x.shape)} does not divide into {self.micro_batches} micro-batches"
                )
            return x.chunk(self.micro_batches, self.dim)

        leaves, spec = tree_flatten(inputs)
        divided = [chunks(x) if isinstance(x, Tensor) else (x,) * self.micro_batches for x in leaves]
        return [tree_unflatten([one[i] for one in divided], spec) for i in range(self.micro_batches)]


def summed_product(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss whose gradient with respect to the output is the target."""
    return (output * target).sum()


class Stage:
    """One rank's stage in one forward and one backward pass."""

    def __init__(self, pipeline: Pipeline, axis: Axis) -> None:
        """Begin with nothing received."""
        self._pipeline, self._axis = pipeline, axis
        self._received: list[list[Tensor]] = []
        self._sent: list[list[Tensor]] = []

    @property
    def is_first(self) -> bool:
        """Return whether the stage takes the inputs."""
        return self._axis.rank == 0

    @property
    def is_last(self) -> bool:
        """Return whether the stage has the outputs."""
        return self._axis.rank == self._axis.size - 1

    def forward(self, call: Callable[..., Any] | None, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of all micro-batches on the last stage, and nothing on others.

        A later stage is called with what the one before it returned in place of the first input.
        """
        returned = []
        for some, named in self._pipeline.parts((args, kwargs)):
            if not self.is_first and args:
                some = (self._receive(), *some[1:])
            elif not self.is_first:
                named = {**named, next(iter(kwargs)): self._receive()}
            output = call(module, *some, **named) if call else module(*some, **named)
            if self.is_last:
                returned.append(output)
            else:
                self._send(output)
        return _together(returned, self._pipeline.dim) if returned else None

    def backward(self) -> None:
        """Differentiate what was sent on, if this is not the last stage, and hand on what flows back."""
        for i in range(self._pipeline.micro_batches):
            if not self.is_last:
                gradients = [self._get(self._after, torch.empty_like(x)) for x in self._sent[i]]
                torch.autograd.backward(self._sent[i], gradients)
            if not self.is_first:
                for x in self._received[i]:
                    self._put(self._before, torch.zeros_like(x) if x.grad is None else x.grad)

    @property
    def _before(self) -> int:
        return self._axis.ranks[self._axis.rank - 1]

    @property
    def _after(self) -> int:
        return self._axis.ranks[self._axis.rank + 1]

    def _put(self, to: int, x: Tensor) -> None:
        distributed.send(x.contiguous(), to, group=self._axis.group)

    def _get(self, of: int, like: Tensor) -> Tensor:
        distributed.recv(like, of, group=self._axis.group)
        return like

    def _send(self, output: Any) -> None:
        leaves, spec = tree_flatten(output)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        told = [(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else None for x in leaves]
        others = [None if isinstance(x, Tensor) else x for x in leaves]
        distributed.send_object_list([told, others, spec], self._after, group=self._axis.group)
        for x in tensors:
            self._put(self._after, x.detach())
        self._sent.append([x for x in tensors if x.requires_grad])

    def _receive(self) -> Any:
        header: list[Any] = [None] * 3
        distributed.recv_object_list(header, self._before, group=self._axis.group)
        told, leaves, spec = header
        received = []
        for i, one in enumerate(told):
            if one is not None:
                shape, dtype, is_differentiable = one
                leaves[i] = self._get(self._before, torch.empty(shape, dtype=dtype))
                if is_differentiable:
                    received.append(leaves[i].requires_grad_())
        self._received.append(received)
        # A module may write to what it is given, which autograd allows of all but leaves.
        return tree_map_only(Tensor, lambda x: x.clone(), tree_unflatten(leaves, spec))


def _together(returned: Sequence[Any], dim: int) -> Any:
    """Return the outputs of micro-batches as one."""
    if len(returned) == 1:
        return returned[0]
    flat = [tree_flatten(one) for one in returned]
    leaves = [
        torch.cat(some, dim) if isinstance(some[0], Tensor) else some[0]
        for some in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])
