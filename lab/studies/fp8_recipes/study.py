"""Compare FP8 recipes: delayed, current and block scaling, MXFP8 and NVFP4.

The study makes four measurements: the loss of a tensor by distribution and role, the loss of a module, the effect of a
tensor whose magnitude changes from one step to the next, and FlashAttention-3's test of FP8 attention. That test's
outliers are one of the distributions.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from lab.studies.settings import DISTRIBUTIONS, check_names, gpu_with, why_nowhere
from lab.studies.te_modules import AS_TE, MODULES, Shape, placed, pooled_relative_l2
from parity import te
from parity.case.case import Case, Pair, Rng
from parity.case.validate import CheckedSize
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.numerics.errors import measure as errors_of
from parity.numerics.errors import sqnr_db
from parity.numerics.formats import OperandPart, e4m3
from parity.passes.all_passes import model_tensors, run_candidate, tensors_of
from parity.passes.prepare import prepare
from parity.te import PRECISIONS, Kernels
from parity.user_error import UserError

# The loss of one tensor that a recipe quantizes, by its role in a linear layer.


# Where a TE module keeps the quantizer of each role: a key of its ``quantizers``, and an index.
_QUANTIZERS: Mapping[str, tuple[str, int]] = {
    "inputs": ("scaling_fwd", 0),
    "weights": ("scaling_fwd", 1),
    "gradients": ("scaling_bwd", 0),
}
ROLES: tuple[OperandPart, ...] = ("inputs", "weights", "gradients")
BODY = 0.99  # the share of smallest elements, which contains no outliers


@dataclass(frozen=True)
class TensorRun:
    """One tensor under one recipe.

    Attributes:
        distribution: a name in ``DISTRIBUTIONS``.
        role: one of ``ROLES``.
        recipe: the name of a precision that has a TE recipe.
        size: the tensor is ``[size, size]``.
        earlier: earlier passes that set delayed scaling's scale. They use other draws, unless the tensor is the weight.
        seed: the seed of the values.
    """

    distribution: str
    role: OperandPart
    recipe: str
    size: int
    earlier: int
    seed: int


@dataclass(frozen=True)
class TensorLoss:
    """Signal to quantization noise ratios, in decibels.

    Attributes:
        te: the ratio of TE's quantized tensor.
        model: the ratio of the rounding model's tensor, whose per-tensor scale comes from the tensor itself.
        te_body: the ratio of TE's tensor over the ``BODY`` smallest elements.
        gpu: the real or emulated GPU that TE ran on.
    """

    te: float
    model: float
    te_body: float
    gpu: str


def measure_tensor(run: TensorRun, kernels: Kernels) -> TensorLoss:
    """Quantize a tensor with TE's own quantizer and with the rounding model's format."""
    precision = PRECISIONS[run.recipe]
    rng, draw = Rng(run.seed, f"{run.role} {run.distribution}"), DISTRIBUTIONS[run.distribution]
    values = draw(rng, run.size, run.size).to(kernels.device, precision.dtype)
    to_format = precision.rounding.operand_format(run.role)
    assert to_format is not None, "recipes have a format for each operand"
    with gpu_with(precision, kernels) as gpu:
        quantized = _quantized(run, values, rng, kernels)
    modelled = to_format(values.float(), 1)
    is_body = values.abs() <= values.abs().flatten().kthvalue(math.ceil(BODY * values.numel())).values
    return TensorLoss(
        te=_sqnr_of_tensor(quantized, values),
        model=_sqnr_of_tensor(modelled, values),
        te_body=_sqnr_of_tensor(quantized[is_body], values[is_body]),
        gpu=gpu,
    )


def _quantized(run: TensorRun, values: Tensor, rng: Rng, kernels: Kernels) -> Tensor:
    """Return the values quantized by TE in a linear layer that has already seen earlier draws."""
    precision, draw = PRECISIONS[run.recipe], DISTRIBUTIONS[run.distribution]
    linear = kernels.te.Linear(run.size, run.size, bias=False, params_dtype=precision.dtype, device=kernels.device.type)
    for _ in range(run.earlier):
        drawn = {role: rng.normal(run.size, run.size) for role in ROLES if role != run.role}
        drawn[run.role] = values if run.role == "weights" else draw(rng, run.size, run.size)
        tensors = {role: tensor.to(kernels.device, precision.dtype) for role, tensor in drawn.items()}
        with torch.no_grad():
            linear.weight.copy_(tensors["weights"])
        with precision.autocast(kernels):
            y = linear(tensors["inputs"].requires_grad_())
        y.backward(tensors["gradients"])
    meta, index = _QUANTIZERS[run.role]
    quantizer = linear.quantizers[meta][index]
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer(values).dequantize()


def _sqnr_of_tensor(x: Tensor, golden: Tensor) -> float:
    return errors_of(x, golden.double(), golden.dtype).sqnr_db


# The loss of a whole module under a recipe, by the distribution of its inputs.


@dataclass(frozen=True)
class ModuleRun:
    """One module under one recipe.

    Attributes:
        module: a name in ``te_modules.MODULES``.
        distribution: the distribution of the inputs. Weights are PyTorch's initial ones, output gradients N(0, 1).
        recipe: the name of a precision.
        hidden, seq: the module's size.
        seed: the seed of weights, inputs and output gradients.
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
        te: the ratios of TE's module.
        model: the ratios of the rounding model.
        gpu: the real or emulated GPU that TE ran on.
    """

    te: Mapping[str, float]
    model: Mapping[str, float]
    gpu: str


def measure_module(run: ModuleRun, kernels: Kernels) -> ModuleLoss:
    """Run one pass of TE's module and one of the rounding model, and compare both with FP64."""
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
    """Return the module's case with inputs of this distribution, always the same objects (see ``placed``)."""
    case, checked = placed(module, shape)
    draw = DISTRIBUTIONS[distribution]

    def build(te: ModuleType, **sizes: Any) -> Pair:
        pair = case.factory(te, **sizes)
        return replace(pair, inputs=lambda rng, batch, seq: draw(rng, batch, seq, shape.hidden))

    return replace(case, name=f"{case.name}_{distribution}", factory=build), checked


# A linear layer whose input or output gradient suddenly changes in magnitude, under each recipe.


Change = Literal["up", "down", "spike"]
CHANGES: tuple[Change, ...] = ("up", "down", "spike")
Side = Literal["input", "gradient"]
SIDES: tuple[Side, ...] = ("input", "gradient")
# The judged result: the first one that a GEMM computes from the changed tensor.
JUDGED: Mapping[Side, str] = {"input": "output", "gradient": "input gradient"}
AS_GOOD_DB = 1.0
SETTLED_STEPS = 16


@dataclass(frozen=True)
class StepsRun:
    """A linear layer's passes around a change.

    Attributes:
        recipe: the name of a precision that has a TE recipe.
        history: how many amaxes delayed scaling remembers; 0 if the recipe keeps no history.
        side: whether the input or the output gradient changes.
        change: ``up`` (larger from then on), ``down`` (smaller from then on) or ``spike`` (larger in one step only).
        factor: the factor of the change.
        before: steps before the change.
        after: the most steps from the change on. ``SETTLED_STEPS`` in a row that are as good as before end the run.
        size: input, weight and output gradient are ``[size, size]``.
        seed: the seed of all values.
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
    """Hold the loss of the judged result in each step.

    Attributes:
        sqnr_db: the signal to quantization noise ratio of each step; minus infinity if the result is not finite.
        clipped: the share of the tensor's elements that its delayed scale puts above the format's range, in the step of
            the change and in the next; empty if the scale comes from the tensor itself.
        flushed: the share of elements that become 0, in the same steps.
        gpu: the real or emulated GPU that TE ran on.
    """

    sqnr_db: tuple[float, ...]
    clipped: tuple[float, ...]
    flushed: tuple[float, ...]
    gpu: str

    def steady(self, before: int) -> tuple[float, float]:
        """Return median and minimum before the change, skipping the first half, where the history is short."""
        settled = sorted(self.sqnr_db[before // 2 : before])
        return settled[len(settled) // 2], settled[0]

    def recovered_after(self, before: int) -> int | None:
        """Return the number of steps after which all later ones are as good as before; None if the last one is not.

        A step is as good as before if it is at most ``AS_GOOD_DB`` below the worst step before the change.
        """
        bad = [i for i, is_good in enumerate(self._as_good(before)) if not is_good]
        if not bad:
            return 0
        return None if bad[-1] == len(self.sqnr_db) - before - 1 else bad[-1] + 1

    def has_settled(self, before: int) -> bool:
        """Return whether the last ``SETTLED_STEPS`` steps are after the change and as good as before it."""
        last = self._as_good(before)[-SETTLED_STEPS:]
        return len(last) == SETTLED_STEPS and all(last)

    def _as_good(self, before: int) -> list[bool]:
        _, worst = self.steady(before)
        return [sqnr >= worst - AS_GOOD_DB for sqnr in self.sqnr_db[before:]]


def measure_steps(run: StepsRun, kernels: Kernels) -> Steps:
    """Run the steps, each with new values. The weight is never updated."""
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
    """Return the SQNR of the judged result of a forward and backward pass."""
    x, dy, weight = tensors["input"].requires_grad_(), tensors["gradient"], linear.weight.detach().double()
    with _autocast(run, kernels):
        y = linear(x)
    y.backward(dy)
    linear.weight.grad = None
    assert x.grad is not None
    if run.side == "input":
        return _sqnr_of_step(y, x.double() @ weight.t())
    return _sqnr_of_step(x.grad, dy.double() @ weight)


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
    """Return the shares of elements that the delayed scale puts above the range or rounds to 0."""
    meta, dtype = ("scaling_fwd", torch.float8_e4m3fn) if side == "input" else ("scaling_bwd", torch.float8_e5m2)
    info = torch.finfo(dtype)
    scaled = values.double().abs() * linear.quantizers[meta][0].scale.double()
    smallest = info.smallest_normal * info.eps
    return (scaled > info.max).double().mean().item(), (scaled < smallest / 2).double().mean().item()


def _sqnr_of_step(result: Tensor, golden: Tensor) -> float:
    errors = errors_of(result, golden, result.dtype)
    return errors.sqnr_db if errors.finite else -math.inf


# Attention with FP8 queries, keys and values, quantized in the ways that FlashAttention-3 compares.
#
# This follows arXiv 2407.08608, sections 3.3 and 4.3, in plain FP32 with E4M3 roundings
# (``parity.numerics.formats``), without TE or a GPU.


BLOCK = 128  # rows that share a scale in block quantization
_LARGEST_PROBABILITY = 256.0  # unnormalised probabilities, at most 1, are multiplied by it before the cast to E4M3


@dataclass(frozen=True)
class AttentionRun:
    """Attention of one head, in all of ``WAYS``.

    Attributes:
        distribution: a name in ``DISTRIBUTIONS``, for queries, keys and values.
        seq: number of tokens.
        head_dim: channels of the head, a power of two.
        seed: the seed of the values.
    """

    distribution: str
    seq: int
    head_dim: int
    seed: int


@dataclass(frozen=True)
class AttentionLoss:
    """The errors of attention's output against FP64.

    Attributes:
        rmse: the root mean square error of each way, as FlashAttention-3 reports it.
    """

    rmse: Mapping[str, float]


Rounder = Callable[[Tensor], Tensor]


def _exact(x: Tensor) -> Tensor:
    return x


def _fp16(x: Tensor) -> Tensor:
    return x.half().float()


def _per_block(x: Tensor) -> Tensor:
    return torch.cat([e4m3(rows) for rows in x.split(BLOCK)])


def _scaled_e4m3(probabilities: Tensor) -> Tensor:
    return (probabilities * _LARGEST_PROBABILITY).to(torch.float8_e4m3fn).float() / _LARGEST_PROBABILITY


@dataclass(frozen=True)
class _Way:
    """Hold the roundings of queries and keys, values and probabilities, and whether queries and keys are rotated."""

    scored: Rounder = _exact
    values: Rounder = _exact
    probabilities: Rounder = _exact
    rotate: bool = False


FP16, PLAIN, BLOCKS = "FP16", "FP8, a scale a tensor", "FP8, a scale a block"
ROTATED, ROTATED_BLOCKS = "FP8, rotated, a scale a tensor", "FP8, rotated, a scale a block"
_WAYS: Mapping[str, _Way] = {
    FP16: _Way(_fp16, _fp16, _fp16),
    PLAIN: _Way(e4m3, e4m3, _scaled_e4m3),
    BLOCKS: _Way(_per_block, _per_block, _scaled_e4m3),
    ROTATED: _Way(e4m3, e4m3, _scaled_e4m3, rotate=True),
    ROTATED_BLOCKS: _Way(_per_block, _per_block, _scaled_e4m3, rotate=True),
    "queries and keys alone in FP8": _Way(scored=e4m3),
    "queries and keys alone in FP8, rotated": _Way(scored=e4m3, rotate=True),
    "values alone in FP8": _Way(values=e4m3),
    "probabilities alone in FP8": _Way(probabilities=_scaled_e4m3),
}
WAYS = tuple(_WAYS)


def measure_attention(run: AttentionRun) -> AttentionLoss:
    """Attend in every way. Rotated queries and keys share one random orthogonal matrix."""
    draw = DISTRIBUTIONS[run.distribution]
    rng = Rng(run.seed, f"attention {run.distribution}")
    query, key, value = (draw(rng, run.seq, run.head_dim).half().float() for _ in range(3))
    rotation = _rotation(rng, run.head_dim)
    golden = _scores(query.double(), key.double()).softmax(-1) @ value.double()
    rmse = {}
    for name, way in _WAYS.items():
        scored = [way.scored(x @ rotation if way.rotate else x) for x in (query, key)]
        scores = _scores(*scored)
        weights = (scores - scores.amax(-1, keepdim=True)).exp_()
        output = way.probabilities(weights) @ way.values(value) / weights.sum(-1, keepdim=True)
        rmse[name] = (output - golden).square().mean().sqrt().item()
    return AttentionLoss(rmse)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.t() / math.sqrt(query.shape[-1])


def _rotation(rng: Rng, size: int) -> Tensor:
    """Return an orthogonal matrix: a Hadamard matrix with random signs of its rows."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = rng.integers(size, high=2) * 2.0 - 1.0
    return signs[:, None] * matrix / math.sqrt(size)


# All runs, read from the record or computed.


RECORD = "fp8_recipes.jsonl"
RECIPES = tuple(name for name, precision in PRECISIONS.items() if precision.recipe is not None)
DELAYED = "fp8_delayed"
STEPS_BEFORE = 32
STEPS_AFTER = 16


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        recipes: names in ``RECIPES``.
        distributions: names in ``settings.DISTRIBUTIONS``.
        size: single tensors are ``[size, size]``.
        earlier: earlier passes that set delayed scaling's scale of a single tensor.
        modules: names in ``te_modules.MODULES`` whose input is ``[1, seq, hidden]``.
        hidden, seq: sizes of the modules.
        histories: how many amaxes delayed scaling remembers when a tensor's magnitude changes.
        factors: factors by which the magnitude changes.
        steps_size: both widths of the linear layer whose tensors change, and its number of tokens.
        attention_seq, head_dim: sizes of FlashAttention-3's test.
        seeds: how many seeds to run, starting at 0.
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
    """Measure what is missing from the folder's record.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a name is unknown, or block scaling does not support a size.
    """
    check(settings)
    kernels = te.kernels()
    missing = {name: why_nowhere(PRECISIONS[name], kernels) for name in settings.recipes}
    missing = {name: reason for name, reason in missing.items() if reason is not None}
    able = dataclasses.replace(settings, recipes=tuple(name for name in settings.recipes if name not in missing))
    return results(able, folder, kernels), missing, able, kernels


def results(settings: Settings, folder: Path, kernels: Kernels) -> Results:
    """Run what is missing from the folder's record, and return all results."""
    campaign: Campaign[Run, Result] = Campaign(
        folder / RECORD, Result, functools.partial(identity, kernels=kernels), record.code_of(__name__)
    )
    return campaign.complete(runs(settings), lambda entry: measure(entry, kernels), "measuring")


def runs(settings: Settings) -> Iterator[Run]:
    """Yield all runs. Runs that share a golden value follow each other."""
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
    """Return the run around one change, long enough for a delayed scale to recover from a large amax in its history."""
    after = STEPS_AFTER + (0 if change == "up" else history)
    return StepsRun(recipe, history, side, change, factor, STEPS_BEFORE, after, settings.steps_size, seed=0)  # type: ignore[arg-type]


def measure(entry: Run, kernels: Kernels) -> Result:
    """Measure one run."""
    torch.manual_seed(entry.seed)  # for stochastic rounding
    if isinstance(entry, TensorRun):
        return measure_tensor(entry, kernels)
    if isinstance(entry, ModuleRun):
        return measure_module(entry, kernels)
    if isinstance(entry, StepsRun):
        return measure_steps(entry, kernels)
    return measure_attention(entry)


def identity(entry: Run, kernels: Kernels) -> dict[str, Any]:
    """Return everything that a run's result depends on."""
    named = {"what": type(entry).__name__, "start": record.fingerprint([Rng(entry.seed).normal(16)])}
    if not isinstance(entry, AttentionRun):
        named |= {"kernels": kernels.backend, "te": te.version()}
    if isinstance(entry, ModuleRun):
        named |= {"freedom": dataclasses.asdict(AS_TE)}
    return named | dataclasses.asdict(entry)


def check(settings: Settings) -> None:
    """Check that the settings can be run.

    Raises:
        UserError: naming the field and its allowed values.
    """
    check_names("recipes", settings.recipes, RECIPES)
    check_names("distributions", settings.distributions, DISTRIBUTIONS)
    check_names("modules", settings.modules, MODULES)
    for field, multiple in (("size", 32), ("seq", 32), ("steps_size", 32), ("hidden", 128)):
        if getattr(settings, field) < 1 or getattr(settings, field) % multiple:
            raise UserError(f"{field}: {getattr(settings, field)} is not a multiple of {multiple}, which recipes need")
    if settings.head_dim < 1 or settings.head_dim & (settings.head_dim - 1):
        raise UserError(f"head_dim: {settings.head_dim} is not a power of two, which Hadamard matrices require")
    if min(settings.seeds, settings.earlier, *settings.histories) < 1:
        raise UserError("seeds, earlier and histories must be at least 1")


def _steps_runs(settings: Settings, recipe: str, history: int) -> Iterator[StepsRun]:
    for side in SIDES:
        for change in CHANGES:
            for factor in settings.factors:
                yield steps_run(settings, recipe, history, side, change, factor)
