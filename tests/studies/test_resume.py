"""A study makes what its record lacks, and nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity.lab import record

CODE = {"torch": "2"}


def identity(run: int) -> dict[str, int]:
    return {"number": run}


def test_only_what_the_record_lacks_is_made_in_the_order_of_the_runs(tmp_path: Path) -> None:
    path, made = tmp_path / "runs.jsonl", []
    record.append(path, identity(2), 4, CODE)
    record.make_missing(path, (3, 2, 1), identity, lambda run: made.append(run) or run**2, "squaring", CODE)
    assert made == [3, 1]
    assert record.recorded(path, (1, 2, 3), identity) == {1: 1, 2: 4, 3: 9}
    assert record.outdated(path, CODE) is None


def test_what_was_made_before_an_interruption_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"

    def make(run: int) -> int:
        if run == 3:
            raise KeyboardInterrupt
        return run**2

    with pytest.raises(KeyboardInterrupt):
        record.make_missing(path, (1, 2, 3, 4), identity, make, "squaring", CODE)
    assert record.recorded(path, (1, 2, 3, 4), identity) == {1: 1, 2: 4}
