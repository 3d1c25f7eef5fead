"""Have another process own the exit code, so that nothing that runs in this one can end it as if all were well.

C code that calls ``_exit(0)`` ends its process at once, and nothing in that process hears of it. So the process that
somebody has started forks: the child goes on with the work, and the parent does nothing but wait for its end, and pass
on what is meant for it. If the child has not said how the work ended, an exit code of 0 is none.

Both stay in one group of processes, so that the terminal, Ctrl-C, Ctrl-Z and signals to the group reach the child as
they would without the parent. The parent leaves nothing behind but the child's exit code or signal: what is on the
stack, such as a profiler, and what is to run at exit belongs to the child.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from parity.machine.process import withheld

UNSAID = 1  # the exit code of work that ended with 0, but has not said that it is done
_ENDED_EARLY = (
    "parity: the process of this run ended with exit code 0 before the run was over, perhaps because C code called "
    "_exit; so the exit code is 1"
)


def possible() -> bool:
    """Return whether this process can leave its work to a child, and nobody looks for the work in this one.

    A debugger that is attached would lose it, whether of Python's (a trace function) or of the system's, such as gdb or
    strace; and a fork takes no other thread along, whether Python's or that of a library.
    """
    return sys.platform == "linux" and not _is_debugged() and _has_one_thread()


def _is_debugged() -> bool:
    """Return whether Python calls a debugger, or measures coverage, at each line (from 3.12 on by ``monitoring``)."""
    monitoring = getattr(sys, "monitoring", None)
    return sys.gettrace() is not None or (
        monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    )


def _has_one_thread() -> bool:
    """Return whether this process has one thread, and no other process traces it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return threading.active_count() == 1
    found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return [found.get(name, wanted).strip() for name, wanted in _ALONE.items()] == list(_ALONE.values())


_ALONE = {"TracerPid": "0", "Threads": "1"}


class LastWord:
    """Tell the parent that the child has done its work, and with which exit code."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = withheld(pipe)  # what the work forks is not to say it
        self._identity = _identity(pipe.fileno())

    def say(self, code: int) -> None:
        """Say with which exit code the work ended, unless somebody has closed the pipe meanwhile."""
        with suppress(OSError):
            if _identity(self._pipe.fileno()) == self._identity:  # else another file has its number
                self._pipe.write(bytes([code & 0xFF]))  # as the system keeps it


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def supervised() -> LastWord | None:
    """Go on in a child, whose exit code the parent takes over once it is said; the parent does not return.

    The child is killed if the parent is.

    Returns:
        Where the child says how its work ended; None if the system has no process for it, so that there is no parent.
    """
    read, write = os.pipe()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    usual = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it was ignored, nobody could wait for a child
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:
        child = -1
    if child > 0:
        os.close(write)
        _wait_for(child, read)
    if child == 0:
        _end_with(parent)
    signal.signal(signal.SIGCHLD, usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(read)
    if child < 0:
        os.close(write)
        return None
    return LastWord(os.fdopen(write, "wb", buffering=0))


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, which no code in it can keep from happening."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


_PR_SET_PDEATHSIG = 1  # of Linux's ``sys/prctl.h``

# The parent.


_FROM_KEYBOARD = frozenset({signal.SIGINT, signal.SIGQUIT})
_PASSED_ON = _FROM_KEYBOARD | {signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
_AWAITED = _PASSED_ON | {signal.SIGTSTP, signal.SIGCHLD}


def _wait_for(child: int, read: int) -> NoReturn:
    """Pass on signals until the child has ended, and end as it did."""
    while True:
        heard = signal.sigwaitinfo(_AWAITED)
        number = signal.Signals(heard.si_signo)
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                _end_as(os.waitstatus_to_exitcode(status), lambda: _said(read))
        elif number == signal.SIGTSTP:
            os.kill(child, number)
            _stop()
        elif number not in _FROM_KEYBOARD or heard.si_code <= 0:  # from a process; what the terminal sends, all get
            os.kill(child, number)


def _stop() -> None:
    """Stop as by Ctrl-Z, if there is a shell to go on by."""
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def _said(read: int) -> int | None:
    """Return the exit code that the child said, or None."""
    os.set_blocking(read, False)
    try:
        word = os.read(read, 1)
    except BlockingIOError:  # somebody else holds the pipe open, and has not said anything either
        return None
    return word[0] if word else None


def _end_as(code: int, said: Callable[[], int | None]) -> NoReturn:
    """End with the child's exit code or signal, but with 0 only if the child said so."""
    if code == 0:
        word = said()
        if word is None:
            with suppress(OSError):
                os.write(2, f"{_ENDED_EARLY}\n".encode())
        code = UNSAID if word is None else word
    elif code < 0:
        number = -code
        resource.setrlimit(
            resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
        )  # the child's is told
        with suppress(OSError):  # there is no handler for SIGKILL
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        code = 128 + number  # as a shell says it; the first process of a container does not die of a signal
    os._exit(code)
