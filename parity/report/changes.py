"""What changed from one run to another, item by item."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from parity.report.items import Item, in_order
from parity.result import Result

Kind = Literal["newly failing", "newly passing", "new", "gone", "otherwise", "margin", "none"]
_FAILED = ("failed", "error")


@dataclass(frozen=True)
class Change:
    """One item in two runs; at least one of them has it.

    Attributes:
        before: of the older run, or None.
        after: of the newer run, or None.
    """

    before: Item | None
    after: Item | None

    @property
    def item(self) -> Item:
        """The newer one where there is one."""
        shown = self.after or self.before
        assert shown is not None
        return shown

    @property
    def growth(self) -> float:
        """The newer margin over the older; NaN where one run did not compare, or both margins are 0 or infinite."""
        if self.before is None or self.after is None:
            return math.nan
        old, new = self.before.worst.margin, self.after.worst.margin
        if old == new or math.isnan(old) or math.isnan(new):
            return 1.0 if old == new else math.nan
        return new / old if old else math.inf

    def kind(self, factor: float) -> Kind:
        """What is to be told of it.

        Args:
            factor: by which a margin has to grow or shrink.
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
    """Every item of either run, in the order of reports.

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
