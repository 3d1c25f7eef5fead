"""FP8 recipes side by side: delayed, current and block scaling, MXFP8 and NVFP4.

Four measurements: what a tensor loses by its distribution and role (``tensor_sqnr``), what a module loses
(``module_sqnr``), what happens when a tensor's magnitude changes from one step to the next (``stale_scales``), and
FlashAttention-3's test of FP8 attention, whose outliers all of them share (``fp8_attention``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parity import te
from parity.case.case import Rng
from parity.lab import record
from parity.lab.studies.fp8_recipes import fp8_attention, module_sqnr, stale_scales, tensor_sqnr
from parity.lab.studies.fp8_recipes.fp8_attention import AttentionLoss, AttentionRun
from parity.lab.studies.fp8_recipes.module_sqnr import ModuleLoss, ModuleRun
from parity.lab.studies.fp8_recipes.stale_scales import CHANGES, SIDES, Steps, StepsRun
from parity.lab.studies.fp8_recipes.tensor_sqnr import ROLES, TensorLoss, TensorRun
from parity.lab.studies.settings import DISTRIBUTIONS, check_names, why_nowhere
from parity.lab.studies.te_modules import AS_TE, MODULES
from parity.te import Kernels
from parity.te.precision import PRECISIONS
from parity.user_error import UserError

RECORD = "fp8_recipes.jsonl"
RECIPES = tuple(name for name, precision in PRECISIONS.items() if precision.recipe is not None)
DELAYED = "fp8_delayed"
STEPS_BEFORE = 32
STEPS_AFTER = 16


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        recipes: names of ``RECIPES``.
        distributions: names of ``distributions.DISTRIBUTIONS``.
        size: of the single tensors, ``[size, size]``.
        earlier: passes from which delayed scaling has the scale of a single tensor.
        modules: names of ``te_modules.MODULES`` whose input is ``[1, seq, hidden]``.
        hidden, seq: of the modules.
        histories: amaxes that delayed scaling remembers, where a tensor's magnitude changes.
        factors: of that change.
        steps_size: of the linear layer there, in both dimensions, and its tokens.
        attention_seq, head_dim: of FlashAttention-3's test.
        seeds: how many, from 0.
    """

    recipes: tuple[str, ...] = RECIPES
    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)
    size: int = 512
    earlier: int = 8
    modules: tuple[str, ...] = ("linear", "layernorm_linear", "layernorm_mlp_swiglu", "transformer_layer_llama")
    hidden: int = 256
    seq: int = 256
    histories: tuple[int, ...] = (1, 16, 1024)
    factors: tuple[float, ...] = (4.0, 64.0, 4096.0, 65536.0)
    steps_size: int = 64
    attention_seq: int = 4096
    head_dim: int = 128
    seeds: int = 3


FULL = Settings()
QUICK = Settings(
    size=128,
    earlier=2,
    modules=("linear", "layernorm_mlp_swiglu"),
    hidden=128,
    seq=64,
    histories=(1, 16),
    factors=(64.0, 65536.0),
    steps_size=32,
    attention_seq=512,
    seeds=1,
)

Run = TensorRun | ModuleRun | StepsRun | AttentionRun
Result = TensorLoss | ModuleLoss | Steps | AttentionLoss
Results = Mapping[Run, Result]


def measured(settings: Settings, folder: Path) -> tuple[Results, Mapping[str, str | None], Settings, Kernels]:
    """Measure what the folder's record lacks.

    Returns:
        What ``report.write`` is given, but for the folder.

    Raises:
        UserError: for a name that there is not, or sizes that block scaling does not take.
    """
    check(settings)
    kernels = te.kernels()
    missing = {name: why_nowhere(PRECISIONS[name], kernels) for name in settings.recipes}
    missing = {name: reason for name, reason in missing.items() if reason is not None}
    able = dataclasses.replace(settings, recipes=tuple(name for name in settings.recipes if name not in missing))
    measure_missing(able, folder, kernels)
    return results(able, folder, kernels), missing, able, kernels


def measure_missing(settings: Settings, folder: Path, kernels: Kernels) -> None:
    """Make the runs that the folder's record lacks, and append each when it is finished."""
    record.make_missing(
        folder / RECORD,
        runs(settings),
        functools.partial(identity, kernels=kernels),
        lambda entry: dataclasses.asdict(measure(entry, kernels)),
        "measuring",
        record.code_of(__name__),
    )


def results(settings: Settings, folder: Path, kernels: Kernels) -> Results:
    """All runs of the settings, from the record."""
    recorded = record.recorded(folder / RECORD, runs(settings), functools.partial(identity, kernels=kernels))
    return {entry: _result(entry, result) for entry, result in recorded.items()}


def runs(settings: Settings) -> Iterator[Run]:
    """All runs, those next to each other that share a golden value."""
    for seed in range(settings.seeds):
        for distribution in settings.distributions:
            yield AttentionRun(distribution, settings.attention_seq, settings.head_dim, seed)
            for role in ROLES:
                for recipe in settings.recipes:
                    yield TensorRun(distribution, role, recipe, settings.size, settings.earlier, seed)
            for module in settings.modules:
                for recipe in ("bf16", *settings.recipes):
                    yield ModuleRun(module, distribution, recipe, settings.hidden, settings.seq, seed)
    for recipe in settings.recipes:
        for history in settings.histories if recipe == DELAYED else (0,):
            yield from _steps_runs(settings, recipe, history)


def steps_run(settings: Settings, recipe: str, history: int, side: str, change: str, factor: float) -> StepsRun:
    """The run around one change; long enough to see a scale recover that the past holds down."""
    after = STEPS_AFTER + (0 if change == "up" else history)
    return StepsRun(recipe, history, side, change, factor, STEPS_BEFORE, after, settings.steps_size, seed=0)  # type: ignore[arg-type]


def measure(entry: Run, kernels: Kernels) -> Result:
    """Measure one run."""
    torch.manual_seed(entry.seed)  # of stochastic rounding
    if isinstance(entry, TensorRun):
        return tensor_sqnr.measure(entry, kernels)
    if isinstance(entry, ModuleRun):
        return module_sqnr.measure(entry, kernels)
    if isinstance(entry, StepsRun):
        return stale_scales.measure(entry, kernels)
    return fp8_attention.measure(entry)


def identity(entry: Run, kernels: Kernels) -> dict[str, Any]:
    """All that a run's result depends on."""
    named = {"what": type(entry).__name__, "start": record.fingerprint([Rng(entry.seed).normal(16)])}
    if not isinstance(entry, AttentionRun):
        named |= {"kernels": kernels.backend, "te": te.version()}
    if isinstance(entry, ModuleRun):
        named |= {"freedom": dataclasses.asdict(AS_TE)}
    return named | dataclasses.asdict(entry)


def check(settings: Settings) -> None:
    """Refuse settings that cannot be run.

    Raises:
        UserError: names the field and what it may hold.
    """
    check_names("recipes", settings.recipes, RECIPES)
    check_names("distributions", settings.distributions, DISTRIBUTIONS)
    check_names("modules", settings.modules, MODULES)
    for field, multiple in (("size", 32), ("seq", 32), ("steps_size", 32), ("hidden", 128)):
        if getattr(settings, field) < 1 or getattr(settings, field) % multiple:
            raise UserError(f"{field}: {getattr(settings, field)} is no multiple of {multiple}, which recipes need")
    if settings.head_dim < 1 or settings.head_dim & (settings.head_dim - 1):
        raise UserError(f"head_dim: {settings.head_dim} is no power of two, as Hadamard matrices are wide")
    if min(settings.seeds, settings.earlier, *settings.histories) < 1:
        raise UserError("seeds, earlier and histories count from 1")


def _steps_runs(settings: Settings, recipe: str, history: int) -> Iterator[StepsRun]:
    for side in SIDES:
        for change in CHANGES:
            for factor in settings.factors:
                yield steps_run(settings, recipe, history, side, change, factor)


def _result(entry: Run, fields: Mapping[str, Any]) -> Result:
    if isinstance(entry, TensorRun):
        return TensorLoss(**fields)
    if isinstance(entry, ModuleRun):
        return ModuleLoss(**fields)
    if isinstance(entry, StepsRun):
        return Steps(
            sqnr_db=tuple(fields["sqnr_db"]),
            clipped=tuple(fields["clipped"]),
            flushed=tuple(fields["flushed"]),
            gpu=fields["gpu"],
        )
    return AttentionLoss(**fields)
