"""A run's notes for a terminal: what its comparisons leave unproven, so that a pass is not overrated."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator

from parity.report.numbers import plural

MOST_LINES = 5
_LONGEST = 200  # characters; some list every parameter of a model


def lines(notes: Counter[str]) -> Iterator[str]:
    """A line for each of the commonest notes, and how many others the report has.

    Args:
        notes: each with the number of items that have it.
    """
    for note, count in notes.most_common(MOST_LINES):
        yield f"note of {plural(count, 'item')}: {textwrap.shorten(note, _LONGEST, placeholder=' ...')}"
    others = len(notes) - MOST_LINES
    if others > 0:
        yield f"and {others} more in the report"
