"""Plots of the study ``expected_error``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parity.lab.studies.expected_error.study import (
    ALONE,
    MODEL,
    NOTHING_LEFT,
    SUMS,
    TE,
    Results,
    Settings,
    base,
    law,
    mean,
    sizes_of,
    sweep,
)
from parity.lab.studies.te_modules import MODULES

PART_TITLES = {
    "weights": "weights",
    "inputs": "GEMM inputs",
    "storage": "stored results",
    "attention": "attention",
    SUMS: "FP32 sums",
}
# Gradients are rounded in the backward pass alone: they have no part in an output's error.
PARTS_OF_OUTPUTS = tuple(part for part in PART_TITLES if part in ALONE)
_AXES = {"hidden": "hidden size", "seq": "sequence length", "depth": "modules in a row"}
_MARKERS = "osv^D<>pP*X"


def growth(found: Results, settings: Settings) -> Figure:
    """The output's error over each size: TE's as markers, the law as lines; a column a precision."""
    columns = settings.precisions
    figure = Figure(figsize=(2.7 * len(columns), 8.4), layout="constrained")
    axes = figure.subplots(len(_AXES), len(columns), squeeze=False, sharex="row", sharey="col")
    for row, size in zip(axes, _AXES, strict=True):
        for axis, precision in zip(row, columns, strict=True):
            for index, name in enumerate(settings.modules):
                _growth_line(axis, found, settings, name, precision, size, index)
            axis.grid(True, which="major", alpha=0.3)
            axis.set_xlabel(_AXES[size])
    for axis, precision in zip(axes[0], columns, strict=True):
        axis.set_title(precision)
    for row in axes:
        row[0].set_ylabel("relative L2 error of the output")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize="small")
    return figure


def parts(found: Results, settings: Settings) -> Figure:
    """What each rounding alone costs the output, as a share of the sum of squares; a column a precision."""
    columns = settings.precisions
    names = settings.modules
    figure = Figure(figsize=(2.1 * len(columns) + 3, 0.36 * len(names) + 1.8), layout="constrained")
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axis, precision in zip(axes, columns, strict=True):
        shares = np.array([shares_of(found, settings, name, precision) for name in names])
        left = np.zeros(len(names))
        for part, share in zip(PARTS_OF_OUTPUTS, shares.T, strict=True):
            axis.barh(range(len(names)), share, left=left, label=PART_TITLES[part])
            left += share
        axis.set(title=precision, xlim=(0, 1), yticks=range(len(names)), xticks=[0, 0.5, 1])
        axis.set_yticklabels([MODULES[name].title for name in names])
        axis.set_xlabel("share of squared error", fontsize="small")
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    return figure


def shares_of(found: Results, settings: Settings, name: str, precision: str) -> Sequence[float]:
    """The squared error of each of ``PARTS_OF_OUTPUTS`` alone, over their sum."""
    squares = [mean(found, name, base(settings), precision, part) ** 2 for part in PARTS_OF_OUTPUTS]
    sums = squares[PARTS_OF_OUTPUTS.index(SUMS)]
    # A rounding alone is measured on top of FP32 sums.
    own = [
        square if part == SUMS else max(0.0, square - sums)
        for part, square in zip(PARTS_OF_OUTPUTS, squares, strict=True)
    ]
    return [square / sum(own) for square in own]


def explained(found: Results, settings: Settings, name: str, precision: str) -> float:
    """The parts' errors, added as if independent, over the error of all roundings together."""
    squares = [mean(found, name, base(settings), precision, part) ** 2 for part in PARTS_OF_OUTPUTS]
    sums = squares[PARTS_OF_OUTPUTS.index(SUMS)]
    return ((sum(squares) - (len(squares) - 1) * sums) ** 0.5) / mean(found, name, base(settings), precision, MODEL)


def _growth_line(
    axis: Axes, found: Results, settings: Settings, name: str, precision: str, size: str, index: int
) -> None:
    middle = base(settings)
    others = {other for other in _AXES if other != size}
    shapes = sorted(
        (shape for shape in sweep(name, settings) if all(_same(shape, middle, other) for other in others)),
        key=lambda shape: getattr(shape, size),
    )
    values = [getattr(shape, size) for shape in shapes]
    if len(values) < 2:
        return
    color = colormaps["tab20"](index % 20)
    axis.loglog(
        values,
        [mean(found, name, shape, precision, TE) for shape in shapes],
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=4,
        linestyle="",
        color=color,
        label=MODULES[name].title,
    )
    fitted = law(found, settings, name, precision)
    if fitted is not None:
        on_law = [fitted.at(sizes_of(shape)) for shape in shapes]
        drawn = [error if error < NOTHING_LEFT else math.nan for error in on_law]
        axis.loglog(values, drawn, color=color, linewidth=0.8)
    axis.set_xticks(values, labels=map(str, values), fontsize="x-small")
    axis.minorticks_off()


def _same(shape: object, other: object, size: str) -> bool:
    return bool(getattr(shape, size) == getattr(other, size))
