"""Measure what the short sums of a Hopper's FP8 tensor cores cost, over the length of the sum.

Two matrices are cast to E4M3 under current scaling and multiplied with the sums of ``te_on_cpu.tensor_cores``: without
``use_split_accumulator`` (as TE does forward), with it (as TE does backward), and in plain FP32. Golden is the FP64
product of the same FP8 numbers, so only the error of the sum is measured. The error of the cast to FP8 is reported too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lab.studies import reporting
from lab.studies.reporting import (
    Claim,
    all_of,
    between,
    digits,
    mean_digits,
    ratio_interval,
    ratios,
    ratios_between,
)
from lab.studies.settings import Draw, check_names, normal, outliers
from parity.case.case import Rng
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.numerics.errors import measure
from parity.report.numbers import ratio, short
from parity.user_error import UserError
from te_on_cpu import float8, tensor_cores
from te_on_cpu.tensor_cores import HOPPER, Factor

RECORD = "fp8_accumulation.jsonl"
E4M3 = torch.float8_e4m3fn
# In turn: terms of a sum cancel; terms are of one sign, so sums grow; a few terms are much larger than the others.
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": normal,
    "positive": lambda rng, *shape: rng.uniform(*shape),
    "outliers": outliers,
}
WHOLE = 0  # the interval of sums that are never promoted
_SIDES = ("left", "right")  # the random streams of the two matrices


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        distributions: names in ``DISTRIBUTIONS``.
        lengths: lengths K of the sums.
        interval_length: the K at which promotion intervals are compared.
        intervals: numbers of products between promotions, multiples of 32.
        rows: rows of both matrices; ``rows**2`` sums are measured.
        seeds: how many seeds to run, starting at 0.
    """

    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    interval_length: int = 4096
    intervals: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    rows: int = 64
    seeds: int = 4


FULL = Settings()
QUICK = Settings(lengths=(128, 512, 2048), interval_length=2048, intervals=(32, 128, 512), rows=32, seeds=2)


@dataclass(frozen=True)
class Cost:
    """The error of sums of FP8 products.

    Attributes:
        relative_l2: ``|error| / |golden|`` over all sums.
        max_over_rms: the largest error over the root mean square of golden.
        max_relative: the largest relative error of a single sum, which says little where sums cancel.
    """

    relative_l2: float
    max_over_rms: float
    max_relative: float


@dataclass(frozen=True)
class Run:
    """One pair of matrices.

    Attributes:
        distribution: the distribution of their elements.
        length: the length K of the sums.
        seed: the seed of the elements.
    """

    distribution: str
    length: int
    seed: int


# Costs of a run by its way of adding: the number of products between promotions, or "fp32". "cast" is the cast to FP8.
Costs = Mapping[str, Cost]


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Run, Costs], Settings]:
    """Measure what is missing from the folder's record.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a distribution is unknown, or an interval is not a multiple of 32.
    """
    _check(settings)
    campaign: Campaign[Run, Costs] = Campaign(
        folder / RECORD, Costs, functools.partial(_identity, settings=settings), record.code_of(__name__)
    )
    return campaign.complete(runs(settings), lambda entry: costs_of(entry, settings), "adding"), settings


def costs_of(entry: Run, settings: Settings) -> Costs:
    """Multiply one pair of matrices with each way of adding, and measure the errors."""
    draw = DISTRIBUTIONS[entry.distribution]
    exact = [draw(Rng(entry.seed, purpose), settings.rows, entry.length) for purpose in _SIDES]
    scales = [float8.scale_from_amax(float8.amax_of(values), torch.finfo(E4M3).max) for values in exact]
    a, b = (_e4m3(values, scale) for values, scale in zip(exact, scales, strict=True))
    golden = b.double() @ a.double().t()

    def added(interval: int) -> Tensor:
        core = dataclasses.replace(HOPPER, promote_every=interval or HOPPER.promote_every)
        return tensor_cores.product(core, Factor(a, E4M3), Factor(b, E4M3), split=interval != WHOLE)

    unscaled = golden / (scales[0] * scales[1]).double()
    costs = {
        "fp32": _cost(b @ a.t(), golden),
        "cast": _cost(unscaled, exact[1].double() @ exact[0].double().t()),
    }
    return costs | {str(interval): _cost(added(interval), golden) for interval in _intervals(entry, settings)}


def mean(found: Mapping[Run, Costs], distribution: str, length: int, way: str) -> Cost:
    """Return the cost over all seeds: the root mean square of relative errors, and the largest of maxima."""
    costs = [each[way] for entry, each in found.items() if (entry.distribution, entry.length) == (distribution, length)]
    return Cost(
        relative_l2=math.sqrt(sum(cost.relative_l2**2 for cost in costs) / len(costs)),
        max_over_rms=max(cost.max_over_rms for cost in costs),
        max_relative=max(cost.max_relative for cost in costs),
    )


def runs(settings: Settings) -> Iterator[Run]:
    """Yield all pairs of matrices. Each length occurs once, even if it is also ``interval_length``."""
    for distribution in settings.distributions:
        for length in dict.fromkeys((*settings.lengths, settings.interval_length)):
            yield from (Run(distribution, length, seed) for seed in range(settings.seeds))


def _intervals(entry: Run, settings: Settings) -> tuple[int, ...]:
    always = (WHOLE, HOPPER.promote_every)
    return tuple(dict.fromkeys(always + (settings.intervals if entry.length == settings.interval_length else ())))


def _e4m3(values: Tensor, scale: Tensor) -> Tensor:
    return float8.decode(float8.encode(values, scale, E4M3).data, E4M3)


def _cost(result: Tensor, golden: Tensor) -> Cost:
    errors = measure(result, golden, torch.float32)
    relative = ((result.double() - golden) / golden).abs()
    return Cost(
        relative_l2=errors.relative_l2,
        max_over_rms=errors.max_abs / errors.golden_rms,
        max_relative=relative[golden != 0].max().item(),
    )


def _identity(entry: Run, settings: Settings) -> dict[str, Any]:
    start = record.fingerprint(DISTRIBUTIONS[entry.distribution](Rng(entry.seed, side), 1, 16) for side in _SIDES)
    chosen = {"rows": settings.rows, "intervals": list(_intervals(entry, settings)), "start": start}
    return dataclasses.asdict(entry) | chosen


def _check(settings: Settings) -> None:
    check_names("distributions", settings.distributions, DISTRIBUTIONS)
    for interval in settings.intervals:
        if interval < 1 or interval % HOPPER.products:
            raise UserError(f"intervals: {interval} is not a multiple of an instruction's {HOPPER.products} products")


# Claims about the short sums of FP8 tensor cores, next to this study's results.


FAST, SPLIT = str(WHOLE), str(HOPPER.promote_every)
Found = Mapping[Run, Costs]
_DEEPSEEK = 0.02
# A figure agrees with the source if it is within this factor, and an improvement by this factor is significant.
_OF_A_SIZE = 2.0


def claims(found: Found, settings: Settings) -> Iterator[Claim]:
    """Yield each claim with the result of its test on the distributions that were run."""
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
    """Return the exponent p of ``relative L2 error ~ K**p`` for each seed, the slope of a line through the logarithms.

    It is NaN if an error is 0 or there is only one length.
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
ways with the CPU kernels' model of that unit (`te_on_cpu/tensor_cores.py`, with its sources; no GPU was used)
and compares with the FP64 product of the same FP8 numbers. `normal` is N(0, 1), `positive` is uniform on [0, 1),
`outliers` is N(0, 1) plus N(0, 100) in one element of a thousand. {sums} sums a seed, seeds 0 to {last_seed}."""

_CONCLUSION = """\
- Activations after ReLU, softmax or a sigmoid are of one sign; if the weights that meet them mostly are too, a long
  forward GEMM wants `Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True))`."""


def write(found: Mapping[Run, Costs], settings: Settings, folder: Path) -> Path:
    """Write ``fp8_accumulation.md`` and ``.png`` into the folder, and return the report's path."""
    _plot(found, settings).savefig(folder / "fp8_accumulation.png", dpi=110)
    return reporting.written(folder / "fp8_accumulation.md", _sections(found, settings))


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
