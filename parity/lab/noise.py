"""Measure what right kernels of the same port differ by, from records of runs of the same right ports."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from parity.judge import noise
from parity.judge.noise import Growth, Kernels
from parity.report import record
from parity.report.changes import Change, between
from parity.report.record import Record
from parity.user_error import UserError


def measure(others: Sequence[Path], alike: Sequence[Path], output: Path) -> int:
    """Write the laws of growth between every two runs; return how many growths were measured.

    Args:
        others: records of runs of the same pairs, which are known to be right, under kernels that round otherwise.
        alike: those of kernels that round alike.
        output: the table.

    Raises:
        UserError: if no two of the runs share an item that both computed from the same numbers.
    """
    groups: dict[Kernels, list[Record]] = {
        "others": [record.read(file) for file in others],
        "alike": [record.read(file) for file in alike],
    }
    found = [
        growth
        for kernels, runs in groups.items()
        for number, (before, after) in enumerate(itertools.combinations(runs, 2))
        for change in between(before.results, after.results)
        for growth in _growths(kernels, f"{number}", change)
    ]
    missing = set(groups) - {each.kernels for each in found}
    if missing:
        raise UserError(f"no two runs of kernels {' and '.join(missing)} share an item computed from the same numbers")
    told = {kernels: [_named(run) for run in runs] for kernels, runs in groups.items()}
    noise.save(found, {"runs": told}, output)
    return len(found)


def _growths(kernels: Kernels, runs: str, change: Change) -> Iterator[Growth]:
    for each in change.statistics:
        name = f"{change.item.name} {each.tensor}"
        yield Growth(kernels, runs, each.precision, each.after.statistic, name, each.growth)


def _named(run: Record) -> str:
    here = run.environment
    return f"{here.device}, TransformerEngine {here.transformer_engine}, PyTorch {here.torch}, seeds {here.seeds}"
