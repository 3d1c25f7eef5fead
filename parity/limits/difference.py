"""How a table's limits differ from the packaged ones, as plain data that a run's record holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TIMES = 2.0


@dataclass(frozen=True)
class Difference:
    """A limit that is another one than the packaged table's.

    Attributes:
        kind, statistic: of what.
        limit: the table's.
        packaged: the packaged table's.
    """

    kind: str
    statistic: str
    limit: float
    packaged: float

    @property
    def ratio(self) -> float:
        """The limit in packaged ones."""
        return self.limit / self.packaged


@dataclass(frozen=True)
class OfPrecision:
    """A table's limits at one precision against the packaged ones.

    Attributes:
        precision: its name.
        shared: how many laws both tables have.
        wider: how many limits are more than ``TIMES`` the packaged ones.
        tighter: how many are less than the packaged ones by more than that.
        widest, tightest: the limits with the largest and the smallest ratio; None where no law is shared.
        unknown: how many laws the packaged table lacks.
        accepted: what of the limits was far outside, and taken all the same; empty if nothing was.
    """

    precision: str
    shared: int
    wider: int
    tighter: int
    widest: Difference | None
    tightest: Difference | None
    unknown: int
    accepted: str = ""


def widest(found: Iterable[OfPrecision]) -> tuple[str, Difference] | None:
    """Return the widest limit of all, with its precision; None where no law is shared."""
    limits = [(each.precision, each.widest) for each in found if each.widest is not None]
    return max(limits, key=lambda entry: entry[1].ratio, default=None)
