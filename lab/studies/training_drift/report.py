"""Draw the report of the study ``training_drift``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.studies import reporting
from lab.studies.reporting import CANNOT_TELL, Claim, all_of, ratio_interval, ratios_between, verdict
from lab.studies.settings import name_of, told_gpu
from lab.studies.training_drift.study import (
    Distance,
    Drift,
    Drifts,
    Kind,
    Pair,
    Run,
    Settings,
    initial,
    low_formats,
    rounds_alike,
)
from parity import te
from parity.report.environment import KERNELS
from parity.report.numbers import plural, ratio, seeds, short
from parity.te import Kernels

# Plots of the study ``training_drift``.


@dataclass(frozen=True)
class _Line:
    """A line of a plot: label, color, and a function that returns the drift for a seed."""

    label: str
    color: str
    drift: Callable[[int], Drift]


_MEASURES: tuple[tuple[str, Callable[[Distance], float]], ...] = (
    ("Wasserstein-1 distance", lambda one: one.wasserstein),
    ("largest difference", lambda one: one.maximum),
)


def algorithms(found: Drifts, settings: Settings) -> Figure:
    """Draw the drift of all weights over steps, with a column per format: flash attention and its comparisons."""
    figure = Figure(figsize=(3.6 * len(settings.formats), 6.4), layout="constrained")
    columns = figure.subplots(2, len(settings.formats), squeeze=False, sharex=True, sharey="row").T
    for axes, name in zip(columns, settings.formats, strict=True):
        axes[0].set_title(name)
        _draw(axes, _lines(found, name), settings)
    _label(figure, columns)
    return figure


def draw_te(found: Drifts, settings: Settings, precisions: Sequence[str]) -> Figure:
    """Draw the drift of TE and of the rounding model from plain FP32 over steps, with a column per precision."""
    figure = Figure(figsize=(3.0 * len(precisions), 6.4), layout="constrained")
    columns = figure.subplots(2, len(precisions), squeeze=False, sharex=True, sharey="row").T
    for axes, name in zip(columns, precisions, strict=True):
        lines = [
            _Line("other start", "black", partial(of_other_start, found)),
            _Line("plain under the rounding model", "tab:blue", partial(of_rounding, found, name)),
            _Line("TE", "tab:orange", partial(of_te, found, name)),
        ]
        axes[0].set_title(name)
        _draw(axes, lines, settings)
    _label(figure, columns)
    return figure


def tensors(found: Drifts, settings: Settings) -> Figure:
    """Draw each parameter's mean drift after the last step, with a column per low format."""
    names = low_formats(settings)
    parameters = list(of_other_start(found, 0).last.tensors)
    figure = Figure(figsize=(3.2 * len(names) + 2.4, 0.22 * len(parameters) + 1.4), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axis, name in zip(axes, names, strict=True):
        for line in _lines(found, name):
            drifts = [line.drift(seed).last for seed in range(settings.seeds)]
            means = [sum(one.tensors[each].wasserstein for one in drifts) / len(drifts) for each in parameters]
            axis.semilogx(means, parameters, "o", color=line.color, label=line.label, markersize=4)
        axis.set(title=name, xlabel="Wasserstein-1 distance")
        axis.grid(True, alpha=0.3)
    axes[0].invert_yaxis()
    _legend(figure, axes[0], len(names))
    return figure


def _lines(found: Drifts, number_format: str) -> list[_Line]:
    """Return the lines of one format: flash attention and its comparisons."""
    low = [
        _Line("low precision, from FP32", "tab:blue", partial(of_format, found, number_format)),
        _Line("flash, every step rounded", "tab:red", partial(of_algorithm, found, "flash everywhere", number_format)),
    ]
    return [
        _Line("other start", "black", partial(of_other_start, found)),
        *(low if number_format != "fp32" else []),
        _Line("flash, as kernels round", "tab:orange", partial(of_algorithm, found, "flash", number_format)),
        _Line("one FP32 ulp", "tab:gray", partial(of_algorithm, found, "nudged", number_format)),
    ]


def _draw(axes: Sequence[Axes], lines: Sequence[_Line], settings: Settings) -> None:
    for axis, (_, measure) in zip(axes, _MEASURES, strict=True):
        for line in lines:
            for seed in range(settings.seeds):
                drift = line.drift(seed)
                values = [measure(distance.whole) for distance in drift.distances]
                label, style = (line.label, "-") if seed == 0 else (None, "--")
                axis.semilogy(drift.steps, values, color=line.color, label=label, linestyle=style, linewidth=1.2)
        axis.grid(True, alpha=0.3)


def _label(figure: Figure, columns: Sequence[Sequence[Axes]]) -> None:
    for axis, (name, _) in zip(columns[0], _MEASURES, strict=True):
        axis.set_ylabel(name)
    for axes in columns:
        axes[-1].set_xlabel("step")
    fullest = max((axes[0] for axes in columns), key=lambda axis: len(axis.get_legend_handles_labels()[0]))
    _legend(figure, fullest, len(columns))


def _legend(figure: Figure, axis: Axes, columns: int) -> None:
    """Draw the legend of an axis below the whole figure, no wider than the figure."""
    labelled = axis.get_legend_handles_labels()
    figure.legend(*labelled, loc="outside lower center", ncols=min(5, 2 * columns), fontsize="small")


# Golden et al.'s claims about the effect of flash attention on training, tested with the study's results.


# Two drifts count as equal if neither is this many times the other, because two seeds differ by as much.
OF_A_SIZE = 2.0
_SOURCE = "arXiv 2405.02803"
_SOURCE_LOW, _SOURCE_HIGH = 2.0, 5.0


def claims(found: Drifts, settings: Settings, precisions: Sequence[str]) -> list[Claim]:
    """Return all claims, each with the result of its test.

    Args:
        found: the drifts of all pairs.
        settings: the study's settings.
        precisions: the precisions in which TE trained.
    """
    tested = []
    if low_formats(settings):
        tested = [test(found, settings) for test in (_below_low_precision, _over_other_start, _below_other_start)]
    if precisions:
        tested.append(_port_is_faithful(found, settings, precisions))
    return tested


def of_algorithm(found: Drifts, kind: Kind, number_format: str, seed: int) -> Drift:
    """Return a run's drift from baseline attention in the same format."""
    return found[Pair(Run(kind, number_format, seed), Run("baseline", number_format, seed))]


def of_format(found: Drifts, number_format: str, seed: int) -> Drift:
    """Return the drift of baseline attention in a format from the same in FP32."""
    return found[Pair(Run("baseline", number_format, seed), Run("baseline", "fp32", seed))]


def of_other_start(found: Drifts, seed: int) -> Drift:
    """Return the drift from other starting weights, in FP32."""
    return found[Pair(Run("other start", "fp32", seed), Run("baseline", "fp32", seed))]


def of_te(found: Drifts, precision: str, seed: int) -> Drift:
    """Return TE's drift from plain FP32."""
    return found[Pair(Run("te", precision, seed), Run("baseline", "fp32", seed))]


def of_rounding(found: Drifts, precision: str, seed: int) -> Drift:
    """Return the drift from plain FP32 of the plain model under a precision's rounding model."""
    return found[Pair(Run("rounded", rounds_alike(precision), seed), Run("baseline", "fp32", seed))]


def low_over_flash(found: Drifts, low: str, flash: str, seed: int) -> float:
    """Return low precision's last Wasserstein-1 drift over flash attention's, in the same or another format."""
    return _moved(of_format(found, low, seed)) / _moved(of_algorithm(found, "flash", flash, seed))


def every_seed(settings: Settings) -> range:
    """Return the seeds that low precision, flash attention, one ulp and another start run with."""
    return range(max(settings.seeds, settings.control_seeds))


def ulp_ratios(found: Drifts, settings: Settings, kind: Kind) -> dict[str, list[float]]:
    """Return flash attention's last drift (for ``baseline``, low precision's) over one ulp's, by format and seed."""
    ratios = {}
    for name in low_formats(settings):
        ratios[name] = [
            _moved(of_format(found, name, seed) if kind == "baseline" else of_algorithm(found, kind, name, seed))
            / _moved(of_algorithm(found, "nudged", name, seed))
            for seed in every_seed(settings)
        ]
    return ratios


def control(found: Drifts, settings: Settings) -> list[float]:
    """Return flash attention's drift over that of one ulp without it, averaged geometrically over formats, by seed."""
    by_format = ulp_ratios(found, settings, "flash").values()
    return [statistics.geometric_mean(of_seed) for of_seed in zip(*by_format, strict=True)]


def separates(ratios: Sequence[float]) -> bool:
    """Return whether flash attention differs from a change of one ulp: the interval of their ratio excludes 1."""
    _, low, high = ratio_interval(ratios)
    return not low <= 1.0 <= high


def factor(ratios: Sequence[float]) -> str:
    """Format the geometric mean over seeds and its 95 % interval, as in ``1.5 (1.2 to 1.9)``."""
    middle, low, high = ratio_interval(ratios)
    return short(middle) if len(ratios) < 2 else f"{short(middle)} ({short(low)} to {short(high)})"


def _below_low_precision(found: Drifts, settings: Settings) -> Claim:
    over_flash = {
        name: [low_over_flash(found, name, name, seed) for seed in every_seed(settings)]
        for name in low_formats(settings)
    }
    told = separates(control(found, settings))
    return Claim(
        _SOURCE,
        "flash attention's drift (from baseline attention) is 2 to 5 times below low-precision training's (from FP32)",
        f"Wasserstein-1, low precision over flash: {_named(over_flash)}; over one FP32 ulp without flash: "
        f"{_named(ulp_ratios(found, settings, 'baseline'))}.",
        all_of([ratios_between(of_seeds, _SOURCE_LOW, _SOURCE_HIGH) for of_seeds in over_flash.values()])
        if told
        else CANNOT_TELL,
        f"Flash's drift is {factor(control(found, settings))} times what one FP32 ulp in the initial weights does in "
        "the same format. Training passes on any difference of rounding, so where this is about 1, the figure on the "
        "left is no property of flash attention.",
    )


def _moved(drift: Drift) -> float:
    return drift.last.whole.wasserstein


def _named(factors: Mapping[str, Sequence[float]]) -> str:
    return "; ".join(f"{name} {factor(of_seeds)}" for name, of_seeds in factors.items())


def _over_other_start(found: Drifts, settings: Settings) -> Claim:
    factors = {
        name: [
            _moved(of_format(found, name, seed)) / _moved(of_other_start(found, seed)) for seed in every_seed(settings)
        ]
        for name in low_formats(settings)
    }
    below = [1 / one for of_seeds in factors.values() for one in of_seeds]
    return Claim(
        _SOURCE,
        "low precision's drift is above that of another random initialisation",
        f"Wasserstein-1, low precision over other start: {_named(factors)}; {short(min(below))} to {short(max(below))} "
        "times below it.",
        all_of([ratios_between(of_seeds, 1.0, math.inf) for of_seeds in factors.values()]),
        "Ours is a small model, trained briefly with FP32 master weights.",
    )


def _below_other_start(found: Drifts, settings: Settings) -> Claim:
    factors = {
        name: [
            _moved(of_other_start(found, seed)) / _moved(of_algorithm(found, "flash", name, seed))
            for seed in every_seed(settings)
        ]
        for name in low_formats(settings)
    }
    return Claim(
        "this project",
        "flash attention's drift is below that of another random initialisation",
        f"Wasserstein-1, other start over flash: {_named(factors)}.",
        all_of([ratios_between(of_seeds, 1.0, math.inf) for of_seeds in factors.values()]),
        "Wasserstein-1 compares the weights as sets. Two initialisations are two draws from one distribution, so as "
        "sets they are close from the start, although individual weights differ, as the largest difference shows.",
    )


def _port_is_faithful(found: Drifts, settings: Settings, precisions: Sequence[str]) -> Claim:
    factors = {
        name: [
            _moved(of_te(found, name, seed)) / _moved(of_rounding(found, name, seed)) for seed in range(settings.seeds)
        ]
        for name in precisions
    }
    return Claim(
        "this project",
        "TE's modules drift from plain FP32 as far as their precision's roundings make plain PyTorch drift, within a "
        f"factor of {OF_A_SIZE:g}",
        "Wasserstein-1, TE over the plain model under the rounding model, a figure a seed: "
        + "; ".join(f"{name} {', '.join(map(short, of_seeds))}" for name, of_seeds in factors.items()),
        verdict([1 / OF_A_SIZE <= one <= OF_A_SIZE for of_seeds in factors.values() for one in of_seeds]),
        "The rounding model rounds what TE's kernels do, elsewhere by a unit in the last place. Two such trainings are "
        "about as far from each other as from FP32.",
    )


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
- **Attention**: `lab/studies/stepwise.py`, both algorithms in both directions; what each rounds is said in
  [flash_stability.md](flash_stability.md). In FP32 flash differs from baseline in the order of sums alone.
- **Low precision**: the plain model under parity's rounding model (`parity/rounding/`), emulated on any device. TF32
  rounds GEMM operands; BF16 and FP16 also what is stored. AdamW holds FP32 masters, as in Megatron-LM; FP16 has a loss
  scale of {loss_scale:g}.
- **TE**: each of its runs is also compared with the plain model under the rounding model of its precision. TE computes
  FP32 GEMMs in TF32. Delayed scaling, which needs a history of amaxes, makes its warm-up passes before training.
- **Wasserstein-1** is the mean distance of the sorted weights, which a test holds equal to
  `scipy.stats.wasserstein_distance`.
- **What it cannot say**: {steps} steps of a small model. The source trains a large model for longer, on GPUs."""


def write(found: Drifts, missing: Mapping[str, str], settings: Settings, kernels: Kernels, folder: Path) -> Path:
    """Write ``training_drift.md`` and its plots into the folder, and return the report's path.

    Args:
        found: the drifts of all pairs.
        missing: precisions that TE cannot run here, each with the reason.
        settings: the study's settings.
        kernels: the kernels that TE ran on.
        folder: an existing folder.
    """
    precisions = [name for name in settings.te_precisions if name not in missing]
    algorithms(found, settings).savefig(folder / "training_drift.png", dpi=90)
    if precisions:
        draw_te(found, settings, precisions).savefig(folder / "training_drift_te.png", dpi=90)
    if low_formats(settings):
        tensors(found, settings).savefig(folder / "training_drift_tensors.png", dpi=90)
    return reporting.written(folder / "training_drift.md", _sections(found, missing, settings, kernels, precisions))


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
        f"{te.version()} is {KERNELS[kernels.backend]}. {told_gpu(precisions, kernels)}"
    )
    yield "## Claims"
    yield "Figures are after the last step."
    yield reporting.claims(claims(found, settings, precisions))
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
    yield "The record, `training_drift.jsonl`, holds both measures for each parameter at each look."


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
    return reporting.texts(rows, ["training", "format", "seed", *_MEASURED, "low precision's over it", *_LOSSES])


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
    return reporting.texts(rows, headers)


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
    return reporting.texts(rows, ["parameter", *measured])


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
    return reporting.texts(rows, ["precision", "seed", *headers, "TE's W1 over rounding's", *_LOSSES])
