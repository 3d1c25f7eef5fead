"""Keep what is computed of a case and asked for again, and know the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Value = TypeVar("Value")


@dataclass
class _Entry:
    value: Any
    size: Callable[[Any], int]


@dataclass
class Cache:
    """Values by key, each computed when it is first asked for; nobody but the cache puts one in."""

    _entries: dict[Hashable, _Entry] = field(default_factory=dict)
    _subject: Hashable = None

    def get(self, key: Hashable, compute: Callable[[], Value], size: Callable[[Value], int] = lambda _: 0) -> Value:
        """Return the value of this key, computed now if it is not kept.

        Args:
            key: of the value.
            compute: the value.
            size: its bytes, asked for whenever the memory of all is: a value may grow.
        """
        if key not in self._entries:
            self._entries[key] = _Entry(compute(), size)
        value: Value = self._entries[key].value
        return value

    def take(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of this key and keep it no longer; it is computed if it is not kept."""
        return self._entries.pop(key).value if key in self._entries else compute()

    def group(self, name: str, subject: Hashable) -> Cache:
        """Return the values of one subject, such as a rounding; those of another subject by this name are let go."""
        found = self._entries.get(name)
        if found is None or found.value._subject != subject:
            found = self._entries[name] = _Entry(Cache(_subject=subject), lambda group: group.bytes)
        group: Cache = found.value
        return group

    def values(self) -> list[Any]:
        """Return all values that are kept."""
        return [entry.value for entry in self._entries.values()]

    @property
    def bytes(self) -> int:
        """The memory that all values take, as far as they say."""
        return sum(entry.size(entry.value) for entry in self._entries.values())
