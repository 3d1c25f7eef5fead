"""Lets workers share a device, or have it alone for a while.

A file lock, because the kernel takes it back from a worker that dies in whatever way.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class DeviceLock:
    """One device's lock, the same for all workers that name the same file.

    Attributes:
        path: of the lock; another file, its gate, lies beside it.
        release_memory: called where this process does not use the device and another has it alone or waits for that.
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
        return self.path.with_suffix(f".{part}").open("w")


def _free(gate: IO[str]) -> bool:
    try:
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(gate, fcntl.LOCK_UN)
    return True
