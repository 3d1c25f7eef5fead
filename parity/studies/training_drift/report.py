"""Draws the report of the study ``training_drift``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from parity import te
from parity.report.environment import KERNELS
from parity.report.numbers import plural, ratio, seeds, short
from parity.studies import gpu, tables
from parity.studies.device import name_of
from parity.studies.training_drift import plots
from parity.studies.training_drift.claims import claims as tested
from parity.studies.training_drift.claims import (
    control,
    every_seed,
    factor,
    low_over_flash,
    of_algorithm,
    of_format,
    of_other_start,
    of_rounding,
    of_te,
    separates,
    ulp_ratios,
)
from parity.studies.training_drift.study import Drift, Drifts, Pair, low_formats
from parity.studies.training_drift.trajectory import Kind, Run, Settings, initial, rounds_alike
from parity.te import Kernels

_INTRODUCTION = """\
A rounding that is different in one pass is different in every step of a training, and each step starts from what the
last one left. Golden et al. ("Is Flash Attention Stable?", arXiv 2405.02803) ask not whether the weights differ in the
end, for they must, but how far, and next to what. This study does the same on a small {model} ({layers} layers, hidden
{hidden}, {heads} heads, {parameters} parameters) that reads {steps} batches of {batch} x {seq} bytes. Each training
starts from the same weights and reads the same batches, with one thing changed:

- **flash, as kernels round**: attention by tiles of {tile} keys, with its running sums in FP32; compared with baseline
  attention in the same format;
- **flash, every step rounded**: each intermediate result of flash attention rounded to the format; compared with the
  same;
- **low precision**: every GEMM operand and stored activation in the format, weights and gradients in its dtype;
  compared with FP32;
- **one FP32 ulp**: each initial weight moved to the next FP32 number, up or down; compared with the same format from
  the weights as they were. It says what training makes of the smallest difference that there is;
- **other start**: another random initialisation, in FP32; compared with FP32;
- **TE**: TransformerEngine's modules, under a precision's recipe; compared with FP32.

*Largest difference* is of a weight from its counterpart. *Wasserstein-1* is the mean distance by which the weights of
one model must move to be, as a set, those of the other; two weights that change places do not count. Both are of the
FP32 master weights. Seeds {seeds}, of weights and batches; {every} for low precision, flash as kernels round, one ulp
and other start, where it is a matter of ratios."""

_METHOD = """\
- **Attention**: `parity/studies/stepwise/attention.py` forward and `gradient.py` backward, both algorithms in
  both directions; what each rounds is said in [flash_stability.md](flash_stability.md). In FP32 flash differs from
  baseline in the order of sums alone.
- **Low precision**: the plain model under parity's rounding model (`parity/rounding/`), emulated on any device. TF32
  rounds GEMM operands; BF16 and FP16 also what is stored. AdamW holds FP32 masters, as in Megatron-LM; FP16 has a loss
  scale of {loss_scale:g}.
- **TE**: each of its runs is also compared with the plain model under the rounding model of its precision. TE computes
  FP32 GEMMs in TF32. A recipe that scales by the past makes its warm-up passes before training.
- **Wasserstein-1** is the mean distance of the sorted weights, which a test holds equal to
  `scipy.stats.wasserstein_distance`.
- **What it cannot say**: {steps} steps of a small model. The source trains a large model for longer, on GPUs."""


def write(found: Drifts, missing: Mapping[str, str], settings: Settings, kernels: Kernels, folder: Path) -> Path:
    """Write ``training_drift.md`` and its plots into the folder; returns the report's path.

    Args:
        found: every pair's drift.
        missing: precisions that TE cannot compute in here, each with the reason.
        settings: of the study.
        kernels: that TE ran on.
        folder: exists.
    """
    precisions = [name for name in settings.te_precisions if name not in missing]
    plots.algorithms(found, settings).savefig(folder / "training_drift.png", dpi=90)
    if precisions:
        plots.te(found, settings, precisions).savefig(folder / "training_drift_te.png", dpi=90)
    if low_formats(settings):
        plots.tensors(found, settings).savefig(folder / "training_drift_tensors.png", dpi=90)
    path = folder / "training_drift.md"
    sections = _sections(found, missing, settings, kernels, precisions)
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return path


def _sections(
    found: Drifts, missing: Mapping[str, str], settings: Settings, kernels: Kernels, precisions: Sequence[str]
) -> Iterator[str]:
    yield "# What deviation does to training"
    if low_formats(settings):
        yield _short_answer(found, settings)
    shown = vars(settings) | {"seeds": seeds(tuple(range(settings.seeds))), "parameters": _parameters(settings)}
    shown["every"] = seeds(tuple(every_seed(settings)))
    yield _INTRODUCTION.format(**shown)
    yield (
        f"Trained on {name_of(kernels)}, torch {torch.__version__}. Formats of "
        "the plain model are emulated on any device; TransformerEngine "
        f"{te.version()} is {KERNELS[kernels.backend]}. {gpu.told(precisions, kernels)}"
    )
    yield "## Claims"
    yield "Figures are after the last step."
    yield tables.claims(tested(found, settings, precisions))
    yield "## Flash attention and low precision"
    yield "![Drift of all weights over steps, by format](training_drift.png)"
    yield "Solid: seed 0; dashed: the others. After the last step:"
    yield _algorithms(found, settings)
    if low_formats(settings):
        yield (
            "Low precision's Wasserstein-1 distance over that of flash attention (as kernels round) in the same "
            "format, or in another, and over that of one ulp: the geometric mean over seeds "
            f"{seeds(tuple(every_seed(settings)))} and its 95 % interval."
        )
        yield _across_formats(found, settings)
        yield "## Tensor by tensor"
        yield "After the last step, mean over seeds."
        yield "![Wasserstein-1 distance of each parameter](training_drift_tensors.png)"
        yield _tensors(found, settings)
    if precisions:
        yield "## TransformerEngine"
        yield "![Drift of TE's models over steps, by precision](training_drift_te.png)"
        yield _te(found, settings, precisions)
    for name, reason in missing.items():
        yield f"- `{name}` did not run: {reason}"
    yield "## How it was done"
    yield _METHOD.format(**shown)
    yield (
        "The record, `training_drift.jsonl`, holds both measures for each parameter at each look. Made by "
        "`parity study training_drift`."
    )


def _parameters(settings: Settings) -> int:
    return sum(weight.numel() for weight in initial(Run("baseline", "fp32", 0), settings).values())


def _short_answer(found: Drifts, settings: Settings) -> str:
    ratios = control(found, settings)
    answer = "tells" if separates(ratios) else "cannot tell"
    factors = [
        f"{factor([low_over_flash(found, name, name, seed) for seed in every_seed(settings)])} in {name.upper()}"
        for name in low_formats(settings)
    ]
    losses = [abs(drift.loss - drift.loss_against) for pair, drift in found.items() if pair.run.kind != "other start"]
    return (
        f"**This experiment {answer} flash attention from any other change of rounding**: after {settings.steps} steps "
        f"it has moved the weights {factor(ratios)} times as far as one unit in the last place of the initial FP32 "
        f"weights does without it (Wasserstein-1, geometric mean of {plural(len(ratios), 'seed')} and its 95 % "
        f"interval). Low precision has moved them further than flash attention by a factor of {', of '.join(factors)}. "
        f"No training's last loss is further than {short(max(losses))} nats a byte from the one that it is compared "
        "with."
    )


def _algorithms(found: Drifts, settings: Settings) -> str:
    rows = []
    for seed in range(settings.seeds):
        rows.append(_row("other start", "fp32", seed, of_other_start(found, seed), None))
        for name in settings.formats:
            low = None if name == "fp32" else of_format(found, name, seed)
            if low is not None:
                rows.append(_row("low precision", name, seed, low, low))
                everywhere = of_algorithm(found, "flash everywhere", name, seed)
                rows.append(_row("flash, every step rounded", name, seed, everywhere, low))
            rows.append(_row("flash, as kernels round", name, seed, of_algorithm(found, "flash", name, seed), low))
            rows.append(_row("one FP32 ulp", name, seed, of_algorithm(found, "nudged", name, seed), low))
    return tables.texts(rows, ["training", "format", "seed", *_MEASURED, "low precision's over it", *_LOSSES])


def _across_formats(found: Drifts, settings: Settings) -> str:
    def cell(low: str, flash: str) -> str:
        return factor([low_over_flash(found, low, flash, seed) for seed in every_seed(settings)])

    names = low_formats(settings)
    over_ulp = {kind: ulp_ratios(found, settings, kind) for kind in _OVER_ULP}
    rows = [
        [low, *(cell(low, flash) for flash in names), *(factor(over_ulp[kind][low]) for kind in over_ulp)]
        for low in names
    ]
    headers = ["low precision", *(f"over flash in {name}" for name in names), *_OVER_ULP.values()]
    return tables.texts(rows, headers)


_OVER_ULP: dict[Kind, str] = {"baseline": "over one ulp", "flash": "flash over one ulp, both in this format"}
_MEASURED = ["largest difference", "Wasserstein-1"]
_LOSSES = ["last loss", "last loss of the other"]


def _row(training: str, name: str, seed: int, drift: Drift, low: Drift | None) -> list[str]:
    whole = drift.last.whole
    factor = "" if low is None else ratio(low.last.whole.wasserstein, whole.wasserstein)
    return [training, name, str(seed), short(whole.maximum), short(whole.wasserstein), factor, *_losses(drift)]


def _losses(drift: Drift) -> list[str]:
    return [f"{drift.loss:.4f}", f"{drift.loss_against:.4f}"]


def _tensors(found: Drifts, settings: Settings) -> str:
    def mean(drifts: Sequence[Drift], name: str) -> list[str]:
        distances = [drift.last.tensors[name] for drift in drifts]
        return [
            short(sum(one.maximum for one in distances) / len(distances)),
            short(sum(one.wasserstein for one in distances) / len(distances)),
        ]

    every = range(settings.seeds)
    rows = []
    for name in of_other_start(found, 0).last.tensors:
        cells = mean([of_other_start(found, seed) for seed in every], name)
        for number_format in low_formats(settings):
            cells += mean([of_format(found, number_format, seed) for seed in every], name)
            cells += mean([of_algorithm(found, "flash", number_format, seed) for seed in every], name)
        rows.append([f"`{name}`", *cells])
    headers = ["other start"] + [
        f"{number_format}, {what}" for number_format in low_formats(settings) for what in ("low precision", "flash")
    ]
    measured = [f"{header}, {measure}" for header in headers for measure in ("largest", "W1")]
    return tables.texts(rows, ["parameter", *measured])


def _te(found: Drifts, settings: Settings, precisions: Sequence[str]) -> str:
    rows = []
    for name in precisions:
        for seed in range(settings.seeds):
            own, rounded = of_te(found, name, seed), of_rounding(found, name, seed)
            between = found[Pair(Run("te", name, seed), Run("rounded", rounds_alike(name), seed))]
            cells = [
                short(value)
                for drift in (own, rounded, between)
                for value in (drift.last.whole.maximum, drift.last.whole.wasserstein)
            ]
            factor = ratio(own.last.whole.wasserstein, rounded.last.whole.wasserstein)
            rows.append([name, str(seed), *cells, factor, *_losses(own)])
    headers = [
        f"{what}, {measure}"
        for what in ("TE from FP32", "rounding model from FP32", "TE from rounding model")
        for measure in ("largest", "W1")
    ]
    return tables.texts(rows, ["precision", "seed", *headers, "TE's W1 over rounding's", *_LOSSES])
