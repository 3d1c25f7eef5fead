"""Plots of the study ``fp8_recipes``."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parity.studies.fp8_recipes.means import module_mean, tensor_mean
from parity.studies.fp8_recipes.stale_scales import CHANGES, SIDES, Steps
from parity.studies.fp8_recipes.study import DELAYED, STEPS_BEFORE, Results, Settings, steps_run
from parity.studies.fp8_recipes.tensor_sqnr import ROLES
from parity.studies.te_modules import MODULES

FLOOR_DB = -2.0  # results that are worse, or not finite, are drawn here
CHANGE_TITLES = {"up": "grows for good", "down": "shrinks for good", "spike": "grows in one step alone"}


def by_distribution(found: Results, settings: Settings) -> Figure:
    """SQNR of tensors by role, and of modules' outputs, a bar a recipe."""
    panels = [*ROLES, *settings.modules]
    figure = Figure(figsize=(3.4 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    places, width = np.arange(len(settings.distributions)), 0.8 / max(1, len(settings.recipes))
    for axis, panel in zip(axes, panels, strict=True):
        for index, recipe in enumerate(settings.recipes):
            values = [
                tensor_mean(found, distribution, panel, recipe)
                if panel in ROLES
                else module_mean(found, panel, distribution, recipe, "output")
                for distribution in settings.distributions
            ]
            axis.bar(places + (index - (len(settings.recipes) - 1) / 2) * width, values, width, label=recipe)
        title = f"{panel}, quantized" if panel in ROLES else f"output of\n{MODULES[panel].title}"
        axis.set_title(title, fontsize="medium")
        axis.set_xticks(places)
        axis.set_xticklabels(settings.distributions)
        axis.grid(True, axis="y", alpha=0.3)
    axes[0].set_ylabel("SQNR, dB (higher is better)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def around_changes(found: Results, settings: Settings) -> Figure:
    """SQNR over steps around a change by the largest factor, a panel for each change and side."""
    figure = Figure(figsize=(4.6 * len(CHANGES), 3.1 * len(SIDES)), layout="constrained")
    axes = figure.subplots(len(SIDES), len(CHANGES), squeeze=False, sharey=True)
    ticks = sorted({-STEPS_BEFORE // 2, 0, STEPS_BEFORE // 2, *(each for each in settings.histories if each > 9)})
    for row, side in zip(axes, SIDES, strict=True):
        for axis, change in zip(row, CHANGES, strict=True):
            for recipe in settings.recipes:
                for history in settings.histories if recipe == DELAYED else (0,):
                    steps = found[steps_run(settings, recipe, history, side, change, max(settings.factors))]
                    assert isinstance(steps, Steps)
                    _line(axis, steps, f"{recipe}, {history} remembered" if history else recipe)
            axis.set_title(f"{side} {CHANGE_TITLES[change]}")
            axis.axvline(0, color="black", linewidth=0.5)
            axis.grid(True, alpha=0.3)
            axis.set_xscale("symlog", linthresh=STEPS_BEFORE / 2)
            axis.set_xticks(ticks, labels=map(str, ticks))
            axis.minorticks_off()
            axis.set_xlabel("steps from the change on")
        row[0].set_ylabel("SQNR, dB")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _line(axis: Axes, steps: Steps, label: str) -> None:
    first = STEPS_BEFORE // 2
    numbers = range(first - STEPS_BEFORE, len(steps.sqnr_db) - STEPS_BEFORE)
    axis.plot(numbers, [max(FLOOR_DB, sqnr) for sqnr in steps.sqnr_db[first:]], label=label, linewidth=1.2)
