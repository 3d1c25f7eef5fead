"""Plots of the study ``flash_stability``."""

from __future__ import annotations

import dataclasses
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parity.lab.studies.flash_stability.claims import base_rows, of_length
from parity.lab.studies.flash_stability.deviation import Deviation, Results, over_seeds
from parity.lab.studies.flash_stability.sweeps import AS_KERNELS, EVERYWHERE, Run, Settings, plain_run, untiled
from parity.lab.studies.stepwise import FORMATS

_COLORS = {"flash": "tab:orange", "baseline": "tab:blue"}
_STYLES: dict[str, dict[str, Any]] = {
    EVERYWHERE: dict(linestyle="-", marker="o", label="every step rounded"),
    AS_KERNELS: dict(linestyle="--", marker="s", label="as kernels round", markerfacecolor="none"),
}


def draw(found: Results, settings: Settings) -> Figure:
    """One row a distribution; formats, keys, keys of a tile, and rescalings, each against relative L2."""
    names = settings.distributions
    figure = Figure(figsize=(15, 3.6 * len(names) + 0.6), layout="constrained")
    axes = figure.subplots(len(names), 4, squeeze=False)
    for row, name in zip(axes, names, strict=True):
        base = plain_run(settings, name)
        _formats(row[0], found, settings, base)
        _lengths(row[1], found, settings, base)
        _tiles(row[2], found, settings, base)
        _rescalings(row[3], found, settings, base)
        row[0].set_ylabel(f"{name} inputs\nrelative L2 deviation")
        for axis in row:
            axis.grid(True, which="major", alpha=0.3)
        row[3].legend(fontsize="small")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _styled(algorithm: str, rounded: str) -> dict[str, Any]:
    style = _STYLES[rounded]
    return {**style, "color": _COLORS[algorithm], "label": f"{algorithm}, {style['label']}"}


def _both(base: Run) -> list[Run]:
    pair = (untiled(base), base)
    return [dataclasses.replace(one, rounded=rounded) for one in pair for rounded in _STYLES]


def _formats(axis: Axes, found: Results, settings: Settings, base: Run) -> None:
    names = sorted(settings.formats, key=lambda name: -FORMATS[name].mantissa_bits)
    for entry in _both(base):
        errors = [_at(found, settings, dataclasses.replace(entry, format=name)).relative_l2 for name in names]
        axis.semilogy(names, [error or float("nan") for error in errors], **_styled(entry.algorithm, entry.rounded))
    axis.set(title="number formats", xlabel="from many mantissa bits to few")


def _lengths(axis: Axes, found: Results, settings: Settings, base: Run) -> None:
    for entry in _both(base):
        errors = [_at(found, settings, of_length(entry, settings, keys)).relative_l2 for keys in settings.lengths]
        axis.loglog(settings.lengths, errors, **_styled(entry.algorithm, entry.rounded))
    axis.set(title=f"{settings.format.upper()}, tiles of {settings.tile} keys", xlabel="keys")


def _tiles(axis: Axes, found: Results, settings: Settings, base: Run) -> None:
    for rounded in _STYLES:
        entry = dataclasses.replace(base, rounded=rounded, rows=base_rows(settings))
        errors = [
            _at(found, settings, dataclasses.replace(entry, columns=width)).relative_l2 for width in settings.tiles
        ]
        axis.loglog(settings.tiles, errors, **_styled("flash", rounded))
    axis.axhline(_at(found, settings, untiled(base)).relative_l2, color=_COLORS["baseline"], linewidth=1)
    axis.set(title=f"{settings.format.upper()}, {settings.length} keys; line: baseline", xlabel="keys of a tile")


def _rescalings(axis: Axes, found: Results, settings: Settings, base: Run) -> None:
    for known, label, marker in ((False, "as the maximum rises", "o"), (True, "maximum known beforehand", "x")):
        of = [
            _at(found, settings, dataclasses.replace(base, rises=rises, maximum_known=known))
            for rises in settings.rises
        ]
        color = "tab:green" if known else _COLORS["flash"]
        axis.plot(settings.rises, [one.relative_l2 for one in of], marker=marker, label=label, color=color)
    axis.set_ylim(bottom=0)
    axis.set(title="same keys, tiles in another order", xlabel="rises of the maximum after the first tile")


def _at(found: Results, settings: Settings, entry: Run) -> Deviation:
    return over_seeds(found, entry, settings)
