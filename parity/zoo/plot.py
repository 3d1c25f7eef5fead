"""The zoo's plot: detection by method and precision, and against a bug's signal to noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parity.zoo import summary
from parity.zoo.summary import METHODS, Verdicts

# Edges of the bins of the norm ratio, by factors of the square root of 10.
_EDGES = [10 ** (exponent / 2) for exponent in range(-6, 7)]


def draw(verdicts: Verdicts, precisions: Sequence[str]) -> Figure:
    """Three panels: bugs told from the right port, right ports rejected, and bugs told apart over their norm ratio."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    detected, alarms, power = figure.subplots(1, 3)
    _bars(detected, precisions, lambda name, method: _told_apart(verdicts, name, method))
    _bars(alarms, precisions, lambda name, method: _rejected(verdicts, name, method))
    _power(power, verdicts)
    detected.set_title("bugs told from the right port", fontsize="medium")
    alarms.set_title("right ports rejected", fontsize="medium")
    figure.legend(*detected.get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS))
    return figure


def _told_apart(verdicts: Verdicts, precision: str, method: str) -> float:
    trials = [trial for trial, _ in summary.judged(verdicts, False, precision)]
    return summary.told_apart(verdicts, trials, method).share


def _rejected(verdicts: Verdicts, precision: str, method: str) -> float:
    return summary.rejections(summary.judged(verdicts, True, precision), method).share


def _bars(axes: Axes, precisions: Sequence[str], share: Callable[[str, str], float]) -> None:
    """A group of bars a precision, one a method."""
    width = 0.8 / len(METHODS)
    for i, method in enumerate(METHODS):
        shares = [share(name, method) for name in precisions]
        axes.bar(
            [x + (i - len(METHODS) / 2 + 0.5) * width for x in range(len(precisions))], shares, width, label=method
        )
    axes.set_xticks(range(len(precisions)), precisions, rotation=30, ha="right", fontsize="small")
    axes.set_ylim(0, 1)


def _power(axes: Axes, verdicts: Verdicts) -> None:
    """The share of trials that each method tells apart, over the norm ratio of the bug at the place."""
    places = [(summary.strength(found).norm_ratio, found) for found in summary.by_place(verdicts).values()]
    for method in METHODS:
        points = []
        for low, high in pairwise(_EDGES):
            found = [trial for ratio, trials in places if low <= ratio < high for trial, _ in trials]
            if found:
                points.append((math.sqrt(low * high), summary.told_apart(verdicts, found, method).share))
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=method)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("effect of the bug / rounding noise, norms")
    axes.set_title("bugs told apart over their strength", fontsize="medium")
