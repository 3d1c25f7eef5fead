"""How much faster two workers run the built-in cases than one process does.

    python benchmarks/scaling.py [-k EXPRESSION] [--out benchmarks/results/scaling.json]

The clock of ``pytest cases -n 0`` over that of ``-n 2``, each started anew, imports and report included: with one
thread a process, so that both compute alike, for one seed and for several, since each process imports PyTorch and TE
anew; and with as many threads as PyTorch and the plugin choose by themselves, which is what users get.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from measuring import Measure, machine, parser, report
from suite_cases import CASES


@dataclass(frozen=True)
class Run:
    """Of the built-in cases.

    Attributes:
        seeds: how many.
        one_thread: a process, and not as many as it chooses by itself.
    """

    seeds: int
    one_thread: bool

    @property
    def name(self) -> str:
        threads = "one thread a process" if self.one_thread else "threads as chosen by themselves"
        return f"{self.seeds} seed{'s' if self.seeds > 1 else ''}, {threads}"


def seconds(run: Run, workers: int, keyword: str | None) -> float:
    """Of the clock, for a whole run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-p", "no:cacheprovider", "-n", str(workers)]
        command += [f"--parity-report={folder}", f"--parity-seeds={run.seeds}", *(["-k", keyword] if keyword else [])]
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        if run.one_thread:
            environment["OMP_NUM_THREADS"] = "1"
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=CASES.parent)
        took = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return took


def main() -> None:
    made = parser(__doc__)
    made.add_argument("-k", dest="keyword", help="only items that match, as pytest's -k")
    made.add_argument("--seeds", type=int, default=3, help="of the longer run")
    made.add_argument("--repeats", type=int, default=1)
    arguments = made.parse_args()
    rows, ratios = [], {}
    for run in (Run(1, True), Run(arguments.seeds, True), Run(1, False)):
        took = {0: math.inf, 2: math.inf}
        for _ in range(arguments.repeats):  # in turn, so that a busy spell of the machine meets both
            for workers in took:
                took[workers] = min(took[workers], seconds(run, workers, arguments.keyword))
        ratios[run] = took[0] / took[2]
        rows.append((run.name, *(f"{took[workers]:.1f}" for workers in took), f"{ratios[run]:.2f}"))
    measures = [
        Measure(f"-n 0 over -n 2, {run.name}", ratio, 1.8 if run.one_thread else None, at_least=True)
        for run, ratio in ratios.items()
    ]
    report(__doc__, measures, ("run", "-n 0 (s)", "-n 2 (s)", "ratio"), rows, arguments.out, machine())


if __name__ == "__main__":
    main()
