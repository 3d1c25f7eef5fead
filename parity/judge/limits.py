"""Derive limits: the rate of false alarms, the law of each statistic over faithful ports, and the table of laws."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from parity import data_files
from parity.data_files import NotReadableError
from parity.user_error import UserError

# How often a run may raise a false alarm: all limits follow from this.


# What limits aim at: a whole run of the default suite raises a false alarm at most once in a thousand runs.
FALSE_ALARMS_A_RUN = 1e-3
# The number of statistics that such a run judges, rounded up: about 300 comparisons of 6 tensors by 7 statistics each.
STATISTICS_A_RUN = 20_000


# What was counted of that: an extrapolation as far as 1e-3 / 20,000 is no measurement. A test holds it to the reports.
COUNTED = (
    "of 5,130 right ports on emulated kernels, at seeds that no limit was fitted to, 1 was rejected, so at most one in "
    "1,080 is (95 % confidence)"
)

# The definition of a margin in reports. README and docs/design.md say the same.
MARGIN = "the worst statistic over its limit"


def describe() -> str:
    """Return how limits are set and what was counted of that, in two sentences."""
    return (
        "Each tensor is judged by several statistics of its error: the norm, the largest element, the worst row and "
        "slice, its bias in one direction, and its resemblance to known mistakes, on Gaussian and on probing inputs. "
        f"Limits aim at a false alarm in one of {1 / FALSE_ALARMS_A_RUN:,.0f} runs of the default suite, which is an "
        f"extrapolation; counted was less: {COUNTED}."
    )


# The distribution of one statistic over faithful ports, and the limit that it sets.
#
# The logarithm of a ratio is modelled as normal above its center, which is the median, or 0 if that is higher. The
# lower side has another shape, which does not matter because an error below the model's is never a failure. A signed
# statistic is modelled as normal around zero. Tensors differ, so tails are heavier than normal near the top. The spread
# is therefore that of the narrowest normal distribution whose upper tail lies nowhere below the measured one. The limit
# is a quantile of Student's t distribution, since the spread is known from finitely many tensors. A tensor counts once,
# however many seeds it was measured with, since its values resemble each other.


SIGNED = ("gain", "mistake")
WORST_OF_MANY = ("largest", "row", "slice")
# No spread counts as smaller than this, because no rounding model is trusted more closely. The spreads are of the
# logarithm, and wider for statistics that are the worst of many values, which a few errors decide. For signed
# statistics they are in standard deviations.
_LEAST_SPREAD = 0.1
LEAST_SPREADS = {"largest": 0.15, "row": 0.15, "slice": 0.15, "gain": 1.0, "mistake": 1.0}
# With fewer tensors the quantiles of Student's t are astronomical, and a limit that nothing exceeds is useless.
FEWEST_TENSORS = 8
# In standard deviations. A law need not fit closer to the center.
_TAIL_BEGINS = 1.0
# Smaller ratios count as this one: 0 has no logarithm, and ratios so small do not matter.
SMALLEST_RATIO = 1e-3


@dataclass(frozen=True)
class Law:
    """The distribution of one statistic over faithful ports.

    Attributes:
        center: median of the ratio's logarithm, at least 0; 0 for a signed statistic.
        spread: standard deviation of a normal distribution around the center that bounds the upper tail.
        tensors: how many different tensors were measured.
        samples: how many values were measured.
        largest: the largest value that was seen, as a ratio or in standard deviations.
    """

    center: float
    spread: float
    tensors: int
    samples: int
    largest: float

    def limit(self, statistic: str, probability: float = FALSE_ALARMS_A_RUN / STATISTICS_A_RUN) -> float:
        """Return the value that a faithful port exceeds with this probability.

        Args:
            statistic: its name; for one of ``SIGNED`` the limit is for its magnitude.
            probability: the probability of a false alarm from one statistic of one tensor.
        """
        signed = statistic in SIGNED
        quantile = -special.stdtrit(self.tensors - 1, probability / 2 if signed else probability)
        distance = float(quantile * self._effective_spread(statistic))
        return distance if signed else _compute_exponential(self.center + distance)

    def deviations(self, value: float, statistic: str) -> float:
        """Return how many standard deviations a value lies above the center; for a signed statistic, its magnitude."""
        signed = statistic in SIGNED
        distance = abs(value) if signed else math.log(max(value, SMALLEST_RATIO)) - self.center
        return distance / self._effective_spread(statistic)

    def _effective_spread(self, statistic: str) -> float:
        return max(self.spread, LEAST_SPREADS.get(statistic, _LEAST_SPREAD))


def fit(values: Sequence[float], tensors: Sequence[str], statistic: str) -> Law:
    """Return the law that fits the values of faithful ports.

    Args:
        values: finite, at least one.
        tensors: the name of each value's tensor, which only serves to tell tensors apart.
        statistic: its name.

    Raises:
        UserError: if there are too few different tensors to extrapolate from.
    """
    count = len(set(tensors))
    if count < FEWEST_TENSORS:
        raise UserError(too_few(count))
    signed = statistic in SIGNED
    measured = np.asarray(values, dtype=float)
    if signed:
        center, distances = 0.0, np.abs(measured)
    else:
        logarithms = np.log(np.maximum(measured, SMALLEST_RATIO))
        center = max(0.0, float(np.median(logarithms)))
        distances = logarithms - center
    return Law(center, _fit_spread(np.sort(distances), signed), count, len(measured), float(np.abs(measured).max()))


def _compute_exponential(exponent: float) -> float:
    """Return the exponential; infinity if no float can hold it."""
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


def too_few(count: int) -> str:
    """Say why this many tensors are not enough."""
    return (
        f"{count} different tensors cannot show what happens once in a million times; give cases that have at least "
        f"{FEWEST_TENSORS} of each kind"
    )


def _fit_spread(distances: NDArray[np.float64], signed: bool) -> float:
    """Return the spread of the narrowest normal distribution (half-normal for magnitudes) that bounds
    the sorted distances' tail.
    """
    ranks = (np.arange(len(distances)) + 0.5) / len(distances)
    quantiles = special.ndtri((1 + ranks) / 2 if signed else ranks)
    tail = quantiles >= _TAIL_BEGINS
    return max(0.0, float(np.max(distances[tail] / quantiles[tail], initial=0.0)))


# A JSON file of laws by precision, kind of tensor and statistic, with its provenance.


PACKAGED = Path(__file__).with_name("packaged.json")
_FORMAT = 1
# A limit this large proves nothing: faithful ports have never set one above 10, and 1/2**20 is FP32's own rounding.
_PASSES_ALL = 1e6

Key = tuple[str, str, str]
"""Precision, kind of tensor, statistic."""


@dataclass(frozen=True, eq=False)
class Table:
    """The laws that ``parity calibrate`` has measured.

    Attributes:
        laws: by precision, kind of tensor and statistic.
        provenance: versions, device, cases, sizes and seeds.
    """

    laws: Mapping[Key, Law]
    provenance: Mapping[str, Any]

    def has_laws(self, precision: str) -> bool:
        """Return whether a precision of this name was measured."""
        return any(key[0] == precision for key in self.laws)

    def limit(self, precision: str, kind: str, statistic: str, family: str = "") -> float:
        """Return the largest value that passes.

        Args:
            precision: its name.
            kind: the kind of tensor.
            statistic: its name.
            family: the name of a precision whose law is taken if this one has none.

        Raises:
            UserError: if the table has no law for it.
        """
        law = self.laws.get((precision, kind, statistic), self.laws.get((family, kind, statistic)))
        if law is None:
            raise UserError(
                f"the calibration table has no limit for {statistic!r} of the kind {kind!r} at {precision}; "
                f"make one with: parity calibrate --precision {precision}"
            )
        return _compute_limit(law, statistic)


@lru_cache(maxsize=1024)
def _compute_limit(law: Law, statistic: str) -> float:
    return law.limit(statistic)


def save(table: Table, file: Path) -> None:
    """Write the table, sorted, one law per line, so that two tables can be compared by eye."""
    laws = [
        json.dumps({"precision": key[0], "kind": key[1], "statistic": key[2], **_round_floats(dataclasses.asdict(law))})
        for key, law in sorted(table.laws.items())
    ]
    provenance = json.dumps(dict(table.provenance), indent=2).replace("\n", "\n  ")
    text = f'{{\n  "format": {_FORMAT},\n  "provenance": {provenance},\n  "laws": [\n    '
    file.write_text(text + ",\n    ".join(laws) + "\n  ]\n}\n", encoding="utf-8")


@lru_cache(maxsize=4)
def load(file: Path) -> Table:
    """Read a table.

    Raises:
        UserError: if the file does not exist, it cannot be read, or one of its laws gives no limit.
    """
    if not file.exists():
        raise UserError(f"there is no calibration table {file}; make one with: parity calibrate --out {file}")
    data = data_files.bytes_of(file, "the calibration table")
    try:
        loaded = data_files.parsed(data, _table_of)
    except NotReadableError as error:
        raise UserError(f"{file} is not a calibration table: {error}; make one with: parity calibrate") from None
    for key, law in loaded.laws.items():
        why = why_no_limit(key, law)
        if why:
            raise UserError(f"{file} has a law that gives no limit: {why}; make another table with: parity calibrate")
    return loaded


def _table_of(content: Any) -> Table:
    """Return the table that a file's JSON describes."""
    if content["format"] != _FORMAT:
        raise NotReadableError(f"it has format {content['format']!r}, but this version reads {_FORMAT}")
    laws: dict[Key, Law] = {}
    for position, each in enumerate(content["laws"]):
        fields = dict(each)
        key = fields.pop("precision"), fields.pop("kind"), fields.pop("statistic")
        if not all(isinstance(part, str) for part in key):
            raise NotReadableError(f"laws.{position}: precision, kind and statistic must be texts")
        if key in laws:
            raise NotReadableError(f"laws.{position}: it has a second law for {key[2]!r} of {key[1]!r} in {key[0]}")
        laws[key] = Law(**fields)
    if not isinstance(content["provenance"], dict):
        raise NotReadableError("provenance: it is not an object")
    return Table(laws, content["provenance"])


def why_no_limit(key: Key, law: Law) -> str:
    """Say why a law gives no useful limit; return an empty text if it gives one."""
    what = f"{key[2]!r} of the kind {key[1]!r} in {key[0]}"
    for field in dataclasses.fields(law):
        value = getattr(law, field.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"{what} has the {field.name} {value!r}, which is not a number"
        if value < 0 and field.name != "center":
            return f"{what} has the {field.name} {value:g}, which is below 0"
    if law.tensors != int(law.tensors) or law.tensors < 2:
        return f"{what} was measured on {law.tensors:g} tensors; a limit needs a whole number of at least 2"
    limit = law.limit(key[2])
    if not 0 < limit < _PASSES_ALL:
        return f"{what} would be {limit:.2g}, where {'nothing passes' if limit <= 0 else 'everything would pass'}"
    return ""


def packaged() -> Table:
    """Return the table that comes with parity."""
    return load(PACKAGED)


def _round_floats(law: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in law.items()}


# How a table's limits differ from the packaged ones, as plain data for a run's record.


TIMES = 2.0  # as in the rule below


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
        """Return the limit over the packaged one."""
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
        accepted: which limits were far outside but accepted anyway; empty if none were.
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
# - a port showed a value that, by the packaged law, right ports show in less than one calibration in a thousand;
# - the law's limit would be more than ``TIMES`` the packaged one, even if it were known from as many tensors. Having
#   few tensors already makes a limit wider (Student's t), which is no sign of a wrong port.
#
# Twice the expected error is four times its variance, as much as a kernel loses that does each rounding of the model
# four times. The model already rounds everything that the least fused faithful kernel stores, so no kernel should need
# that.


def compared(table: Table) -> tuple[OfPrecision, ...]:
    """Compare each of a table's limits with the packaged one, by precision; return nothing for the packaged table."""
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
    # Fewer than one right calibration in a thousand has a value this rare.
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
