"""Draw the report of the study ``fp8_accumulation``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from parity.cpu.tensor_cores import HOPPER
from parity.lab.studies.fp8_accumulation import WHOLE, Cost, Costs, Run, Settings, mean
from parity.lab.studies.reports import shared as reporting
from parity.lab.studies.reports.shared import (
    Claim,
    all_of,
    between,
    digits,
    mean_digits,
    ratio_interval,
    ratios,
    ratios_between,
)
from parity.report.numbers import ratio, short

# What is said of the short sums of FP8 tensor cores, next to what the study ``fp8_accumulation`` found.


FAST, SPLIT = str(WHOLE), str(HOPPER.promote_every)
Found = Mapping[Run, Costs]
_DEEPSEEK = 0.02
# A figure is of the source's size within this factor, and an improvement significant from it on.
_OF_A_SIZE = 2.0


def claims(found: Found, settings: Settings) -> Iterator[Claim]:
    """Yield each claim with its test on the distributions that were run."""
    yield _size(found, settings)
    yield _promotion(found, settings)
    if "normal" in settings.distributions:
        yield _hidden(found, settings)
    if "positive" in settings.distributions and len(settings.lengths) > 1:
        yield _growing(found, settings)


def of_seeds(found: Found, distribution: str, length: int, way: str) -> list[Cost]:
    """Return the cost of one way of adding at each seed."""
    return [each[way] for run, each in found.items() if (run.distribution, run.length) == (distribution, length)]


def growth(found: Found, settings: Settings, distribution: str, way: str) -> list[float]:
    """Return, of each seed, p of the law ``relative L2 error ~ K**p``: the slope of a line through the logarithms.

    NaN where an error is 0 or there is but one length.
    """
    by_length = [of_seeds(found, distribution, length, way) for length in settings.lengths]
    return [_slope(settings, [cost.relative_l2 for cost in of_seed]) for of_seed in zip(*by_length, strict=True)]


def _slope(settings: Settings, errors: list[float]) -> float:
    if len(errors) < 2 or min(errors) == 0.0:
        return math.nan
    return statistics.linear_regression([math.log(k) for k in settings.lengths], [math.log(e) for e in errors]).slope


def _ratios(found: Found, distribution: str, length: int, way: str, over: str) -> list[float]:
    ones, others = ([cost.relative_l2 for cost in of_seeds(found, distribution, length, each)] for each in (way, over))
    return ratios(ones, others)


def _size(found: Found, settings: Settings) -> Claim:
    length = settings.interval_length
    largest = {
        name: [cost.max_over_rms for cost in of_seeds(found, name, length, FAST)] for name in settings.distributions
    }
    return Claim(
        "DeepSeek-V3 (arXiv 2412.19437, section 3.3.2): two random matrices, K = 4096",
        "maximum relative error of nearly 2 %",
        f"K = {length}, mean over seeds: "
        + "; ".join(f"{name} {mean_digits([100 * each for each in errors])} %" for name, errors in largest.items()),
        all_of(
            [
                ratios_between([each / _DEEPSEEK for each in errors], 1 / _OF_A_SIZE, _OF_A_SIZE)
                for errors in largest.values()
            ]
        ),
        "the source names neither the distribution nor what the error is relative to; ours is the largest error over "
        f"the RMS of {settings.rows**2} sums. Within a factor of {_OF_A_SIZE:g} counts as agreement",
    )


def _promotion(found: Found, settings: Settings) -> Claim:
    gains = {name: _ratios(found, name, settings.interval_length, FAST, SPLIT) for name in settings.distributions}
    return Claim(
        "ibid.",
        f"promotion every {SPLIT} products improves precision significantly",
        f"K = {settings.interval_length}: relative L2 smaller by a factor of "
        + "; ".join(f"{name} {short(ratio_interval(of_seed)[0])}" for name, of_seed in gains.items()),
        all_of([ratios_between(of_seed, _OF_A_SIZE, math.inf) for of_seed in gains.values()]),
        f"a factor of {_OF_A_SIZE:g} counts as significant",
    )


def _hidden(found: Found, settings: Settings) -> Claim:
    over_cast = {length: _ratios(found, "normal", length, FAST, "cast") for length in settings.lengths}
    worst = max(over_cast, key=lambda length: max(over_cast[length]))
    return Claim(
        "this project",
        "where terms cancel, fast sums lose less than the cast to FP8 at every K",
        f"normal: at most {short(max(over_cast[worst]))} of the cast's error, at K = {worst}",
        all_of([ratios_between(of_length, 0.0, 1.0) for of_length in over_cast.values()]),
        "what is cut off is proportional to the sum so far, which stays small",
    )


def _growing(found: Found, settings: Settings) -> Claim:
    slopes = growth(found, settings, "positive", FAST)
    return Claim(
        "this project",
        "where all terms are of one sign, fast sums lose more and more: the relative error grows faster than K",
        f"positive: as K^{statistics.fmean(slopes):.2f}",
        between(slopes, 1.0, math.inf),
        "what is cut off is proportional to the sum so far, and always toward zero; in the end the sum stops growing",
    )


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
ways with the CPU kernels' model of that unit (`parity/cpu/tensor_cores.py`, with its sources; no GPU was used)
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
    yield reporting.claims(claims(found, settings))
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
    return reporting.numbers(
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
    return reporting.numbers(rows, ["promoted every", *headers])


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
