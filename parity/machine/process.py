"""Set up the memory and the child processes of a process that compares, and let another one own its exit code."""

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

# The memory of tensors: a process keeps freed memory for its next tensors, and gets memory in large pages.
#
# A comparison allocates and frees tensors of the same sizes over and over. By default, glibc returns the memory of
# large tensors each time, and the kernel clears every page that it hands out again: a tenth of a comparison's time.
# Pages of 2 MiB instead of 4 KiB save another tenth, most of it in a process's first comparisons. The weights of a
# large model are returned nevertheless, because keeping them would leave holes that nothing else fits into.


# Two parameters from glibc's ``malloc.h``: how much may be free at the heap's end before it is returned, and the size
# from which on a block lies outside the heap, so that freeing it always returns it. ``_LARGEST_KEPT`` is the largest
# such size that glibc takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 2**25
_LARGEST = 2**31 - 1  # the largest value that ``mallopt`` takes


def use_huge_pages() -> None:
    """Ask the kernel for large pages for tensors of 2 MiB or more, unless the environment says otherwise.

    PyTorch reads the setting when it allocates its first tensor (``THP_MEM_ALLOC_ENABLE``,
    ``c10/core/impl/alloc_cpu.cpp`` of 2.13), so calling this later has no effect.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed() -> bool:
    """Keep memory that is freed from now on, up to a share of the machine's memory.

    Returns:
        Whether that was possible. The C library must be glibc, the environment must not configure its heap, and the
        amount of free memory must be known.
    """
    libc, free = glibc(), devices.free_memory()
    if libc is None or free is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    limit = min(devices.share_to_keep(free), _LARGEST)
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, limit) and libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT))


def give_back() -> None:
    """Return the kept memory to the system, for another process that needs it."""
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)


def glibc() -> Any:
    """Return the C library of this process if it is glibc, else None."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None


# Keep imports out of Python's garbage collection, since modules live as long as the process.
#
# PyTorch and TE create some 350,000 objects when they are imported. Without this, the collector traverses them a dozen
# times during the imports, and again whenever a comparison has left enough garbage.


@contextmanager
def lasting() -> Iterator[None]:
    """Turn garbage collection off within the context, and exclude all objects that exist at its end for good."""
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
    """Unfreeze at exit, but only for Triton, whose extension complains about objects that were never freed.

    Freeing everything takes over a second.
    """
    if "triton" in sys.modules:
        gc.unfreeze()


# Processes that share work. Each is started afresh, computes in one thread, and ends with the process that started it,
# even if that is killed: on every system, a pipe that only the parent holds open shows the parent's end.


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of this many processes. If the context is interrupted or raises, end them and begin nothing more.

    They are spawned, not forked, because TE's modules hold locks and caches that a fork would copy in mid-use.
    """
    before = multiprocessing.active_children()
    pool = spawned(count, _set_up_child)
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
    """Return a pool of this many processes, which end with this one. Each calls ``begin`` first."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=context, initializer=_begin_and_end_with_parent, initargs=(begin,))


def _begin_and_end_with_parent(begin: Callable[[], object] | None) -> None:
    end_with_parent()
    if begin is not None:
        begin()


def end_with_parent() -> None:
    """End this process, which ``multiprocessing`` has started, when its parent ends."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _set_up_child() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal, because the parent ends these; use one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)


# Another program does not know when it has to end, so a third process waits for the end of this one and then kills it.
_GUARD = "import os, signal, sys; sys.stdin.read() or os.kill(int(sys.argv[1]), signal.SIGKILL)"


@contextmanager
def ended_with_this(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Make sure, within the context, that a child process is killed if this process ends, however it ends.

    If the child leads a process group, as it does when it was started in a new session, the whole group is killed.
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


# Keep processes that a case forks from going on with the run, and from holding its pipes and locks.


@contextmanager
def forks_ended() -> Iterator[None]:
    """End processes that are forked within the context where they would leave it. The original process goes on."""
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
    """Withhold a file from each process that is forked from now on, and return the file.

    A pipe ends, and a lock is free, only when the last process that holds it ends. So a process that waits for this one
    would wait for all of its forks, too. In the forks, the file's descriptor stays taken, so that no other file gets
    the same number by mistake.
    """
    _withheld.add(file)
    return file


def _replace_withheld_files() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in _withheld:
        if not file.closed:
            os.dup2(nothing, file.fileno(), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_replace_withheld_files)


# Let another process own the exit code, so that no code in this one can end it as if all were well.
#
# C code that calls ``_exit(0)`` ends its process at once, and nothing in that process notices. So the process that the
# user has started forks: the child goes on with the work, and the parent only waits for its end and forwards signals.
# If the child has not said how the work ended, its exit code of 0 does not count.
#
# Both stay in one process group, so that the terminal, Ctrl-C, Ctrl-Z and signals to the group reach the child as they
# would without the parent. The parent ends with the child's exit code or signal and does nothing else at its end:
# everything on the stack, such as a profiler, and all exit handlers belong to the child.


UNSAID = 1  # the exit code if the child ended with 0 but did not say that the work is done
_ENDED_EARLY = (
    "parity: the process of this run ended with exit code 0 before the run was over, perhaps because C code called "
    "_exit; so the exit code is 1"
)


def possible() -> bool:
    """Return whether this process can leave its work to a child without anybody missing the work here.

    An attached debugger would lose the work, be it a debugger of Python (a trace function) or of the system, such as
    gdb or strace. And a fork does not copy other threads, neither Python's nor a library's.
    """
    return sys.platform == "linux" and not _is_debugged() and _has_one_thread()


def _is_debugged() -> bool:
    """Return whether a debugger or coverage traces Python's lines (from 3.12 on, perhaps by ``sys.monitoring``)."""
    monitoring = getattr(sys, "monitoring", None)
    return sys.gettrace() is not None or (
        monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    )


def _has_one_thread() -> bool:
    """Return whether this process has a single thread and no other process traces it."""
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
        self._pipe = withheld(pipe)  # so that no fork of the child can say it
        self._identity = _identify_file(pipe.fileno())

    def say(self, code: int) -> None:
        """Say with which exit code the work ended, unless somebody has closed the pipe in the meantime."""
        with suppress(OSError):
            if _identify_file(self._pipe.fileno()) == self._identity:  # else another file has its number
                self._pipe.write(bytes([code & 0xFF]))  # the part of an exit code that the system keeps


def _identify_file(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def supervised() -> LastWord | None:
    """Fork, and return only in the child. The parent waits and ends with the exit code that the child says.

    The child is killed if the parent is.

    Returns:
        The object by which the child says how its work ended; None if the system could not fork.
    """
    read, write = os.pipe()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    usual = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while it is ignored, nobody can wait for a child
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
    """Make the kernel kill this process when its parent ends, which no code in this process can prevent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


_PR_SET_PDEATHSIG = 1  # from Linux's ``sys/prctl.h``

# The parent's side.


_FROM_KEYBOARD = frozenset({signal.SIGINT, signal.SIGQUIT})
_PASSED_ON = _FROM_KEYBOARD | {signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
_AWAITED = _PASSED_ON | {signal.SIGTSTP, signal.SIGCHLD}


def _wait_for(child: int, read: int) -> NoReturn:
    """Forward signals until the child has ended, and end as it did."""
    while True:
        heard = signal.sigwaitinfo(_AWAITED)
        number = signal.Signals(heard.si_signo)
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                _end_as(os.waitstatus_to_exitcode(status), lambda: _read_exit_code(read))
        elif number == signal.SIGTSTP:
            os.kill(child, number)
            _stop_process()
        elif number not in _FROM_KEYBOARD or heard.si_code <= 0:  # from a process; the terminal signals the child, too
            os.kill(child, number)


def _stop_process() -> None:
    """Stop as by Ctrl-Z, if there is a shell that can continue this process."""
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def _read_exit_code(read: int) -> int | None:
    """Return the exit code that the child said; None if it said none."""
    os.set_blocking(read, False)
    try:
        word = os.read(read, 1)
    except BlockingIOError:  # another process holds the pipe open, and has not said anything either
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
        )  # so that only the child dumps its core
        with suppress(OSError):  # there is no handler for SIGKILL
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        code = 128 + number  # as in a shell; the first process of a container does not die of a signal
    os._exit(code)
