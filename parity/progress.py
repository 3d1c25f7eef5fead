"""Show progress and the estimated time left: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from types import TracebackType
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

QUIET = "PARITY_QUIET"  # if this variable is set, no progress is shown
_BETWEEN_LINES = 30.0  # seconds; without a terminal, anything shorter prints no line
Each = TypeVar("Each")


class Following:
    """A context manager that shows the progress of work that is made of parts.

    The display changes only when a part is done. There is no background thread, because a user's code may fork.

    Args:
        doing: what is being done, such as ``comparing``.
        total: how many parts there are; None if that is unknown.
        file: where to show it; None for standard error.
    """

    def __init__(self, doing: str, total: int | None = None, file: TextIO | None = None) -> None:
        self._file = sys.stderr if file is None else file
        self._doing, self._total, self._done = doing, total, 0
        self._began = self._told = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Following:
        if _is_terminal(self._file) and not is_quiet():
            console, is_own = Console(file=self._file, highlight=False), self._file is sys.stderr
            self._bar = Progress(
                *_make_columns(self._total),
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=is_own,  # what is printed meanwhile appears above the bar
                redirect_stderr=is_own,
            )
            self._task = self._bar.add_task(self._doing, total=self._total)
            self._bar.start()
            self._bar.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def step(self, parts: int = 1, doing: str = "") -> None:
        """Report that more parts are done.

        Args:
            parts: how many more.
            doing: what is being done now; empty if that has not changed.
        """
        self._done += parts
        self._doing = doing or self._doing
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self._doing, refresh=True)
        elif time.monotonic() - self._told >= _BETWEEN_LINES and not is_quiet() and self._file is not None:
            self._told = time.monotonic()
            with suppress(OSError, ValueError):  # nobody reads, or the file is closed
                print(line(self._doing, self._done, self._total, self._told - self._began), file=self._file, flush=True)

    def at(self, done: int, total: int) -> None:
        """Report how many parts are done, and how many there are, which may have been unknown or fewer before."""
        if self._bar is not None and total != self._total:
            self._bar.columns = _make_columns(total)
            self._bar.update(self._task, total=total)
        self._total = total
        self.step(done - self._done)

    def end(self) -> None:
        """Remove the bar, so that later output takes its place."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_columns(total: int | None) -> tuple[ProgressColumn, ...]:
    """Return the columns of a bar; without a total, it only shows the time so far."""
    what = TextColumn("{task.description}", markup=False)
    if not total:
        return what, TimeElapsedColumn()
    return what, MofNCompleteColumn(), BarColumn(), TextColumn("left"), TimeRemainingColumn()


def followed(parts: Iterable[Each], doing: str, total: int | None = None) -> Iterator[Each]:
    """Yield each part, and show how many are done.

    Args:
        parts: a sequence, or any iterable if ``total`` says how many there are.
        doing, total: see ``Following``.
    """
    count = len(parts) if total is None and isinstance(parts, Sized) else total
    if count == 0:
        return
    with Following(doing, count) as following:
        for part in parts:
            yield part
            following.step()


def line(doing: str, done: int, total: int | None, seconds: float) -> str:
    """Return ``comparing: 12 of 300 after 40 s, about 16 min left``; without a total, only how many are done."""
    if total is None:
        return f"{doing}: {done} after {duration(seconds)}"
    left = f", about {duration(seconds * (total - done) / done)} left" if 0 < done < total else ""
    return f"{doing}: {done} of {total} after {duration(seconds)}{left}"


def duration(seconds: float) -> str:
    """Return a time as people say it: ``40 s``, ``16 min``, ``2 h 5 min``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def is_quiet() -> bool:
    """Return whether progress should not be shown."""
    return bool(os.environ.get(QUIET))


def _is_terminal(file: TextIO | None) -> bool:
    """Return whether a bar can be drawn there; forcing colours does not turn a file into a terminal."""
    with suppress(ValueError, AttributeError):  # it is closed, or there is none
        return file is not None and file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return False
