"""What a whole module loses under a recipe, by the distribution of its inputs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from parity.case.case import Case, Pair
from parity.case.validate import CheckedSize
from parity.lab.studies.over_seeds import pooled_relative_l2
from parity.lab.studies.settings import DISTRIBUTIONS, gpu_with
from parity.lab.studies.te_modules import AS_TE, Shape, placed
from parity.numerics.errors import sqnr_db
from parity.passes.all_passes import model_tensors, run_candidate, tensors_of
from parity.passes.prepare import prepare
from parity.te import Kernels
from parity.te.precision import PRECISIONS


@dataclass(frozen=True)
class ModuleRun:
    """One module under one recipe.

    Attributes:
        module: name of ``te_modules.MODULES``.
        distribution: of the inputs; weights are PyTorch's initial ones, output gradients N(0, 1).
        recipe: name of a precision.
        hidden, seq: the module's size.
        seed: of weights, inputs and output gradients.
    """

    module: str
    distribution: str
    recipe: str
    hidden: int
    seq: int
    seed: int


@dataclass(frozen=True)
class ModuleLoss:
    """Signal to quantization noise ratios, in decibels, by kind of tensor.

    Attributes:
        te: of TE's module.
        model: of the rounding model.
        gpu: that TE ran on or was emulated.
    """

    te: Mapping[str, float]
    model: Mapping[str, float]
    gpu: str


def measure(run: ModuleRun, kernels: Kernels) -> ModuleLoss:
    """A pass of TE's module and of the rounding model, against FP64."""
    precision = PRECISIONS[run.recipe]
    case, checked = _case(run.module, run.distribution, Shape(run.hidden, run.seq))
    prepared = prepare(case, checked, precision.dtype, run.seed, kernels)
    golden = tensors_of(prepared.golden)
    with gpu_with(precision, kernels) as gpu:
        candidate, _ = run_candidate(case, checked, prepared, precision, run.seed, kernels)
    modelled = model_tensors(prepared, precision.rounding, AS_TE)
    te, model = (
        {kind: sqnr_db(error) for kind, error in pooled_relative_l2(tensors, golden).items()}
        for tensors in (candidate, modelled)
    )
    return ModuleLoss(te, model, gpu)


@functools.lru_cache(maxsize=64)
def _case(module: str, distribution: str, shape: Shape) -> tuple[Case, CheckedSize]:
    """The module's case with inputs of another distribution; the same objects each time, see ``placed``."""
    case, checked = placed(module, shape)
    draw = DISTRIBUTIONS[distribution]

    def build(te: ModuleType, **sizes: Any) -> Pair:
        pair = case.factory(te, **sizes)
        return replace(pair, inputs=lambda rng, batch, seq: draw(rng, batch, seq, shape.hidden))

    return replace(case, name=f"{case.name}_{distribution}", factory=build), checked
