"""Give an item that computes in several processes the cores of as many workers."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

from parity.machine.forks import withheld

_ASKED_AGAIN = 0.02  # seconds; nothing tells when one of several locks is free, and only the first in the queue asks


class Slots:
    """As many slots as a run has workers; an item takes one for each of its processes.

    A slot is a file lock, because the kernel takes that back from a worker however it dies. Who holds slots waits for
    none, and only the first in the queue holds some before it has all of its own, so each wait ends.

    Args:
        folder: shared by the run's workers.
        count: how many slots there are.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    @contextmanager
    def taken(self, wanted: int) -> Iterator[None]:
        """Within the context, so many slots are taken, or all of them if there are fewer.

        Who comes later stays behind in the queue, so that an item that wants many gets them.
        """
        with ExitStack() as files:
            free = [files.enter_context(self._open(f"slot-{number}")) for number in range(self.count)]
            missing = min(wanted, self.count)
            with self._open("slots") as queue:
                fcntl.flock(queue, fcntl.LOCK_EX)
                while missing:
                    got = list(islice(filter(_is_taken, free), missing))
                    free = [slot for slot in free if slot not in got]
                    missing -= len(got)
                    if missing:
                        time.sleep(_ASKED_AGAIN)
            yield

    def _open(self, name: str) -> IO[str]:
        return withheld((self.folder / name).open("w"))


def _is_taken(slot: IO[str]) -> bool:
    """Take a slot, and return whether it was free."""
    try:
        fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
