"""Changes to a reference that hold at once, also where two are about one operation: its mask and its scale, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parity.watching.trace import Edit


def together(first: Sequence[Edit], second: Sequence[Edit]) -> tuple[Edit, ...] | None:
    """Both mistakes' edits; None where they change the same thing."""
    shared = {one.site for one in first} & {one.site for one in second}
    made = [one for one in (*first, *second) if one.site not in shared]
    for site in shared:
        same = [one for one in (*first, *second) if one.site == site]
        merged = _of_one_operation(*same) if len(same) == 2 else ()
        if not merged:
            return None
        made += merged
    return tuple(made)


def _of_one_operation(one: Edit, other: Edit) -> tuple[Edit, ...]:
    """The edits with which an operation is changed as both say; none where that cannot be."""
    if one.of is None or other.of is None or one.of.operation is not other.of.operation:
        return ()
    changes = _united(one.of.changes, other.of.changes)
    return () if changes is None else tuple(one.of.operation.edits(**changes))


def _united(some: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any] | None:
    """All changes; None where both change one thing. Of a tuple ``None`` says that an element stays as it is."""
    united = dict(some)
    for name, value in others.items():
        if name not in united:
            united[name] = value
            continue
        known = united[name]
        if not (isinstance(known, tuple) and isinstance(value, tuple) and len(known) == len(value)):
            return None
        if any(x is not None and y is not None for x, y in zip(known, value, strict=True)):
            return None
        united[name] = tuple(y if x is None else x for x, y in zip(known, value, strict=True))
    return united
