"""Trainings that offload their activations by themselves: right ones, and ones that read back something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from parity.case.case import Training
from parity.case.training import Model

# TE's context around the two TE modules of a port, as its documentation has it: a loop over layers.

Synchronize = Callable[[Tensor], Tensor]


def in_order(layers: list[Callable[[Tensor], Tensor]], x: Tensor, context: Any, synchronize: Synchronize) -> Tensor:
    """Call the layers as one should."""
    for layer in layers:
        with context:
            x = layer(x)
        x = synchronize(x)
    return x


def never(layers: list[Callable[[Tensor], Tensor]], x: Tensor, context: Any, synchronize: Synchronize) -> Tensor:
    """Forget to synchronize."""
    for layer in layers:
        with context:
            x = layer(x)
    return x


def at_the_end(layers: list[Callable[[Tensor], Tensor]], x: Tensor, context: Any, synchronize: Synchronize) -> Tensor:
    """Synchronize once, what the last layer returns."""
    return synchronize(never(layers, x, context, synchronize))


def too_late(layers: list[Callable[[Tensor], Tensor]], x: Tensor, context: Any, synchronize: Synchronize) -> Tensor:
    """Synchronize what each layer returns once the next one has run."""
    returned = []
    for layer in layers:
        with context:
            x = layer(x)
        returned.append(x)
        for one in returned[-2:-1]:
            synchronize(one)
    return synchronize(x)


def looping(
    loop: Callable[..., Tensor] = in_order, model_layers: int = 2, **options: Any
) -> Callable[[ModuleType], Training]:
    """Return a training that calls the two TE modules of the host ``glued`` like this."""

    def training(te: ModuleType) -> Training:
        def offload(module: Any) -> Callable[..., Tensor]:
            made = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=model_layers)

            def call(module: Any, x: Tensor) -> Tensor:
                layers = [module.first, lambda hidden: module.second(F.gelu(hidden, approximate="tanh"))]
                return loop(layers, x, *made)

            return call

        return Training(offload=offload, **options)

    return training


# Copies on the host that a port makes by itself.


class Host:
    """Keeps what is saved for the backward pass on the host, as PyTorch's ``save_on_cpu`` does.

    Attributes:
        saved: how many tensors have been saved since the forward pass began.
    """

    def __init__(self) -> None:
        self.saved = 0

    def copy(self, x: Tensor) -> Tensor:
        """Copy a tensor to the host."""
        return x.detach().to("cpu", copy=True)

    @contextmanager
    def offloading(self) -> Iterator[None]:
        """Within the context, offload what is saved."""
        self.saved = 0

        def pack(x: Tensor) -> Any:
            self.saved += 1
            kept = None if self.stays(x) else self.copy(x)
            return x if kept is None else (x.device, x.dtype, kept)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, dtype, kept = packed
            returned: Tensor = kept.to(device, dtype, copy=True)
            return returned

        with saved_tensors_hooks(pack, unpack):
            yield

    def stays(self, x: Tensor) -> bool:
        """Return whether a tensor is left on the device: TE asks parameters for more than their numbers."""
        return isinstance(x, nn.Parameter)

    def __call__(self, module: nn.Module) -> None:
        """Offload what the candidate saves from now on."""
        forward = module.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            with self.offloading():
                return forward(*args, **kwargs)

        module.forward = offloaded


class In16Bits(Host):
    """Halves the traffic by rounding what is saved in FP32."""

    def copy(self, x: Tensor) -> Tensor:
        """Round it to BF16."""
        return super().copy(x.to(torch.bfloat16) if x.dtype is torch.float32 else x)


class FilledOnce(Host):
    """Keeps its buffers from step to step, and fills each once."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[int, Tensor] = {}

    def copy(self, x: Tensor) -> Tensor:
        """Return the buffer."""
        if self.saved not in self.buffers:
            self.buffers[self.saved] = super().copy(x)
        return self.buffers[self.saved]


class WithWeights(Host):
    """Offloads weights as well."""

    def stays(self, x: Tensor) -> bool:
        """Keep nothing on the device."""
        return False


class WeightsOnce(WithWeights):
    """Offloads weights as well, and copies these to the host in the first step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, Tensor] = {}

    def copy(self, x: Tensor) -> Tensor:
        """Return the copy of a weight that there is."""
        if not isinstance(x, nn.Parameter):
            return super().copy(x)
        return self.copies.setdefault(id(x), super().copy(x))


def perturbed(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Move the weights between the forward and the backward pass, unseen by autograd."""
    optimizer.zero_grad()
    loss = model.loss(x)
    before = [one.data.clone() for one in model.parameters()]
    for one in model.parameters():
        one.data.mul_(1.25)
    loss.backward()
    for one, old in zip(model.parameters(), before, strict=True):
        one.data.copy_(old)
    optimizer.step()
    return loss


def hosted(kind: type[Host], **options: Any) -> Callable[[ModuleType], Training]:
    """Return a training with copies on the host."""
    return lambda te: Training(offload=kind(), **options)
