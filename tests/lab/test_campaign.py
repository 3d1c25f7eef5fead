"""A campaign makes what its record lacks, and nothing twice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from parity.lab import record
from parity.lab.campaign import Campaign, FourDigits, made

CODE = {"torch": "2"}


@dataclass(frozen=True)
class Square:
    root: int
    of: FourDigits


def square(root: int) -> Square:
    return Square(root, root**2)


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign[int, Square]:
    return Campaign(tmp_path / "runs.jsonl", Square, lambda root: {"number": root}, CODE)


def test_only_what_the_record_lacks_is_made_in_the_order_of_the_jobs(campaign: Campaign[int, Square]) -> None:
    done: list[int] = []
    campaign.keep(2, square(2))
    found = campaign.complete((3, 2, 1, 3), lambda root: done.append(root) or square(root), "squaring")
    assert done == [3, 1]
    assert list(found.items()) == [(root, square(root)) for root in (3, 2, 1)]
    assert campaign.finished((4, 1)) == {1: square(1)}


def test_what_was_made_before_an_interruption_is_kept_with_the_code_that_made_it(tmp_path: Path) -> None:
    campaign: Campaign[int, Square] = Campaign(tmp_path / "runs", Square, lambda root: {"number": root}, CODE)

    def make(root: int) -> Square:
        if root == 3:
            raise KeyboardInterrupt
        return square(root)

    with pytest.raises(KeyboardInterrupt):
        campaign.complete((1, 2, 3, 4), make, "squaring")
    assert campaign.finished((1, 2, 3, 4)) == {1: square(1), 2: square(2)}
    assert record.outdated(tmp_path / "runs", CODE) is None


def test_numbers_are_kept_with_four_digits_and_nan_as_null(campaign: Campaign[int, Square], tmp_path: Path) -> None:
    for root, number in enumerate((math.pi, math.nan, math.inf)):
        campaign.keep(root, Square(root, number))
    assert [entry["of"] for entry in record.read(tmp_path / "runs.jsonl").values()] == [3.142, None, math.inf]
    found = campaign.finished(range(3))
    assert found[0].of == 3.142
    assert math.isnan(found[1].of)


def test_processes_make_every_job(tmp_path: Path) -> None:
    assert dict(made((-1, -2, -3), abs, "taking magnitudes", 2)) == {-1: 1, -2: 2, -3: 3}
