"""How an error grows with sizes: a power of each, or for some a factor for each further one, fitted to measurements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Sizes = Mapping[str, float]
# An exponential is preferred to a power law only where it comes closer by so much: few points cannot tell them apart.
_CLEARLY = 1.05


@dataclass(frozen=True)
class Law:
    """``base * prod((size / reference) ** exponent) * prod(rate ** (size - reference))``.

    Attributes:
        base: the error at the reference sizes.
        reference: the sizes that others are measured by.
        exponents: of the sizes in which the error is a power law.
        rates: of those in which it grows by a factor for each further one.
        worst_factor: between a measurement and the law, at least 1.
    """

    base: float
    reference: Sizes
    exponents: Mapping[str, float]
    worst_factor: float
    rates: Mapping[str, float] = field(default_factory=dict)

    def at(self, sizes: Sizes) -> float:
        """The error that the law gives."""
        powers = math.prod((sizes[name] / self.reference[name]) ** each for name, each in self.exponents.items())
        return (
            self.base
            * powers
            * math.prod(rate ** (sizes[name] - self.reference[name]) for name, rate in self.rates.items())
        )


def fit(
    measured: Sequence[tuple[Sizes, float]], reference: Sizes, perhaps_exponential: Sequence[str] = ()
) -> Law | None:
    """The law whose logarithms are closest to the measurements' in the mean square.

    Args:
        measured: sizes, each with its error; errors that are 0 or not finite are left out.
        reference: of the law; sizes that do not vary in the measurements get neither exponent nor rate.
        perhaps_exponential: sizes in which the error may grow by a factor for each further one.

    Returns:
        None if no measurement is left.
    """
    usable = [(sizes, error) for sizes, error in measured if 0.0 < error < math.inf]
    if not usable:
        return None
    varying = [name for name in reference if len({sizes[name] for sizes, _ in usable}) > 1]
    doubtful = [name for name in perhaps_exponential if name in varying]
    choices = itertools.chain.from_iterable(itertools.combinations(doubtful, n) for n in range(len(doubtful) + 1))
    first, *others = (_fit(usable, reference, varying, exponential) for exponential in choices)
    best = min(others, key=lambda law: law.worst_factor, default=first)
    return best if best.worst_factor * _CLEARLY < first.worst_factor else first


def _fit(
    measured: Sequence[tuple[Sizes, float]], reference: Sizes, varying: Sequence[str], exponential: Sequence[str]
) -> Law:
    def coordinate(sizes: Sizes, name: str) -> float:
        if name in exponential:
            return sizes[name] - reference[name]
        return math.log(sizes[name] / reference[name])

    design = np.array([[1.0, *(coordinate(sizes, name) for name in varying)] for sizes, _ in measured])
    errors = np.log([error for _, error in measured])
    solution = np.linalg.lstsq(design, errors, rcond=None)[0]
    slopes = dict(zip(varying, solution[1:].tolist(), strict=True))
    return Law(
        base=math.exp(solution[0]),
        reference=dict(reference),
        exponents={name: slope for name, slope in slopes.items() if name not in exponential},
        worst_factor=math.exp(np.abs(design @ solution - errors).max()),
        rates={name: math.exp(slope) for name, slope in slopes.items() if name in exponential},
    )
