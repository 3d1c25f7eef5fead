"""Format numbers and markdown tables for people to read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from parity import shown

# Numbers for people to read: by default, two significant digits, and three from 100 on.


def short(value: float, digits: int = 2) -> str:
    """Return a number as short text, such as ``0.43``, ``140``, ``2.9e-4`` or ``∞``; ``–`` for NaN."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if digits > 1 and 99.5 <= abs(value) < 999.5:
        return f"{value:.0f}"
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{int(exponent)}"


def cosine(value: float) -> str:
    """Return a cosine as text. Near 1, only the distance from 1 is informative: ``1 - 4.2e-8``."""
    distance = 1.0 - value
    if distance == 0.0 or not 0.0 < abs(distance) < 0.01:
        return short(value)
    return f"1 {'-' if distance > 0 else '+'} {short(abs(distance))}"


def ratio(numerator: float, denominator: float) -> str:
    """Return one error as a multiple of another; ``–`` if both are zero."""
    if denominator == 0.0:
        return short(math.inf if numerator > 0.0 else math.nan)
    return short(numerator / denominator)


def seeds(values: tuple[int, ...]) -> str:
    """Return seeds as text, such as ``0``, ``0 to 19`` or ``0, 3, 7``."""
    if len(values) > 2 and values == tuple(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 item`` or ``3 items``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# Tables in GitHub's dialect of markdown.


def markdown_table(rows: Iterable[Iterable[object]], headers: Sequence[str], left: int | None = None) -> str:
    """Return a markdown table whose cells, numbers included, are not reformatted.

    Args:
        rows: the cells, which become text. ``|`` and line ends are escaped.
        headers: a heading for each column.
        left: how many columns, from the first, are left-aligned; the others are right-aligned. None aligns no column.
    """
    cells = [[_in_cell(str(cell)) for cell in row] for row in rows]
    alignment = None if left is None else ["left"] * left + ["right"] * (len(headers) - left)
    headers = [_in_cell(header) for header in headers]
    return tabulate(cells, headers, tablefmt="github", disable_numparse=True, colalign=alignment)


def _in_cell(cell: str) -> str:
    """Escape each ``|``, so that an odd number of backslashes is before it, however many the cell has there."""
    return re.sub(r"((?:\\\\)*)(\\?)\|", lambda found: f"{found[1]}{2 * found[2]}\\|", shown.line(cell))
