"""Keep a run alive that has no workers, or see to it that its end is told.

Without workers, a case runs in pytest's own process, which stays the one that the user has started, for debuggers,
profilers and Ctrl-C. What Python code can do to end it is refused here, and what C code does by ``exit`` is heard while
there is time for a report and an exit code. What else ends it, such as a crash in C code, is told by another process,
which only waits for that.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from parity.machine.forks import withheld
from parity.machine.process import glibc

# A case that calls os._exit would end the run with an exit code of its own, and no report.


class EndedProcess(BaseException):
    """Raised in the place of what would end the process."""


@contextmanager
def exit_refused() -> Iterator[list[str]]:
    """Within the context, ``os._exit`` raises in this process; processes that a case forks may end as they like.

    Yields:
        The calls, also those of threads, which alone end by them.
    """
    calls: list[str] = []
    exit_now, process = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            exit_now(status)
        calls.append(f"os._exit({status})")
        raise EndedProcess(f"{calls[-1]}, which would have ended the run")

    os._exit = refuse
    try:
        yield calls
    finally:
        os._exit = exit_now


# C code that calls ``exit`` would end the run, too. That cannot be stopped, but the C library calls who asked for it.


@contextmanager
def exit_heard(ended: Callable[[], object]) -> Iterator[None]:
    """Within the context, call this if C code ends the process by ``exit``; it is not to return.

    What is asked for last is called first, so before anything that was loaded earlier is torn down. Nothing is heard of
    ``_exit``, nor where the C library is not glibc: musl cannot be told that the context has been left.
    """
    libc, process, left = glibc(), os.getpid(), False
    if libc is None:
        yield
        return

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def exiting(argument: object) -> None:
        if not left and os.getpid() == process:  # what a case forks may end as it likes
            ended()

    asker = ctypes.c_char()  # its address stands for the library that asked
    libc["__cxa_atexit"](exiting, None, ctypes.byref(asker))
    try:
        yield
    finally:
        left = True
        libc["__cxa_finalize"](ctypes.byref(asker))  # calls it now, and never again


# Another process waits for the end of this one, and draws the report if this one cannot.


_WAITER = """
import os, subprocess, sys
record, advice, *reports = sys.argv[1:]
told = sys.stdin.read().splitlines()
if told and told[-1]:
    for report in reports:
        subprocess.run([sys.executable, "-m", "parity", "report", record, "-o", report], stdout=subprocess.DEVNULL)
    ended = f"the process of this run ended while it compared {told[-1]}; {advice}"
    print(f"parity: {ended}\\nreport: {reports[0]}", file=sys.stderr)
"""


class Waiter:
    """A process that draws the reports from the record if this process ends without a farewell.

    It ends with this one in any case, since its input does.
    """

    def __init__(self, record: Path, reports: Sequence[Path], advice: str, stderr: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAITER, record, advice, *reports],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is not for it
        )
        assert self._process.stdin is not None
        withheld(self._process.stdin)

    def tell(self, node_id: str) -> None:
        """Tell which item is compared from now on; an empty text for none, which is a farewell if it is the last."""
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody has ended it
            self._process.stdin.write(f"{node_id}\n".encode(errors="backslashreplace"))
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """Say farewell; the process ends."""
        self.tell("")
        self._process.communicate()
