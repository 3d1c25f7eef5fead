"""How an error grows with sizes: a power law in each of them, fitted to measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Sizes = Mapping[str, float]


@dataclass(frozen=True)
class Law:
    """``error(sizes) = base * prod((sizes[name] / reference[name]) ** exponents[name])``.

    Attributes:
        base: the error at the reference sizes.
        reference: the sizes that others are measured by.
        exponents: of those sizes that vary in the measurements.
        worst_factor: between a measurement and the law, at least 1.
    """

    base: float
    reference: Sizes
    exponents: Mapping[str, float]
    worst_factor: float

    def at(self, sizes: Sizes) -> float:
        """The error that the law gives."""
        return self.base * math.prod(
            (sizes[name] / self.reference[name]) ** exponent for name, exponent in self.exponents.items()
        )


def fit(measured: Sequence[tuple[Sizes, float]], reference: Sizes) -> Law | None:
    """The law whose logarithms are closest to the measurements' in the mean square.

    Args:
        measured: sizes, each with its error; errors that are 0 or not finite are left out.
        reference: of the law.

    Returns:
        None if no measurement is left.
    """
    usable = [(sizes, error) for sizes, error in measured if 0.0 < error < math.inf]
    if not usable:
        return None
    varying = [name for name in reference if len({sizes[name] for sizes, _ in usable}) > 1]
    logarithms = [[math.log(sizes[name] / reference[name]) for name in varying] for sizes, _ in usable]
    design = np.column_stack([np.ones(len(usable)), np.asarray(logarithms).reshape(len(usable), len(varying))])
    errors = np.log([error for _, error in usable])
    solution = np.linalg.lstsq(design, errors, rcond=None)[0]
    return Law(
        base=math.exp(solution[0]),
        reference=dict(reference),
        exponents=dict(zip(varying, solution[1:].tolist(), strict=True)),
        worst_factor=math.exp(np.abs(design @ solution - errors).max()),
    )
