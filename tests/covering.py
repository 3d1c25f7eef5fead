"""Choose a few rows of a parametrized test that cover what all rows cover, one by one and in pairs.

A test with several parameters has a row for each combination of their values. What a wrong line of code does hardly
ever depends on more than two values at once (Kuhn, Wallace and Gallo, "Software fault interactions", IEEE TSE 30,
2004), so rows are left out if others have each of their values and, with three parameters or more, each pair of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest


def choose_rows(rows: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Return the numbers of rows that cover all rows, in order.

    Args:
        rows: each row's value of each parameter.
    """
    columns = [column for name in rows[0] if len(set(column := [row[name] for row in rows])) > 1]
    if len(columns) < 2:
        return list(range(len(rows)))
    together = min(2, len(columns) - 1)
    owed = [set(combinations(enumerate(column[i] for column in columns), together)) for i in range(len(rows))]
    chosen = []
    while any(owed):
        best = max(range(len(rows)), key=lambda i: len(owed[i]))
        chosen.append(best)
        covered = set(owed[best])
        owed = [one - covered for one in owed]
    return sorted(chosen)


def leave_out_rows(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out rows that others cover and slow ones, unless all are asked for, or tests by name.

    Slow are those that ``slow.txt`` names and those marked ``only_full``.


    Raises:
        pytest.UsageError: if a line of ``slow.txt`` names no test of a file that was collected.
    """
    if config.getoption("--full") or any("::" in one for one in config.args) or config.getoption("keyword"):
        return
    tests: dict[str, list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = _find_slow_rows(items) | {item for item in items if item.get_closest_marker("only_full")}
    for rows in tests.values():
        kept = choose_rows([_read_values(row) for row in rows])
        left_out |= set(rows) - {rows[i] for i in kept}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _find_slow_rows(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    by_name = {item.nodeid: item for item in items}
    files = {name.partition("::")[0] for name in by_name}
    lines = (Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").splitlines()
    slow = [f"tests/{line}" for line in lines if not line.startswith("#")]
    unknown = [name for name in slow if name not in by_name and name.partition("::")[0] in files]
    if unknown:
        raise pytest.UsageError(f"tests/slow.txt names no test: {unknown[0]}")
    return {by_name[name] for name in slow if name in by_name}


def _read_values(item: Any) -> dict[str, Hashable]:
    """Return what each ``parametrize`` of a test, and each parametrized fixture, gives to this row."""
    values: dict[str, Hashable] = {name: id(value) for name, value in item.callspec.params.items()}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        of_mark = [name.strip() for name in names.split(",") if name.strip() in values]
        values[names] = tuple([values.pop(name) for name in of_mark])  # a row of a table is kept as a whole
    return values
