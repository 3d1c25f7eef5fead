"""The trainings of the study ``training_drift``: one small model, one thing changed at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parity import weights
from parity.inputs import Rng
from parity.precision import PRECISIONS
from parity.studies.gpu import gpu_with
from parity.studies.stepwise.core import Arithmetic, StepwiseCore
from parity.studies.training.language_model import (
    ARCHITECTURES,
    LanguageModel,
    Size,
    initial_weights,
    load,
    load_candidate,
)
from parity.studies.training.text import VOCABULARY, batches
from parity.studies.training.train import Pass, Schedule, plain_pass, rounded_pass, te_pass, train
from parity.te import Kernels

Kind = Literal["baseline", "flash", "flash everywhere", "nudged", "other start", "rounded", "te"]
# The precision whose rounding model a format of plain training has; FP32 rounds nothing.
_ROUNDED_AS = {"tf32": "fp32", "bf16": "bf16", "fp16": "fp16"}
FORMATS = ("fp32", *_ROUNDED_AS)
# Seeds of the weights of "other start" begin here.
_OTHER_START = 1000


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        model: name of ``language_model.ARCHITECTURES``.
        formats: names of ``FORMATS`` in which baseline and flash attention train; FP32 must be among them.
        te_precisions: names of ``PRECISIONS`` in which TE trains.
        steps: of training on a CPU.
        gpu_steps: of training on a GPU.
        every: steps between two looks at the weights.
        seeds: of initial weights and batches: how many, from 0.
        control_seeds: ditto for low precision, flash attention as kernels round, one ulp and another start alone, whose
            ratios need more seeds to tell.
        batch: sequences a step.
        seq: bytes a sequence.
        hidden, layers, heads, groups: sizes of the model; ``groups`` of a llama.
        tile: queries and keys of flash attention's tiles.
        learning_rate: of AdamW.
        warmup: steps until the learning rate is reached.
        loss_scale: of FP16.
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
            everywhere``); baseline from weights moved by a unit in the last place of FP32 (``nudged``), or from others
            altogether (``other start``); the plain model under a precision's rounding model (``rounded``); or TE.
        precision: of ``FORMATS``; of ``PRECISIONS`` for ``rounded`` and ``te``.
        seed: of weights and batches.
    """

    kind: Kind
    precision: str
    seed: int


@dataclass(frozen=True)
class Trajectory:
    """What a training leaves: FP32 masters by the plain model's names, by step, and the loss of each step."""

    weights: Mapping[int, Mapping[str, Tensor]]
    losses: Sequence[float]


def rounds_alike(precision: str) -> str:
    """The first precision with the same rounding model: recipes that differ in when they scale share one."""
    return next(name for name, known in PRECISIONS.items() if known.rounding == PRECISIONS[precision].rounding)


# The masters of a step, in the order of the model's parameters, by the names of the plain model's.
_Named = Callable[[Sequence[Tensor]], dict[str, Tensor]]


@functools.lru_cache(maxsize=16)
def trajectory(entry: Run, settings: Settings, kernels: Kernels) -> Trajectory:
    """Train once; the last few are kept, since a training is part of several pairs."""
    torch.manual_seed(entry.seed)  # of stochastic rounding
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
        # A recipe that scales by the past gets one before it counts, as in every comparison of parity's.
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
    """A run's weights at step 0, exact in BF16."""
    seed = entry.seed + (_OTHER_START if entry.kind == "other start" else 0)
    return initial_weights(ARCHITECTURES[settings.model], size_of(settings), seed, torch.bfloat16)


def size_of(settings: Settings) -> Size:
    """Of the study's model."""
    ffn = settings.hidden * ARCHITECTURES[settings.model].widening
    return Size(VOCABULARY, settings.seq, settings.hidden, settings.layers, settings.heads, settings.groups, ffn)


def _model(entry: Run, settings: Settings, kernels: Kernels) -> tuple[LanguageModel, _Named, torch.dtype]:
    """The model at step 0, the names of its weights, and the dtype that weights and gradients are rounded to."""
    architecture, size, start = ARCHITECTURES[settings.model], size_of(settings), initial(entry, settings)
    if entry.kind == "te":
        dtype = PRECISIONS[entry.precision].dtype
        model = architecture.candidate(size, kernels).to(dtype)
        load_candidate(model, architecture, size, start)
        te_names = [name for name, _ in model.named_parameters()]
        shapes = {name: tuple(tensor.shape) for name, tensor in start.items()}

        def named_by_map(masters: Sequence[Tensor]) -> dict[str, Tensor]:
            te_weights = dict(zip(te_names, masters, strict=True))
            return weights.to_reference(architecture.weight_map(size), te_weights, shapes)

        return model, named_by_map, dtype
    model = architecture.reference(size).to(kernels.device)
    load(model, start)
    if entry.kind != "rounded":
        for index in range(size.layers):
            model.set_submodule(f"layers.{index}.attention.core", StepwiseCore(_arithmetic(entry, settings)))
    names = [name for name, _ in model.named_parameters()]
    # Plain FP32 and TF32 train in FP32; TE's FP32 does as well.
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
    """The model's weights, each moved to the next FP32 number above or below."""
    rng = Rng(seed, "nudge")
    masters = []
    for parameter in model.parameters():
        up = rng.integers(*parameter.shape, high=2).bool().to(parameter.device)
        target = torch.where(up, torch.inf, -torch.inf)
        masters.append(torch.nextafter(parameter.detach().float(), target))
    return masters
