"""Writes each result of a pytest run as it arrives, and draws the report at the end.

Of a result that is written, no more is kept than the report shows, and torch is not imported: where xdist's workers
compare, this process only listens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from parity.plugin.options import Options

if TYPE_CHECKING:
    from parity.report.digest import Digest


class Recorder:
    """A pytest plugin for the process that hears of every test: the only one, or xdist's controller.

    It touches no file before the first result of a parity item.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._digest: Digest | None = None
        self._verdict = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines: dict[str, Any] = getattr(report, "parity_lines", {})
        if not lines:
            return
        from parity.report import record
        from parity.report.digest import Digest

        report.parity_lines = {}  # type: ignore[attr-defined]  # pytest keeps every report until its end
        if self._digest is None:
            record.start(self._options.record, lines["environment"])
            self._digest = Digest(record.environment_of(lines["environment"]))
        for line in lines["results"]:
            record.append(self._options.record, line)
        if lines["results"]:  # an item of which parity itself failed has none
            self._digest.add([record.result_of(line) for line in lines["results"]])

    def pytest_sessionfinish(self) -> None:
        if self._digest is None:
            return
        from parity.report import markdown

        self._options.report.write_text(markdown.draw(self._digest, self._options.name), encoding="utf-8")
        self._verdict = markdown.verdict(self._digest)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._digest is None:
            return
        terminalreporter.section("parity")
        terminalreporter.write_line(self._verdict)
        terminalreporter.write_line(f"report: {self._options.report}")
        terminalreporter.write_line(f"record: {self._options.record}")
