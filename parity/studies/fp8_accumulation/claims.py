"""What is said of the short sums of FP8 tensor cores, next to what the study ``fp8_accumulation`` found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping

from parity.cpu.products.accumulation import HOPPER
from parity.report.numbers import short
from parity.studies.fp8_accumulation.study import WHOLE, Cost, Costs, Run, Settings
from parity.studies.over_seeds import all_of, between, mean_digits, ratio_interval, ratios, ratios_between
from parity.studies.tables import Claim

FAST, SPLIT = str(WHOLE), str(HOPPER.promote_every)
Found = Mapping[Run, Costs]
_DEEPSEEK = 0.02
# A figure is of the source's size within this factor, and an improvement significant from it on.
_OF_A_SIZE = 2.0


def claims(found: Found, settings: Settings) -> Iterator[Claim]:
    """Each claim with its test on the distributions that were run."""
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
