"""Compare each pair in the process as it was before any test, and before another file of pairs was imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from parity.plugin.item import ParityItem

if TYPE_CHECKING:
    from pathlib import Path

    from parity.trace.effects import State

_FIRST: pytest.StashKey[State] = pytest.StashKey()
_LAST: pytest.StashKey[Path | None] = pytest.StashKey()
_FILES: pytest.StashKey[dict[Path, tuple[State, set[str]]]] = pytest.StashKey()
_FIXTURES: pytest.StashKey[dict[str, tuple[State, State]]] = pytest.StashKey()


def begin(config: pytest.Config) -> None:
    """Note the first state, and import what a comparison and the end of a run need, before a pair can prevent it."""
    import parity.comparison
    import parity.report.ci
    import parity.report.html  # noqa: F401
    from parity.trace.effects import State

    config.stash[_FIRST], config.stash[_FILES], config.stash[_FIXTURES] = State.now(), {}, {}


@contextmanager
def imported(module: pytest.Module) -> Iterator[None]:
    """Import a file of pairs in the first state. What it changes stays, for its own pairs and for other tests."""
    if _FIRST not in module.config.stash:
        yield
        return
    from parity.trace.effects import State

    first, files = module.config.stash[_FIRST], module.config.stash[_FILES]
    around, loaded = State.now(), set(sys.modules)
    first.restore()
    try:
        yield
    finally:
        own = State.now()
        around.followed_by(first, own).restore()
        for other, names in list(files.values()):
            if _uses_any_of(vars(module).get("_obj"), names):
                own = own.followed_by(first, other)
        files[module.path] = own, set(sys.modules) - loaded


def _uses_any_of(module: ModuleType | None, names: set[str]) -> bool:
    """Return whether a module uses one of the modules that another file was the first to import."""
    return any(
        (value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")) in names
        for value in list(vars(module).values() if module else ())
    )


@contextmanager
def set_up(fixture: pytest.FixtureDef[object], config: pytest.Config) -> Iterator[None]:
    """Note what a fixture changes that stays set up for several items, which is in force for pairs that use it."""
    if fixture.scope == "function" or _FIXTURES not in config.stash:
        yield
        return
    from parity.trace.effects import State

    before = State.now()
    yield
    fixtures, name = config.stash[_FIXTURES], fixture.argname
    fixtures[name] = before, State.now()
    fixture.addfinalizer(lambda: fixtures.pop(name, None))


@contextmanager
def compared(item: pytest.Item) -> Iterator[None]:
    """Compare a pair in the state in which its file alone would have been imported, and leave the present one.

    What fixtures have changed that the pair uses belongs to that state, and lasts as long as they do. The next pair of
    the file finds it as well, because what a pair changes is undone.
    """
    stash = item.config.stash
    last, stash[_LAST] = stash.get(_LAST, None), None
    if not isinstance(item, ParityItem) or item.path not in stash.get(_FILES, ()):
        yield
        return
    if last == item.path:
        yield
        stash[_LAST] = last
        return
    from parity.trace.effects import Disturbed, State

    own, around = stash[_FILES][item.path][0], State.now()
    for name, (before, after) in stash[_FIXTURES].items():
        if name in item.fixturenames:
            own = own.followed_by(before, after)
    changed = own.changes(around)
    kept = own.restore() if changed else []
    told = [each for each in changed if not each.startswith("the environment")]
    item.disturbed = Disturbed(told, kept, "other tests or files", "for this comparison")
    try:
        yield
    finally:
        if changed:
            around.followed_by(own, State.now()).restore()
        else:
            stash[_LAST] = item.path
