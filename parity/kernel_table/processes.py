"""All calls on one kind of kernels, by processes that replace each other where a kernel ends one or loses the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from parity.kernel_table import measure
from parity.kernel_table.measure import Outcome

ENDED = Outcome(error="the process ended in this call")
_MOST_IN_VAIN = 3  # processes in succession that end in their first call


def outcomes(start: Callable[[int], int], count: int, folder: Path) -> list[Outcome]:
    """The outcome of each call.

    Args:
        start: ``start(first)`` runs a process that makes the calls from this index on, writes each outcome into the
            folder, and returns its exit code: ``measure.GPU_LOST`` if the GPU fails every call after the last one.
        count: of calls.
        folder: of the outcomes.
    """
    first = in_vain = 0
    while first < count and in_vain < _MOST_IN_VAIN:
        code = start(first)
        reached = next((i for i in range(first, count) if not measure.file(i, folder).exists()), count)
        in_vain = in_vain + 1 if reached == first else 0
        if reached < count and code != measure.GPU_LOST:
            measure.write(ENDED, reached, folder)
            reached += 1
        first = reached
    return [measure.read(i, folder) for i in range(count)]
