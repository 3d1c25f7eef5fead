"""Show a calibration table and how well its laws fit."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from parity.judge.limits import FALSE_ALARMS_A_RUN, STATISTICS_A_RUN, Table
from parity.lab.calibration.measure import LeftOut, Measured, Sample
from parity.report.numbers import markdown_table, short

_INTRODUCTION = f"""\
How far faithful ports stray from the rounding model, by statistic (`parity/judge/statistics.py`), kind of tensor and
precision. A port is the reference itself with the freedom of a kernel drawn at random (what it stores, into how many
parts it splits a sum), or a TransformerEngine module of the cases. `center` and `spread` are those of the ratio's
logarithm, or of the signed statistic; the limit is what a faithful port exceeds with probability
{FALSE_ALARMS_A_RUN:g} / {STATISTICS_A_RUN:,}, so that a whole run of the default suite raises a false alarm less often
than once in {1 / FALSE_ALARMS_A_RUN:,.0f} runs. [docs/statistics.md](../docs/statistics.md) explains it from the
start."""

_FIT = """\
Each measured value as standard deviations from its law's center, with the spread that the limit uses, against the
normal quantile of its rank (of its magnitude's rank for `gain` and `mistake`, which have a sign). The law bounds the
tail: beyond one standard deviation no point of a statistic of one kind of tensor lies above the line. The points end
where the samples do; the dotted line is where the limits lie at least, to which the law extrapolates."""


def write(table: Table, measured: Measured, path: Path) -> None:
    """Write the report, and its plot beside it.

    Args:
        table: laws.
        measured: to whose samples those of their precisions were fitted.
        path: of the markdown.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _plot(table, measured.samples).savefig(path.with_suffix(".png"), dpi=110)
    path.write_text("\n\n".join(_sections(table, measured, path)) + "\n", encoding="utf-8")


def _sections(table: Table, measured: Measured, path: Path) -> Iterator[str]:
    samples = measured.samples
    yield "# Calibration of the tolerances"
    yield _INTRODUCTION
    yield "## Provenance"
    yield _provenance(table.provenance)
    if measured.left_out:
        yield _left_out(measured.left_out)
    yield "## Fit"
    yield _FIT
    yield f"![Measured against expected standard deviations]({path.with_suffix('.png').name})"
    beyond = sum(abs(sample.value) > table.limit(*_key(sample)) for sample in samples)
    yield f"Of {len(samples):,} values, {beyond} lie beyond their limit."
    yield "## Laws"
    yield _laws(table)
    yield "Made by `parity calibrate`."


def _provenance(provenance: Mapping[str, Mapping[str, object]]) -> str:
    columns = list(dict.fromkeys(column for entry in provenance.values() for column in entry))
    rows = [
        [precision, *(_text(entry.get(column, "")) for column in columns)] for precision, entry in provenance.items()
    ]
    return markdown_table(rows, ["precision", *columns])


def _left_out(ports: Sequence[LeftOut]) -> str:
    """Return which cases could not run, each once a precision, with the first reason."""
    reasons = {(port.case, port.precision): port.reason for port in reversed(ports)}
    counts = Counter((port.case, port.precision) for port in ports)
    rows = [[*key, count, reasons[key]] for key, count in counts.items()]
    return "Left out, since they raise:\n\n" + markdown_table(rows, ["case", "precision", "ports", "what"])


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _laws(table: Table) -> str:
    rows = [
        [*key, f"{law.center:.3f}", f"{law.spread:.3f}", law.tensors, law.samples, short(law.largest), short(limit)]
        for key, law in sorted(table.laws.items())
        for limit in [table.limit(*key)]
    ]
    headers = ["precision", "kind", "statistic", "center", "spread", "tensors", "samples", "largest", "limit"]
    return markdown_table(rows, headers, left=3)


def _key(sample: Sample) -> tuple[str, str, str]:
    return sample.precision, sample.kind, sample.statistic


def _plot(table: Table, samples: Sequence[Sample]) -> Figure:
    precisions = list(dict.fromkeys(sample.precision for sample in samples))
    columns = min(4, len(precisions))
    figure = Figure(figsize=(3.6 * columns, 3.4 * math.ceil(len(precisions) / columns)), layout="constrained")
    axes = figure.subplots(math.ceil(len(precisions) / columns), columns, squeeze=False, sharex=True, sharey=True)
    required = stats.norm.isf(FALSE_ALARMS_A_RUN / STATISTICS_A_RUN)
    for axis, precision in zip(axes.flat, precisions, strict=False):
        for statistic, values in _standardized(table, samples, precision).items():
            ranks = (np.arange(len(values)) + 0.5) / len(values)
            axis.plot(stats.norm.ppf(ranks), np.sort(values), ".", markersize=2, label=statistic)
        axis.axline((0, 0), slope=1, color="black", linewidth=0.8)
        axis.axhline(required, color="black", linewidth=0.8, linestyle=":")
        axis.set(title=precision, xlabel="normal quantile", ylabel="measured", xlim=(-1, 6), ylim=(-3, 7))
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, markerscale=6)
    return figure


def _standardized(table: Table, samples: Sequence[Sample], precision: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.precision == precision:
            law = table.laws[_key(sample)]
            found[sample.statistic].append(law.deviations(sample.value, sample.statistic))
    return found
