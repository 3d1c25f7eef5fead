"""All calls on one kind of kernels, by processes that replace each other where a kernel ends one or loses the GPU."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from parity.kernel_table import measure
from parity.kernel_table.measure import Outcome

ENDED = Outcome(error="the process ended in this call")
TIME_OVER = Outcome(error="the time for all calls was over")
_NEVER_BEGUN = Outcome(error="no process came to this call")
_MOST_IN_VAIN = 3  # processes in succession that end in their first call
# Seconds from one outcome to the next after which a kernel is taken to hang. The first takes the import of TE, and some
# the compilation of a Triton kernel.
LONGEST_CALL = 120.0


def outcomes(start: Callable[[int], int | None], count: int, folder: Path) -> list[Outcome]:
    """The outcome of each call.

    Args:
        start: ``start(first)`` runs a process that makes the calls from this index on, writes each outcome into the
            folder, and returns its exit code: ``measure.GPU_LOST`` if the GPU fails every call after the last one. None
            where the time for all calls is over.
        count: of calls.
        folder: of the outcomes.
    """
    first = in_vain = 0
    missing = _NEVER_BEGUN
    while first < count and in_vain < _MOST_IN_VAIN:
        code = start(first)
        if code is None:
            missing = TIME_OVER
            break
        reached = next((i for i in range(first, count) if not measure.file(i, folder).exists()), count)
        in_vain = in_vain + 1 if reached == first else 0
        if reached < count and code != measure.GPU_LOST:
            measure.write(ENDED, reached, folder)
            reached += 1
        first = reached
    return [measure.read(i, folder) or missing for i in range(count)]


def run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, ends: float, longest: float = LONGEST_CALL
) -> int | None:
    """Run one process; its exit code, or None if the time for all calls was over before it ended.

    Args:
        command: of the process.
        environment: of the process.
        folder: of the outcomes that it writes.
        ends: ``time.monotonic()`` at which it is ended.
        longest: seconds without a new outcome after which it is ended.
    """
    with subprocess.Popen(command, env=environment) as process:
        made, since = _made(folder), time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=max(0.0, min(1.0, ends - time.monotonic())))
            now, before = time.monotonic(), made
            made = _made(folder)
            since = now if made != before else since
            if now >= ends or now - since >= longest:
                process.kill()
                code = process.wait()
                return None if now >= ends else code


def _made(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())
