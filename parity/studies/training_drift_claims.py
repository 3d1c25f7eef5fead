"""Golden et al.'s claims about what flash attention does to training, tested on the figures of ``training_drift``."""

from __future__ import annotations

from collections.abc import Sequence

from parity.report.numbers import ratio, short
from parity.studies.claims import Claim, verdict
from parity.studies.drift_trajectory import Kind, Run, Settings, rounds_alike
from parity.studies.training_drift import Drift, Drifts, Pair

# Two drifts are of a size if neither is this many times the other: two seeds differ as much.
OF_A_SIZE = 2.0
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


def low_formats(settings: Settings) -> list[str]:
    """The formats below FP32."""
    return [name for name in settings.formats if name != "fp32"]


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


def _below_low_precision(found: Drifts, settings: Settings) -> Claim:
    kinds: tuple[Kind, ...] = ("flash", "flash everywhere", "nudged")
    factors = {kind: {name: _factors(found, settings, name, kind) for name in low_formats(settings)} for kind in kinds}
    ours, everywhere, nudged = (
        "; ".join(f"{name} {_listed(of_seeds)}" for name, of_seeds in factors[kind].items()) for kind in kinds
    )
    return Claim(
        "Flash attention's drift (from baseline attention) is below low-precision training's (from FP32).",
        "2 to 5 times, Wasserstein",
        f"Wasserstein-1, low precision over flash, a figure a seed: {ours}. With every step rounded: {everywhere}.",
        verdict([_SOURCE_LOW <= one <= _SOURCE_HIGH for of_seeds in factors["flash"].values() for one in of_seeds]),
        "Training passes on whatever moves it, so much of flash's drift is not flash's own: baseline attention from "
        "weights moved by one FP32 unit in the last place drifts by low precision's drift over "
        f"{nudged}. What is left is one rounding of attention against low precision's roundings of "
        "every layer.",
    )


def _factors(found: Drifts, settings: Settings, number_format: str, kind: Kind) -> list[float]:
    """Low precision's last drift over that of a kind of run, for each seed."""
    return [
        of_format(found, number_format, seed).last.whole.wasserstein
        / of_algorithm(found, kind, number_format, seed).last.whole.wasserstein
        for seed in range(settings.seeds)
    ]


def _below_other_start(found: Drifts, settings: Settings) -> Claim:
    holds, ours = [], []
    for name in settings.formats:
        texts = []
        for seed in range(settings.seeds):
            flash, other = of_algorithm(found, "flash", name, seed).last.whole, of_other_start(found, seed).last.whole
            holds.append(flash.wasserstein < other.wasserstein)
            texts.append(ratio(other.wasserstein, flash.wasserstein))
        ours.append(f"{name} {', '.join(texts)}")
    return Claim(
        "Flash attention's drift is below that of another random initialisation.",
        "–",
        f"Wasserstein-1, other start over flash, a figure a seed: {'; '.join(ours)}.",
        verdict(holds),
        "Wasserstein-1 compares the weights as sets. Two initialisations are two draws from one distribution, so as "
        "sets they are near each other from the start, while each weight is another: the largest difference says so.",
    )


def _port_is_faithful(found: Drifts, settings: Settings, precisions: Sequence[str]) -> Claim:
    holds, ours = [], []
    for name in precisions:
        factors = [
            of_te(found, name, seed).last.whole.wasserstein / of_rounding(found, name, seed).last.whole.wasserstein
            for seed in range(settings.seeds)
        ]
        holds += [1 / OF_A_SIZE <= factor <= OF_A_SIZE for factor in factors]
        ours.append(f"{name} {_listed(factors)}")
    return Claim(
        "(This project's own.) TE's modules drift from plain FP32 as far as their precision's roundings make plain "
        "PyTorch drift.",
        f"1, within a factor of {OF_A_SIZE:g}",
        f"Wasserstein-1, TE over the plain model under the rounding model, a figure a seed: {'; '.join(ours)}.",
        verdict(holds),
        "The rounding model rounds what TE's kernels do, elsewhere by a unit in the last place. Two such trainings are "
        "about as far from each other as from FP32.",
    )


def _listed(factors: Sequence[float]) -> str:
    return ", ".join(map(short, factors))
