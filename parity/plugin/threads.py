"""Let a run end although its pairs have left threads running, which Python would wait for without end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

_LEFT = pytest.StashKey[dict[threading.Thread, str]]()
_SECONDS = 10.0  # that what is left has to end by itself, as a pool of threads does when it is told


@contextmanager
def noted(config: pytest.Config, node_id: str) -> Iterator[None]:
    """Note what is begun within the context and outlives it, apart from daemons, which nobody waits for."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        left = {thread for thread in threading.enumerate() if not thread.daemon} - before
        config.stash.setdefault(_LEFT, {}).update(dict.fromkeys(left, node_id))


def end_without(config: pytest.Config, code: int) -> None:
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
        until = time.monotonic() + _SECONDS
        for thread, node_id in left.items():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                told = f"parity: {node_id} left {thread.name} running, which has not ended; the process ends without it"
                with suppress(Exception):  # a pair may have closed them
                    print(told.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
                    sys.stdout.flush()
                os._exit(code)

    threading.Thread(target=wait, name="parity-end", daemon=True).start()
