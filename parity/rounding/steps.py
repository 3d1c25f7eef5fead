"""How a port's optimizers hold what their steps write in place: weights and moments.

A step computes in FP32. TE's kernels round once what it writes: weights, where no FP32 master weights go on beside
them, and moments that are held in less than FP32 (``common/multi_tensor/adam.cu`` and
``pytorch/optimizers/fused_adam.py`` of TE 2.20.2). PyTorch's own optimizers round what each of their calls returns.
Which of these a port's optimizers do is seen once the port has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from parity.watching.whose import is_of_te

_MASTER = "master_param"  # as TE calls it


@dataclass(frozen=True)
class Steps:
    """How optimizers hold what their steps write.

    Attributes:
        weights: the dtype in which weights go on from step to step; None for FP32 (master weights).
        moments: ditto of the optimizer's state, by its name, where that is less than FP32.
        each_call: whether each of a step's calls rounds, as PyTorch's do, or the step once at its end.
    """

    weights: torch.dtype | None
    moments: tuple[tuple[str, torch.dtype], ...] = ()
    each_call: bool = False

    @property
    def remark(self) -> str:
        """What is expected for its sake; empty where all goes on in FP32."""
        held = [("weights", self.weights)] if self.weights else []
        lost = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in (*held, *self.moments))
        return f"the port's optimizer holds {lost}: what its steps round is expected" if lost else ""


@contextmanager
def steps_seen(dtype: torch.dtype) -> Iterator[list[Steps]]:
    """Appends how an optimizer holds weights of a dtype of less than FP32, for each step inside of the context."""
    seen: list[Steps] = []

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped = [p for p in stepped_by(optimizer) if p.dtype is dtype and dtype is not torch.float32]
        if stepped:
            seen.append(_held(optimizer, stepped))

    handle = register_optimizer_step_post_hook(after_step)
    try:
        yield seen
    finally:
        handle.remove()


def together(seen: list[Steps]) -> Steps | None:
    """Whatever one of a port's steps rounds; None if it made none."""
    if not seen:
        return None
    weights = next((one.weights for one in seen if one.weights is not None), None)
    moments = tuple(sorted({moment for one in seen for moment in one.moments}, key=str))
    return Steps(weights, moments, any(one.each_call for one in seen))


def stepped_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that a step changes."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _held(optimizer: Optimizer, stepped: list[Tensor]) -> Steps:
    of_te = any(is_of_te(kind) for kind in type(optimizer).__mro__)
    masters: set[torch.dtype] = set()
    moments: set[tuple[str, torch.dtype]] = set()
    for parameter in stepped:
        held = {name: x for name, x in optimizer.state[parameter].items() if isinstance(x, Tensor) and x.dim()}
        master = held.pop(_MASTER, parameter)
        masters.add(torch.float32 if master.dtype is torch.int16 else master.dtype)  # the rest of an FP32's bits
        moments |= {(name, x.dtype) for name, x in held.items() if x.dtype in (torch.float16, torch.bfloat16)}
    weights = next((dtype for dtype in masters if dtype is not torch.float32), None)
    return Steps(weights, tuple(sorted(moments, key=str)), each_call=not of_te)
