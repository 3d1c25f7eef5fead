"""Ends what runs too long, a hung CUDA kernel too: no signal handler runs while one is waited for, but threads do."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

# How long after the limit faulthandler, which needs no interpreter lock, ends the process: code that hangs may keep the
# lock, so that no thread of Python runs. A thread that does run has ten times as long: it may draw a large report.
GRACE_SECONDS = 30.0


@contextmanager
def time_limit(seconds: float, expired: Callable[[], None], stacks: Path | int) -> Iterator[None]:
    """End the process if the context is left too late; it never returns once the time is over.

    Args:
        seconds: the limit; 0 for none.
        expired: called in a thread of its own when the time is over, then the process ends with code 1.
        stacks: the file, or its open descriptor, for the threads' stacks if not even that thread can run.
    """
    if not seconds:
        yield
        return
    over = threading.Lock()  # held from when the time is over, or from when the context was left in time

    with open(stacks, "w", closefd=not isinstance(stacks, int)) as file:

        def end() -> None:
            if over.acquire(blocking=False):
                faulthandler.dump_traceback_later(10 * GRACE_SECONDS, exit=True, file=file)
                end_process(expired)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=file)
        timer.start()
        try:
            yield
        finally:
            over.acquire()  # waits for ever where the time is over
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()


def end_process(last: Callable[[], None] = lambda: None) -> NoReturn:
    """End this process at once, after a last call, whatever becomes of that."""
    try:
        last()
    finally:
        os._exit(1)
