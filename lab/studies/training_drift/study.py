"""Measure how rounding affects training: how far the weights of two models that should be equal drift apart.

Follows the second half of Golden et al., "Is Flash Attention Stable?" (arXiv 2405.02803). The same small language model
trains several times from the same weights on the same batches, each time with one change: flash attention instead of
baseline, a narrower format instead of FP32, or TE's modules instead of plain PyTorch. The drift of the weights is
compared with that from different starting weights, and with that from a change of one unit in the last place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

from lab.studies import training
from lab.studies.settings import check_names, gpu_with, kernels_on, why_nowhere
from lab.studies.stepwise import Arithmetic, StepwiseCore, full_fp32_products
from lab.studies.training import (
    ARCHITECTURES,
    VOCABULARY,
    LanguageModel,
    Pass,
    Schedule,
    Size,
    batches,
    initial_weights,
    load,
    load_candidate,
    plain_pass,
    rounded_pass,
    te_pass,
    train,
)
from parity import te
from parity.case import transfer
from parity.case.case import Rng
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.te import PRECISIONS, Kernels
from parity.user_error import UserError

# The distance between the weights of two models.


@dataclass(frozen=True)
class Distance:
    """The distance between two sets of numbers.

    Attributes:
        maximum: the largest difference of a number from its counterpart.
        wasserstein: the Wasserstein-1 distance: how far numbers must move, on average, to turn one set into the other,
            in any order. It is 0 if two numbers have merely swapped places.
    """

    maximum: float
    wasserstein: float


@dataclass(frozen=True)
class WeightDistance:
    """The distance between the weights of two models.

    Attributes:
        whole: the distance of all weights as one set.
        tensors: the distance of each parameter, by name.
    """

    whole: Distance
    tensors: Mapping[str, Distance]


def between(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> WeightDistance:
    """Return the distance between two models with the same parameters.

    Raises:
        ValueError: if a parameter's sizes differ.
    """
    tensors = {name: _distance(one[name], other[name]) for name in one}
    whole = (torch.cat([model[name].flatten() for name in one]) for model in (one, other))
    return WeightDistance(_distance(*whole), tensors)


def wasserstein(one: Tensor, other: Tensor) -> float:
    """Return the Wasserstein-1 distance of two sets with the same number of elements.

    Optimal transport on a line keeps the order, so this is the mean distance between the sorted sets (Peyré and Cuturi,
    "Computational Optimal Transport", 2019, remark 2.28).

    Args:
        one: a tensor of any shape.
        other: a tensor with as many elements.

    Raises:
        ValueError: if the sizes differ.
    """
    if one.numel() != other.numel():
        raise ValueError(f"{one.numel()} numbers cannot be matched with {other.numel()}")
    ascending = [x.flatten().double().sort().values for x in (one, other)]
    return (ascending[0] - ascending[1]).abs().mean().item()


def _distance(one: Tensor, other: Tensor) -> Distance:
    return Distance((one.double() - other.double()).abs().max().item(), wasserstein(one, other))


# The trainings of one small model, with one change at a time.


Kind = Literal["baseline", "flash", "flash everywhere", "nudged", "other start", "rounded", "te"]
# The precision whose rounding model is used to train the plain model in a format. FP32 rounds nothing.
_ROUNDED_AS = {"tf32": "fp32", "bf16": "bf16", "fp16": "fp16"}
FORMATS = ("fp32", *_ROUNDED_AS)
# The first seed of the weights of "other start".
_OTHER_START = 1000


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        model: a name in ``training.ARCHITECTURES``.
        formats: names in ``FORMATS`` in which baseline and flash attention train; must include FP32.
        te_precisions: names in ``PRECISIONS`` in which TE trains.
        steps: number of training steps on a CPU.
        gpu_steps: number of training steps on a GPU.
        every: steps between two comparisons of the weights.
        seeds: how many seeds of initial weights and batches to run, starting at 0.
        control_seeds: the same for low precision, flash attention as kernels round, one ulp and another start, whose
            ratios need more seeds.
        batch: sequences per step.
        seq: bytes per sequence.
        hidden, layers, heads, groups: sizes of the model; only a llama uses ``groups``.
        tile: queries and keys of flash attention's tiles.
        learning_rate: AdamW's learning rate.
        warmup: steps until the learning rate is reached.
        loss_scale: the loss scale of FP16.
        device: ``cpu``, ``gpu``, or ``auto`` for the GPU where TE's kernels can run on one.
    """

    model: str = "llama"
    formats: tuple[str, ...] = FORMATS
    te_precisions: tuple[str, ...] = tuple(PRECISIONS)
    steps: int = 300
    gpu_steps: int = 2000
    every: int = 20
    seeds: int = 2
    control_seeds: int = 8
    batch: int = 4
    seq: int = 64
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    groups: int = 2
    tile: int = 8
    learning_rate: float = 1e-3
    warmup: int = 10
    loss_scale: float = 1024.0
    device: str = "auto"


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        kind: ``baseline`` and ``flash`` attention, rounding as kernels do; flash with every step rounded (``flash
            everywhere``); baseline from weights moved by a unit in the last place of FP32 (``nudged``), or from
            other weights (``other start``); the plain model under a precision's rounding model (``rounded``); or TE.
        precision: a name in ``FORMATS``, or in ``PRECISIONS`` for ``rounded`` and ``te``.
        seed: the seed of weights and batches.
    """

    kind: Kind
    precision: str
    seed: int


@dataclass(frozen=True)
class Trajectory:
    """Hold the results of a training: FP32 masters by step and by the plain model's names, and the losses."""

    weights: Mapping[int, Mapping[str, Tensor]]
    losses: Sequence[float]


def rounds_alike(precision: str) -> str:
    """Return the first precision with the same rounding model. Recipes that only scale at other times share one."""
    return next(name for name, known in PRECISIONS.items() if known.rounding == PRECISIONS[precision].rounding)


# Turns a step's masters, in the order of the model's parameters, into a mapping by the plain model's names.
_Named = Callable[[Sequence[Tensor]], dict[str, Tensor]]


@functools.lru_cache(maxsize=16)
def trajectory(entry: Run, settings: Settings, kernels: Kernels) -> Trajectory:
    """Train once, and return the trajectory. It is cached because a training is part of several pairs."""
    torch.manual_seed(entry.seed)  # for stochastic rounding
    if entry.kind != "te":
        return _trained(entry, settings, kernels)
    with gpu_with(PRECISIONS[entry.precision], kernels):
        return _trained(entry, settings, kernels)


def _trained(entry: Run, settings: Settings, kernels: Kernels) -> Trajectory:
    model, named, dtype = _model(entry, settings, kernels)
    scale = settings.loss_scale if dtype == torch.float16 else 1.0
    seen: dict[int, dict[str, Tensor]] = {}

    def observe(step: int, masters: Sequence[Tensor]) -> None:
        if step % settings.every == 0 or step == settings.steps:
            seen[step] = named([master.cpu().clone() for master in masters])

    data = batches(entry.seed, settings.steps, settings.batch, settings.seq)
    forward_backward = _pass(entry, scale, kernels)
    if entry.kind == "te":
        # Delayed scaling needs a history before the first step counts, as in all of parity's comparisons.
        for _ in range(PRECISIONS[entry.precision].warmup_passes):
            forward_backward(model, data[0])
    losses = train(
        model,
        Schedule(settings.learning_rate, settings.warmup),
        [tokens.to(kernels.device) for tokens in data],
        forward_backward,
        dtype,
        loss_scale=scale,
        observe=observe,
        masters=_nudged(model, entry.seed) if entry.kind == "nudged" else None,
    )
    return Trajectory(seen, losses)


def initial(entry: Run, settings: Settings) -> dict[str, Tensor]:
    """Return a run's weights at step 0, exact in BF16."""
    seed = entry.seed + (_OTHER_START if entry.kind == "other start" else 0)
    return initial_weights(ARCHITECTURES[settings.model], size_of(settings), seed, torch.bfloat16)


def size_of(settings: Settings) -> Size:
    """Return the size of the study's model."""
    ffn = settings.hidden * ARCHITECTURES[settings.model].widening
    return Size(VOCABULARY, settings.seq, settings.hidden, settings.layers, settings.heads, settings.groups, ffn)


def _model(entry: Run, settings: Settings, kernels: Kernels) -> tuple[LanguageModel, _Named, torch.dtype]:
    """Return the model at step 0, a function that names its masters, and the dtype of weights and gradients."""
    architecture, size, start = ARCHITECTURES[settings.model], size_of(settings), initial(entry, settings)
    if entry.kind == "te":
        dtype = PRECISIONS[entry.precision].dtype
        model = architecture.candidate(size, kernels).to(dtype)
        load_candidate(model, architecture, size, start)
        te_names = [name for name, _ in model.named_parameters()]
        shapes = {name: tuple(tensor.shape) for name, tensor in start.items()}

        def named_by_map(masters: Sequence[Tensor]) -> dict[str, Tensor]:
            te_weights = dict(zip(te_names, masters, strict=True))
            return transfer.to_reference(architecture.weight_map(size), te_weights, shapes)

        return model, named_by_map, dtype
    model = architecture.reference(size).to(kernels.device)
    load(model, start)
    if entry.kind != "rounded":
        for index in range(size.layers):
            model.set_submodule(f"layers.{index}.attention.core", StepwiseCore(_arithmetic(entry, settings)))
    names = [name for name, _ in model.named_parameters()]
    # Plain FP32 and TF32 train in FP32, like TE's FP32.
    precision = PRECISIONS[entry.precision if entry.kind == "rounded" else _ROUNDED_AS.get(entry.precision, "fp32")]
    return model, lambda masters: dict(zip(names, masters, strict=True)), precision.dtype


def _arithmetic(entry: Run, settings: Settings) -> Arithmetic:
    algorithm: Literal["baseline", "flash"] = "flash" if entry.kind in ("flash", "flash everywhere") else "baseline"
    return Arithmetic(algorithm, entry.precision, entry.kind == "flash everywhere", settings.tile)


def _pass(entry: Run, scale: float, kernels: Kernels) -> Pass:
    if entry.kind == "te":
        return te_pass(PRECISIONS[entry.precision], kernels, scale)
    if entry.kind == "rounded":
        return rounded_pass(PRECISIONS[entry.precision].rounding, scale)
    if entry.precision == "fp32":
        return plain_pass
    return rounded_pass(PRECISIONS[_ROUNDED_AS[entry.precision]].rounding, scale)


def _nudged(model: LanguageModel, seed: int) -> list[Tensor]:
    """Return the model's weights, each moved to the next FP32 number above or below."""
    rng = Rng(seed, "nudge")
    masters = []
    for parameter in model.parameters():
        up = rng.integers(*parameter.shape, high=2).bool().to(parameter.device)
        target = torch.where(up, torch.inf, -torch.inf)
        masters.append(torch.nextafter(parameter.detach().float(), target))
    return masters


RECORD = "training_drift.jsonl"


FULL = Settings()
QUICK = Settings(
    formats=("fp32", "bf16"),
    te_precisions=("bf16",),
    steps=40,
    gpu_steps=40,
    every=10,
    seeds=1,
    control_seeds=2,
    layers=1,
)


@dataclass(frozen=True)
class Pair:
    """Two trainings whose weights are compared."""

    run: Run
    against: Run


@dataclass(frozen=True)
class Drift:
    """The drift between two trainings.

    Attributes:
        steps: the steps at which the weights were compared.
        distances: the distance at each of these steps.
        loss: the run's loss at its last step, in nats per byte.
        loss_against: the same for the other training.
    """

    steps: tuple[int, ...]
    distances: tuple[WeightDistance, ...]
    loss: float
    loss_against: float

    @property
    def last(self) -> WeightDistance:
        """The distance after the last step."""
        return self.distances[-1]


Drifts = Mapping[Pair, Drift]


def measured(settings: Settings, folder: Path) -> tuple[Drifts, Mapping[str, str], Settings, Kernels]:
    """Train what is missing from the folder's record.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a name is unknown, FP32 is missing from the formats, or the device is not available.
    """
    check(settings)
    kernels = kernels_on(settings.device)
    if kernels.backend == "gpu":
        settings = dataclasses.replace(settings, steps=settings.gpu_steps)
    found = results(settings, folder, kernels)
    refused = {name: why_nowhere(PRECISIONS[name], kernels) for name in settings.te_precisions}
    missing = {name: reason for name, reason in refused.items() if reason is not None}
    return found, missing, settings, kernels


def results(settings: Settings, folder: Path, kernels: Kernels) -> Drifts:
    """Compare the pairs that are missing from the folder's record, and return all drifts."""
    campaign: Campaign[Pair, Drift] = Campaign(
        folder / RECORD,
        Annotated[Drift, PlainSerializer(_to_json), PlainValidator(_from_json)],
        functools.partial(_identity, settings=settings, kernels=kernels),
        record.code_of(__name__),
    )
    with full_fp32_products():
        found = campaign.complete(pairs(settings, kernels), lambda pair: drift_of(pair, settings, kernels), "training")
    trajectory.cache_clear()
    return found


def drift_of(pair: Pair, settings: Settings, kernels: Kernels) -> Drift:
    """Train both runs of a pair, and compare their weights."""
    run, against = (trajectory(one, settings, kernels) for one in (pair.run, pair.against))
    return Drift(
        steps=tuple(run.weights),
        distances=tuple(between(run.weights[step], against.weights[step]) for step in run.weights),
        loss=run.losses[-1],
        loss_against=against.losses[-1],
    )


def pairs(settings: Settings, kernels: Kernels) -> Iterator[Pair]:
    """Yield the pairs to compare. Pairs that share a training follow each other."""
    for seed in range(max(settings.seeds, settings.control_seeds)):
        plain = Run("baseline", "fp32", seed)
        yield Pair(Run("other start", "fp32", seed), plain)
        for name in low_formats(settings):
            baseline = Run("baseline", name, seed)
            yield Pair(baseline, plain)
            yield Pair(Run("flash", name, seed), baseline)
            yield Pair(Run("nudged", name, seed), baseline)
            if seed < settings.seeds:
                yield Pair(Run("flash everywhere", name, seed), baseline)
        if seed >= settings.seeds:
            continue
        yield Pair(Run("flash", "fp32", seed), plain)
        yield Pair(Run("nudged", "fp32", seed), plain)
        for name in available(settings, kernels):
            rounded = Run("rounded", rounds_alike(name), seed)
            yield from (Pair(Run("te", name, seed), other) for other in (plain, rounded))
        for name in dict.fromkeys(map(rounds_alike, available(settings, kernels))):
            yield Pair(Run("rounded", name, seed), plain)


def low_formats(settings: Settings) -> list[str]:
    """Return the formats below FP32."""
    return [name for name in settings.formats if name != "fp32"]


def available(settings: Settings, kernels: Kernels) -> list[str]:
    """Return the precisions that TE can run on these kernels."""
    return [name for name in settings.te_precisions if why_nowhere(PRECISIONS[name], kernels) is None]


def check(settings: Settings) -> None:
    """Check that names are known, that sizes fit, and that formats include FP32, which others are compared with.

    Raises:
        UserError: if not.
    """
    check_names("model", (settings.model,), ARCHITECTURES)
    check_names("formats", settings.formats, FORMATS)
    check_names("te_precisions", settings.te_precisions, PRECISIONS)
    if "fp32" not in settings.formats:
        raise UserError("formats: fp32 must be among them, since the others are compared with it")
    training.check(size_of(settings), settings.batch, [PRECISIONS[name] for name in settings.te_precisions])


def _identity(pair: Pair, settings: Settings, kernels: Kernels) -> dict[str, Any]:
    """Return everything that a drift depends on, which excludes the choice of other pairs."""
    selection = {"formats", "te_precisions", "seeds", "control_seeds", "gpu_steps", "device"}
    identity = {name: value for name, value in dataclasses.asdict(settings).items() if name not in selection}
    start = _fingerprint(pair.run, settings), _fingerprint(pair.against, settings)
    identity |= dataclasses.asdict(pair) | {"start": list(start), "device": kernels.backend}
    return identity | ({"te": te.version()} if pair.run.kind == "te" else {})


@functools.lru_cache(maxsize=256)
def _fingerprint(entry: Run, settings: Settings) -> int:
    """Return the fingerprint of the initial weights and batches."""
    data = batches(entry.seed, settings.steps, settings.batch, settings.seq)
    return record.fingerprint([*initial(entry, settings).values(), *data])


def _to_json(drift: Drift) -> dict[str, Any]:
    def numbers(distance: Distance) -> list[float]:
        return [float(f"{value:.4g}") for value in (distance.maximum, distance.wasserstein)]

    return {
        "steps": list(drift.steps),
        "whole": [numbers(one.whole) for one in drift.distances],
        "tensors": {name: [numbers(one.tensors[name]) for one in drift.distances] for name in drift.last.tensors},
        "loss": drift.loss,
        "loss_against": drift.loss_against,
    }


def _from_json(found: Mapping[str, Any]) -> Drift:
    distances = tuple(
        WeightDistance(Distance(*whole), {name: Distance(*each[i]) for name, each in found["tensors"].items()})
        for i, whole in enumerate(found["whole"])
    )
    return Drift(tuple(found["steps"]), distances, found["loss"], found["loss_against"])
