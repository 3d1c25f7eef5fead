"""How a process ends that can compare no more: a kernel hangs in it, or one broke its CUDA context.

A worker says so in the report of its last item, and xdist replaces it. Without workers there is nobody to go on.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from parity.plugin import lines
from parity.plugin.watchdog import end_process

if TYPE_CHECKING:
    from parity.plugin.item import ParityItem
    from parity.result import Result

BROKEN_BY = pytest.StashKey[str]()
STDERR = pytest.StashKey[int]()
USE_WORKERS = "with -n 1 or more, a new worker takes the place of one that cannot go on"


def keep_stderr(config: pytest.Config) -> None:
    """Keep a descriptor of standard error that pytest does not capture later, for what is said last."""
    config.stash[STDERR] = os.dup(2)
    config.add_cleanup(lambda: os.close(config.stash[STDERR]))


def announce(report: pytest.TestReport) -> None:
    """Mark a report as the last one of its worker."""
    report.parity_last = True  # type: ignore[attr-defined]


def is_last(report: pytest.TestReport) -> bool:
    """Whether a worker announced its end with this report."""
    return bool(getattr(report, "parity_last", False))


def told(results: Sequence[Result]) -> str:
    """What pytest shows of an item that ended early: why, or how it failed and why no cause was found."""
    from parity.report import failure
    from parity.report.items import Item

    last = results[-1]
    return f"{failure.message(Item(tuple(results)))}\n{last.notes[-1]}" if last.status == "failed" else last.reason


class EndsAfterLastReport:
    """A pytest plugin for workers. xdist takes the end for a crash in the item, and so gives it to no other worker."""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if is_last(report):
            end_process()


def out_of_time(item: ParityItem, main_thread: int) -> None:
    """Report an item that hangs, from the thread that watches over it; the process ends when this returns.

    Without workers the run is over with it: then pytest finishes here, and draws its summary and the report.

    Args:
        item: its results tell what was compared so far.
        main_thread: the identifier of the thread that hangs.
    """
    workers = bool(item.workplace.worker)
    seconds = f"ran longer than {item.options.timeout:g} s (--parity-timeout, or --timeout of parity run); "
    ended = "its worker was ended and replaced" if workers else f"the run ends with it: {USE_WORKERS}"
    item.results.append(item.cut_short(seconds + ended))
    stack = "".join(traceback.format_stack(sys._current_frames()[main_thread]))
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=told(item.results),
        when="call",
        sections=[("where it was", stack)],
    )
    report.parity_lines = lines.of_item(item)  # type: ignore[attr-defined]
    announce(report)
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    item.ihook.pytest_runtest_logreport(report=report)
    if not workers:
        item.config.hook.pytest_sessionfinish(session=item.session, exitstatus=pytest.ExitCode.TESTS_FAILED)
        sys.stdout.flush()
