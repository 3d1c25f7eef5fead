"""Golden et al.'s claims about what flash attention does to training, tested on the figures of ``training_drift``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from parity.report.numbers import short
from parity.studies.over_seeds import CANNOT_TELL, all_of, ratio_interval, ratios_between
from parity.studies.tables import Claim, verdict
from parity.studies.training_drift.study import Drift, Drifts, Pair, low_formats
from parity.studies.training_drift.trajectory import Kind, Run, Settings, rounds_alike

# Two drifts are of a size if neither is this many times the other: two seeds differ as much.
OF_A_SIZE = 2.0
_SOURCE = "arXiv 2405.02803"
_SOURCE_LOW, _SOURCE_HIGH = 2.0, 5.0


def claims(found: Drifts, settings: Settings, precisions: Sequence[str]) -> list[Claim]:
    """Each claim with its test.

    Args:
        found: every pair's drift.
        settings: of the study.
        precisions: in which TE trained.
    """
    tested = []
    if low_formats(settings):
        tested = [test(found, settings) for test in (_below_low_precision, _over_other_start, _below_other_start)]
    if precisions:
        tested.append(_port_is_faithful(found, settings, precisions))
    return tested


def of_algorithm(found: Drifts, kind: Kind, number_format: str, seed: int) -> Drift:
    """A run's drift from baseline attention in the same format."""
    return found[Pair(Run(kind, number_format, seed), Run("baseline", number_format, seed))]


def of_format(found: Drifts, number_format: str, seed: int) -> Drift:
    """Baseline attention's drift in a format from that in FP32."""
    return found[Pair(Run("baseline", number_format, seed), Run("baseline", "fp32", seed))]


def of_other_start(found: Drifts, seed: int) -> Drift:
    """The drift of other starting weights, FP32."""
    return found[Pair(Run("other start", "fp32", seed), Run("baseline", "fp32", seed))]


def of_te(found: Drifts, precision: str, seed: int) -> Drift:
    """TE's drift from plain FP32."""
    return found[Pair(Run("te", precision, seed), Run("baseline", "fp32", seed))]


def of_rounding(found: Drifts, precision: str, seed: int) -> Drift:
    """The drift from plain FP32 of the plain model under a precision's rounding model."""
    return found[Pair(Run("rounded", rounds_alike(precision), seed), Run("baseline", "fp32", seed))]


def low_over_flash(found: Drifts, low: str, flash: str, seed: int) -> float:
    """Low precision's last drift, Wasserstein-1, over that of flash attention in the same or another format."""
    return _moved(of_format(found, low, seed)) / _moved(of_algorithm(found, "flash", flash, seed))


def every_seed(settings: Settings) -> range:
    """The seeds of low precision, flash attention, one ulp and another start."""
    return range(max(settings.seeds, settings.control_seeds))


def ulp_ratios(found: Drifts, settings: Settings, kind: Kind) -> dict[str, list[float]]:
    """By format and seed: flash attention's last drift, or low precision's (``baseline``), over that of one ulp."""
    ratios = {}
    for name in low_formats(settings):
        ratios[name] = [
            _moved(of_format(found, name, seed) if kind == "baseline" else of_algorithm(found, kind, name, seed))
            / _moved(of_algorithm(found, "nudged", name, seed))
            for seed in every_seed(settings)
        ]
    return ratios


def control(found: Drifts, settings: Settings) -> list[float]:
    """Flash attention's drift over that of one ulp without flash, at each seed the geometric mean over formats."""
    by_format = ulp_ratios(found, settings, "flash").values()
    return [statistics.geometric_mean(of_seed) for of_seed in zip(*by_format, strict=True)]


def separates(ratios: Sequence[float]) -> bool:
    """Return whether seeds tell flash attention from a change of one ulp: the interval of their ratio leaves out 1."""
    _, low, high = ratio_interval(ratios)
    return not low <= 1.0 <= high


def factor(ratios: Sequence[float]) -> str:
    """``1.5 (1.2 to 1.9)``: the geometric mean over seeds and its 95 % interval."""
    middle, low, high = ratio_interval(ratios)
    return short(middle) if len(ratios) < 2 else f"{short(middle)} ({short(low)} to {short(high)})"


def _below_low_precision(found: Drifts, settings: Settings) -> Claim:
    over_flash = {
        name: [low_over_flash(found, name, name, seed) for seed in every_seed(settings)]
        for name in low_formats(settings)
    }
    told = separates(control(found, settings))
    return Claim(
        _SOURCE,
        "flash attention's drift (from baseline attention) is 2 to 5 times below low-precision training's (from FP32)",
        f"Wasserstein-1, low precision over flash: {_named(over_flash)}; over one FP32 ulp without flash: "
        f"{_named(ulp_ratios(found, settings, 'baseline'))}.",
        all_of([ratios_between(of_seeds, _SOURCE_LOW, _SOURCE_HIGH) for of_seeds in over_flash.values()])
        if told
        else CANNOT_TELL,
        f"Flash's drift is {factor(control(found, settings))} times what one FP32 ulp in the initial weights does in "
        "the same format. Training passes on any difference of rounding, so where this is about 1, the figure on the "
        "left is no property of flash attention.",
    )


def _moved(drift: Drift) -> float:
    return drift.last.whole.wasserstein


def _named(factors: Mapping[str, Sequence[float]]) -> str:
    return "; ".join(f"{name} {factor(of_seeds)}" for name, of_seeds in factors.items())


def _over_other_start(found: Drifts, settings: Settings) -> Claim:
    factors = {
        name: [
            _moved(of_format(found, name, seed)) / _moved(of_other_start(found, seed)) for seed in every_seed(settings)
        ]
        for name in low_formats(settings)
    }
    below = [1 / one for of_seeds in factors.values() for one in of_seeds]
    return Claim(
        _SOURCE,
        "low precision's drift is above that of another random initialisation",
        f"Wasserstein-1, low precision over other start: {_named(factors)}; {short(min(below))} to {short(max(below))} "
        "times below it.",
        all_of([ratios_between(of_seeds, 1.0, math.inf) for of_seeds in factors.values()]),
        "Ours is a small model, trained briefly with FP32 master weights.",
    )


def _below_other_start(found: Drifts, settings: Settings) -> Claim:
    factors = {
        name: [
            _moved(of_other_start(found, seed)) / _moved(of_algorithm(found, "flash", name, seed))
            for seed in every_seed(settings)
        ]
        for name in low_formats(settings)
    }
    return Claim(
        "this project",
        "flash attention's drift is below that of another random initialisation",
        f"Wasserstein-1, other start over flash: {_named(factors)}.",
        all_of([ratios_between(of_seeds, 1.0, math.inf) for of_seeds in factors.values()]),
        "Wasserstein-1 compares the weights as sets. Two initialisations are two draws from one distribution, so as "
        "sets they are near each other from the start, while each weight is another: the largest difference says so.",
    )


def _port_is_faithful(found: Drifts, settings: Settings, precisions: Sequence[str]) -> Claim:
    factors = {
        name: [
            _moved(of_te(found, name, seed)) / _moved(of_rounding(found, name, seed)) for seed in range(settings.seeds)
        ]
        for name in precisions
    }
    return Claim(
        "this project",
        "TE's modules drift from plain FP32 as far as their precision's roundings make plain PyTorch drift, within a "
        f"factor of {OF_A_SIZE:g}",
        "Wasserstein-1, TE over the plain model under the rounding model, a figure a seed: "
        + "; ".join(f"{name} {', '.join(map(short, of_seeds))}" for name, of_seeds in factors.items()),
        verdict([1 / OF_A_SIZE <= one <= OF_A_SIZE for of_seeds in factors.values() for one in of_seeds]),
        "The rounding model rounds what TE's kernels do, elsewhere by a unit in the last place. Two such trainings are "
        "about as far from each other as from FP32.",
    )
