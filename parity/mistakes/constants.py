"""Say which numbers a port may have where the reference has its own: one policy and one table for all mistakes.

A search for a port's number begins at the values that people use, and close to the reference's own on either side. From
whichever value leaves the least error it goes on to numbers up to eight times as large or as small, and farther while
the error keeps falling (``parity.search.screen.tuned``). So it finds a number that stands in no table as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

NORM_EPS = (1e-5, 1e-6, 1e-8, 1e-12)
"""eps of TE's modules, of Llama, and of BERT's family."""

LARGE_NORM_EPS = (1e-4, 1e-3)
"""eps of Keras and of models converted from it. Matched filters leave these out: those for smaller eps see them too."""

ROPE_BASES = (10_000.0, 500_000.0, 1_000_000.0, 100_000.0, 1_000.0)
"""Bases of Llama, Llama 3, Qwen, and others between them, the likeliest first."""

GRID_ROPE_BASES = (100.0, 10_000.0)
"""Bases of rotations by rows and columns: DINOv3's and EVA-02's, and that of most others."""

ROPE_SHARES = (0.25, 0.5, 0.75, 1.0, 0.375, 0.125, 0.625, 0.875)
"""Shares of a head's channels that models rotate, and the eighths between them."""

LLAMA3_LENGTHS, YARN_LENGTHS = (8192.0,), (4096.0, 32768.0)
"""Lengths that models were trained with before their frequencies were scaled."""

LLAMA3_FACTORS, YARN_FACTORS = (8.0, 32.0), (4.0, 40.0)
"""Factors by which published models scale their frequencies."""

INTERPOLATION_FACTORS = (2.0, 4.0, 8.0)
"""Factors by which positions are divided (TE's ``seq_len_interpolation_factor``)."""

SOFTCAPS = (30.0, 50.0)
"""Gemma 2's caps of logits and of scores."""

GATE_LIMITS = (7.0, 10.0, 2.0)
"""Limits of clamped gated units: gpt-oss's, another common one, and one from which a search reaches smaller ones."""

LEAKY_SLOPE = 0.01
"""PyTorch's slope of leaky ReLU."""

LABEL_SMOOTHINGS = (0.1,)
"""The label smoothing that most people use."""

Z_LOSSES = (1e-4, 1e-3, 1e-2)
"""Factors of the z-loss: PaLM's and larger ones."""

TEMPERATURES = (0.7, 0.6, 0.8, 1.2)
"""Temperatures at which tokens are sampled."""

WEIGHT_DECAYS = (0.01, 0.1)
"""``torch.optim.AdamW``'s default, and that of most language models."""

MOMENTA = (0.9, 0.95, 0.99, 0.999)
"""Momenta of SGD and betas of Adam."""

OPTIMIZER_EPS = (1e-8, 1e-6, 1e-5)
"""eps of Adam: PyTorch's default and those of some large models."""

# Times the reference's own number: so near to it that the error falls, whichever side the port's number is on.
_NEAR = (0.9, 1.1)

Numbered = TypeVar("Numbered")
"""A mistake about a number: a dataclass with the fields ``value`` and ``tuned``."""


def numbers(
    made: Callable[[float], Numbered], own: Iterable[float] = (), usual: Iterable[float] = (), subtle: bool = False
) -> Iterator[Numbered]:
    """Yield a mistake with each number at which the search for a port's number begins.

    Args:
        made: from a positive number to the mistake with it, which changes nothing where the number is the reference's.
        own: the reference's own number, or numbers where its places differ; those that are not positive and finite
            are passed over.
        usual: numbers that people use, the likeliest first.
        subtle: whether a matched filter looks for the mistake. It gets one direction, that of a number next to the
            reference's own, else of the likeliest: what any other number near it changes points along the same line.
    """
    near = [factor * number for number in own for factor in _NEAR]
    known = [number for number in dict.fromkeys((*usual, *near)) if 0.0 < number < math.inf]
    nearest = near[-1] if near and near[-1] in known else next(iter(known), None)
    for mistake in map(tunable(made), known):
        is_nearest = subtle and mistake.value == nearest  # type: ignore[attr-defined]
        yield replace(mistake, subtle=True) if is_nearest else mistake  # type: ignore[type-var]


def tunable(made: Callable[[float], Numbered]) -> Callable[[float], Numbered]:
    """Return ``made`` such that its mistakes say which number they are about and can be made again with another."""

    def with_number(number: float) -> Numbered:
        mistake: Numbered = replace(made(number), value=number, tuned=with_number)  # type: ignore[type-var]
        return mistake

    return with_number


# What people write: numbers of a digit below 0.01 and of two above, powers of two, simple fractions, small whole
# numbers, and the roots of heads' widths, by which scores are scaled; or one over any of these. A search that fits the
# wrong mistake ends anywhere: of numbers spread evenly in their logarithm, 2 % below 0.01 and 20 % above pass.


_SMALL = 0.01
_LARGEST_WHOLE = 64
_FRACTIONS = tuple(part / 16 for part in range(1, 33))
_ROOTS = tuple(math.sqrt(width) for width in range(8, 257, 8))
_SAME = 0.002  # two numbers whose ratio is this near to 1 are not told apart by a search


def is_written(number: float) -> bool:
    """Return whether people write such a number, so that a search which ends at it has found what the port has.

    Args:
        number: positive.
    """
    rounded = float(f"{number:.0e}" if number < _SMALL else f"{number:.1e}")
    whole = (float(one) for one in range(1, _LARGEST_WHOLE + 1))
    power = 2.0 ** round(math.log2(number))
    known = (rounded, power, *_FRACTIONS, *whole, *_ROOTS)
    return any(abs(one / number - 1.0) < _SAME or abs(one * number - 1.0) < _SAME for one in known)
