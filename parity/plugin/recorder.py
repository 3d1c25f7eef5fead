"""Writes each result of a pytest run as it arrives, and draws the report at the end."""

from __future__ import annotations

from typing import Any

import pytest

from parity.plugin.options import Options


class Recorder:
    """A pytest plugin for the process that hears of every test: the only one, or xdist's controller.

    It touches no file before the first result of a parity item.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._started = False
        self._verdict = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines: dict[str, Any] = getattr(report, "parity_lines", {})
        if not lines:
            return
        from parity.report import record

        if not self._started:
            record.start(self._options.record, lines["environment"])
            self._started = True
        for line in lines["results"]:
            record.append(self._options.record, line)

    def pytest_sessionfinish(self) -> None:
        if not self._started:
            return
        from parity.report import markdown, record

        run = record.read(self._options.record)
        self._options.report.write_text(markdown.draw(run, self._options.name), encoding="utf-8")
        self._verdict = markdown.verdict(run)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._started:
            return
        terminalreporter.section("parity")
        terminalreporter.write_line(self._verdict)
        terminalreporter.write_line(f"report: {self._options.report}")
        terminalreporter.write_line(f"record: {self._options.record}")
