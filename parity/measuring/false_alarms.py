"""Count how often right ports are rejected, on seeds, sizes and models that no limit was fitted to."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from parity import te
from parity.case.case import Case, Size
from parity.case.recipes import find_precision
from parity.case.validate import check_case
from parity.comparison import compare_at
from parity.judge.limits import FALSE_ALARMS_A_RUN, STATISTICS_A_RUN, packaged
from parity.machine import files
from parity.measuring import right_ports
from parity.measuring.record import Campaign, made
from parity.measuring.right_ports import DRAWN_MODELS, drawn
from parity.report import environment
from parity.report.numbers import markdown_table
from parity.report.templates import render
from parity.result import Result
from parity.te import Backend, why_unavailable

# Compare right ports in parallel processes, and record how each was judged.


DRAWN = "drawn"


@dataclass(frozen=True)
class Plan:
    """Say what to compare: each case at one size drawn for each seed, and for some seeds at its own sizes.

    Attributes:
        files: files of pairs that are known to agree, or ``right_ports.ZOO``.
        precisions: their names, or ``FILE::NAME``; those that this machine cannot run are left out.
        seeds: seeds of weights, inputs and sizes; none that the limits were fitted to.
        own: for how many of the first seeds the cases' own sizes are compared, too.
        backend: whose kernels run the TE modules.
    """

    files: tuple[str, ...]
    precisions: tuple[str, ...]
    seeds: tuple[int, ...]
    own: int
    backend: Backend | Literal["auto"]


@dataclass(frozen=True)
class Port:
    """A right port.

    Attributes:
        file: the case's file.
        case: the case's name.
        precision: the precision's name.
        seed: the seed of weights and inputs.
        size: the index of one of the case's own sizes, or ``drawn``.
    """

    file: str
    case: str
    precision: str
    seed: int
    size: int | str


@dataclass(frozen=True)
class Outcome:
    """The outcome of comparing a port.

    Attributes:
        status: ``passed``, ``failed``, ``error`` or ``skipped``.
        label: the size's label.
        tensors: how many were compared.
        statistics: how many were judged.
        margins: for each statistic, the largest margin of all tensors; above 1 is a false alarm.
        alarms: each statistic whose margin is above 1, in words.
        reason: why there is no verdict.
    """

    status: str
    label: str
    tensors: int
    statistics: int
    margins: dict[str, float]
    alarms: tuple[str, ...]
    reason: str


def run(plan: Plan, path: Path, workers: int) -> dict[Port, Outcome]:
    """Compare the ports that the record lacks, and return the outcomes of all.

    Args:
        plan: what to compare.
        path: the record, JSON lines, which belongs to one version of parity and its limits.
        workers: how many processes to use, each with one thread.
    """
    campaign: Campaign[Port, Outcome] = Campaign(path, Outcome)
    groups = _group_ports(plan)
    ports = [port for group in groups for port in group]
    with files.claimed(path):
        done = campaign.finished(ports)
        missing = [tuple(group) for group in groups if any(port not in done for port in group)]
        for group, outcomes in made(missing, functools.partial(_compare_ports, plan), "comparing", workers):
            for port, outcome in zip(group, outcomes, strict=True):
                campaign.keep(port, outcome)
        return campaign.finished(ports)


def _group_ports(plan: Plan) -> list[list[Port]]:
    """Return the ports in groups of one case, seed and size, whose precisions share golden."""
    kernels = te.kernels(plan.backend)
    precisions = [name for name in plan.precisions if why_unavailable(find_precision(name), kernels) is None]
    groups = []
    for number, seed in enumerate(plan.seeds):
        for file in plan.files:
            for case in right_ports.cases(file):
                chosen = [name for name in precisions if case.runs_at(find_precision(name).name)]
                sizes = [*(range(len(case.sizes)) if number < plan.own else ()), DRAWN]
                groups += [[Port(file, case.name, name, seed, size) for name in chosen] for size in sizes if chosen]
    return groups


def _compare_ports(plan: Plan, ports: Sequence[Port]) -> list[Outcome]:
    """Compare ports of one case. Runs in a worker process."""
    case = right_ports.case(ports[0].file, ports[0].case)
    return [_judge_port(plan, case, port) for port in ports]


def _judge_port(plan: Plan, case: Case, port: Port) -> Outcome:
    kernels = te.kernels(plan.backend)
    sized = dataclasses.replace(case, sizes=(_resolve_size(case, port),))
    (checked,) = check_case(sized, kernels.te)
    return _summarize_result(compare_at(sized, checked, find_precision(port.precision), port.seed, kernels, packaged()))


def _resolve_size(case: Case, port: Port) -> Size:
    if isinstance(port.size, int):
        return case.sizes[port.size]
    return drawn(case, find_precision(port.precision), port.seed)


def _summarize_result(result: Result) -> Outcome:
    margins: dict[str, float] = {}
    for tensor in result.tensors:
        for check in tensor.checks:
            margins[check.statistic] = max(margins.get(check.statistic, 0.0), check.margin)
    alarms = tuple(
        f"{tensor.label}: {check.statistic} {check.value:.3g}, limit {check.limit:.3g} {check.where}".strip()
        for tensor in result.tensors
        for check in tensor.checks
        if check.margin > 1
    )
    return Outcome(
        result.status,
        result.size_label,
        len(result.tensors),
        sum(len(tensor.checks) for tensor in result.tensors),
        margins,
        alarms,
        result.reason,
    )


# The report of a count of false alarms.


CONFIDENCE = 0.95

Outcomes = Mapping[Port, Outcome]


def write_report(outcomes: Outcomes, backend: str, path: Path) -> None:
    """Write the report, and its plot beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _draw_plot(outcomes).savefig(path.with_suffix(".png"), dpi=110)
    seeds = sorted({port.seed for port in outcomes})
    report = render(
        "measuring/false_alarms.md.jinja",
        aim=FALSE_ALARMS_A_RUN / STATISTICS_A_RUN,
        confidence=CONFIDENCE,
        here=environment.measure(backend, (), 0),
        transformer_engine=te.version(),
        seeds=f"{seeds[0]} to {seeds[-1]}",
        fitted_seeds=_format_fitted_seeds(),
        counts=_tabulate_counts(outcomes),
        alarms=[(port, outcome.label, alarm) for port, outcome in outcomes.items() for alarm in outcome.alarms],
        plot=path.with_suffix(".png").name,
        largest_margins=_tabulate_largest_margins(outcomes),
        unjudged=Counter(
            (port.case, port.precision, outcome.reason)
            for port, outcome in outcomes.items()
            if outcome.status not in ("passed", "failed")
        ),
        made_by=environment.made_by("parity false-alarms"),
    )
    path.write_text(report, encoding="utf-8")


def upper_bound(alarms: int, checks: int) -> float:
    """Return the upper bound on the probability of an alarm (one-sided Clopper-Pearson), which is 1 without checks."""
    return float(stats.beta.ppf(CONFIDENCE, alarms + 1, checks - alarms)) if checks > alarms else 1.0


def _format_fitted_seeds() -> str:
    seeds = sorted({seed for entry in packaged().provenance.values() for seed in entry["seeds"]})
    return ", ".join(map(str, seeds))


def _by_precision(outcomes: Outcomes) -> dict[str, list[tuple[Port, Outcome]]]:
    found: dict[str, list[tuple[Port, Outcome]]] = {}
    for port, outcome in outcomes.items():
        if outcome.status in ("passed", "failed"):
            found.setdefault(port.precision, []).append((port, outcome))
    return found


def _tabulate_counts(outcomes: Outcomes) -> str:
    rows = []
    for precision, judged in _by_precision(outcomes).items():
        checks = sum(outcome.tensors for _, outcome in judged)
        rejected = sum(outcome.status == "failed" for _, outcome in judged)
        alarmed = sum(len({alarm.split(":")[0] for alarm in outcome.alarms}) for _, outcome in judged)
        rows.append(
            [
                f"`{precision}`",
                f"{len(judged):,}",
                f"{sum(port.size == DRAWN for port, _ in judged):,}",
                f"{sum(port.file == DRAWN_MODELS for port, _ in judged):,}",
                f"{checks:,}",
                f"{sum(outcome.statistics for _, outcome in judged):,}",
                rejected,
                f"{upper_bound(rejected, len(judged)):.1e}",
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
        "at most",
        "checks rejected",
        "at most",
    ]
    return markdown_table(rows, headers, left=1)


def _tabulate_largest_margins(outcomes: Outcomes) -> str:
    statistics = _list_statistics(outcomes)
    rows = [
        [f"`{precision}`", *(_format_margin(max(_list_margins(judged, name), default=math.nan)) for name in statistics)]
        for precision, judged in _by_precision(outcomes).items()
    ]
    headers = ["largest margin", *statistics]
    return markdown_table(rows, headers)


def _format_margin(margin: float) -> str:
    return "–" if math.isnan(margin) else f"{margin:.2f}"


def _list_statistics(outcomes: Outcomes) -> list[str]:
    return list(dict.fromkeys(name for outcome in outcomes.values() for name in outcome.margins))


def _list_margins(judged: Sequence[tuple[Port, Outcome]], statistic: str) -> list[float]:
    return [outcome.margins[statistic] for _, outcome in judged if statistic in outcome.margins]


def _draw_plot(outcomes: Outcomes) -> Figure:
    precisions = _by_precision(outcomes)
    columns = min(4, max(1, len(precisions)))
    rows = max(1, math.ceil(len(precisions) / columns))
    figure = Figure(figsize=(3.6 * columns, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis, (precision, judged) in zip(axes.flat, precisions.items(), strict=False):
        for statistic in _list_statistics(outcomes):
            margins = np.sort(_list_margins(judged, statistic))
            axis.step(margins, 1 - np.arange(len(margins)) / max(1, len(margins)), where="pre", label=statistic)
        axis.axvline(1.0, color="black", linestyle=":")
        axis.set(title=precision, xlabel="margin", ylabel="share of ports above", yscale="log", xlim=(0, 1.3))
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure
