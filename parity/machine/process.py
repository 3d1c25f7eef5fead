"""Set up a process that compares, and have another process own its exit code."""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, TypeVar
from weakref import WeakSet

from parity.machine import devices

# The memory of tensors: what a process frees is kept for its next tensors, and it comes in large pages.
#
# A comparison allocates and frees tensors of the same sizes over and over. By default, glibc gives the memory of large
# tensors back each time, and the kernel clears every page that it hands out again: a tenth of a comparison's time.
# Pages of 2 MiB instead of 4 KiB save another tenth, most of it in a process's first comparisons. The weights of a
# large model are given back all the same: kept, they leave holes that nothing else fits into.


# From ``malloc.h`` of glibc: how much may be free at the heap's end before it is given back, and from which size on a
# block lies outside of the heap, from where it is always given back, with the largest size that glibc takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 2**25
_LARGEST = 2**31 - 1  # the largest value that ``mallopt`` takes


def use_huge_pages() -> None:
    """Ask the kernel for large pages for tensors of 2 MiB or more, unless the environment says otherwise.

    PyTorch looks when it allocates its first tensor (``THP_MEM_ALLOC_ENABLE``, ``c10/core/impl/alloc_cpu.cpp`` of
    2.13); later it is too late, and changes nothing.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed() -> bool:
    """Keep what is freed from now on, up to a share of the machine's memory.

    Returns:
        Whether that was possible: the C library is glibc, the environment says nothing else about its
        heap, and the system
        tells how much memory is free.
    """
    libc, free = glibc(), devices.free_memory()
    if libc is None or free is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    limit = min(devices.share_to_keep(free), _LARGEST)
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, limit) and libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT))


def give_back() -> None:
    """Give back what is free now, for another process that needs the memory."""
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)


def glibc() -> Any:
    """Return the C library of this process; None if it is another."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None


# Keep imports out of Python's garbage collection, since modules live as long as the process.
#
# PyTorch and TE create some 350,000 objects when they are imported. Without this, the collector goes over them a dozen
# times meanwhile, and again whenever a comparison has left enough garbage.


@contextmanager
def lasting() -> Iterator[None]:
    """Within the context, collect nothing; what exists at its end is never looked at again."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.unregister(_unfreeze_for_triton)
        atexit.register(_unfreeze_for_triton)
        if collected:
            gc.enable()


def _unfreeze_for_triton() -> None:
    """Unfreeze at exit, where Triton's extension counts what was never freed, and complains; freeing
    all takes over a second.
    """
    if "triton" in sys.modules:
        gc.unfreeze()


# Processes that share work. Each is started anew, computes in one thread, and ends with the process that started it,
# also if that is killed: a process's end is noticed by the end of a pipe that it alone holds open, on every system.


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of so many processes; if its user is interrupted or raises, end what runs in it, and
    begin nothing more.

    They are started anew, since TE's modules hold locks and caches that a fork would copy half-used.
    """
    before = multiprocessing.active_children()
    pool = spawned(count, _begin)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in before:
                process.terminate()
        raise
    finally:
        pool.shutdown()


def spawned(count: int, begin: Callable[[], object] | None = None) -> ProcessPoolExecutor:
    """Return a pool of so many processes, which end with this one; each calls ``begin`` first."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=context, initializer=_begin_and_end_with_parent, initargs=(begin,))


def _begin_and_end_with_parent(begin: Callable[[], object] | None) -> None:
    end_with_parent()
    if begin is not None:
        begin()


def end_with_parent() -> None:
    """End this process, which ``multiprocessing`` has started, when the one that asked for it ends."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _begin() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal; the process that started these ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)


# Another program does not know that it has to end: a third process, which only waits for this one's end, kills it then.
_GUARD = "import os, signal, sys; sys.stdin.read() or os.kill(int(sys.argv[1]), signal.SIGKILL)"


@contextmanager
def ended_with_this(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Within the context, kill a process that this one has started if this one ends, however it ends.

    If it leads a group of processes, as one that was started in a session of its own does, all of them are killed.
    """
    leads = os.getpgid(process.pid) == process.pid
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(-process.pid if leads else process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with suppress(OSError):
            guard.communicate(b"farewell")


# Keep what a case forks from going on with the run, and from holding what the run holds: pipes and locks.


@contextmanager
def forks_ended() -> Iterator[None]:
    """End what is forked within the context where it would leave it; the process that entered it goes on."""
    process = os.getpid()
    failed = True
    try:
        yield
        failed = False
    finally:
        if os.getpid() != process:
            os._exit(int(failed))


class File(Protocol):
    """A file that Python has opened."""

    @property
    def closed(self) -> bool: ...

    def fileno(self) -> int: ...


_File = TypeVar("_File", bound=File)
_withheld: WeakSet[File] = WeakSet()


def withheld(file: _File) -> _File:
    """Withhold a file from each process that is forked from now on, and return it.

    A pipe ends, and a lock is free, when the last process that has it ends: who waits for this one would wait for
    everything that it has forked. The number of the file stays taken there, so that no other file gets it by mistake.
    """
    _withheld.add(file)
    return file


def _withhold() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in _withheld:
        if not file.closed:
            os.dup2(nothing, file.fileno(), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_withhold)


# Have another process own the exit code, so that nothing that runs in this one can end it as if all were well.
#
# C code that calls ``_exit(0)`` ends its process at once, and nothing in that process hears of it. So the process that
# somebody has started forks: the child goes on with the work, and the parent does nothing but wait for its end, and
# pass on what is meant for it. If the child has not said how the work ended, an exit code of 0 is none.
#
# Both stay in one group of processes, so that the terminal, Ctrl-C, Ctrl-Z and signals to the group reach the child as
# they would without the parent. The parent leaves nothing behind but the child's exit code or signal: what is on the
# stack, such as a profiler, and what is to run at exit belongs to the child.


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
