"""Write each result of a pytest run as it arrives, and draw the report at the end.

Of a result that is written, only what the report shows is kept, and torch is not imported: if xdist's workers compare,
this process only listens.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from parity.plugin import uncollected
from parity.plugin.options import Options

if TYPE_CHECKING:
    from parity.report.markdown import Digest
    from parity.report.record import Uncollected


class Recorder:
    """A pytest plugin for the process that hears of every test: the only one, or xdist's controller.

    It touches no file before the first result of a parity item. What cannot be written any more, for example to a full
    disk, is kept, and goes into a folder for temporary files at the end.
    """

    def __init__(self, options: Options) -> None:
        self._record, self._report, self._name = options.record, options.report, options.name
        self._digest: Digest | None = None
        self._verdict = ""
        self._begun = False
        self._meanwhile: int | None = None
        self._uncollected: dict[str, Uncollected] = {}
        self._unwritten: list[str] = []
        self._troubles: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines: dict[str, Any] = getattr(report, "parity_lines", {})
        if lines:
            report.parity_lines = {}  # type: ignore[attr-defined]  # pytest keeps every report until its end
            self.record(lines)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        message = uncollected.noted(report)
        if message and report.nodeid not in self._uncollected:  # each of xdist's workers collects, and reports it
            from parity.report.record import Uncollected, uncollected_line

            self._uncollected[report.nodeid] = Uncollected(report.nodeid, message)
            if self._digest is not None:
                self._write(uncollected_line(self._uncollected[report.nodeid]))

    def record(self, lines: dict[str, Any]) -> None:
        """Write an item's lines, see ``ending.of_item``, in place of those that were written meanwhile."""
        from parity.report import record

        self._withdraw()
        digest = self._digest or self._begin(lines["environment"])
        for line in lines["results"]:
            self._write(line)
        if lines["results"]:  # an item in which parity itself failed has none
            digest.add([record.result_of(line) for line in lines["results"]])

    def record_meanwhile(self, environment: str, results: Sequence[str]) -> None:
        """Write what is known about an item before its comparison ends, which this process may not live to see.

        Args:
            environment: the record's first line.
            results: lines, which the next call, or that of ``record``, replaces.
        """
        from parity.report import record

        self._withdraw()
        if self._digest is None:
            self._begin(environment)
        if self._begun and not self._unwritten:
            with suppress(OSError):  # the item's own lines will report it
                self._meanwhile = self._record.stat().st_size
                record.append(self._record, "".join(results))

    def _withdraw(self) -> None:
        """Take back what was written meanwhile."""
        if self._meanwhile is not None:
            with suppress(OSError):
                if self._record.stat().st_size > self._meanwhile:
                    os.truncate(self._record, self._meanwhile)
            self._meanwhile = None

    def _begin(self, environment: str) -> Digest:
        from parity.report import record
        from parity.report.markdown import Digest

        self._digest = Digest(record.environment_of(environment), uncollected=self._uncollected)
        self._write(environment)
        for each in self._uncollected.values():
            self._write(record.uncollected_line(each))
        return self._digest

    def pytest_sessionfinish(self) -> None:
        if self._digest is None:
            return
        from parity.report import markdown

        drawn, self._verdict = markdown.draw(self._digest, self._name), markdown.verdict(self._digest)
        if self._unwritten or not self._tried(lambda: self._report.write_text(drawn, encoding="utf-8")):
            self._tried(lambda: self._save_elsewhere(drawn))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._digest is None:
            return
        from parity.report import failure

        terminalreporter.section("parity")
        terminalreporter.write_line(self._verdict)
        for note in failure.lines(self._digest.notes):
            terminalreporter.write_line(note)
        for trouble in self._troubles:
            terminalreporter.write_line(trouble)
        terminalreporter.write_line(f"report: {self._report}")
        terminalreporter.write_line(f"record: {self._record}")

    def _write(self, line: str) -> None:
        """Add a line to the record; the first line begins it."""
        from parity.report import record

        write = record.append if self._begun else record.start
        if self._unwritten or not self._tried(lambda: write(self._record, line)):
            self._unwritten.append(line)  # lines after one that may be half written are kept, too
        else:
            self._begun = True

    def _tried(self, write: Callable[[], object]) -> bool:
        """Return whether a file could be written."""
        try:
            write()
        except OSError as error:
            self._troubles.append(f"could not write: {error}")
            return False
        return True

    def _save_elsewhere(self, drawn: str) -> None:
        """Put the report, and the record if it is not complete, into a folder of their own."""
        folder = Path(tempfile.mkdtemp(prefix="parity-report-"))
        report, record = folder / self._report.name, folder / self._record.name
        report.write_text(drawn, encoding="utf-8")
        self._report = report
        if self._unwritten:
            record.write_text("".join([*self._written(), *self._unwritten]), encoding="utf-8")
            self._record = record

    def _written(self) -> list[str]:
        """Return the record's lines, without a last one that was cut short."""
        if not self._begun or not self._record.is_file():
            return []
        lines = self._record.read_text(encoding="utf-8").splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]
