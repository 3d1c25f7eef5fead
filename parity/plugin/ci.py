"""Tell GitHub what a run found, if it runs there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parity.plugin import uncollected

if TYPE_CHECKING:
    from parity.plugin.recorder import Recorder
    from parity.report.ci import Place

# https://docs.github.com/en/actions/reference/workflows-and-actions/variables
_IS_GITHUB = "GITHUB_ACTIONS"
_SUMMARY = "GITHUB_STEP_SUMMARY"
_CHECKOUT = "GITHUB_WORKSPACE"


class GitHub:
    """A pytest plugin for the process that hears of every test.

    Args:
        recorder: the one that keeps the results.
        asked: what is told, of ``options.CI``.
        start: the folder where pytest was started.
    """

    def __init__(self, recorder: Recorder, asked: frozenset[str], start: Path) -> None:
        self._recorder, self._start = recorder, start
        self._annotates = "annotations" in asked and os.environ.get(_IS_GITHUB) == "true"
        self._summary = os.environ.get(_SUMMARY, "") if "summary" in asked else ""
        self._found: list[tuple[Place, str, str]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note where a failed item's pair is declared, and what is wrong."""
        if self._annotates and report.failed and hasattr(report, "parity_lines"):
            file, line, name = report.location
            self._found.append((self._place(file, (line or 0) + 1), name, _message(report)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        message = uncollected.noted(report)
        if self._annotates and message:
            found = (self._place(report.nodeid.partition("::")[0]), "not collected", message)
            if found not in self._found:  # each of xdist's workers collects
                self._found.append(found)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        digest = self._recorder.digest
        if digest is None:
            return
        from parity.report import ci

        if self._summary:
            with suppress(OSError), Path(self._summary).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(ci.summary(digest, self._recorder.name))
        for found in self._found[: ci.MOST_ANNOTATIONS]:
            terminalreporter.write_line(ci.annotation(*found))
        if len(self._found) > ci.MOST_ANNOTATIONS:
            terminalreporter.write_line(ci.others(len(self._found) - ci.MOST_ANNOTATIONS))

    def _place(self, file: str, line: int = 0) -> Place:
        """Return a place with the file as GitHub names it, below the repository."""
        from parity.report.ci import Place

        path = Path(os.path.normpath(self._start / file))
        checkout = Path(os.environ.get(_CHECKOUT) or self._start)
        return Place((path.relative_to(checkout) if path.is_relative_to(checkout) else path).as_posix(), line)


def _message(report: pytest.TestReport) -> str:
    """Return what is wrong with an item; pytest's own text, which names a worker, if there are no results."""
    from parity.report import failure, record
    from parity.report.items import Item

    results = tuple(map(record.result_of, report.parity_lines["results"]))
    item = Item(results) if results else None
    return failure.message(item) if item is not None and item.bad else report.longreprtext
