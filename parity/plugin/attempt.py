"""Compare at the right moment: beside others on the device or alone, in limited time, again if memory ran out."""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

from parity.machine.forks import withheld
from parity.plugin.options import Workplace
from parity.plugin.slots import Slots

if TYPE_CHECKING:
    from parity.result import Result

# Let workers share a device, or have it alone for a while.
#
# It is a file lock, because the kernel takes that back from a worker however it dies.


class DeviceLock:
    """One device's lock, the same for all workers that name the same file.

    Attributes:
        path: the lock's file; another file, its gate, is beside it.
        release_memory: called while this process does not use the device and another has it alone or waits for that.
    """

    def __init__(self, path: Path, release_memory: Callable[[], None]) -> None:
        self.path, self.release_memory = path, release_memory

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within the context, others may use the device too, but nobody has it alone."""
        with self._open("gate") as gate, self._open("device") as device:
            if not _free(gate):
                self.release_memory()
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(device, fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
            try:
                yield
            finally:
                if not _free(gate):
                    self.release_memory()
                fcntl.flock(device, fcntl.LOCK_UN)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the context, no other worker uses the device; who comes later waits, so that its turn comes."""
        with self._open("gate") as gate, self._open("device") as device:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(device, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(device, fcntl.LOCK_UN)
                fcntl.flock(gate, fcntl.LOCK_UN)

    def _open(self, part: str) -> IO[str]:
        return withheld(self.path.with_suffix(f".{part}").open("w"))


def _free(gate: IO[str]) -> bool:
    try:
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(gate, fcntl.LOCK_UN)
    return True


# Make one comparison: beside others on the device or alone, in limited time, and again if memory ran out.


RETRIED = "memory ran out beside other items, so it ran a second time, alone on its device"


def attempt(
    compare: Callable[[], Result],
    time_limit: Callable[[], AbstractContextManager[None]],
    need: Callable[[], int | None],
    workplace: Workplace,
    processes: int = 1,
) -> Result:
    """Compare and, if memory runs out, compare once more with the device to itself.

    Args:
        compare: makes the comparison.
        time_limit: entered around each comparison and the question what it needs, not while waiting for others.
        need: says about how many bytes it takes; one that takes more than the worker's share starts alone.
        workplace: this process's.
        processes: in how many it computes; it waits for as many workers' cores.

    Returns:
        The result; a skip with the reason if memory runs out again.
    """
    from parity.machine import devices
    from parity.passes import memory

    def run(alone: bool) -> Result:
        with _cores(workplace, processes), _device(workplace, alone), time_limit():
            return compare()

    def needed() -> int | None:
        with time_limit():  # it calls the pair's modules, which may hang in it
            return need()

    first = run(alone=workplace.share is not None and (needed() or 0) > workplace.share)
    if not _lacks_memory(first):
        return first
    memory.release()
    second = run(alone=True)
    if not _lacks_memory(second):
        return dataclasses.replace(second, notes=(*second.notes, RETRIED))
    memory.release()
    reason = (
        f"does not fit in memory, though it was tried twice and alone on its device: it needs about "
        f"{devices.in_words(needed())}, {devices.in_words(devices.free())} are free; {second.reason}"
    )
    return dataclasses.replace(second, status="skipped", reason=reason)


def _lacks_memory(result: Result) -> bool:
    return result.status == "error" and result.device_error == "out of memory"


def _cores(workplace: Workplace, processes: int) -> AbstractContextManager[None]:
    """Hold the cores of as many workers; a process without others has them anyway."""
    if workplace.folder is None or workplace.workers == 1:
        return nullcontext()
    return Slots(workplace.folder, workplace.workers).taken(processes)


def _device(workplace: Workplace, alone: bool) -> AbstractContextManager[None]:
    """Hold the device, shared with other workers or not; a process without others has it anyway."""
    if workplace.lock is None:
        return nullcontext()
    from parity.passes import memory

    lock = DeviceLock(workplace.lock, memory.release)
    return lock.alone() if alone else lock.shared()
