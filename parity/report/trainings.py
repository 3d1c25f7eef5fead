"""Draw trainings: the losses of each step beside the reference's, and how near each step is to its limit."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parity import shown
from parity.report.numbers import markdown_table, short
from parity.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from parity.judge.band import Band  # a report is drawn without torch


@dataclass(frozen=True)
class Curve:
    """A training, and where right ones lie.

    Attributes:
        result: of the candidate's training.
        band: of right trainings' losses; None if none was drawn.
    """

    result: Result
    band: Band | None = None


def left(curve: Curve) -> str:
    """Say where a training leaves its band; an empty text if it does not."""
    band = curve.band
    if band is None:
        return ""
    told = [f"the loss leaves its band at step {band.loss_left.step}"] if band.loss_left else []
    if band.weights_left:
        names = band.weights_left.where
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        told.append(
            f"after step {band.weights_left.step}, {', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'} "
            "farther from the training in FP64 than right trainings are"
        )
    return "; ".join(told)


def over_seeds(curves: Sequence[Curve]) -> str:
    """Return a table of how the last losses of a training's seeds lie; an empty text if each has one seed.

    A right training's deviation has Student's distribution, with as many degrees of freedom as there are drawn
    trainings: its variance is ``n / (n - 2)``.
    """
    groups: dict[str, list[Band]] = {}
    for curve in curves:
        if curve.band is not None and curve.band.drawn > 2:
            groups.setdefault(curve.result.item, []).append(curve.band)
    rows = []
    for item, bands in groups.items():
        if len(bands) > 1:
            variance = statistics.fmean(band.drawn / (band.drawn - 2) for band in bands)
            mean = statistics.fmean(band.deviation for band in bands)
            size = math.sqrt(statistics.fmean(band.deviation**2 for band in bands))
            expected = f"0 ± {short(math.sqrt(variance / len(bands)))}"
            rows.append((shown.code(item), len(bands), short(mean), expected, short(size), short(math.sqrt(variance))))
    columns = ("training", "seeds", "mean deviation", "expected", "root mean square", "expected")
    return markdown_table(rows, columns, left=1) if rows else ""


def summary(results: Sequence[Result]) -> str:
    """Return a table with a row for each training: where its loss goes, and its largest margin."""
    rows = []
    for result in results:
        if result.steps:
            worst = max(result.steps, key=lambda step: step.margin)
            losses = f"{result.steps[0].loss:.5g} to {result.steps[-1].loss:.5g}"
            rows.append(
                (
                    shown.code(result.item),
                    result.seed,
                    result.status,
                    len(result.steps),
                    losses,
                    short(worst.margin),
                    worst.number,
                )
            )
    return markdown_table(rows, ("training", "seed", "status", "steps", "loss", "largest margin", "at step"), left=3)


def write(curves: Sequence[Curve], path: Path) -> Path | None:
    """Write the report, markdown, and its plot beside it if matplotlib is installed; return the plot's path."""
    plot = path.with_suffix(".png") if importlib.util.find_spec("matplotlib") else None
    path.parent.mkdir(parents=True, exist_ok=True)
    if plot is not None:
        drawn(curves).savefig(plot, dpi=110)
    path.write_text(shown.text("\n\n".join(_sections(curves, plot)) + "\n"), encoding="utf-8")
    return plot


def _sections(curves: Sequence[Curve], plot: Path | None) -> Iterator[str]:
    yield "# Trainings"
    backends = {curve.result.backend for curve in curves}
    if "cpu" in backends:
        yield "TE's kernels here are emulated: TransformerEngine's own Python on parity's CPU kernels."
    yield (
        "*reference* is the loss that the reference in FP64 has with the candidate's weights and batch: the same step. "
        "*its own* is the loss of the reference's own training, from which right trainings drift away by chance; *low* "
        "and *high* are how far. *margin* is the largest of the step's tensors; up to 1 passes, whatever the band says."
    )
    yield summary([curve.result for curve in curves])
    if drawn_from := {curve.band.drawn for curve in curves if curve.band is not None}:
        yield (
            f"Bands are drawn from {max(drawn_from)} trainings of each reference under the precision's rounding model, "
            "with roundings that are drawn anew for each step. A right training whose errors are those of the model "
            "leaves its band at some step once in 20 times. A deviation is that of the last loss, over the root mean "
            "square of those trainings'."
        )
    if together := over_seeds(curves):
        yield together
    if plot is not None:
        yield f"![losses and margins]({plot.name})"
    for curve in curves:
        result = curve.result
        yield f"## {shown.prose(result.item)}, seed {result.seed}: {result.status}"
        if result.reason:
            yield shown.prose(f"{result.reason[:1].upper()}{result.reason[1:]}.")
        for finding in result.findings:
            yield f"- **{shown.prose(finding.name)}**: {shown.prose(finding.message)}"
        if told := left(curve):
            yield shown.prose(f"{told[:1].upper()}{told[1:]}.")
        columns: list[tuple[str, Sequence[float]]] = [
            ("loss", [step.loss for step in result.steps]),
            ("reference", [step.golden for step in result.steps]),
        ]
        if curve.band is not None:
            columns += [("its own", curve.band.free), ("low", curve.band.low), ("high", curve.band.high)]
        losses = zip(*(numbers for _, numbers in columns), strict=False)
        rows = [
            (step.number, *(f"{loss:.6g}" for loss in some), short(step.margin))
            for step, some in zip(result.steps, losses, strict=False)
        ]
        yield markdown_table(rows, ("step", *(name for name, _ in columns), "margin"))


def drawn(curves: Sequence[Curve]) -> Figure:
    """Return the plot: losses above, with the reference's own training and the band; margins below, with the limit."""
    from matplotlib.figure import Figure  # the report can be had without

    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, margins = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for curve in curves:
        numbers = [step.number for step in curve.result.steps]
        label = f"{curve.result.item}, seed {curve.result.seed}"
        line = losses.plot(numbers, [step.loss for step in curve.result.steps], label=label)[0]
        if curve.band is not None:
            losses.plot(numbers, curve.band.free, ":", color=line.get_color())
            losses.fill_between(numbers, curve.band.low, curve.band.high, color=line.get_color(), alpha=0.2)
        margins.plot(numbers, [step.margin for step in curve.result.steps], ".-", color=line.get_color())
    margins.axhline(1.0, color="black", linewidth=0.8)
    losses.set(ylabel="loss (dotted: the reference's own training; shaded: right ones)")
    margins.set(xlabel="step", ylabel="margin (1 is the limit)")
    losses.legend(fontsize="small")
    return figure
