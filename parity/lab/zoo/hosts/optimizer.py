"""A linear layer that is trained for some steps, by AdamW, and then computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from parity.case.case import Pair
from parity.lab.zoo.hosts.case import UNQUANTIZED, host

SMALL = dict(batch=64, width=64, out=96)
LARGE = dict(batch=256, width=256, out=384)
STEPS = 4
# An eps that gradients of this size feel, as those of a large batch's average loss feel 1e-8.
SETTINGS: dict[str, Any] = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.1)


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
        """``x`` is ``[batch, width]``, the target ``[batch, out]``; returns what is left of it before and after."""
        linear = copy.deepcopy(self.linear)
        optimizer = self.optimizer(linear.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.enable_grad():
                (linear(x.detach()) - target.detach()).square().mean().backward()
            optimizer.step()
        return {"before": self.linear(x) - target, "after": linear(x) - target}


@host("trained_linear", SMALL, LARGE, precisions=UNQUANTIZED)
def trained_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    """With FP32 master weights, as whoever trains 16-bit weights should have."""
    return Pair(
        reference=Trained(nn.Linear(width, out, bias=False), lambda weights: AdamW(weights, **SETTINGS)),
        candidate=Trained(
            te.Linear(width, out, bias=False),
            lambda weights: te.optimizers.FusedAdam(weights, **SETTINGS, master_weights=True),
        ),
        weights={"linear.weight": "linear.weight"},
        inputs=lambda rng, batch: (rng.normal(batch, width), rng.normal(batch, out)),
    )


HOSTS = (trained_linear,)
