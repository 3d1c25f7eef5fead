"""Estimate how much memory the largest case of a run needs, before anything is collected: ``python -m ... FILE...``.

This takes a process of its own, on the CPU kernels and without allocating a tensor, so that the controller imports
neither torch nor TransformerEngine and no GPU is touched.
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
    """Return about how many bytes the largest comparison of these files' cases takes; None if that cannot be told."""
    command = [sys.executable, "-m", __name__, *map(str, files)]
    environment = {**os.environ, CUDA_VISIBLE_DEVICES: ""}
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LONGEST, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    last = ran.stdout.split()[-1:]  # whatever the files print, this is printed after it
    return int(last[0]) if ran.returncode == 0 and last and last[0].isdecimal() else None


def _needs(files: Sequence[str]) -> Iterator[int]:
    """Yield the need of each case at each size; what cannot be imported or does not fit is reported
    when it is collected.
    """
    from parity import te
    from parity.case import registry
    from parity.case.validate import check_case
    from parity.passes import memory

    kernels = te.kernels("cpu")
    for file in files:
        try:
            with registry.mistakes_kept():  # they are told when the file is collected
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
    print(max(_needs(sys.argv[1:]), default=0))
