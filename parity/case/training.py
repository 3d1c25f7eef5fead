"""Train a module as its pair says: its loss, its optimizer, and what one step is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from parity.case.case import MakeOptimizer, Pair, Rng, Training, signed_as_call
from parity.ranks.layout import Parallel
from parity.te import state
from parity.user_error import UserError

# The optimizer that both have if the pair names none. Its eps is too small for any gradient to feel.
ADAM: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def reference_optimizer(training: Training) -> MakeOptimizer:
    """Return what makes the reference's optimizer."""
    return training.optimizer or (lambda model: AdamW(model.parameters(), **ADAM))


def candidate_optimizer(training: Training, te: ModuleType) -> MakeOptimizer:
    """Return what makes the candidate's optimizer."""

    def fused_adam(model: nn.Module) -> Optimizer:
        narrow = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
        made: Optimizer = te.optimizers.FusedAdam(model.parameters(), **ADAM, master_weights=narrow)
        return made

    return training.candidate_optimizer or training.optimizer or fused_adam


class Model:
    """A pair's module as a training step calls it.

    Attributes:
        module: the reference or the candidate.
        micro_batch: the number of the micro-batch, from 0, if a step has several; a TE module is told whether it is
            the first, unless the pair calls it.
        recipe: of the precision, an object of TE's; None without one.
        cuda: ``torch.cuda``, or what has its streams and graphs on the CPU kernels.
        calls: the arguments of all calls since the last clearing.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any] | None,
        loss: Callable[..., Tensor] | None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        recipe: Any = None,
        cuda: Any = torch.cuda,
    ) -> None:
        """Call ``module`` by ``call``, each time in a new context that ``around`` makes, such as TE's autocast."""
        self.module, self.recipe, self.cuda = module, recipe, cuda
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.micro_batch: int | None = None
        self._call, self._loss, self._around = call or nn.Module.__call__, loss or distance_to_targets, around
        self._is_told = call is None and "is_first_microbatch" in inspect.signature(module.forward).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        self.calls.append((args, kwargs))
        if self._is_told and self.micro_batch is not None:
            kwargs = {"is_first_microbatch": self.micro_batch == 0} | kwargs
        with self._around():
            return self._call(self.module, *args, **kwargs)

    def without_recipe(self) -> Model:
        """Return the same, called in no context."""
        return Model(self.module, self._call, self._loss, cuda=self.cuda)

    @contextmanager
    def within(self, around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Within the context, call the module in another context as well, which ``around`` makes for each call."""
        outer = self._around

        @contextmanager
        def both() -> Iterator[None]:
            with outer(), around():
                yield

        self._around = both
        try:
            yield
        finally:
            self._around = outer

    def called_by(self, call: Callable[..., Any]) -> Model:
        """Return the same, which calls its module in another way."""
        return Model(self.module, call, self._loss, self._around, self.recipe, self.cuda)

    def parameters(self) -> list[nn.Parameter]:
        """Return the module's parameters."""
        return list(self.module.parameters())

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a call with these inputs, one number."""
        loss = self._loss(self(*args, **kwargs), *args, **kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"the loss of a training is a tensor that holds one number, not {shape}")
        return loss.reshape(())


def distance_to_targets(returned: Any, *_: Any, **__: Any) -> Tensor:
    """Return a single number as it is; else half the squared distance of the outputs to targets, averaged over tokens.

    All tokens have one target, so that micro-batches have the loss of their tokens. It holds multiples of 1/8 up to 2,
    which every precision has. A mean over tokens alone keeps gradients in FP16's range.
    """
    outputs = [x for x in tree_leaves(returned) if isinstance(x, Tensor) and x.is_floating_point()]
    if len(outputs) == 1 and outputs[0].numel() == 1:
        return outputs[0]
    if not outputs:
        raise UserError(
            "a training needs a loss, and its module returns nothing in floating point; give one as "
            "training=parity.Training(loss=...)"
        )
    return torch.stack([distance_of_part(i, one, one.shape) for i, one in enumerate(outputs)]).sum()


def distance_of_part(
    number: int, output: Tensor, whole: torch.Size, part_of: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return what a part of an output adds to that distance.

    Args:
        number: of the output, from 0.
        output: the part.
        whole: the shape of the whole output.
        part_of: returns the part of a whole tensor; None for a part that is the whole.
    """
    wide = output if output.dtype is torch.float64 else output.float()
    tokens = whole.numel() // whole[-1] if whole else 1
    target = _target(number, whole[-1:], wide.device, wide.dtype)
    if part_of is not None:
        target = part_of(target.expand(whole)).reshape(output.shape)
    return (wide - target).square().sum() / (2 * max(tokens, 1))


# A CUDA graph that captures the loss cannot draw them on the host, or copy them from there.
@functools.lru_cache(maxsize=64)
def _target(number: int, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    return (Rng(number, "targets").integers(*shape, low=-16, high=17) / 8).to(device, dtype)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Hold a part of a batch.

    Attributes:
        share: by what its loss is multiplied.
        args, kwargs: arguments of a call.
    """

    share: float
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def plain_step(
    clip: float | None,
    split: Callable[[Any], Sequence[MicroBatch]] | None = None,
    between_ranks: Parallel | None = None,
) -> Callable[..., Tensor]:
    """Return a training step without any trick: gradients of one batch, clipped if they are to be, and an update.

    Args:
        clip: the largest norm of all gradients; None for any.
        split: splits the inputs into micro-batches, whose gradients are added up.
        between_ranks: what the port does after a backward pass, and how it computes that norm, on one of several ranks.
    """

    def step(model: Model, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        state.clear(model.module)
        if split is None:
            loss = model.loss(*args, **kwargs)
            loss.backward()
        else:
            loss = torch.zeros(())
            for model.micro_batch, part in enumerate(split(kwargs or args)):
                own = part.share * model.loss(*part.args, **part.kwargs)
                own.backward()
                loss = loss.to(own) + own.detach()
        for parameter in model.parameters():
            gradient = state.gradient(parameter)
            if gradient is not None and gradient is not parameter.grad:  # TE added it to main_grad
                parameter.grad = gradient.to(parameter.dtype)
        if between_ranks is not None and between_ranks.finish is not None:
            between_ranks.finish(model.module)
        if clip is not None and between_ranks is not None and between_ranks.gradient_norm is not None:
            norm = torch.as_tensor(between_ranks.gradient_norm(model.module))
            clip_grad._clip_grads_with_norm_(model.parameters(), clip, norm)  # where a step's watcher sees it
        elif clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    return step


def losses(pair: Pair) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return how to call the reference and the candidate so that each returns its loss."""

    def calling(module: nn.Module, call: Callable[..., Any] | None) -> Callable[..., Tensor]:
        def loss(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            return Model(module, call, pair.training.loss).loss(*args, **kwargs)

        return signed_as_call(loss, module, call)

    return calling(pair.reference, pair.call_reference), calling(pair.candidate, pair.call_candidate)
