"""Golden et al.'s claims about what flash attention does to training, tested on the figures of ``training_drift``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parity.report.numbers import short
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
        tested.append(_below_low_precision(found, settings))
    tested.append(_below_other_start(found, settings))
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


def _below_low_precision(found: Drifts, settings: Settings) -> Claim:
    low, every = low_formats(settings), range(settings.seeds)
    factors = {name: [low_over_flash(found, name, name, seed) for seed in every] for name in low}
    everywhere = {
        name: [
            _moved(of_format(found, name, seed)) / _moved(of_algorithm(found, "flash everywhere", name, seed))
            for seed in every
        ]
        for name in low
    }
    over_nudged = [
        _moved(of_algorithm(found, "flash", name, seed)) / _moved(of_algorithm(found, "nudged", name, seed))
        for name in low
        for seed in every
    ]
    return Claim(
        _SOURCE,
        "flash attention's drift (from baseline attention) is 2 to 5 times below low-precision training's (from FP32)",
        f"Wasserstein-1, low precision over flash, a figure a seed: {_named(factors)}. With every step rounded: "
        f"{_named(everywhere)}.",
        verdict([_SOURCE_LOW <= one <= _SOURCE_HIGH for of_seeds in factors.values() for one in of_seeds]),
        f"Flash's drift is {short(min(over_nudged))} to {short(max(over_nudged))} times what one FP32 ulp in the "
        "initial weights does in the same format. Rounding makes of any difference one of its own size, and training "
        f"passes that on, so what counts is which formats are compared{_across(found, settings)}.",
    )


def _across(found: Drifts, settings: Settings) -> str:
    """The factor with flash attention in one format and low precision in another, where there are several."""
    low = low_formats(settings)
    if len(low) < 2:
        return ""
    factors = [
        low_over_flash(found, one, other, seed) for one in low for other in low for seed in range(settings.seeds)
    ]
    return (
        f": with flash in any of {', '.join(low)} and low precision in any, the factor is {short(min(factors))} to "
        f"{short(max(factors))}"
    )


def _moved(drift: Drift) -> float:
    return drift.last.whole.wasserstein


def _named(factors: Mapping[str, Sequence[float]]) -> str:
    return "; ".join(f"{name} {_listed(of_seeds)}" for name, of_seeds in factors.items())


def _below_other_start(found: Drifts, settings: Settings) -> Claim:
    factors = {
        name: [
            _moved(of_other_start(found, seed)) / _moved(of_algorithm(found, "flash", name, seed))
            for seed in range(settings.seeds)
        ]
        for name in settings.formats
    }
    return Claim(
        "this project",
        "flash attention's drift is below that of another random initialisation",
        f"Wasserstein-1, other start over flash, a figure a seed: {_named(factors)}.",
        verdict([one > 1 for of_seeds in factors.values() for one in of_seeds]),
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
        f"Wasserstein-1, TE over the plain model under the rounding model, a figure a seed: {_named(factors)}.",
        verdict([1 / OF_A_SIZE <= one <= OF_A_SIZE for of_seeds in factors.values() for one in of_seeds]),
        "The rounding model rounds what TE's kernels do, elsewhere by a unit in the last place. Two such trainings are "
        "about as far from each other as from FP32.",
    )


def _listed(factors: Sequence[float]) -> str:
    return ", ".join(map(short, factors))
