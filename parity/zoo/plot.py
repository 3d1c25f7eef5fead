"""The zoo's plot: detection by method and precision, and against a bug's signal to noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parity.zoo import summary
from parity.zoo.summary import METHODS, Verdicts

# Edges of the bins of the norm ratio, by factors of the square root of 10.
_EDGES = [10 ** (exponent / 2) for exponent in range(-6, 7)]


def draw(verdicts: Verdicts, precisions: Sequence[str]) -> Figure:
    """Three panels: bugs detected, right ports rejected, and bugs detected over their norm ratio."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    detected, alarms, power = figure.subplots(1, 3)
    _bars(detected, verdicts, precisions, clean=False, title="planted bugs detected")
    _bars(alarms, verdicts, precisions, clean=True, title="right ports rejected")
    _power(power, verdicts)
    detected.legend(fontsize="x-small")
    return figure


def _bars(axes: Axes, verdicts: Verdicts, precisions: Sequence[str], clean: bool, title: str) -> None:
    width = 0.8 / len(METHODS)
    for i, method in enumerate(METHODS):
        shares = [summary.rejections(summary.judged(verdicts, clean, name), method).share for name in precisions]
        axes.bar(
            [x + (i - len(METHODS) / 2 + 0.5) * width for x in range(len(precisions))], shares, width, label=method
        )
    axes.set_xticks(range(len(precisions)), precisions, rotation=30, ha="right", fontsize="small")
    axes.set_ylim(0, 1)
    axes.set_title(title, fontsize="medium")


def _power(axes: Axes, verdicts: Verdicts) -> None:
    """The share of trials that each method detects, over the norm ratio of the bug at the place."""
    places = [(summary.strength(found).norm_ratio, found) for found in summary.by_place(verdicts).values()]
    for method in METHODS:
        points = []
        for low, high in pairwise(_EDGES):
            found = [trial for ratio, trials in places if low <= ratio < high for trial in trials]
            if found:
                points.append((math.sqrt(low * high), summary.rejections(found, method).share))
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=method)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("effect of the bug / rounding noise, norms")
    axes.set_title("bugs detected over their strength", fontsize="medium")
