"""How much faster two workers run the built-in cases than one process does.

    python benchmarks/scaling.py [-k EXPRESSION] [--out benchmarks/results/scaling.json]

The clock of ``pytest cases -n 0`` over that of ``-n 2``, each started anew, imports and report included; with one
thread a process, so that both compute alike, and with as many threads as PyTorch and the plugin choose by themselves,
which is what users get.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from measuring import Measure, machine, parser, report, wall_seconds
from suite_cases import CASES


def run(workers: int, keyword: str | None, one_thread: bool) -> None:
    """A whole run of the built-in cases."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-p", "no:cacheprovider", "-n", str(workers)]
        command += [f"--parity-report={folder}", *(["-k", keyword] if keyword else [])]
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        if one_thread:
            environment["OMP_NUM_THREADS"] = "1"
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=CASES.parent)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("-k", dest="keyword", help="only items that match, as pytest's -k")
    made.add_argument("--repeats", type=int, default=2)
    arguments = made.parse_args()
    rows, ratios = [], {}
    for one_thread in (True, False):
        seconds = {
            workers: min(
                wall_seconds(lambda workers=workers, one_thread=one_thread: run(workers, arguments.keyword, one_thread))
                for _ in range(arguments.repeats)
            )
            for workers in (0, 1, 2)
        }
        ratios[one_thread] = seconds[0] / seconds[2]
        threads = "1" if one_thread else "by themselves"
        rows.append((threads, *(f"{seconds[workers]:.1f}" for workers in seconds), f"{ratios[one_thread]:.2f}"))
    measures = [
        Measure("-n 0 over -n 2, one thread a process", ratios[True], 1.8, at_least=True),
        Measure("-n 0 over -n 2, threads as chosen by themselves", ratios[False]),
    ]
    report(__doc__, measures, ("threads", "-n 0 (s)", "-n 1 (s)", "-n 2 (s)", "ratio"), rows, arguments.out, machine())


if __name__ == "__main__":
    main()
