"""The report's overview: cases by precisions, each with its verdict and its worst margin."""

from __future__ import annotations

from collections.abc import Sequence

from parity.report.items import Item, precisions
from parity.report.numbers import short
from parity.report.tables import markdown_table

PASSED, FAILED, ERROR, SKIPPED = "✅", "❌", "💥", "–"


def draw(items: Sequence[Item]) -> str:
    """A markdown table; a cell is empty where the case does not ask for the precision."""
    columns = precisions(items)
    cases = dict.fromkeys(item.case for item in items)
    rows = []
    for case in cases:
        by_precision = {
            precision: [item for item in items if item.case == case and item.precision == precision]
            for precision in columns
        }
        rows.append([f"`{case}`", *(_cell(by_precision[precision]) for precision in columns)])
    return markdown_table(rows, ["case", *columns])


def verdict_of(item: Item) -> str:
    """``✅ 0.43``, ``❌ 140``, ``💥 error`` or ``–``."""
    if item.status == "skipped":
        return SKIPPED
    if item.status == "error":
        return f"{ERROR} error"
    return f"{PASSED if item.status == 'passed' else FAILED} {short(item.worst.margin)}"


def _cell(items: Sequence[Item]) -> str:
    """The worst item over all sizes."""
    for status in ("error", "failed", "passed", "skipped"):
        alike = [item for item in items if item.status == status]
        if alike:
            return verdict_of(max(alike, key=lambda item: 0.0 if status in ("error", "skipped") else item.worst.margin))
    return ""
