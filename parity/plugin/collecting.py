"""Collect a file of pairs in limited time, and say of one that hangs or ends its process where it did."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parity.plugin import ending, uncollected
from parity.plugin.alone import exit_heard, exit_refused
from parity.plugin.options import of


class Module(pytest.Module):
    """A file of pairs, which may have the name of another folder's: ``llama/pairs.py`` beside ``mixtral/pairs.py``.

    pytest gives both the module name ``pairs``, and refuses the second one.
    """

    def _getobj(self) -> Any:
        taken = getattr(sys.modules.get(self.path.stem), "__file__", None)
        if taken is None or Path(taken).resolve() == self.path.resolve() or (self.path.parent / "__init__.py").exists():
            return super()._getobj()
        from parity.case.registry import module_of

        return module_of(self.path.resolve())


@contextmanager
def collected_in_time(module: pytest.Module, seconds: float) -> Iterator[None]:
    """Within the context, a file of pairs is collected, for so many seconds at most; 0 for no limit.

    A file that takes longer is interrupted, also in a worker, and the others are collected: see ``too_late``. One that
    goes on all the same, or whose C code ends the process, ends the run.
    """
    config, diary = module.config, of(module.config).diary
    stacks = diary.stacks if diary else config.stash[ending.STDERR]
    expired = partial(_end_run, module, _too_long(seconds), threading.get_ident())

    def exited() -> None:
        cause = "its C code called exit while it was collected, which ends the process"
        ending.end_process(partial(_end_run, module, cause, threading.get_ident()))

    limit = ending.time_limit(seconds, expired, stacks, ending.interruption(config))
    with limit, exit_heard(exited), exit_refused():  # also in a worker: each that follows would end as well
        yield


def too_late(module: pytest.Module, seconds: float, interrupted: KeyboardInterrupt) -> pytest.CollectReport:
    """Return the report on a file that was interrupted since its time was up."""
    from parity.trace.whose import forget_handler, interrupted_at, way_there

    forget_handler(interrupted)
    return _report(module, f"{_too_long(seconds)}; {interrupted_at(interrupted)}", way_there(interrupted))


def _too_long(seconds: float) -> str:
    return f"{ending.too_long(seconds)} while it was collected"


def _end_run(module: pytest.Module, cause: str, thread: int) -> None:
    """Report the file of pairs with which this process ends, and with it the run: every worker collects every file."""
    report = _report(module, f"{cause}; the run ends with it", ending.stack_of(thread))
    ending.announce(report)
    ending.show_output(module.config)
    module.ihook.pytest_collectreport(report=report)
    if not hasattr(module.config, "workerinput"):
        ending.finish(module.session)


def _report(module: pytest.Module, cause: str, stack: str) -> pytest.CollectReport:
    report = pytest.CollectReport(module.nodeid, "failed", f"{module.nodeid}: {cause}\n{stack.rstrip()}", [])
    uncollected.note(report, module.config.invocation_params.dir)
    return report
