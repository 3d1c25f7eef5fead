"""Optimizer steps inside a comparison, and what ports get wrong about their rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.walk import back, binary
from parity.watching.trace import Trace, edit

_STEPS = (1, 2, 4, 8, 16, 32, 64, 128)
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of an FP32 number that is cut off to the dtype


def optimizer_hypotheses(trace: Trace, module: nn.Module, dtype: torch.dtype) -> Iterator[Hypothesis]:
    """Wrong roundings of a weight to which the reference adds an update of its shape.

    Args:
        trace: of the reference.
        module: the reference.
        dtype: of the port's weights.
    """
    for call in trace.calls if dtype in _DROPPED_BITS else ():
        named = binary(call)
        if named is None or named[0] not in ("add", "sub") or trace.parameter(back(trace, named[1])) is None:
            continue
        weight = named[1]
        shape = trace.tensor(weight).shape
        if len(shape) < 2 or trace.tensor(call.outputs[0]).shape != shape:
            continue
        for described, update in _updates(dtype):
            yield Hypothesis(
                "master-weights",
                f"weights {described}",
                f"keep FP32 master weights and round them to nearest after each step; weights are {described}",
                module,
                (edit(call, (weight,), _passing_gradients(update)),),
            )


def _updates(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    """From the updated weight and the weight before, in FP32, to the wrongly updated weight."""
    yield "not updated at all", lambda updated, weight: weight
    yield "cut off, not rounded", lambda updated, weight: _cut(updated, dtype)
    for steps in _STEPS:
        yield f"rounded after each of {steps} steps", _in_steps(steps, dtype)


def _in_steps(steps: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    def update(updated: Tensor, weight: Tensor) -> Tensor:
        step = ((updated - weight) / steps).to(dtype)
        rounded = weight.to(dtype)
        for _ in range(steps):
            rounded = rounded + step
        return rounded.float()

    return update


def _cut(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.view(torch.int32) & (-1 << _DROPPED_BITS[dtype])).view(torch.float32)


def _passing_gradients(update: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def instead(was: Tensor, weight: Tensor) -> Tensor:
        return was + (update(was.detach().float(), weight.detach().float()).to(was.dtype) - was.detach())

    return instead
