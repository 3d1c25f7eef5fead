"""A linear layer whose input or output gradient changes its magnitude from one step to the next, under each recipe.

Delayed scaling takes a tensor's scale from its past: after a jump it is the wrong one, until the past is forgotten.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from parity.case.case import Rng
from parity.lab.studies.settings import gpu_with
from parity.numerics.errors import measure as errors_of
from parity.te import Kernels
from parity.te.precision import PRECISIONS

Change = Literal["up", "down", "spike"]
CHANGES: tuple[Change, ...] = ("up", "down", "spike")
Side = Literal["input", "gradient"]
SIDES: tuple[Side, ...] = ("input", "gradient")
# What is judged: the first result of the GEMM that reads the tensor.
JUDGED: Mapping[Side, str] = {"input": "output", "gradient": "input gradient"}
AS_GOOD_DB = 1.0
SETTLED_STEPS = 16


@dataclass(frozen=True)
class StepsRun:
    """A linear layer's passes around a change.

    Attributes:
        recipe: name of a precision that has a TE recipe.
        history: amaxes that delayed scaling remembers; 0 where the recipe has no past.
        side: whether the input or the output gradient changes.
        change: ``up``, larger by ``factor`` from then on; ``down``, smaller by it; ``spike``, larger in one step alone.
        factor: of the change.
        before: steps before it.
        after: steps from it on, at most: ``SETTLED_STEPS`` in a row that are as good as before end the run.
        size: input, weight and output gradient are ``[size, size]``.
        seed: of all values.
    """

    recipe: str
    history: int
    side: Side
    change: Change
    factor: float
    before: int
    after: int
    size: int
    seed: int


@dataclass(frozen=True)
class Steps:
    """What the judged result lost in each step.

    Attributes:
        sqnr_db: signal to quantization noise ratio of each step; minus infinity where the result is not finite.
        clipped: share of the tensor's elements above the largest that its delayed scale can take, in the step of the
            change and in the step after it; empty where the scale is the tensor's own.
        flushed: ditto of those so small that they become 0.
        gpu: that TE ran on or was emulated.
    """

    sqnr_db: tuple[float, ...]
    clipped: tuple[float, ...]
    flushed: tuple[float, ...]
    gpu: str

    def steady(self, before: int) -> tuple[float, float]:
        """Median and minimum before the change; the first half, when delayed scaling has no past yet, is left out."""
        settled = sorted(self.sqnr_db[before // 2 : before])
        return settled[len(settled) // 2], settled[0]

    def recovered_after(self, before: int) -> int | None:
        """Steps from the change on until every later one is as good as before; None if the last one is not.

        As good is what lies at most ``AS_GOOD_DB`` below the worst of the steps before.
        """
        bad = [i for i, is_good in enumerate(self._as_good(before)) if not is_good]
        if not bad:
            return 0
        return None if bad[-1] == len(self.sqnr_db) - before - 1 else bad[-1] + 1

    def has_settled(self, before: int) -> bool:
        """Whether the last ``SETTLED_STEPS`` came after the change and are as good as before."""
        last = self._as_good(before)[-SETTLED_STEPS:]
        return len(last) == SETTLED_STEPS and all(last)

    def _as_good(self, before: int) -> list[bool]:
        _, worst = self.steady(before)
        return [sqnr >= worst - AS_GOOD_DB for sqnr in self.sqnr_db[before:]]


def measure(run: StepsRun, kernels: Kernels) -> Steps:
    """Take the steps, each with values of its own and without an update of the weight."""
    precision = PRECISIONS[run.recipe]
    rng = Rng(run.seed, "steps")
    with gpu_with(precision, kernels) as gpu:
        linear = kernels.te.Linear(
            run.size, run.size, bias=False, params_dtype=precision.dtype, device=kernels.device.type
        )
        with torch.no_grad():
            linear.weight.copy_(rng.normal(run.size, run.size, std=run.size**-0.5))
        steps = Steps((), (), (), gpu)
        for step in range(run.before + run.after):
            stds = {side: _factor(run, step) if side == run.side else 1.0 for side in SIDES}
            drawn = {side: rng.normal(run.size, run.size, std=std) for side, std in stds.items()}
            tensors = {side: tensor.to(kernels.device, precision.dtype) for side, tensor in drawn.items()}
            if run.history and step in (run.before, run.before + 1):
                clipped, flushed = _misfits(linear, run.side, tensors[run.side])
                steps = replace(steps, clipped=(*steps.clipped, clipped), flushed=(*steps.flushed, flushed))
            steps = replace(steps, sqnr_db=(*steps.sqnr_db, _pass(run, linear, tensors, kernels)))
            if step >= run.before and steps.has_settled(run.before):
                break
    return steps


def _pass(run: StepsRun, linear: Any, tensors: Mapping[Side, Tensor], kernels: Kernels) -> float:
    """The SQNR of the judged result of a forward and backward pass."""
    x, dy, weight = tensors["input"].requires_grad_(), tensors["gradient"], linear.weight.detach().double()
    with _autocast(run, kernels):
        y = linear(x)
    y.backward(dy)
    linear.weight.grad = None
    assert x.grad is not None
    if run.side == "input":
        return _sqnr(y, x.double() @ weight.t())
    return _sqnr(x.grad, dy.double() @ weight)


def _factor(run: StepsRun, step: int) -> float:
    if step < run.before or (run.change == "spike" and step > run.before):
        return 1.0
    return 1 / run.factor if run.change == "down" else run.factor


def _autocast(run: StepsRun, kernels: Kernels) -> AbstractContextManager[None]:
    if not run.history:
        return PRECISIONS[run.recipe].autocast(kernels)
    recipes = importlib.import_module("transformer_engine.common.recipe")
    return kernels.te.autocast(enabled=True, recipe=recipes.DelayedScaling(amax_history_len=run.history))


def _misfits(linear: Any, side: Side, values: Tensor) -> tuple[float, float]:
    """The shares of elements that the delayed scale puts above the format's range and below half its least number."""
    meta, dtype = ("scaling_fwd", torch.float8_e4m3fn) if side == "input" else ("scaling_bwd", torch.float8_e5m2)
    info = torch.finfo(dtype)
    scaled = values.double().abs() * linear.quantizers[meta][0].scale.double()
    smallest = info.smallest_normal * info.eps
    return (scaled > info.max).double().mean().item(), (scaled < smallest / 2).double().mean().item()


def _sqnr(result: Tensor, golden: Tensor) -> float:
    errors = errors_of(result, golden, result.dtype)
    return errors.sqnr_db if errors.finite else -math.inf
