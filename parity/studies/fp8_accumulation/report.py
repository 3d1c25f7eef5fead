"""Draws the report of the study ``fp8_accumulation``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from parity.cpu.products.accumulation import HOPPER
from parity.report.numbers import ratio, short
from parity.studies import tables
from parity.studies.fp8_accumulation.study import WHOLE, Cost, Costs, Run, Settings, mean

FAST, SPLIT = str(WHOLE), str(HOPPER.promote_every)
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
- What is cut off is proportional to the sum so far, and always toward zero. Where terms cancel, that hides behind the
  cast to FP8 at every K measured; where they are all of one sign, it grows faster than K until the sum stops growing.
  Activations after ReLU, softmax or a sigmoid are of one sign; if the weights that meet them mostly are too, a long
  forward GEMM wants `Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True))`."""


def write(found: Mapping[Run, Costs], settings: Settings, folder: Path) -> Path:
    """Write ``fp8_accumulation.md`` and ``.png`` into the folder; returns the report's path."""
    _plot(found, settings).savefig(folder / "fp8_accumulation.png", dpi=110)
    path = folder / "fp8_accumulation.md"
    path.write_text("\n\n".join(_sections(found, settings)) + "\n", encoding="utf-8")
    return path


def growth(found: Mapping[Run, Costs], settings: Settings, distribution: str, way: str) -> float:
    """The exponent p of the law ``relative L2 error ~ K**p``: the slope of a line through the logarithms.

    NaN where an error is 0 or there is but one length.
    """
    errors = [mean(found, distribution, length, way).relative_l2 for length in settings.lengths]
    if len(errors) < 2 or min(errors) == 0.0:
        return math.nan
    return statistics.linear_regression([math.log(k) for k in settings.lengths], [math.log(e) for e in errors]).slope


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
    yield _claims(found, settings)
    yield "## What it means"
    yield _meaning(found, settings)
    yield "Made by `parity study fp8_accumulation`."


def _by_length(found: Mapping[Run, Costs], settings: Settings) -> str:
    rows = []
    for length in settings.lengths:
        costs = [mean(found, name, length, way) for name in settings.distributions for way in _LABELS]
        rows.append([str(length), *(short(cost.relative_l2) for cost in costs)])
    slopes = [growth(found, settings, name, way) for name in settings.distributions for way in _LABELS]
    headers = [f"{name}, {way}" for name in settings.distributions for way in ("fast", "split", "FP32", "cast")]
    return tables.numbers(
        [*rows, ["p", *(short(slope) if math.isnan(slope) else f"{slope:.2f}" for slope in slopes)]], ["K", *headers]
    )


def _by_interval(found: Mapping[Run, Costs], settings: Settings) -> str:
    rows = []
    for interval in (*settings.intervals, WHOLE):
        costs = [mean(found, name, settings.interval_length, str(interval)) for name in settings.distributions]
        cells = [cell for cost in costs for cell in (short(cost.relative_l2), short(cost.max_over_rms))]
        rows.append([str(interval) if interval else "never", *cells])
    headers = [f"{name}, {what}" for name in settings.distributions for what in ("relative L2", "max / RMS")]
    return tables.numbers(rows, ["promoted every", *headers])


def _claims(found: Mapping[Run, Costs], settings: Settings) -> str:
    length = settings.interval_length
    fast = {name: mean(found, name, length, FAST) for name in settings.distributions}
    split = {name: mean(found, name, length, SPLIT) for name in settings.distributions}
    rows = [
        [
            "DeepSeek-V3 (arXiv 2412.19437, section 3.3.2): two random matrices, K = 4096",
            "maximum relative error of nearly 2 %",
            f"K = {length}: " + "; ".join(f"{name} {_percent(cost)}" for name, cost in fast.items()),
            "in size: the source names neither the distribution nor what the error is relative to; ours is the largest "
            "error over the RMS of the sums",
        ],
        [
            "ibid.: promotion every 128 products improves precision significantly",
            "–",
            "relative L2 smaller by "
            + "; ".join(f"{name} {ratio(fast[name].relative_l2, split[name].relative_l2)}" for name in fast),
            "yes",
        ],
    ]
    return tables.texts(rows, ["source", "its figure", "ours", "agree"])


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


def _percent(cost: Cost) -> str:
    return f"{short(100 * cost.max_over_rms)} %"


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
