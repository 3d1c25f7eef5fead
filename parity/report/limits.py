"""What every report says of limits that are not the packaged ones: a pass by wider limits proves less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parity.limits.difference import TIMES, Difference, OfPrecision, widest
from parity.report.numbers import short
from parity.report.tables import markdown_table

_COLUMNS = (
    *("precision", f"limits more than {TIMES:g} times as wide", f"less than 1/{TIMES:g} as wide", "of", "widest"),
    *("times the packaged one", "tightest", "times the packaged one", "not in the packaged table", "accepted"),
)


def told(file: str, compared: Sequence[OfPrecision] | None) -> str:
    """Say by how much a table's limits differ from the packaged ones; empty without a table.

    Args:
        file: the table's; empty for the packaged one.
        compared: its limits against the packaged ones; None where that is not known.
    """
    if not file:
        return ""
    if compared is None:
        return f"{file} (this record does not say how they differ from the packaged ones)"
    if not compared:
        return f"{file} (the same as the packaged ones)"
    of_all = widest(compared)
    if of_all is None:
        return f"{file} (the packaged table has none for these precisions, so that they were compared with nothing)"
    precision, difference = of_all
    wider, tighter, shared = (sum(getattr(each, name) for each in compared) for name in ("wider", "tighter", "shared"))
    if difference.ratio <= 1.0:
        return f"{file} (none is wider than the packaged ones, and {tighter} of {shared} less than 1/{TIMES:g} as wide)"
    return (
        f"{file} ({precision} {_told(difference)}, {short(difference.ratio)} times as wide, is the largest difference; "
        f"{wider} of {shared} limits are more than {TIMES:g} times as wide as the packaged ones"
        f"{'; accepted when the table was made' if any(each.accepted for each in compared) else ''})"
    )


def section(compared: Sequence[OfPrecision] | None) -> Iterator[str]:
    """A table with a row a precision; nothing where limits are the packaged ones, or not known."""
    if compared:
        yield "## Limits"
        yield (
            "These are not the packaged limits. Where they are wider, ports pass that the packaged ones reject; "
            "`parity calibrate` measures them on ports that somebody knows to be right."
        )
        yield markdown_table(map(_row, compared), _COLUMNS)


def _row(each: OfPrecision) -> tuple[object, ...]:
    counts = each.precision, each.wider, each.tighter, each.shared
    return *counts, *_cells(each.widest), *_cells(each.tightest), each.unknown, each.accepted


def _cells(difference: Difference | None) -> tuple[str, str]:
    return ("", "") if difference is None else (_told(difference), short(difference.ratio))


def _told(difference: Difference) -> str:
    """``norm of outputs 351 instead of 1.7``."""
    what = f"{difference.statistic} of {difference.kind}s"
    return f"{what} {short(difference.limit)} instead of {short(difference.packaged)}"
