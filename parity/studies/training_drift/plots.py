"""Plots of the study ``training_drift``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parity.studies.training_drift.claims import (
    of_algorithm,
    of_format,
    of_other_start,
    of_rounding,
    of_te,
)
from parity.studies.training_drift.study import Drift, Drifts, low_formats
from parity.studies.training_drift.trajectory import Settings
from parity.studies.training_drift.weight_distance import Distance


@dataclass(frozen=True)
class _Line:
    """What a plot shows: a comparison by its label and color, with its drift by seed."""

    label: str
    color: str
    drift: Callable[[int], Drift]


_MEASURES: tuple[tuple[str, Callable[[Distance], float]], ...] = (
    ("Wasserstein-1 distance", lambda one: one.wasserstein),
    ("largest difference", lambda one: one.maximum),
)


def algorithms(found: Drifts, settings: Settings) -> Figure:
    """A column a format: flash attention and what it is compared with, of all weights over steps."""
    figure = Figure(figsize=(3.6 * len(settings.formats), 6.4), layout="constrained")
    columns = figure.subplots(2, len(settings.formats), squeeze=False, sharex=True, sharey="row").T
    for axes, name in zip(columns, settings.formats, strict=True):
        axes[0].set_title(name)
        _draw(axes, _lines(found, name), settings)
    _label(figure, columns)
    return figure


def te(found: Drifts, settings: Settings, precisions: Sequence[str]) -> Figure:
    """A column a precision: TE and the rounding model, each from plain FP32, of all weights over steps."""
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
    """A column a low format: each parameter after the last step, mean over seeds."""
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
    """Flash attention in a format and what it is compared with."""
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
    """What the lines of an axis mean, below the whole figure and no wider than it."""
    labelled = axis.get_legend_handles_labels()
    figure.legend(*labelled, loc="outside lower center", ncols=min(5, 2 * columns), fontsize="small")
