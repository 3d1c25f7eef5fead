"""What a pair or a file that pytest could not collect says of itself: one message, without a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def message(report: pytest.CollectReport) -> str:
    """What is wrong, beginning with where: a file's line if pytest's text has one, else the id."""
    text = without_traceback(report.longreprtext)
    file = report.nodeid.split("::")[0]
    return text if file in text else f"{_place(file, report.longreprtext) or report.nodeid}: {text}"


def without_traceback(text: str) -> str:
    """The error's own lines where pytest shows a traceback, which it marks with an ``E``; else the text as it is."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return "\n".join(marked) or text.strip()


def note(report: pytest.CollectReport, start: Path) -> None:
    """Give a report of a pair, or of a file of them, the message that goes into the record.

    Args:
        report: of what could not be collected; from xdist's workers the message travels with it.
        start: the folder that pytest was started in, of which a record tells nothing.
    """
    report.parity_uncollected = message(report).replace(f"{start}/", "")  # type: ignore[attr-defined]


def noted(report: pytest.CollectReport) -> str:
    """That message; empty for what is no pair, or was collected."""
    return str(getattr(report, "parity_uncollected", ""))


def _place(file: str, text: str) -> str:
    """The last line of the file in a traceback as pytest shows it; empty where there is none."""
    lines = re.findall(rf"^(?:.*/)?{re.escape(Path(file).name)}:(\d+): in ", text, re.MULTILINE)
    return f"{file}:{lines[-1]}" if lines else ""
