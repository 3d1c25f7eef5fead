"""Show how far a run is in place of pytest's dots, for ``parity run``."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import pytest

from parity.progress import Following

PLAIN = ("-o", "console_output_style=classic")  # pytest's percentages would stand without its dots


class ItemsFollowed:
    """A pytest plugin that counts items as they are compared, here or in workers; it says nothing where pytest is asked
    for details by ``-v``, or opens a debugger.

    Args:
        file: where to show it; pytest captures standard error itself while a pair's code runs.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._following: Following | None = None
        self._seen: set[str] = set()
        self._failed = 0
        self._is_wanted = True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        option = session.config.option
        self._is_wanted = option.verbose <= 0 and not (option.usepdb or option.collectonly)
        reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
        if self._is_wanted and reporter is not None:
            reporter.showfspath = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._begin(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._begin(len(ids))

    def _begin(self, items: int) -> None:
        if self._is_wanted and self._following is None and items:
            self._following = Following("comparing", items, self._file).__enter__()

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Generator[None, Any, Any]:
        """Leave pytest its counts, and take its letters away."""
        category, letter, word = yield
        return (category, "", "") if self._is_wanted else (category, letter, word)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self._seen or (report.when != "call" and report.passed) or self._following is None:
            return
        self._seen.add(report.nodeid)
        self._failed += report.failed
        self._following.step(doing=f"comparing, {self._failed} failed" if self._failed else "comparing")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.end()

    def end(self) -> None:
        """Take the bar away."""
        if self._following is not None:
            self._following.end()


@contextmanager
def uncaptured_stderr() -> Iterator[TextIO]:
    """Yield standard error as it is now, whatever pytest puts in its place later."""
    try:
        copy = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError, AttributeError):  # it has no descriptor, as in a notebook
        yield sys.stderr
        return
    with copy:
        yield copy
