"""What a report keeps of a run, however long: counts of everything, and the items that are worth a look.

Nobody reads the tables of 100,000 results, and memory should not grow with them, so that beyond ``MOST_RESULTS`` only
the worst items of each case and precision are kept. The record has them all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from parity.report.environment import Environment
from parity.report.items import WORST_FIRST, Item, in_order
from parity.report.record import Record, Uncollected
from parity.result import Result, Status

MOST_RESULTS = 1_000
# Beyond these, so that not every new item leads to a cut.
_SLACK = MOST_RESULTS // 8


@dataclass
class _Cell:
    """Items of one case at one precision, by name."""

    items: dict[str, Item] = field(default_factory=dict)

    def cut(self, most: int) -> None:
        """Keep the worst."""
        if len(self.items) > most:
            worst = sorted(self.items.items(), key=lambda entry: _severity(entry[1]))[:most]
            self.items = dict(worst)

    @property
    def results(self) -> int:
        return sum(len(item.results) for item in self.items.values())


@dataclass
class Digest:
    """A run as its report shows it; grows by one item after another.

    Attributes:
        environment: where and with what it was made.
        counts: how many items there are of each status, also of those that are not kept.
        notes: how many items have each note, ditto.
        uncollected: pairs and files of which nothing was compared, by id.
    """

    environment: Environment
    counts: Counter[Status] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    uncollected: dict[str, Uncollected] = field(default_factory=dict)
    _cells: dict[tuple[str, str, str], _Cell] = field(default_factory=dict)  # by file, case and precision
    _results: int = 0
    _most: int = MOST_RESULTS  # items of a cell

    def add(self, results: Sequence[Result]) -> None:
        """Add an item, or more results of one.

        Args:
            results: of one item, at least one; one for each seed.
        """
        first = results[0]
        cell = self._cells.setdefault((first.path, first.case, first.precision), _Cell())
        before = cell.items.get(first.item)
        if before is not None:
            self.counts[before.status] -= 1
        earlier = before.results if before else ()
        self.notes.update(note for note in _notes(results) if note not in _notes(earlier))
        together = (*earlier, *results)
        cell.items[first.item] = item = Item(tuple(sorted(together, key=lambda result: result.seed)))
        self.counts[item.status] += 1
        self._results += len(results)
        if self._results > MOST_RESULTS + _SLACK:
            self._cut()

    @property
    def complete(self) -> bool:
        """Whether all that the run was to compare has a result."""
        return not (self.missing or self.uncollected)

    @property
    def failed(self) -> int:
        """How many items failed, or could not be compared."""
        return self.counts["failed"] + self.counts["error"]

    @property
    def missing(self) -> int:
        """How many items of the run have no result."""
        return max(self.environment.items - self.counts.total(), 0)

    @property
    def items(self) -> list[Item]:
        """Those that are kept, in an order that does not depend on which worker was faster."""
        if self._results > MOST_RESULTS:
            self._cut()
        return in_order(item for cell in self._cells.values() for item in cell.items.values())

    def _cut(self) -> None:
        """Keep as many of each cell as leave ``MOST_RESULTS`` in all, and at least one."""
        while True:
            for cell in self._cells.values():
                cell.cut(self._most)
            self._results = sum(cell.results for cell in self._cells.values())
            if self._results <= MOST_RESULTS or self._most == 1:
                return
            self._most //= 2


def digest(record: Record) -> Digest:
    """The digest of a run that was read back."""
    found = Digest(record.environment, uncollected={each.node_id: each for each in record.uncollected})
    by_item: dict[str, list[Result]] = {}
    for result in record.results:
        by_item.setdefault(f"{result.path}::{result.item}", []).append(result)
    for results in by_item.values():
        found.add(results)
    return found


def _notes(results: Sequence[Result]) -> dict[str, None]:
    return dict.fromkeys(note for result in results for note in result.notes)


def _severity(item: Item) -> tuple[int, float, str]:
    """Smaller for worse."""
    margin = item.worst.margin
    return WORST_FIRST.index(item.status), 0.0 if math.isnan(margin) else -margin, item.name
