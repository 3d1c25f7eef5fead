"""Estimate how much memory the largest case of a run needs, before anything is collected.

A process of its own (``python -m parity.plugin.memory_estimate FILE...``) does so, on the CPU kernels and without
allocating a tensor, so that the controller imports neither torch nor TransformerEngine and no GPU is touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from parity.machine.devices import CUDA_VISIBLE_DEVICES

_LONGEST = 120.0  # seconds; a file of pairs may do anything when it is imported


def largest_need(files: Iterable[Path]) -> int | None:
    """Estimate how many bytes the largest comparison of these files' cases takes; return None if that is unknown."""
    command = [sys.executable, "-m", __name__, *map(str, files)]
    environment = {**os.environ, CUDA_VISIBLE_DEVICES: ""}
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LONGEST, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    last = ran.stdout.split()[-1:]  # printed after whatever the files print
    return int(last[0]) if ran.returncode == 0 and last and last[0].isdecimal() else None


def _estimate_memory(files: Sequence[str]) -> Iterator[int]:
    """Yield the bytes that each case needs at each size.

    Skips files and cases with errors, which are reported when they are collected.
    """
    from parity import te
    from parity.case import registry
    from parity.case.validate import check_case
    from parity.passes import memory

    kernels = te.kernels("cpu")
    for file in files:
        try:
            with registry.mistakes_kept():  # they are reported when the file is collected
                cases = registry.load_file(Path(file))
        except Exception:  # a user's file
            continue
        for case in cases:
            try:
                sizes = check_case(case, kernels.te)
            except Exception:  # a user's factory
                continue
            yield from (memory.estimate(case, checked, kernels.te) or 0 for checked in sizes)


if __name__ == "__main__":
    print(max(_estimate_memory(sys.argv[1:]), default=0))
