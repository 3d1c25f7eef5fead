"""The plot of speed against error: what each precision buys and costs, a panel a workload."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parity.throughput.record import EMULATED, Record
from parity.throughput.row import Row

_COLUMNS = 3
_MARKERS = {"eager": "o", "compiled": "s", "TE": "^"}


def draw(found: Record) -> Figure:
    """Speed of both passes together over the output's error; a workload of which nothing has an error has no panel."""
    panels: dict[str, list[Row]] = {}
    for row in found.rows:
        if row.times is not None and row.error:
            panels.setdefault(f"{row.workload}\n{row.size}", []).append(row)
    columns = max(1, min(_COLUMNS, len(panels)))
    lines = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(5 * columns, 4 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis, (title, rows) in zip(axes.flat, panels.items(), strict=False):
        _panel(axis, title, rows)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    device = "" if found.environment is None else found.environment.device
    figure.suptitle(EMULATED if found.is_emulated else f"Speed against error, {device}", fontsize="medium", wrap=True)
    return figure


def speed(row: Row) -> float:
    """TFLOP/s of both passes; passes a second where there are no matrix products."""
    assert row.times is not None
    return row.flops / row.times.both / 1e12 if row.flops else 1 / row.times.both


def _panel(axis: Axes, title: str, rows: list[Row]) -> None:
    for kind, marker in _MARKERS.items():
        of_kind = [row for row in rows if row.implementation == kind]
        points = [(row.error or 0.0, speed(row)) for row in of_kind]
        axis.plot([x for x, _ in points], [y for _, y in points], marker, label=kind)
        for row, point in zip(of_kind, points, strict=True):
            axis.annotate(row.precision, point, fontsize="x-small", xytext=(3, 3), textcoords="offset points")
    axis.set(xscale="log", yscale="log", xlabel="relative error of the output")
    axis.set_ylabel("TFLOP/s, forward and backward" if any(row.flops for row in rows) else "passes a second")
    axis.set_title(title, fontsize="small")
    axis.legend(fontsize="x-small")
