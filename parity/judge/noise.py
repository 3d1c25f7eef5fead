"""Tell whether a statistic has grown by more than right kernels of the same port differ.

Two versions of TransformerEngine, of PyTorch, of a driver or of a GPU round the same item in different ways. Golden and
the expected error are the same for both, so faults of the rounding model cancel, and much smaller changes can be told
than a limit allows. A limit's own law cannot tell them: a right port whose statistic grows by some distance from above
the law's center lies at least that far above the center, so the law allows such a growth as often as a failure.

So growth has laws of its own, measured on the same items under kernels that are known to be right (``python -m lab
noise``) and fitted like limits. There are two, because noise depends on what has changed:

- *alike*: nothing that decides how kernels round has changed. Only the order of sums may differ.
- *others*: TransformerEngine, PyTorch, a library, the GPU or a choice among kernels has changed. Kernels may then split
  sums, keep fewer bits of them or round operands differently (``parity.numerics.kernel_choices``). They may be right
  and still err by half as much again as expected.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from scipy import special

from parity.judge import limits
from parity.judge.limits import FALSE_ALARMS_A_RUN, SIGNED, Key, Law, Table
from parity.result import Check, Kind

PACKAGED = Path(__file__).with_name("noise.json")
Kernels = Literal["alike", "others"]
# Every other precision stores its results in 16 bits, and its kernels have the same choices.
_FP32, _SIXTEEN_BITS = "fp32", "16 bits"
# Components along a direction share one law, because few tensors were measured for `mistake` alone.
_COMPONENT = "gain or mistake"


def growth(before: Check, after: Check, precision: str, kind: Kind) -> float:
    """Return by how much a statistic has grown.

    An error that is no larger than expected is as good as none, so a ratio below 1 counts as 1: kernels that round as
    much as the model or less are right. If a limit is wider than the packaged one, because few numbers scale a whole
    gradient or because the user has another table, a value counts for proportionally less.

    Args:
        before, after: the checks of the same statistic and tensor in two runs.
        precision: the precision's name.
        kind: the tensor's kind.

    Returns:
        The logarithm of the ratio of both values; for a signed statistic the difference in standard deviations,
        positive if the newer value has the larger magnitude.
    """
    old, new = _normalize_value(before, precision, kind), _normalize_value(after, precision, kind)
    if old == new:
        return 0.0
    if before.statistic in SIGNED:
        return math.copysign(new - old, abs(new) - abs(old))
    return math.log(max(new, 1.0)) - math.log(max(old, 1.0))


def _normalize_value(check: Check, precision: str, kind: Kind) -> float:
    law = limits.packaged().laws.get((precision, kind, check.statistic))
    return check.value if law is None else check.value * law.limit(check.statistic) / check.limit


@dataclass(frozen=True)
class Growth:
    """The difference of one tensor's statistic between two runs that are known to be right.

    Attributes:
        kernels: whether the kernels of the two runs round alike.
        runs: which two runs.
        precision: the precision's name.
        statistic: its name.
        tensor: the name of the tensor, with that of its item.
        value: as ``growth`` returns it.
    """

    kernels: Kernels
    runs: str
    precision: str
    statistic: str
    tensor: str
    value: float


def laws(measured: Iterable[Growth]) -> dict[Key, Law]:
    """Return the laws of growth, which are symmetric because either run may be the older one.

    Two versions may differ in everything that they compute, or in little of it. So a law is not that of all pairs of
    runs, but that of the pair that differs most.
    """
    grouped: dict[Key, dict[str, list[Growth]]] = defaultdict(lambda: defaultdict(list))
    for each in measured:
        grouped[_make_key(each.kernels, each.precision, each.statistic)][each.runs].append(each)
    found = {key: [law for group in by_runs.values() if (law := _fit_law(group))] for key, by_runs in grouped.items()}
    return {key: max(each, key=lambda law: law.spread) for key, each in found.items() if each}


def _fit_law(group: Sequence[Growth]) -> Law | None:
    """Return the law of one pair of runs; None if there are too few different tensors to extrapolate from."""
    tensors = [each.tensor for each in group]
    enough = len(set(tensors)) >= limits.FEWEST_TENSORS
    return limits.fit([each.value for each in group], tensors, SIGNED[0]) if enough else None


def allowed(
    kernels: Kernels, precision: str, statistic: str, elements: int, compared: int, table: Table | None = None
) -> float:
    """Return the growth that right kernels exceed, by its law, once in 1,000 comparisons of this many statistics.

    However similar kernels are, the norm of independent rounding errors scatters by ``1 / sqrt(2 n)`` of itself, and
    the ratio of two norms by ``1 / sqrt(n)``. So a law that is measured on large tensors is widened by this for small
    ones. A statistic that is the worst of many values depends on a few errors, so its spread is never smaller than the
    least spread for limits.

    Args:
        kernels: whether the kernels of both runs round alike.
        precision: the precision's name.
        statistic: its name.
        elements: the tensor's number of elements.
        compared: how many statistics the whole comparison of two runs has.
        table: the table of laws of growth; None for the packaged one.
    """
    law = (table or packaged()).laws[_make_key(kernels, precision, statistic)]
    least = limits.LEAST_SPREADS[statistic] if statistic in limits.WORST_OF_MANY else 0.0
    spread = max(law.spread, least)
    if statistic not in SIGNED:
        spread = math.hypot(spread, 1 / math.sqrt(max(elements, 1)))
    return _compute_quantile(law.tensors, FALSE_ALARMS_A_RUN / max(compared, 1)) * spread


@lru_cache(maxsize=1024)
def _compute_quantile(tensors: int, probability: float) -> float:
    return float(-special.stdtrit(tensors - 1, probability))


def packaged() -> Table:
    """Return the table that comes with parity."""
    return limits.load(PACKAGED)


def save(measured: Iterable[Growth], provenance: Mapping[str, Any], file: Path) -> None:
    """Write a table of laws of growth."""
    limits.save(Table(laws(measured), provenance), file)


def _make_key(kernels: Kernels, precision: str, statistic: str) -> Key:
    law = _COMPONENT if statistic in SIGNED else statistic
    return kernels, _FP32 if precision == _FP32 else _SIXTEEN_BITS, law
