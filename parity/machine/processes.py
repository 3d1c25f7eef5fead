"""Processes that share out work, each started anew and computing in one thread, and that end with what started them."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of so many; where its user is interrupted or raises, what runs in it is ended, and nothing more begins.

    They are started anew, since TE's modules hold locks and caches that a fork would copy half-used.
    """
    before = multiprocessing.active_children()
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
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


def _begin() -> None:
    """Ctrl-C reaches every process of a terminal; the one that started these ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
