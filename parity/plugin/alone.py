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
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

import pytest

from parity.case.files import that_import_parity
from parity.machine import process
from parity.machine.process import LastWord, glibc, withheld

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


# Let a run end although its pairs have left threads running, which Python would wait for without end.


_LEFT = pytest.StashKey[dict[threading.Thread, str]]()
_SECONDS_TO_END = 10.0  # that what is left has to end by itself, as a pool of threads does when it is told


@contextmanager
def threads_noted(config: pytest.Config, node_id: str) -> Iterator[None]:
    """Note what is begun within the context and outlives it, apart from daemons, which nobody waits for."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        left = {thread for thread in threading.enumerate() if not thread.daemon} - before
        config.stash.setdefault(_LEFT, {}).update(dict.fromkeys(left, node_id))


def end_without_threads(config: pytest.Config, code: int) -> None:
    """End this process with a code, soon after its main thread has ended, if only noted threads keep it from that.

    Args:
        config: of the process.
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
                told = f"parity: {node_id} left {thread.name} running, which has not ended; the process ends without it"
                with suppress(Exception):  # a pair may have closed them
                    print(told.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
                    sys.stdout.flush()
                os._exit(code)

    threading.Thread(target=wait, name="parity-end", daemon=True).start()


# Have another process own the exit code of ``pytest`` where pairs are compared in pytest's own process.
#
# C code of a case that calls ``_exit(0)`` would end the run as if all were well. The process forks before any
# conftest is imported, so before PyTorch, CUDA, capturing and coverage begin, which then all are in the child; what
# was started only waits (``machine/process.py``). That is done only where nobody else counts on this process:
# pytest was started by its own command, and neither has workers nor a debugger. Who calls ``pytest.main`` goes on
# after it, so nothing is done.


_NAME = "parity-watched"
_COMMANDS = ("_console_main", "console_main")  # of pytest 9.1 and later, and of those before
_MAIN = ("_main", "main")
_ELSEWHERE = ("usepdb", "trace", "collectonly", "version", "help", "looponfail", "tx")  # options


_Code: TypeAlias = int | pytest.ExitCode | None


class Watched:
    """Say, as a pytest plugin, how the run has ended.

    Args:
        word: where it says so.
    """

    def __init__(self, word: LastWord) -> None:
        self._word = word

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self) -> Generator[None, _Code, _Code]:
        code = yield
        self._word.say(int(code or 0))
        return code


def watch(config: pytest.Config) -> None:
    """Go on in a child if this process compares by itself, and is pytest's own."""
    if config.pluginmanager.is_blocked(_NAME):  # by -p no:parity-watched
        return
    if _compares_itself(config) and _is_of_its_command() and process.possible() and _has_cases(config):
        word = process.supervised()
        if word is not None:
            config.pluginmanager.register(Watched(word), _NAME)


def _compares_itself(config: pytest.Config) -> bool:
    asked = config.known_args_namespace
    return not any(getattr(asked, name, None) for name in ("numprocesses", *_ELSEWHERE))


def _is_of_its_command() -> bool:
    """Return whether pytest's command calls this, and not a run within another, or somebody else's program."""
    calls = [name for frame in _frames() if (name := _name_in_pytest(frame))]
    return any(name in _COMMANDS for name in calls) and sum(name in _MAIN for name in calls) == 1


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name_in_pytest(frame: FrameType) -> str:
    return frame.f_code.co_name if frame.f_globals.get("__name__") == "_pytest.config" else ""


def _has_cases(config: pytest.Config) -> bool:
    """Return whether a file that pytest is asked for imports parity; ``config.args`` does not know them yet."""
    start = config.invocation_params.dir
    by_default = config.getini("testpaths") if start == config.rootpath else []
    named = config.known_args_namespace.file_or_dir or [
        found for pattern in by_default for found in sorted(glob(pattern, root_dir=start, recursive=True))
    ]
    paths = [start / name.split("::")[0] for name in named or ["."]]
    return any(that_import_parity(paths, config.getini("python_files"), config.getini("norecursedirs")))
