"""Draws the report of the study ``fp8_accumulation``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from parity.report.numbers import ratio, short
from parity.studies import tables
from parity.studies.fp8_accumulation import claims
from parity.studies.fp8_accumulation.claims import FAST, SPLIT, growth, of_seeds
from parity.studies.fp8_accumulation.study import WHOLE, Costs, Run, Settings, mean
from parity.studies.over_seeds import digits

_LABELS = {
    FAST: "fast: 14 bits over all of K",
    SPLIT: f"split: 14 bits, promoted every {SPLIT}",
    "fp32": "FP32",
    "cast": "(the cast to FP8 itself)",
}


_INTRODUCTION = """\
A Hopper's tensor core adds 32 FP8 products at a time to a sum of which it keeps 14 bits, and cuts off the rest.
Without `use_split_accumulator`, which TE asks for in the forward pass of its per-tensor recipes, one such sum runs
over all of K; with it, as TE asks backward, it is added to a sum in FP32 every {split} products. This study adds both
ways with the CPU kernels' model of that unit (`parity/cpu/products/accumulation.py`, with its sources; no GPU was used)
and compares with the FP64 product of the same FP8 numbers. `normal` is N(0, 1), `positive` is uniform on [0, 1),
`outliers` is N(0, 1) plus N(0, 100) in one element of a thousand. {sums} sums a seed, seeds 0 to {last_seed}."""

_CONCLUSION = """\
- Activations after ReLU, softmax or a sigmoid are of one sign; if the weights that meet them mostly are too, a long
  forward GEMM wants `Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True))`."""


def write(found: Mapping[Run, Costs], settings: Settings, folder: Path) -> Path:
    """Write ``fp8_accumulation.md`` and ``.png`` into the folder; returns the report's path."""
    _plot(found, settings).savefig(folder / "fp8_accumulation.png", dpi=110)
    path = folder / "fp8_accumulation.md"
    path.write_text("\n\n".join(_sections(found, settings)) + "\n", encoding="utf-8")
    return path


def _sections(found: Mapping[Run, Costs], settings: Settings) -> Iterator[str]:
    yield "# What the short sums of FP8 tensor cores cost"
    yield _INTRODUCTION.format(split=SPLIT, sums=settings.rows**2, last_seed=settings.seeds - 1)
    yield "![Relative error over K](fp8_accumulation.png)"
    yield "## Over K"
    yield "Relative L2 error of the sums, and of the cast to E4M3 beside it. The last row is p in `error ~ K^p`."
    yield _by_length(found, settings)
    yield f"## Over the interval between promotions, at K = {settings.interval_length}"
    yield _by_interval(found, settings)
    yield "## Claims"
    yield tables.claims(claims.claims(found, settings))
    yield "## What it means"
    yield _meaning(found, settings)
    yield "Made by `parity study fp8_accumulation`."


def _by_length(found: Mapping[Run, Costs], settings: Settings) -> str:
    rows = []
    for length in settings.lengths:
        cells = [_relative_l2(found, name, length, way) for name in settings.distributions for way in _LABELS]
        rows.append([str(length), *cells])
    slopes = [
        statistics.fmean(growth(found, settings, name, way)) for name in settings.distributions for way in _LABELS
    ]
    headers = [f"{name}, {way}" for name in settings.distributions for way in ("fast", "split", "FP32", "cast")]
    return tables.numbers(
        [*rows, ["p", *(short(slope) if math.isnan(slope) else f"{slope:.2f}" for slope in slopes)]], ["K", *headers]
    )


def _by_interval(found: Mapping[Run, Costs], settings: Settings) -> str:
    rows = []
    for interval in (*settings.intervals, WHOLE):
        of_each = [(name, settings.interval_length, str(interval)) for name in settings.distributions]
        cells = [
            cell
            for which in of_each
            for cell in (_relative_l2(found, *which), short(mean(found, *which).max_over_rms, 1))
        ]
        rows.append([str(interval) if interval else "never", *cells])
    headers = [f"{name}, {what}" for name in settings.distributions for what in ("relative L2", "max / RMS")]
    return tables.numbers(rows, ["promoted every", *headers])


def _relative_l2(found: Mapping[Run, Costs], distribution: str, length: int, way: str) -> str:
    errors = [cost.relative_l2 for cost in of_seeds(found, distribution, length, way)]
    return digits(mean(found, distribution, length, way).relative_l2, errors)


def _meaning(found: Mapping[Run, Costs], settings: Settings) -> str:
    length = settings.interval_length
    lines = []
    for name in settings.distributions:
        fast, split, cast = (mean(found, name, length, way).relative_l2 for way in (FAST, SPLIT, "cast"))
        lines.append(
            f"- **{name}**, K = {length}: fast sums lose {short(fast)}, split ones {short(split)}, where the cast to "
            f"FP8 has cost {short(cast)} before: together {ratio(math.hypot(fast, cast), cast)} and "
            f"{ratio(math.hypot(split, cast), cast)} times the cast alone."
        )
    lines.append(_CONCLUSION)
    return "\n".join(lines)


def _plot(found: Mapping[Run, Costs], settings: Settings) -> Figure:
    names = settings.distributions
    figure = Figure(figsize=(4.6 * len(names), 4.4), layout="constrained")
    axes = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axis, name in zip(axes, names, strict=True):
        for way, label in _LABELS.items():
            errors = [mean(found, name, length, way).relative_l2 for length in settings.lengths]
            axis.loglog(settings.lengths, errors, marker="o", label=label, linestyle=":" if way == "cast" else "-")
        axis.set(title=name, xlabel="K, products in a sum")
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("relative L2 error")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(_LABELS), fontsize="small"
    )
    return figure
