"""Compare a run's errors with the packaged laws: ``python -m parity.measuring.gpu_report.limits RECORD REPORT``.

The laws come from emulated kernels until real ones have been measured. A run's record holds every statistic that was
judged, so that nothing has to run again for this.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from parity.judge import limits
from parity.judge.limits import Key
from parity.report import record
from parity.report.numbers import markdown_table, short
from parity.result import Result
from parity.user_error import UserError

_INTRODUCTION = """\
Each statistic of a run that passed or failed, in standard deviations of the packaged law (`reports/calibration.md`),
above its center. A law bounds the upper tail of right ports: about 16 % of them at most lie above 1, and 2 % above 2
(32 % and 5 % for `gain` and `mistake`, whose magnitude counts). A median far above 0 says that the rounding model is
too strict for these kernels; *beyond* are the values that a verdict fails."""
_HEADERS = ("precision", "kind", "statistic", "values", "median", "84 %", "largest", "largest / limit", "beyond")


@dataclass(frozen=True)
class Deviations:
    """All values of one statistic of one kind of tensor at one precision.

    Attributes:
        values: in standard deviations of the law above its center.
        margins: the same values as multiples of their limits.
    """

    values: tuple[float, ...]
    margins: tuple[float, ...]

    @property
    def beyond(self) -> int:
        """Return how many values lie beyond the limit."""
        return sum(margin > 1.0 for margin in self.margins)


def read(file: Path) -> dict[Key, Deviations]:
    """Return the deviations of a run's record from the packaged laws.

    Raises:
        UserError: if the record does not exist.
    """
    return deviations(record.read(file).results)


def deviations(results: Iterable[Result]) -> dict[Key, Deviations]:
    """Return deviations by precision, kind of tensor and statistic, leaving out statistics that have no law."""
    laws = limits.packaged().laws
    found: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for result in results:
        for tensor in result.tensors:
            for check in tensor.checks:
                key = (result.precision, tensor.kind, check.statistic)
                if key in laws:
                    found[key].append((laws[key].deviations(check.value, check.statistic), check.margin))
    return {key: Deviations(*map(tuple, zip(*pairs, strict=True))) for key, pairs in found.items()}


def widest(file: Path) -> tuple[float, Key]:
    """Return the largest ratio of another table's limit to the packaged one, and its key.

    Raises:
        UserError: if the file is not a table, or shares no law with the packaged one.
    """
    other, packaged = limits.load(file), limits.packaged()
    ratios = {key: other.limit(*key) / packaged.limit(*key) for key in other.laws if key in packaged.laws}
    if not ratios:
        raise UserError(f"{file} shares no law with the packaged table")
    key = max(ratios, key=lambda each: ratios[each])
    return ratios[key], key


def verdict(found: Mapping[Key, Deviations]) -> str:
    """Return one sentence with the number of values beyond their limits and the largest margin."""
    values = sum(len(each.values) for each in found.values())
    beyond = sum(each.beyond for each in found.values())
    if not values:
        return "no statistic was judged"
    key, worst = max(found.items(), key=lambda pair: max(pair[1].margins))
    told = f"the largest is {short(max(worst.margins))} of it ({', '.join(key)})"
    return f"{beyond} of {values:,} values lie beyond the packaged limit; {told}"


def draw(found: Mapping[Key, Deviations], kernels: str) -> str:
    """Return the report, markdown. ``kernels`` says whose errors these are."""
    rows = [(*key, *_format_figures(each)) for key, each in sorted(found.items())]
    parts = [
        "# A run against the packaged limits",
        f"Kernels: **{kernels}**. **{verdict(found)}.**",
        _INTRODUCTION,
        markdown_table(rows, _HEADERS),
    ]
    return "\n\n".join(parts) + "\n"


def _format_figures(found: Deviations) -> tuple[str, ...]:
    ordered = sorted(found.values)
    upper = ordered[min(len(ordered) - 1, math.floor(0.84 * len(ordered)))]
    figures = statistics.median(ordered), upper, ordered[-1], max(found.margins)
    return str(len(ordered)), *map(short, figures), str(found.beyond)


def _write_report(file: str, report: str) -> int:
    """Return the exit code: 0 if every value lies within its limit, 1 if one does not, 2 if there are none."""
    try:
        run = record.read(Path(file))
    except UserError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    found = deviations(run.results)
    Path(report).write_text(draw(found, run.environment.kernels), encoding="utf-8")
    print(verdict(found))
    if not found:
        return 2
    return int(any(each.beyond for each in found.values()))


if __name__ == "__main__":
    sys.exit(_write_report(*sys.argv[1:]))
