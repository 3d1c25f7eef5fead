"""Rows that the suite leaves out are covered by others: each value and, of three parameters, each pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from covering import choose_rows


@pytest.mark.parametrize("sizes", [(7,), (3, 3), (6, 5), (4, 3, 3), (5, 2, 2, 2)], ids=str)
def test_chosen_rows_cover_what_all_rows_cover(sizes: tuple[int, ...]) -> None:
    rows = [dict(enumerate(row)) for row in product(*map(range, sizes))]
    chosen = [rows[i] for i in choose_rows([{str(name): value for name, value in row.items()} for row in rows])]
    for together in range(1, max(2, min(3, len(sizes)))):
        for names in combinations(range(len(sizes)), together):
            assert {tuple(row[name] for name in names) for row in chosen} == set(
                product(*(range(sizes[n]) for n in names))
            )
    assert len(chosen) < len(rows) or len(sizes) == 1


def test_rows_of_one_table_all_stay() -> None:
    table = [(1, "a"), (1, "b"), (2, "a")]
    assert choose_rows([{"number,letter": row} for row in table]) == [0, 1, 2]


def test_a_parameter_with_one_value_counts_for_nothing() -> None:
    assert choose_rows([{"n": n, "same": 0} for n in range(4)]) == [0, 1, 2, 3]
