"""Keep a run without workers alive when a case tries to end its process, or make sure that its end is reported.

Without workers, a case runs in pytest's own process. That stays the process that the user has started, for the sake of
debuggers, profilers and Ctrl-C. This module stops Python code from ending it, and notices when C code calls ``exit``,
while there is still time for a report and an exit code. Any other end, such as a crash in C code, is reported by a
second process, which does nothing but wait for it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

import pytest

from parity.machine import process
from parity.machine.process import LastWord, glibc, withheld
from parity.plugin import scan

# A case that calls os._exit would end the run with its own exit code and without a report.


class EndedProcess(BaseException):
    """Raised instead of ending the process."""


@contextmanager
def exit_refused() -> Iterator[list[str]]:
    """Make ``os._exit`` raise in this process within the context; processes that a case forks may still call it.

    Yields:
        The calls so far. They include those of other threads, where the exception ends only the thread.
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


# C code that calls ``exit`` would end the run, too. That cannot be stopped, but the C library calls exit handlers.


@contextmanager
def exit_heard(ended: Callable[[], object]) -> Iterator[None]:
    """Call ``ended``, which must not return, if C code calls ``exit`` within the context.

    The handler that was registered last runs first, so it runs before anything that was loaded earlier is torn down.
    Calls of ``_exit`` go unnoticed, and so does everything where the C library is not glibc, because musl cannot be
    told that the context has been left.
    """
    libc, process, left = glibc(), os.getpid(), False
    if libc is None:
        yield
        return

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def exiting(argument: object) -> None:
        if not left and os.getpid() == process:  # processes that a case forks may call exit
            ended()

    asker = ctypes.c_char()  # its address identifies the library that registered the handler
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
    ended = f"the process of this run ended while it was comparing {told[-1]}; {advice}"
    print(f"parity: {ended}\\nreport: {reports[0]}", file=sys.stderr)
"""


class Waiter:
    """A process that draws the reports from the record if this process ends without dismissing it.

    It always ends with this process, because its standard input ends then.
    """

    def __init__(self, record: Path, reports: Sequence[Path], advice: str, stderr: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAITER, record, advice, *reports],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # so that Ctrl-C does not end it
        )
        assert self._process.stdin is not None
        withheld(self._process.stdin)

    def tell(self, node_id: str) -> None:
        """Tell the process which item is compared from now on; empty for none. If that comes last, it draws nothing."""
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody has ended it
            self._process.stdin.write(f"{node_id}\n".encode(errors="backslashreplace"))
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """End the process without a report."""
        self.tell("")
        self._process.communicate()


# Let a run end although its pairs have left threads running, for which Python would wait forever.


_LEFT = pytest.StashKey[dict[threading.Thread, str]]()
_SECONDS_TO_END = 10.0  # for such threads to end by themselves, as a thread pool's do at exit


@contextmanager
def threads_noted(config: pytest.Config, node_id: str) -> Iterator[None]:
    """Note threads that start within the context and outlive it, except for daemons, for which nobody waits."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        left = {thread for thread in threading.enumerate() if not thread.daemon} - before
        config.stash.setdefault(_LEFT, {}).update(dict.fromkeys(left, node_id))


def end_without_threads(config: pytest.Config, code: int) -> None:
    """End this process soon after its main thread has ended, if only noted threads keep it running.

    Args:
        config: pytest's, which holds the noted threads.
        code: the run's exit code.
    """
    left = {thread: node_id for thread, node_id in config.stash.get(_LEFT, {}).items() if thread.is_alive()}
    if not left:
        return

    def wait() -> None:
        threading.main_thread().join()
        for thread in threading.enumerate():
            if not thread.daemon and thread not in left:
                thread.join()
        until = time.monotonic() + _SECONDS_TO_END
        for thread, node_id in left.items():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                told = (
                    f"parity: {node_id} left the thread {thread.name} running; the process ends without waiting for it"
                )
                with suppress(Exception):  # a pair may have closed the streams
                    print(told.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
                    sys.stdout.flush()
                os._exit(code)

    threading.Thread(target=wait, name="parity-end", daemon=True).start()


# Let another process own the exit code of ``pytest`` where pairs are compared in pytest's own process.
#
# If a case's C code calls ``_exit(0)``, the run would end as if all were well. So the process forks before any conftest
# is imported, and PyTorch, CUDA, capturing and coverage all start in the child. The parent only waits
# (``machine/process.py``). This is done only where nobody else depends on the process: pytest was started by its own
# command, without workers and without a debugger. A program that calls ``pytest.main`` goes on afterwards, so there
# the process does not fork.


_NAME = "parity-watched"
_COMMANDS = ("_console_main", "console_main")  # of pytest 9.1 and later, and of earlier versions
_MAIN = ("_main", "main")
_ELSEWHERE = ("usepdb", "trace", "collectonly", "version", "help", "looponfail", "tx")  # options


_Code: TypeAlias = int | pytest.ExitCode | None


class Watched:
    """A pytest plugin that tells the waiting process how the run has ended.

    Args:
        word: the channel to that process.
    """

    def __init__(self, word: LastWord) -> None:
        self._word = word

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self) -> Generator[None, _Code, _Code]:
        code = yield
        self._word.say(int(code or 0))
        return code


def watch(config: pytest.Config) -> None:
    """Continue in a child process if this is the process of pytest's command and compares pairs itself."""
    if config.pluginmanager.is_blocked(_NAME):  # by -p no:parity-watched
        return
    if _compares_itself(config) and _is_of_its_command() and process.possible() and scan.may_have_cases(config):
        word = process.supervised()
        if word is not None:
            config.pluginmanager.register(Watched(word), _NAME)


def _compares_itself(config: pytest.Config) -> bool:
    asked = config.known_args_namespace
    return not any(getattr(asked, name, None) for name in ("numprocesses", *_ELSEWHERE))


def _is_of_its_command() -> bool:
    """Return whether pytest's command runs this, rather than a nested run or another program."""
    calls = [name for frame in _walk_frames() if (name := _name_in_pytest(frame))]
    return any(name in _COMMANDS for name in calls) and sum(name in _MAIN for name in calls) == 1


def _walk_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name_in_pytest(frame: FrameType) -> str:
    return frame.f_code.co_name if frame.f_globals.get("__name__") == "_pytest.config" else ""
