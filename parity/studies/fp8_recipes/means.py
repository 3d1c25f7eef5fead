"""What the reports of the study ``fp8_recipes`` take from its runs: means over seeds, and the steps around a change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from parity.studies.fp8_recipes.fp8_attention import AttentionLoss, AttentionRun
from parity.studies.fp8_recipes.module_sqnr import ModuleLoss, ModuleRun
from parity.studies.fp8_recipes.stale_scales import Steps
from parity.studies.fp8_recipes.study import DELAYED, Results, Settings, steps_run
from parity.studies.fp8_recipes.tensor_sqnr import TensorLoss, TensorRun


def tensor_mean(
    found: Results, distribution: str, role: str, recipe: str, of: Literal["te", "model", "te_body"] = "te"
) -> float:
    """A tensor's SQNR in decibels."""
    return mean_db(
        getattr(loss, of)
        for run, loss in found.items()
        if isinstance(run, TensorRun)
        and isinstance(loss, TensorLoss)
        and (run.distribution, run.role, run.recipe) == (distribution, role, recipe)
    )


def module_mean(
    found: Results, module: str, distribution: str, recipe: str, kind: str, of: Literal["te", "model"] = "te"
) -> float:
    """A module's SQNR in decibels, by kind of tensor."""
    return mean_db(
        getattr(loss, of)[kind]
        for run, loss in found.items()
        if isinstance(run, ModuleRun)
        and isinstance(loss, ModuleLoss)
        and (run.module, run.distribution, run.recipe) == (module, distribution, recipe)
    )


def attention_rmse(found: Results, distribution: str, way: str) -> float:
    """The root mean square error of attention's output over all seeds."""
    squares = [
        loss.rmse[way] ** 2
        for run, loss in found.items()
        if isinstance(run, AttentionRun) and isinstance(loss, AttentionLoss) and run.distribution == distribution
    ]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.nan


def mean_db(ratios: Iterable[float]) -> float:
    """The SQNR of the mean noise power; NaN of nothing."""
    powers = [10 ** (-ratio / 10) for ratio in ratios]
    return -10 * math.log10(sum(powers) / len(powers)) if powers else math.nan


def delayed_steps(found: Results, settings: Settings, history: int, change: str, factor: float) -> Steps:
    """Delayed scaling around a change of the input."""
    steps = found[steps_run(settings, DELAYED, history, "input", change, factor)]
    assert isinstance(steps, Steps)
    return steps
