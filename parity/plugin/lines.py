"""An item's lines of the record, which travel with pytest's report of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from parity.plugin.item import ParityItem
    from parity.result import Result

_ENVIRONMENT = pytest.StashKey[str]()
_SENT = pytest.StashKey[bool]()


def of_item(item: ParityItem) -> dict[str, Any]:
    """The lines of an item's results; a process's first item brings the environment too."""
    lines: dict[str, Any] = {"results": of_results(item.results)}
    if not item.session.stash.get(_SENT, False):
        item.session.stash[_SENT] = True
        lines["environment"] = environment_line(item)
    return lines


def of_results(results: Sequence[Result]) -> list[str]:
    """A line for each."""
    from parity.report import record

    return [record.result_line(result) for result in results]


def environment_line(item: ParityItem) -> str:
    """The record's first line, as this process would write it."""
    from parity.report import environment, record

    stash = item.session.stash
    if _ENVIRONMENT not in stash:
        planned = sum(isinstance(other, type(item)) for other in item.session.items)
        compared = item.limits_compared()
        measured = environment.measure(item.kernels.backend, item.options.seeds, planned, item.limits, compared)
        stash[_ENVIRONMENT] = record.environment_line(measured)
    return stash[_ENVIRONMENT]
