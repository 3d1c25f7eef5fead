"""Tables in GitHub's markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate


def markdown_table(rows: Iterable[Iterable[object]], headers: Sequence[str], left: int | None = None) -> str:
    """A table whose cells are shown as they are, numbers too.

    Args:
        rows: cells, which become text; a ``|`` in one does not end it.
        headers: one for each column.
        left: how many columns, from the first, are aligned to the left; the others are to the right. None for neither.
    """
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    alignment = None if left is None else ["left"] * left + ["right"] * (len(headers) - left)
    return tabulate(cells, headers, tablefmt="github", disable_numparse=True, colalign=alignment)
