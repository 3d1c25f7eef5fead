"""Runs pytest for ``parity run``, and turns its exit codes into parity's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from parity.plugin import uncollected
from parity.plugin.unknown import unknown_pairs
from parity.user_error import UserError

PASSED, FAILED, MISTAKE = 0, 1, 2
# pytest would rewrite its plugins' asserts; parity is imported before, and has none.
_NOT_REWRITTEN = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
# A pair or a file that is wrong costs no other; in workers pytest goes on in any case.
_OPTIONS = ("-p", "parity.plugin", "-W", _NOT_REWRITTEN, "--continue-on-collection-errors")


class _CollectionErrors:
    """A pytest plugin that keeps what could not be collected, each as one message without a traceback.

    Attributes:
        messages: of what failed, by id.
        skipped: files that skip themselves, each with its reason.
    """

    def __init__(self) -> None:
        self.messages: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.messages.setdefault(report.nodeid, uncollected.message(report))
            report.longrepr = uncollected.without_traceback(report.longreprtext)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skipped.setdefault(report.nodeid, f"{report.nodeid} skips itself: {report.longrepr[2]}")


def run(files: Sequence[str], arguments: Sequence[str]) -> int:
    """Compare the pairs of these files in this process, or in xdist's workers.

    Args:
        files: paths or pytest ids.
        arguments: further arguments of pytest.

    Returns:
        0 if everything passed, 1 if something failed, 2 if nothing could be run, or a pair or a file could not be
        collected, whatever became of the others; then a sentence on stderr says why.
    """
    errors = _CollectionErrors()
    try:
        code = pytest.main([*files, *_OPTIONS, *arguments], plugins=[errors])
    except BrokenPipeError:
        print("parity: nobody reads the output any more, so the run ended before all was compared", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return MISTAKE
    if errors.messages:
        for message in errors.messages.values():
            print(f"parity: {message}", file=sys.stderr)
        return MISTAKE
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        reasons = [*errors.skipped.values(), *_unknown(files)] or [_without_a_match(files, arguments)]
        print(f"parity: nothing to compare: {'; '.join(reasons)}", file=sys.stderr)
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return PASSED if code == pytest.ExitCode.OK else FAILED
    return MISTAKE


def _without_a_match(files: Sequence[str], arguments: Sequence[str]) -> str:
    keyword = f" -k {arguments[arguments.index('-k') + 1]!r}" if "-k" in arguments else ""
    return f"no pair in {', '.join(files)} matches{keyword}"


def _unknown(files: Sequence[str]) -> Iterator[str]:
    """What ids may have meant that workers did not find: these import the files, and this process does not."""
    ids = [file for file in files if "::" in file]
    if not ids:
        return
    from parity import registry

    for path in dict.fromkeys(name.partition("::")[0] for name in ids):
        with suppress(UserError):  # told already, by the workers
            registry.load_file(path)
    yield from unknown_pairs(ids, Path.cwd(), registry.cases())
