"""Run a program that one of NVIDIA's tests starts, as ``parity exec`` does, and compute as the test's own process."""

from __future__ import annotations

import sys
from pathlib import Path

from parity import te
from parity.cpu.loading import script
from parity.lab.nvidia_tests import plugin


def main(first: str, *rest: str) -> None:
    plugin.compute_as_on_a_gpu()
    with te.on_cpu():
        try:
            if first == "-m":
                script.run_module(rest[0], rest[1:])
            else:
                script.run(Path(first), rest)
        except Exception as error:
            script.show_traceback(error)
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
