"""Draws what changed from one run to another: verdict, both environments, then a table for each kind of change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from parity.report import failure, matrix
from parity.report.changes import Change, Kind, between
from parity.report.items import Item
from parity.report.numbers import plural, seeds, short
from parity.report.record import Record
from parity.report.tables import markdown_table

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
        names: of both, for the reader.
        factor: by which a margin has to grow or shrink to be told.
    """

    before: Record
    after: Record
    names: tuple[str, str]
    factor: float

    @cached_property
    def changes(self) -> dict[Kind, list[Change]]:
        """What changed, by kind."""
        found: dict[Kind, list[Change]] = {}
        for change in between(self.before.results, self.after.results):
            found.setdefault(change.kind(self.factor), []).append(change)
        return found


def draw(runs: Comparison) -> str:
    """The whole report as GitHub markdown."""
    changes = runs.changes
    sections = [
        f"# Parity report: {runs.names[1]} against {runs.names[0]}",
        f"**{verdict(runs)}**",
        _environments(runs),
        "A cell holds an item's worst **margin** over all seeds, as in the report of a run: up to 1 passes.",
    ]
    for kind, title in _TITLES.items():
        if kind in changes:
            sections += [f"## {title}", *_told_of(kind, runs.factor), _table(changes[kind])]
    return "\n\n".join(sections) + "\n"


def verdict(runs: Comparison) -> str:
    """All changes in one line."""
    counts = {kind: len(changes) for kind, changes in runs.changes.items()}
    failing = counts.get("newly failing", 0)
    head = f"{matrix.PASSED} no item newly fails"
    if failing:
        head = f"{matrix.FAILED} {plural(failing, 'item')} newly failing"
    if not any(change.before and change.after for changes in runs.changes.values() for change in changes):
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
    return markdown_table(
        [(*row, "" if row[1] == row[2] else "≠") for row in rows], ["environment", "before", "now", ""]
    )


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
        yield f"The verdict is as before, and the margin is not: it changed by more than {factor:g} times."


def _table(changes: Sequence[Change]) -> str:
    return markdown_table([_row(change) for change in changes], _COLUMNS)


def _row(change: Change) -> list[str]:
    after = change.after
    worst = after.worst.worst if after else None
    found = failure.findings(after) if after else []
    return [
        f"`{change.item.name}`",
        _cell(change.before),
        _cell(after),
        "" if math.isnan(change.growth) else short(change.growth),
        f"`{worst.label}`" if worst else "",
        ", ".join(dict.fromkeys(f"{finding.code} {finding.title}" for finding in found)),
    ]


def _cell(item: Item | None) -> str:
    """The verdict; with the reason where nothing was compared."""
    if item is None:
        return ""
    return f"{matrix.verdict_of(item)} {item.worst.reason}" if item.worst.reason else matrix.verdict_of(item)
