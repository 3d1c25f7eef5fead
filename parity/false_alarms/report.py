"""The report of a count of false alarms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from parity import te
from parity.calibration.right_ports import DRAWN_MODELS
from parity.false_alarms.measure import DRAWN, Outcome, Port
from parity.limits.aim import FALSE_ALARMS_A_RUN, STATISTICS_A_RUN
from parity.limits.table import packaged
from parity.report import environment
from parity.report.tables import markdown_table

CONFIDENCE = 0.95
_INTRODUCTION = f"""\
Ports that are known to be right, compared with the packaged limits, on seeds that the limits were not fitted to: at the
cases' own sizes, which calibration knows, and at sizes drawn for each seed, which it does not (batches of 1 to 4, 2 to
160 tokens, 1 to 8 heads, widths up to 384; multiples of 32 under a recipe). Models are drawn, too, which calibration
does not know at all: up to four modules of TE's behind one another, plain lines of PyTorch between them, and often a
loss behind (`parity/calibration/drawn_models.py`). Every rejection is a false alarm. A *check* is one tensor of one
port; each is judged by several statistics. The limits are set so that a statistic of a right port
is beyond its own with a probability of {FALSE_ALARMS_A_RUN / STATISTICS_A_RUN:.0e}. The last column bounds what was
counted: with {CONFIDENCE:.0%} confidence a check raises a false alarm no more often (Clopper and Pearson, Biometrika
26(4), 1934)."""
_PLOT = """\
For each statistic, the share of ports whose largest margin lies above a value; a limit is a margin of 1. A tail that
falls steeply before 1 has room; one that is flat there would raise an alarm with more ports."""

Outcomes = Mapping[Port, Outcome]


def write(outcomes: Outcomes, backend: str, path: Path) -> None:
    """Write the report, and its plot beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _plot(outcomes).savefig(path.with_suffix(".png"), dpi=110)
    path.write_text("\n\n".join(_sections(outcomes, backend, path)) + "\n", encoding="utf-8")


def upper_bound(alarms: int, checks: int) -> float:
    """The largest probability of an alarm that so few leave likely, one-sided Clopper-Pearson; 1 of no checks."""
    return float(stats.beta.ppf(CONFIDENCE, alarms + 1, checks - alarms)) if checks > alarms else 1.0


def _sections(outcomes: Outcomes, backend: str, path: Path) -> Iterator[str]:
    here = environment.measure(backend, (), 0)
    seeds = sorted({port.seed for port in outcomes})
    yield "# False alarms on right ports"
    yield _INTRODUCTION
    yield (
        f"Kernels: {here.kernels}; {here.device}, {here.cpu}; TransformerEngine {te.version()}, torch {here.torch}. "
        f"Seeds {seeds[0]} to {seeds[-1]}; the limits are of seeds {_fitted()}."
    )
    yield _table(outcomes)
    yield "## Every false alarm"
    yield _alarms(outcomes)
    yield "## How near the limits right ports come"
    yield _PLOT
    yield f"![Share of ports above a margin, by statistic]({path.with_suffix('.png').name})"
    yield _largest(outcomes)
    unjudged = _unjudged(outcomes)
    if unjudged:
        yield "## Ports without a verdict"
        yield unjudged
    yield "Made by `parity false-alarms`."


def _fitted() -> str:
    seeds = sorted({seed for entry in packaged().provenance.values() for seed in entry["seeds"]})
    return ", ".join(map(str, seeds))


def _by_precision(outcomes: Outcomes) -> dict[str, list[tuple[Port, Outcome]]]:
    found: dict[str, list[tuple[Port, Outcome]]] = {}
    for port, outcome in outcomes.items():
        if outcome.status in ("passed", "failed"):
            found.setdefault(port.precision, []).append((port, outcome))
    return found


def _table(outcomes: Outcomes) -> str:
    rows = []
    for precision, judged in _by_precision(outcomes).items():
        checks = sum(outcome.tensors for _, outcome in judged)
        alarmed = sum(len({alarm.split(":")[0] for alarm in outcome.alarms}) for _, outcome in judged)
        rows.append(
            [
                f"`{precision}`",
                f"{len(judged):,}",
                f"{sum(port.size == DRAWN for port, _ in judged):,}",
                f"{sum(port.file == DRAWN_MODELS for port, _ in judged):,}",
                f"{checks:,}",
                f"{sum(outcome.statistics for _, outcome in judged):,}",
                sum(outcome.status == "failed" for _, outcome in judged),
                alarmed,
                f"{upper_bound(alarmed, checks):.1e}",
            ]
        )
    headers = [
        "precision",
        "ports",
        "of drawn size",
        "drawn models",
        "checks",
        "statistics",
        "ports rejected",
        "checks rejected",
        "at most",
    ]
    return markdown_table(rows, headers, left=1)


def _alarms(outcomes: Outcomes) -> str:
    lines = [
        f"- `{port.case}[{port.precision}-{outcome.label}]`, seed {port.seed}: {alarm}"
        for port, outcome in outcomes.items()
        for alarm in outcome.alarms
    ]
    return "\n".join(lines) or "None."


def _largest(outcomes: Outcomes) -> str:
    statistics = _statistics(outcomes)
    rows = [
        [f"`{precision}`", *(_text(max(_margins(judged, name), default=math.nan)) for name in statistics)]
        for precision, judged in _by_precision(outcomes).items()
    ]
    headers = ["largest margin", *statistics]
    return markdown_table(rows, headers)


def _text(margin: float) -> str:
    return "–" if math.isnan(margin) else f"{margin:.2f}"


def _unjudged(outcomes: Outcomes) -> str:
    reasons: dict[str, int] = {}
    for port, outcome in outcomes.items():
        if outcome.status not in ("passed", "failed"):
            text = f"`{port.case}` in `{port.precision}`: {outcome.reason}"
            reasons[text] = reasons.get(text, 0) + 1
    return "\n".join(f"- {text} ({count} times)" for text, count in reasons.items())


def _statistics(outcomes: Outcomes) -> list[str]:
    return list(dict.fromkeys(name for outcome in outcomes.values() for name in outcome.margins))


def _margins(judged: Sequence[tuple[Port, Outcome]], statistic: str) -> list[float]:
    return [outcome.margins[statistic] for _, outcome in judged if statistic in outcome.margins]


def _plot(outcomes: Outcomes) -> Figure:
    precisions = _by_precision(outcomes)
    columns = min(4, max(1, len(precisions)))
    rows = max(1, math.ceil(len(precisions) / columns))
    figure = Figure(figsize=(3.6 * columns, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis, (precision, judged) in zip(axes.flat, precisions.items(), strict=False):
        for statistic in _statistics(outcomes):
            margins = np.sort(_margins(judged, statistic))
            axis.step(margins, 1 - np.arange(len(margins)) / max(1, len(margins)), where="pre", label=statistic)
        axis.axvline(1.0, color="black", linestyle=":")
        axis.set(title=precision, xlabel="margin", ylabel="share of ports above", yscale="log", xlim=(0, 1.3))
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure
