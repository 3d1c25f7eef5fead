"""Keep what a case forks from going on with the run, and from holding what the run holds: pipes and locks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar
from weakref import WeakSet


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
