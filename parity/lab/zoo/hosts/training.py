"""Host bugs of a training step around a linear layer: microbatches, averaged losses, an optimizer's updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import AdamW, Optimizer

from parity.case.case import Pair
from parity.lab.zoo.planting import UNQUANTIZED, host

# Microbatches, averaged losses, and steps on master weights.


# A row is a microbatch; MXFP8 wants a multiple of 32 tokens in each.
SMALL_MICROBATCHES = dict(batch=32, seq=32, width=64, out=96)
LARGE_MICROBATCHES = dict(batch=64, seq=32, width=256, out=384)
STEP = (dict(batch=2, seq=32, width=64, out=96), dict(batch=2, seq=128, width=256, out=384))
# Steps that are each less than half the distance between most weights' BF16 neighbours, together more.
STEPS = 32
LEARNING_RATE = 5e-5
# What a loss that is averaged over as many tokens hands back to each: a power of two, so that the factor is exact.
TOKENS = 2**16


class Microbatched(nn.Module):
    """A linear layer that reads a batch row by row and sums its weight gradient in ``main_grad``, as Megatron's do.

    Attributes:
        main_grad_dtype: in which microbatches are summed.
        is_first: TE's ``is_first_microbatch``, for each: True starts a new sum, None adds to what is there.
    """

    def __init__(self, te: ModuleType, width: int, out: int) -> None:
        super().__init__()
        self.linear = te.Linear(width, out, bias=False, fuse_wgrad_accumulation=True)
        self.main_grad_dtype = torch.float32
        self.is_first: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, width]`` to ``[batch, seq, out]``."""
        weight = self.linear.weight
        weight.main_grad = torch.zeros(weight.shape, dtype=self.main_grad_dtype, device=weight.device)
        weight.grad_added_to_main_grad = False
        if not hasattr(weight, "reads_main_grad"):
            weight.register_post_accumulate_grad_hook(_read_main_grad)
            weight.reads_main_grad = True
        return torch.cat([self.linear(row, is_first_microbatch=self.is_first) for row in x.split(1)])


def _read_main_grad(weight: Any) -> None:
    """Read the gradient from ``main_grad``; TE leaves a dummy in ``grad``."""
    weight.grad = weight.main_grad.to(weight.dtype)


class Stepped(nn.Module):
    """A linear layer after some steps of an optimizer on FP32 master weights.

    Attributes:
        step: from the weight, in the module's dtype, and the update to the new weight in the same dtype.
    """

    def __init__(self, te: ModuleType, width: int, out: int) -> None:
        super().__init__()
        self.linear = te.Linear(width, out, bias=False)
        self.step = stepped

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """Take ``[batch, seq, width]``, and an update of the weight's shape."""
        return functional_call(self.linear, {"weight": self.step(self.linear.weight, update)}, (x,))


def stepped(weight: Tensor, update: Tensor) -> Tensor:
    """Return all steps in FP32, then rounded to nearest."""
    return (weight.float() - STEPS * LEARNING_RATE * update.float()).to(weight.dtype)


@host("microbatched_linear", SMALL_MICROBATCHES, LARGE_MICROBATCHES)
def microbatched_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.Linear(width, out, bias=False),
        candidate=Microbatched(te, width, out),
        weights={"weight": "linear.weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


@host("averaged_linear", *STEP)
def averaged_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    """Make output gradients as small as a loss that is averaged over many tokens does."""

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return module(x) / TOKENS

    return Pair(
        reference=nn.Linear(width, out, bias=False),
        candidate=te.Linear(width, out, bias=False),
        weights={"weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
        call_reference=call,
        call_candidate=call,
    )


@host("stepped_linear", *STEP)
def stepped_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    def call_reference(module: nn.Linear, x: Tensor, update: Tensor) -> Tensor:
        return F.linear(x, module.weight - STEPS * LEARNING_RATE * update)

    return Pair(
        reference=nn.Linear(width, out, bias=False),
        candidate=Stepped(te, width, out),
        weights={"weight": "linear.weight"},
        inputs=lambda rng, batch, seq: (rng.normal(batch, seq, width), rng.normal(out, width)),
        call_reference=call_reference,
    )


# A linear layer that is trained for some steps, by AdamW, and then computes.


SMALL_TRAINED = dict(batch=64, width=64, out=96)
LARGE_TRAINED = dict(batch=256, width=256, out=384)
ADAM_STEPS = 4
# An eps that gradients of this size feel, as those of a large batch's average loss feel 1e-8.
ADAM_SETTINGS: dict[str, Any] = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.1)


class Trained(nn.Module):
    """Trains a copy of its layer, so that each pass begins with the same weights.

    Attributes:
        optimizer: from parameters to what steps on them.
    """

    def __init__(self, linear: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
        super().__init__()
        self.linear = linear
        self.optimizer = optimizer

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Take ``[batch, width]`` and a target ``[batch, out]``; return what is left of it before and after."""
        linear = copy.deepcopy(self.linear)
        optimizer = self.optimizer(linear.parameters())
        for _ in range(ADAM_STEPS):
            optimizer.zero_grad()
            with torch.enable_grad():
                (linear(x.detach()) - target.detach()).square().mean().backward()
            optimizer.step()
        return {"before": self.linear(x) - target, "after": linear(x) - target}


@host("trained_linear", SMALL_TRAINED, LARGE_TRAINED, precisions=UNQUANTIZED)
def trained_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    """Train with FP32 master weights, as whoever trains 16-bit weights should."""
    return Pair(
        reference=Trained(nn.Linear(width, out, bias=False), lambda weights: AdamW(weights, **ADAM_SETTINGS)),
        candidate=Trained(
            te.Linear(width, out, bias=False),
            lambda weights: te.optimizers.FusedAdam(weights, **ADAM_SETTINGS, master_weights=True),
        ),
        weights={"linear.weight": "linear.weight"},
        inputs=lambda rng, batch: (rng.normal(batch, width), rng.normal(batch, out)),
    )


HOSTS = (
    microbatched_linear,
    averaged_linear,
    stepped_linear,
    trained_linear,
)
