"""One comparison at its place: beside others on the device or alone, in limited time, and again if memory ran out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from parity.plugin.workplace import Workplace

if TYPE_CHECKING:
    from parity.result import Result

RETRIED = "memory ran out beside other items, so it ran a second time, alone on its device"


def attempt(
    compare: Callable[[], Result],
    time_limit: Callable[[], AbstractContextManager[None]],
    need: Callable[[], int | None],
    workplace: Workplace,
) -> Result:
    """Compare, and where memory runs out, once more with the device to itself.

    Args:
        compare: makes the comparison.
        time_limit: entered around each comparison, not while others are waited for.
        need: tells the bytes that it takes, about; one that takes more than the worker's share starts alone.
        workplace: this process's.

    Returns:
        The result; a skip with the reason if memory runs out even so.
    """
    from parity import memory
    from parity.machine import free_memory

    def run(alone: bool) -> Result:
        with _device(workplace, alone), time_limit():
            return compare()

    first = run(alone=workplace.share is not None and (need() or 0) > workplace.share)
    if not _lacks_memory(first):
        return first
    memory.release()
    second = run(alone=True)
    if not _lacks_memory(second):
        return dataclasses.replace(second, notes=(*second.notes, RETRIED))
    memory.release()
    reason = (
        f"does not fit in memory, alone on its device and tried twice: it needs about {free_memory.in_words(need())}, "
        f"{free_memory.in_words(free_memory.free())} are free; {second.reason}"
    )
    return dataclasses.replace(second, status="skipped", reason=reason)


def _lacks_memory(result: Result) -> bool:
    return result.status == "error" and result.device_error == "out of memory"


def _device(workplace: Workplace, alone: bool) -> AbstractContextManager[None]:
    """The device, shared with other workers or not; a process without others has it anyway."""
    if workplace.lock is None:
        return nullcontext()
    from parity import memory
    from parity.plugin.device_lock import DeviceLock

    lock = DeviceLock(workplace.lock, memory.release)
    return lock.alone() if alone else lock.shared()
