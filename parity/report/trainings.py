"""Draw trainings: the losses of each step beside the reference's, and how near each step is to its limit."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parity import shown
from parity.report.numbers import markdown_table, short
from parity.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curve:
    """A training, and the reference's own in FP64.

    Attributes:
        result: of the candidate's training.
        free: the losses of the reference's training, which nothing ties to the candidate's; it may have more steps.
    """

    result: Result
    free: tuple[float, ...]


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
        "*its own* is the loss of the reference's own training, from which right trainings drift away by chance. "
        "*margin* is the largest of the step's tensors; up to 1 passes."
    )
    yield summary([curve.result for curve in curves])
    if plot is not None:
        yield f"![losses and margins]({plot.name})"
    for curve in curves:
        result = curve.result
        yield f"## {shown.prose(result.item)}, seed {result.seed}: {result.status}"
        if result.reason:
            yield shown.prose(f"{result.reason[:1].upper()}{result.reason[1:]}.")
        for finding in result.findings:
            yield f"- **{shown.prose(finding.name)}**: {shown.prose(finding.message)}"
        rows = [
            (step.number, *(f"{loss:.6g}" for loss in (step.loss, step.golden, free)), short(step.margin))
            for step, free in zip(result.steps, curve.free, strict=False)
        ]
        yield markdown_table(rows, ("step", "loss", "reference", "its own", "margin"))


def drawn(curves: Sequence[Curve]) -> Figure:
    """Return the plot: losses above, with the reference's own training; margins below, with the limit."""
    from matplotlib.figure import Figure  # the report can be had without

    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, margins = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for curve in curves:
        numbers = [step.number for step in curve.result.steps]
        label = f"{curve.result.item}, seed {curve.result.seed}"
        line = losses.plot(numbers, [step.loss for step in curve.result.steps], label=label)[0]
        losses.plot(range(1, len(curve.free) + 1), curve.free, ":", color=line.get_color())
        margins.plot(numbers, [step.margin for step in curve.result.steps], ".-", color=line.get_color())
    margins.axhline(1.0, color="black", linewidth=0.8)
    losses.set(ylabel="loss (dotted: the reference's own training)")
    margins.set(xlabel="step", ylabel="margin (1 is the limit)")
    losses.legend(fontsize="small")
    return figure
