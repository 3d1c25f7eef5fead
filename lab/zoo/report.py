"""Draw the zoo's report from the verdicts: counts over trials, markdown tables and a plot."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.corpus.catalogue import PORTS, group_of
from lab.zoo.rivals import RULES
from lab.zoo.trial import CLEAN, LEAST_SEEDS, Plan, Trial, Verdict, filter_ratio
from parity import te
from parity.measuring.record import write_sections
from parity.report.environment import KERNELS, cpu_model, gpu_name
from parity.report.numbers import markdown_table, plural, short
from parity.te import emulation

# Counts over trials: how many bugs each rule detects, and how many right ports it rejects.


PARITY = "parity"
METHODS = (PARITY, *RULES)
Verdicts = Mapping[Trial, Verdict]


@dataclass(frozen=True)
class Count:
    """A number of hits out of a total."""

    hits: int
    total: int

    @property
    def share(self) -> float:
        """Return the share of hits, from 0 to 1, or NaN if the total is 0."""
        return self.hits / self.total if self.total else math.nan


@dataclass(frozen=True)
class Place:
    """A bug in a host at a size and precision. Its trials differ only in the seed."""

    bug: str
    host: str
    size: str
    precision: str


@dataclass(frozen=True)
class Strength:
    """A bug's signal-to-noise ratios at a place, each the largest of all tensors.

    Attributes:
        norm_ratio: the ratio of norms, as the root mean square over seeds.
        filter_ratio: the ratio of a matched filter; NaN with too few seeds.
    """

    norm_ratio: float
    filter_ratio: float


def rejects(verdict: Verdict, method: str) -> bool:
    """Return whether a rule rejects the port."""
    return verdict.detected if method == PARITY else verdict.rejected[method] > 0


def judged(verdicts: Verdicts, clean: bool, precision: str) -> list[tuple[Trial, Verdict]]:
    """Return the trials at a precision that ended with a verdict."""
    return [
        (trial, verdict)
        for trial, verdict in verdicts.items()
        if (trial.bug == CLEAN) == clean and trial.precision == precision and verdict.status != "error"
    ]


def told_apart(verdicts: Verdicts, trials: Iterable[Trial], method: str) -> Count:
    """Count the bugs that a rule rejects while it accepts the right port, among those whose right port was judged."""
    pairs = [(verdicts[trial], verdicts.get(dataclasses.replace(trial, bug=CLEAN))) for trial in trials]
    judged_pairs = [(bug, clean) for bug, clean in pairs if clean is not None and clean.status != "error"]
    hits = sum(rejects(bug, method) and not rejects(clean, method) for bug, clean in judged_pairs)
    return Count(hits, len(judged_pairs))


def rejections(verdicts: Iterable[tuple[Trial, Verdict]], method: str) -> Count:
    """Count rejected ports."""
    listed = list(verdicts)
    return Count(sum(rejects(verdict, method) for _, verdict in listed), len(listed))


def rejected_tensors(verdicts: Iterable[tuple[Trial, Verdict]], method: str) -> Count:
    """Count rejected tensors, each of which is a check of its own."""
    listed = [verdict for _, verdict in verdicts]
    hits = sum(verdict.failed_tensors if method == PARITY else verdict.rejected[method] for verdict in listed)
    return Count(hits, sum(verdict.tensors for verdict in listed))


def named_first(verdicts: Iterable[tuple[Trial, Verdict]]) -> Count:
    """Count detected bugs whose first finding is the planted one."""
    detected = [(trial, verdict) for trial, verdict in verdicts if verdict.detected]
    hits = sum(bool({*verdict.findings[:1]} & {*PORTS[trial.bug, trial.host].titles}) for trial, verdict in detected)
    return Count(hits, len(detected))


def by_place(verdicts: Verdicts) -> dict[Place, list[tuple[Trial, Verdict]]]:
    """Return the trials with a bug and a verdict, by place, in the order of the verdicts."""
    places: dict[Place, list[tuple[Trial, Verdict]]] = defaultdict(list)
    for trial, verdict in verdicts.items():
        if trial.bug != CLEAN and verdict.status != "error":
            places[Place(trial.bug, trial.host, trial.size, trial.precision)].append((trial, verdict))
    return dict(places)


def strength_of(verdicts: Iterable[tuple[Trial, Verdict]]) -> Strength:
    """Return the strength of a bug, from the trials of one place."""
    signals = defaultdict(list)
    for _, verdict in verdicts:
        for name, signal in verdict.signals.items():
            signals[name].append(signal)
    ratios = [math.sqrt(sum(s.norm_ratio**2 for s in found) / len(found)) for found in signals.values()]
    filters = [filter_ratio([s.coefficient for s in found]) for found in signals.values()]
    return Strength(max(ratios, default=math.nan), max((f for f in filters if not math.isnan(f)), default=math.nan))


def errors(verdicts: Verdicts) -> list[tuple[Trial, Verdict]]:
    """Return the trials in which a port raised."""
    return [(trial, verdict) for trial, verdict in verdicts.items() if verdict.status == "error"]


# The zoo's plot: detection by method and precision, and against a bug's signal-to-noise ratio.


# Edges of the bins of the norm ratio, by factors of the square root of 10.
_EDGES = [10 ** (exponent / 2) for exponent in range(-6, 7)]


def draw(verdicts: Verdicts, precisions: Sequence[str]) -> Figure:
    """Draw three panels: bugs told from right ports, right ports rejected, bugs told apart over their norm ratio."""
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
    trials = [trial for trial, _ in judged(verdicts, False, precision)]
    return told_apart(verdicts, trials, method).share


def _rejected(verdicts: Verdicts, precision: str, method: str) -> float:
    return rejections(judged(verdicts, True, precision), method).share


def _bars(axes: Axes, precisions: Sequence[str], share: Callable[[str, str], float]) -> None:
    """Draw a group of bars for each precision, with one bar for each method."""
    width = 0.8 / len(METHODS)
    for i, method in enumerate(METHODS):
        shares = [share(name, method) for name in precisions]
        axes.bar(
            [x + (i - len(METHODS) / 2 + 0.5) * width for x in range(len(precisions))], shares, width, label=method
        )
    axes.set_xticks(range(len(precisions)), precisions, rotation=30, ha="right", fontsize="small")
    axes.set_ylim(0, 1)


def _power(axes: Axes, verdicts: Verdicts) -> None:
    """Draw the share of trials that each method tells apart, over the norm ratio of the bug at the place."""
    places = [(strength_of(found).norm_ratio, found) for found in by_place(verdicts).values()]
    for method in METHODS:
        points = []
        for low, high in pairwise(_EDGES):
            found = [trial for ratio, trials in places if low <= ratio < high for trial, _ in trials]
            if found:
                points.append((math.sqrt(low * high), told_apart(verdicts, found, method).share))
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=method)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("effect of the bug / rounding noise, norms")
    axes.set_title("bugs told apart over their strength", fontsize="medium")


# The zoo's report: markdown tables and a plot.


_METHOD = f"""\
- **A bug** is a small change to a right port: to the TE module, its weights, its weight map or its call, or to the
  numbers and choices of a model (`lab/corpus/`). Each is planted wherever it changes the result.
- **Told apart**: the port with the bug is rejected and the right port is not, on the same weights and inputs: a rule
  that rejects everything detects nothing. A port is rejected if one of its tensors is: an output, an input's gradient,
  a parameter's gradient. Every rule sees the same tensors; a *check* is one tensor of one right port.
- **The rivals** compare with the golden value, or with plain PyTorch in the precision's dtype (`module.to(dtype)`,
  which also rounds buffers such as RoPE's frequencies). `lab/zoo/rivals.py` cites where each rule is from.
  PyTorch has no FP8 modules, so under a recipe its BF16 stands in. TE's tolerances are applied to this suite's weights
  and gradients.
- **Norm ratio**: the norm of the bug's effect over the norm of the rounding noise, the largest over tensors. The
  effect is the candidate with the bug minus the candidate without, in FP32. A bug that FP32 cannot have, such as
  a stale FP8 scale, has what it adds to the noise, in squares.
- **Filter ratio**: one over the root mean square, over seeds, of the noise regressed on the effect, the largest over
  tensors: the signal to noise ratio of a matched filter (`lab/zoo/trial.py`); needs {LEAST_SEEDS} seeds."""


def write(verdicts: Verdicts, plan: Plan, left_out: Mapping[str, str], path: Path) -> Path:
    """Write the report and the plot beside it.

    Args:
        verdicts: the verdicts of the plan's trials.
        plan: what was to be judged.
        left_out: the precisions that this machine cannot run, each with the reason.
        path: the report's path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".png")
    draw(verdicts, plan.precisions).savefig(picture, dpi=100)
    return write_sections(path, _sections(verdicts, plan, left_out, picture.name), "python -m lab zoo")


def _sections(verdicts: Verdicts, plan: Plan, left_out: Mapping[str, str], picture: str) -> Iterator[str]:
    yield "# The bug zoo: what is detected, and by whom"
    yield _setting(verdicts, plan)
    for name, reason in left_out.items():
        yield f"- `{name}` did not run: {reason}"
    yield "## Planted bugs that are told from the right port"
    yield _detection_table(verdicts, plan.precisions)
    yield f"![Detection by method and precision, and against signal to noise]({picture})"
    yield "## Right ports that are rejected"
    yield "Ports first, then checks: a check is one tensor."
    yield _false_alarms(verdicts, plan.precisions)
    yield "## Detected bugs whose first finding is the planted one"
    yield _naming(verdicts, plan.precisions)
    yield "## Bug by bug"
    yield (
        "Over all sizes and seeds: ✅ where parity told every trial apart, else how many; its smallest margin; then "
        f"the rivals that told every trial apart, by their first letters ({_letters()})."
    )
    yield _bugs(verdicts, plan)
    yield "## What parity missed"
    yield _misses(verdicts)
    raised = errors(verdicts)
    if raised:
        yield "## Ports that raised"
        yield "\n".join(f"- {_told(trial)}: {verdict.reason}" for trial, verdict in raised)
    yield "## How it was done"
    yield _METHOD


def _setting(verdicts: Verdicts, plan: Plan) -> str:
    backend = next((verdict.backend for verdict in verdicts.values() if verdict.status != "error"), "cpu")
    device = gpu_name() if backend == "gpu" else f"an {emulation.gpu_name()}, on {cpu_model()}"
    sizes = ", ".join(f"{size} size with {plural(count, 'seed')}" for size, count in plan.seeds.items())
    bugs = plural(len({port.name for port in plan.ports}), "bug")
    return (
        f"{bugs} in {plural(len(plan.hosts), 'right port')}, at {sizes}: "
        f"{len(verdicts):,} trials. Kernels: {KERNELS[backend]}; {device}; "
        f"TransformerEngine {te.version()}, torch {torch.__version__}."
    )


def _detection_table(verdicts: Verdicts, precisions: Sequence[str]) -> str:
    rows = []
    for precision in precisions:
        trials = [trial for trial, _ in judged(verdicts, False, precision)]
        counts = [told_apart(verdicts, trials, method) for method in METHODS]
        rows.append([f"`{precision}`", *map(_count, counts)])
    return markdown_table(rows, ["precision", *METHODS])


def _false_alarms(verdicts: Verdicts, precisions: Sequence[str]) -> str:
    rows = []
    for precision in precisions:
        clean = judged(verdicts, True, precision)
        ports = [rejections(clean, method) for method in METHODS]
        checks = [rejected_tensors(clean, method) for method in METHODS]
        rows.append([f"`{precision}`", *map(_count, ports), *map(_count, checks)])
    return markdown_table(rows, ["precision", *METHODS, *(f"{method}, checks" for method in METHODS)])


def _naming(verdicts: Verdicts, precisions: Sequence[str]) -> str:
    counts = {name: named_first(judged(verdicts, False, name)) for name in precisions}
    return markdown_table([[_count(count) for count in counts.values()]], [f"`{name}`" for name in counts])


def _bugs(verdicts: Verdicts, plan: Plan) -> str:
    trials: dict[tuple[str, str, str], list[tuple[Trial, Verdict]]] = defaultdict(list)
    for place, found in by_place(verdicts).items():
        trials[place.bug, place.host, place.precision] += found
    rows = []
    for port in plan.ports:
        cells = [_cell(verdicts, trials.get((*port.key, name), [])) for name in plan.precisions]
        if any(cells):
            rows.append([group_of(port), f"`{port.name}`", f"`{port.host}`", *cells])
    return markdown_table(rows, ["subject", "bug", "host", *(f"`{precision}`" for precision in plan.precisions)])


def _cell(verdicts: Verdicts, found: Sequence[tuple[Trial, Verdict]]) -> str:
    if not found:
        return ""
    counts = {method: told_apart(verdicts, [trial for trial, _ in found], method) for method in METHODS}
    detected = counts.pop(PARITY)
    mark = "✅" if detected.hits == detected.total else f"❌ {detected.hits}/{detected.total}"
    rivals = "".join(method[0] for method, count in counts.items() if count.hits == count.total)
    return f"{mark} {short(min(verdict.margin for _, verdict in found))} {rivals}".strip()


def _letters() -> str:
    return ", ".join(f"{method[0]} for {method}" for method in METHODS[1:])


def _misses(verdicts: Verdicts) -> str:
    rows = []
    for place, found in by_place(verdicts).items():
        counts = {method: told_apart(verdicts, [trial for trial, _ in found], method) for method in METHODS}
        detected = counts.pop(PARITY)
        if detected.hits == detected.total:
            continue
        strength = strength_of(found)
        rows.append(
            [
                f"`{place.bug}`",
                f"`{place.host}`",
                place.size,
                f"`{place.precision}`",
                _count(detected),
                short(max(verdict.margin for _, verdict in found)),
                short(strength.norm_ratio),
                short(strength.filter_ratio),
                ", ".join(method for method, count in counts.items() if count.hits),
            ]
        )
    if not rows:
        return "Nothing."
    headers = [
        "bug",
        "host",
        "size",
        "precision",
        "detected",
        "largest margin",
        "norm ratio",
        "filter ratio",
        "seen by",
    ]
    return markdown_table(rows, headers)


def _count(count: Count) -> str:
    return f"{count.hits} of {count.total}" if count.total else "–"


def _told(trial: Trial) -> str:
    what = f"`{trial.bug}` in `{trial.host}`" if trial.bug else f"the right `{trial.host}`"
    return f"{what}, {trial.size}, `{trial.precision}`, seed {trial.seed}"
