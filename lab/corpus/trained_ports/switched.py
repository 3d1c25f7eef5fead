"""Trainings that capture graphs, offload activations, or are compiled: right ones, and ones that this makes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD, AdamW, Optimizer

from parity.case.case import Training
from parity.case.training import ADAM, Model
from parity.te.state import slots

# CUDA graphs: right captures, and those that break on a GPU.


Step = Callable[..., Tensor]


class Passes:
    """Capture the forward and backward passes of a step, but not the optimizer's step."""

    def capture(self, model: Model, optimizer: Optimizer, x: Tensor) -> Step:
        """Warm up, capture, and return the step that replays."""
        self.static = x.detach().clone()
        self.prepare(x.device)
        scaling = [(one, one.clone()) for slot in slots(model.module) for one in (slot.scale, slot.history)]
        for _ in range(2):
            self.passes(model)
        for one, before in scaling:
            one.copy_(before)
        optimizer.zero_grad(set_to_none=True)
        graph = model.cuda.CUDAGraph()
        with model.cuda.graph(graph):
            loss = self.passes(model)

        def step(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
            self.fill(x)
            graph.replay()
            self.update(model, optimizer)
            return loss

        return step

    def prepare(self, device: torch.device) -> None:
        """Put everything that the graph reads on the device."""

    def passes(self, model: Model) -> Tensor:
        """Compute the captured part of a step."""
        loss = model.loss(self.static)
        loss.backward()
        return loss

    def fill(self, x: Tensor) -> None:
        """Copy a batch to the memory that the graph reads."""
        with torch.no_grad():
            self.static.copy_(x)

    def update(self, model: Model, optimizer: Optimizer) -> None:
        """Use the gradients that the graph has computed."""
        optimizer.step()


class NotCopied(Passes):
    """Leave the first batch in the graph's memory."""

    def fill(self, x: Tensor) -> None:
        """Copy nothing."""


class LetGo(Passes):
    """Free the gradients that the graph writes."""

    def update(self, model: Model, optimizer: Optimizer) -> None:
        """Step, and free the gradients."""
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Read(Passes):
    """Read the loss on the host, as if to print it."""

    def passes(self, model: Model) -> Tensor:
        """Read the loss before it is differentiated."""
        loss = model.loss(self.static)
        if loss.item() > 1e9:
            raise ValueError("the loss is too large")
        loss.backward()
        return loss


class Trains(Passes):
    """Make a real step to warm up."""

    def capture(self, model: Model, optimizer: Optimizer, x: Tensor) -> Step:
        """Train on the first batch before the capture."""
        model.loss(x).backward()
        optimizer.step()
        return super().capture(model, optimizer, x)


class LeavesAmaxes(Passes):
    """Warm up with another batch, and leave its amaxes behind."""

    def capture(self, model: Model, optimizer: Optimizer, x: Tensor) -> Step:
        """Run the first batch, multiplied by 16, before the capture."""
        model.loss(16.0 * x).backward()
        return super().capture(model, optimizer, x)


class Scaled(Passes):
    """Scale the loss by a number that doubles in each step, and unscale the gradients before they are used.

    Attributes:
        scale: a number or a tensor.
        is_in_place: whether the scale, a tensor, keeps its memory.
    """

    def __init__(self, scale: float | Tensor = 8.0, is_in_place: bool = False) -> None:
        self.scale, self.is_in_place = scale, is_in_place

    def prepare(self, device: torch.device) -> None:
        """Put a scale that is a tensor on the device, since a graph would keep the old value of one on the CPU."""
        if isinstance(self.scale, Tensor):
            self.scale = self.scale.to(device)

    def passes(self, model: Model) -> Tensor:
        """Scale the loss."""
        loss = model.loss(self.static)
        (self.scale * loss).backward()
        return loss

    def update(self, model: Model, optimizer: Optimizer) -> None:
        """Unscale the gradients, step, and double the scale for the next step."""
        for one in model.parameters():
            if one.grad is not None:
                one.grad.div_(self.scale)
        optimizer.step()
        if self.is_in_place:
            self.scale.mul_(2.0)  # type: ignore[union-attr]
        else:
            self.scale = 2.0 * self.scale

    def __call__(self, model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
        """Make the step without a graph."""
        optimizer.zero_grad()
        self.static = x
        loss = self.passes(model)
        self.update(model, optimizer)
        return loss


class MovedWeights:
    """Step FP32 copies of the weights, and put new tensors into the module afterwards."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the copies and their optimizer."""
        self.masters = [nn.Parameter(one.detach().float().clone()) for one in model.parameters()]
        return AdamW(self.masters, **ADAM)

    def __call__(self, model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
        """Make a step."""
        for one in model.parameters():
            one.grad = None
        loss = model.loss(x)
        loss.backward()
        for one, master in zip(model.parameters(), self.masters, strict=True):
            master.grad = None if one.grad is None else one.grad.float()
        optimizer.step()
        for one, master in zip(model.parameters(), self.masters, strict=True):
            one.data = master.detach().to(one.dtype, copy=True)
        return loss


def capturing(passes: Callable[[], Passes], **options: Any) -> Callable[[ModuleType], Training]:
    """Return a training that captures its passes in this way."""
    return lambda te: Training(graph=passes().capture, **options)


def scaling(**options: Any) -> Callable[[ModuleType], Training]:
    """Return a training whose scale changes, both with a graph and without."""

    def training(te: ModuleType) -> Training:
        scale = options.get("scale", 8.0)
        own = Scaled(scale.clone() if isinstance(scale, Tensor) else scale, options.get("is_in_place", False))
        return Training(candidate_step=own, graph=own.capture)

    return training


def moved_weights(te: ModuleType) -> Training:
    """Return a training whose weights move to other memory in each step."""
    own = MovedWeights()
    return Training(
        optimizer=lambda model: AdamW(model.parameters(), **ADAM),
        candidate_optimizer=own.optimizer,
        candidate_step=own,
    )


def without_recipe(te: ModuleType) -> Training:
    """Return a training that captures its module without a recipe."""

    def capture(model: Model, optimizer: Optimizer, x: Tensor) -> None:
        te.make_graphed_callables(model.module, (x.detach().clone().requires_grad_(),))

    return Training(graph=capture)


def cached_weights(te: ModuleType) -> Training:
    """Return a training whose graph quantizes its weights only in the first step."""

    def capture(model: Model, optimizer: Optimizer, x: Tensor) -> None:
        sample = x.detach().clone().requires_grad_()
        how = dict(enabled=True, recipe=model.recipe, cache_quantized_params=True)
        te.make_graphed_callables(model.module, (sample,), **how)
        replayed, calls = model.module.forward, []

        def forward(x: Tensor) -> Any:
            calls.append(x.shape)
            return replayed(x, is_first_microbatch=len(calls) == 1)

        model.module.forward = forward

    return Training(optimizer=lambda model: SGD(model.parameters(), lr=0.5), graph=capture)


class WholeStep(Passes):
    """Capture the optimizer's step as well."""

    def passes(self, model: Model) -> Tensor:
        """Compute the gradients, and step unless this is a warm-up."""
        loss = super().passes(model)
        if model.cuda.is_current_stream_capturing():
            self.own.step()
        return loss

    def capture(self, model: Model, optimizer: Optimizer, x: Tensor) -> Step:
        """Capture the whole step."""
        self.own = optimizer
        return super().capture(model, optimizer, x)

    def update(self, model: Model, optimizer: Optimizer) -> None:
        """Do nothing, since the graph has made the step."""


def plain_sgd(model: nn.Module) -> Optimizer:
    """Make an optimizer that keeps no state."""
    return SGD(model.parameters(), lr=0.05)


# A port whose PyTorch code between TE's modules is compiled, and values that ``torch.compile`` may take for constants.


class Glued(nn.Module):
    """An MLP whose activation is plain PyTorch, between two modules of TE.

    Attributes:
        scale: a power of two by which activations are multiplied and then divided again.
    """

    def __init__(self, te: ModuleType, width: int, ffn: int) -> None:
        super().__init__()
        self.first, self.second, self.scale = te.LayerNormLinear(width, ffn), te.Linear(ffn, width), 1.0

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
    def known(self) -> float:
        """Return the scale, which is declared constant to the compiler."""
        return self.scale

    @torch.compiler.disable
    def unscaled(self, x: Tensor) -> Tensor:
        """Divide by the scale, without being compiled."""
        return x / self.scale

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP."""
        return self.second(self.unscaled(self.known() * F.gelu(self.first(x), approximate="tanh")))


# Offloaded activations, and mistakes by which something else is read back.


# TE's context around the two TE modules of a port, in a loop over layers as in TE's documentation.

Synchronize = Callable[[Tensor], Tensor]


def in_order(layers: list[Callable[[Tensor], Tensor]], x: Tensor, context: Any, synchronize: Synchronize) -> Tensor:
    """Call the layers in the right way."""
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
    """Synchronize only the output of the last layer."""
    return synchronize(never(layers, x, context, synchronize))


def too_late(layers: list[Callable[[Tensor], Tensor]], x: Tensor, context: Any, synchronize: Synchronize) -> Tensor:
    """Synchronize each layer's output only after the next layer has run."""
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
    """Return a training that calls the two TE modules of the host ``glued`` in this loop."""

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
    """Keep tensors that are saved for the backward pass on the host, as PyTorch's ``save_on_cpu`` does.

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
        """Offload tensors that are saved within the context."""
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
        """Return whether a tensor is left on the device, like parameters, of which TE reads more than their values."""
        return isinstance(x, nn.Parameter)

    def __call__(self, module: nn.Module) -> None:
        """Offload the tensors that the candidate saves from now on."""
        forward = module.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            with self.offloading():
                return forward(*args, **kwargs)

        module.forward = offloaded


class In16Bits(Host):
    """Halve the traffic by rounding saved FP32 tensors."""

    def copy(self, x: Tensor) -> Tensor:
        """Copy a tensor to the host, rounding FP32 to BF16."""
        return super().copy(x.to(torch.bfloat16) if x.dtype is torch.float32 else x)


class FilledOnce(Host):
    """Keep the buffers from step to step, but fill each only once."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[int, Tensor] = {}

    def copy(self, x: Tensor) -> Tensor:
        """Return the buffer for the tensor, which is filled only once."""
        if self.saved not in self.buffers:
            self.buffers[self.saved] = super().copy(x)
        return self.buffers[self.saved]


class WithWeights(Host):
    """Offload weights as well."""

    def stays(self, x: Tensor) -> bool:
        """Keep nothing on the device."""
        return False


class WeightsOnce(WithWeights):
    """Offload weights as well, but copy them to the host only in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, Tensor] = {}

    def copy(self, x: Tensor) -> Tensor:
        """Return the first copy of a weight, or a new copy of any other tensor."""
        if not isinstance(x, nn.Parameter):
            return super().copy(x)
        return self.copies.setdefault(id(x), super().copy(x))


def perturbed(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Change the weights between the forward and the backward pass without autograd noticing."""
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
