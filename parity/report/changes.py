"""Compare two runs item by item, and draw what changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from parity import shown
from parity.report import failure
from parity.report.items import FAILED, PASSED, Item, in_order, verdict_of
from parity.report.numbers import markdown_table, plural, seeds, short
from parity.report.record import Record
from parity.result import Result

# What has changed from one run to another, item by item.


Kind = Literal["newly failing", "newly passing", "new", "gone", "otherwise", "margin", "none"]
_FAILED = ("failed", "error")


@dataclass(frozen=True)
class Change:
    """One item in two runs; at least one of them has it.

    Attributes:
        before: the item in the older run, or None.
        after: the item in the newer run, or None.
    """

    before: Item | None
    after: Item | None

    @property
    def item(self) -> Item:
        """The newer one if there is one."""
        shown = self.after or self.before
        assert shown is not None
        return shown

    @property
    def growth(self) -> float:
        """The newer margin over the older; NaN if one run did not compare, or both margins are 0 or infinite."""
        if self.before is None or self.after is None:
            return math.nan
        old, new = self.before.worst.margin, self.after.worst.margin
        if old == new or math.isnan(old) or math.isnan(new):
            return 1.0 if old == new else math.nan
        return new / old if old else math.inf

    def kind(self, factor: float) -> Kind:
        """Return what kind of change it is.

        Args:
            factor: a margin has to grow or shrink by this factor to count.
        """
        before = self.before.status if self.before else None
        after = self.after.status if self.after else None
        if after in _FAILED and before not in _FAILED:
            return "newly failing"
        if before is None:
            return "new"
        if after is None:
            return "gone"
        if after != before:
            return "newly passing" if after == "passed" else "otherwise"
        return "margin" if self.growth > factor or self.growth < 1 / factor else "none"


def between(before: Iterable[Result], after: Iterable[Result]) -> list[Change]:
    """Return every item of either run, in the order of reports.

    Items are the same where their names are: pairs of one run all have different names, and the path of a file depends
    on where a run was started.
    """
    old, new = _by_name(before), _by_name(after)
    ordered = in_order({**old, **new}.values())
    return [Change(old.get(item.name), new.get(item.name)) for item in ordered]


def _by_name(results: Iterable[Result]) -> dict[str, Item]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.item, []).append(result)
    return {name: Item(tuple(sorted(each, key=lambda result: result.seed))) for name, each in found.items()}


# Draw what has changed from one run to another: verdict, both environments, then a table for each kind of change.


_COLUMNS = ("item", "before", "now", "margin now / before", "worst tensor now", "findings")
_TITLES: dict[Kind, str] = {
    "newly failing": "Newly failing",
    "newly passing": "Newly passing",
    "otherwise": "Otherwise changed",
    "margin": "Other margins",
    "new": "New",
    "gone": "Gone",
}


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        before, after: the older and the newer one.
        names: the names of both, for the reader.
        factor: a margin has to grow or shrink by this factor to be reported.
    """

    before: Record
    after: Record
    names: tuple[str, str]
    factor: float

    @cached_property
    def changes(self) -> dict[Kind, list[Change]]:
        """Return what changed, by kind."""
        found: dict[Kind, list[Change]] = {}
        for change in between(self.before.results, self.after.results):
            found.setdefault(change.kind(self.factor), []).append(change)
        return found

    @property
    def shares_items(self) -> bool:
        """Return whether any item is in both runs."""
        return any(change.before and change.after for changes in self.changes.values() for change in changes)


def draw(runs: Comparison) -> str:
    """Return the whole report as GitHub markdown."""
    changes = runs.changes
    sections = [
        f"# Parity report: {shown.prose(runs.names[1])} against {shown.prose(runs.names[0])}",
        f"**{verdict(runs)}**",
        _environments(runs),
        "A cell holds an item's worst **margin** over all seeds, as in the report of a run: up to 1 passes.",
    ]
    for kind, title in _TITLES.items():
        if kind in changes:
            sections += [f"## {title}", *_told_of(kind, runs.factor), _table(changes[kind])]
    return shown.text("\n\n".join(sections) + "\n")


def verdict(runs: Comparison) -> str:
    """Sum up all changes in one line."""
    counts = {kind: len(changes) for kind, changes in runs.changes.items()}
    failing = counts.get("newly failing", 0)
    head = f"{PASSED} no item newly fails"
    if failing:
        head = f"{FAILED} {plural(failing, 'item')} newly failing"
    if not runs.shares_items:
        head = f"⚠️ the runs have no item in common; {head}"
    words: dict[Kind, str] = {
        "newly passing": "newly passing",
        "otherwise": "otherwise changed",
        "margin": f"with a margin that changed by more than {runs.factor:g} times",
        "new": "new",
        "gone": "gone",
        "none": "as before",
    }
    return ", ".join([head, *(f"{counts[kind]} {text}" for kind, text in words.items() if kind in counts)])


def _environments(runs: Comparison) -> str:
    before, after = (_facts(run) for run in (runs.before, runs.after))
    names = [*before, *(name for name in after if name not in before)]
    rows = [(name, before.get(name, ""), after.get(name, "")) for name in names]
    cells = [(*map(shown.prose, row), "" if row[1] == row[2] else "≠") for row in rows]
    return markdown_table(cells, ["environment", "before", "now", ""])


def _facts(run: Record) -> dict[str, str]:
    items = len({result.item for result in run.results})
    facts = {
        **run.environment.facts,
        "seeds": seeds(run.environment.seeds),
        "items with a result": f"{items} of {max(items, run.environment.items)}",
    }
    if run.uncollected:
        facts["not collected"] = ", ".join(each.node_id for each in run.uncollected)
    return facts


def _told_of(kind: Kind, factor: float) -> Iterator[str]:
    if kind == "margin":
        yield f"The verdict is the same, but the margin changed by more than {factor:g} times."


def _table(changes: Sequence[Change]) -> str:
    return markdown_table([_row(change) for change in changes], _COLUMNS)


def _row(change: Change) -> list[str]:
    after = change.after
    worst = after.worst.worst if after else None
    found = failure.findings(after) if after else []
    return [
        shown.code(change.item.name),
        _cell(change.before),
        _cell(after),
        "" if math.isnan(change.growth) else short(change.growth),
        shown.code(worst.label) if worst else "",
        shown.prose(", ".join(dict.fromkeys(finding.name for finding in found))),
    ]


def _cell(item: Item | None) -> str:
    """Return the verdict, with the reason if nothing was compared."""
    if item is None:
        return ""
    return f"{verdict_of(item)} {shown.prose(item.worst.reason)}" if item.worst.reason else verdict_of(item)
