"""Say by how much a table's limits differ from the packaged ones, and which of them lie far outside."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parity.judge.limits import FALSE_ALARMS_A_RUN, Key, Law, Table, packaged

# How a table's limits differ from the packaged ones, as plain data for a run's record.


TIMES = 2.0


@dataclass(frozen=True)
class Difference:
    """A limit that differs from the packaged table's.

    Attributes:
        kind, statistic: the kind of tensor and the statistic.
        limit: the table's.
        packaged: the packaged table's.
    """

    kind: str
    statistic: str
    limit: float
    packaged: float

    @property
    def ratio(self) -> float:
        """The limit over the packaged one."""
        return self.limit / self.packaged if self.packaged else math.inf  # a damaged record may have 0


@dataclass(frozen=True)
class OfPrecision:
    """A table's limits at one precision against the packaged ones.

    Attributes:
        precision: its name.
        shared: how many laws both tables have.
        wider: how many limits are more than ``TIMES`` the packaged ones.
        tighter: how many are less than the packaged ones by more than that factor.
        widest, tightest: the limits with the largest and the smallest ratio; None if no law is shared.
        unknown: how many laws the packaged table lacks.
        accepted: which limits were far outside, and accepted all the same; empty if none were.
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
    """Return the widest limit of all, with its precision; None if no law is shared."""
    limits = [(each.precision, each.widest) for each in found if each.widest is not None]
    return max(limits, key=lambda entry: entry[1].ratio, default=None)


# By how much a table's limits differ from the packaged ones, and which of them lie far outside.
#
# A wrong port among those that a table was measured on widens its limits until the port passes. So a user's own table
# is checked against the packaged one. A law lies *far outside* if both of these hold:
#
# - a port showed a value that, by the packaged law, right ports show in less than one calibration in a thousand; - the
# law's limit would be more than ``TIMES`` the packaged one, even if it were known from as many tensors. Having few
#   tensors already makes a limit wider (Student's t), which is no sign of a wrong port.
#
# Twice the expected error is four times its variance: what a kernel loses that does each rounding of the model four
# times. The model already rounds all that the least fused of faithful kernels stores, so no kernel should need that.


def compared(table: Table) -> tuple[OfPrecision, ...]:
    """Compare each of a table's limits with the packaged one, by precision; return nothing for the
    packaged table itself.
    """
    known = packaged()
    if table.laws == known.laws:
        return ()
    return tuple(_of_precision(table, known, name) for name in sorted({key[0] for key in table.laws}))


def _of_precision(table: Table, known: Table, precision: str) -> OfPrecision:
    keys = sorted(key for key in table.laws if key[0] == precision)
    shared = [Difference(*key[1:], table.limit(*key), known.limit(*key)) for key in keys if key in known.laws]
    provenance = table.provenance.get(precision)
    return OfPrecision(
        precision,
        shared=len(shared),
        wider=sum(each.ratio > TIMES for each in shared),
        tighter=sum(each.ratio < 1 / TIMES for each in shared),
        widest=max(shared, key=lambda each: each.ratio, default=None),
        tightest=min(shared, key=lambda each: each.ratio, default=None),
        unknown=len(keys) - len(shared),
        accepted=str(provenance.get("accepted", "")) if isinstance(provenance, Mapping) else "",
    )


def far_outside(laws: Mapping[Key, Law]) -> dict[Key, Difference]:
    """Return the laws of one calibration that lie far outside the packaged ones (see above), the widest first."""
    known = packaged()
    # So rare that less than one right calibration in a thousand has such a value.
    rare = FALSE_ALARMS_A_RUN / max(1, sum(law.samples for law in laws.values()))
    found = {
        key: Difference(*key[1:], law.limit(key[2]), known.limit(*key))
        for key, law in laws.items()
        if key in known.laws and _is_far_outside(law, known.laws[key], key[2], rare)
    }
    return dict(sorted(found.items(), key=lambda entry: -entry[1].ratio))


def _is_far_outside(law: Law, known: Law, statistic: str, rare: float) -> bool:
    as_well_known = dataclasses.replace(law, tensors=max(law.tensors, known.tensors))
    is_rare = law.largest > known.limit(statistic, rare)
    return is_rare and as_well_known.limit(statistic) > TIMES * known.limit(statistic)
