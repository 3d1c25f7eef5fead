"""Measure how much faster two workers run the built-in cases than one process does.

    python benchmarks/scaling.py [-k EXPRESSION] [--out benchmarks/results/scaling.json]

The ratio is the wall time of ``pytest cases -n 0`` over that of ``-n 2``, including imports and report. It is measured
with one thread per process, so that both runs compute alike, for one seed and for several, because the time that each
process takes to import PyTorch and TE matters less with more seeds. It is also measured with as many threads as PyTorch
and the plugin choose by themselves, which is what users get.

The benchmark also measures the most that the machine allows: twice the wall time of one ``-n 0`` over that of two at
once, which share only the processor, its caches and the memory. No distribution of items gets more out of two cores.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from measuring import Measure, environment, machine, parser, report
from suite_cases import CASES


@dataclass(frozen=True)
class Run:
    """One way to run the built-in cases.

    Attributes:
        seeds: the number of seeds.
        one_thread: whether each process has only one thread, and not as many as it chooses by itself.
    """

    seeds: int
    one_thread: bool

    @property
    def name(self) -> str:
        threads = "one thread a process" if self.one_thread else "threads as chosen by themselves"
        return f"{self.seeds} seed{'s' if self.seeds > 1 else ''}, {threads}"


def seconds(run: Run, workers: int, keyword: str | None, at_once: int = 1) -> float:
    """Return the wall time in seconds until ``at_once`` whole runs, which are started together, have ended."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        started = [_started(run, workers, keyword, f"{folder}/{i}") for i in range(at_once)]
        for process in started:
            output, _ = process.communicate()
            if process.returncode != 0:
                raise SystemExit(f"{process.args} ended with {process.returncode}:\n{output[-2000:]}")
        return time.perf_counter() - began


def _started(run: Run, workers: int, keyword: str | None, report: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-p", "no:cacheprovider", "-n", str(workers)]
    command += [f"--parity-report={report}", f"--parity-seeds={run.seeds}", *(["-k", keyword] if keyword else [])]
    variables = environment()
    variables.pop("OMP_NUM_THREADS", None)
    if run.one_thread:
        variables["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, cwd=CASES.parent
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("-k", dest="keyword", help="only items that match, as pytest's -k")
    made.add_argument("--seeds", type=int, default=3, help="of the longer run")
    made.add_argument("--repeats", type=int, default=1)
    arguments = made.parse_args()
    rows, measures = [], []
    seconds(Run(1, True), 0, "layernorm_linear")  # compiles Python's modules and keeps them
    for run in (Run(1, True), Run(arguments.seeds, True), Run(1, False)):
        alone, shared, at_once = math.inf, math.inf, math.inf
        for _ in range(arguments.repeats):  # in turn, so that all are affected if the machine is busy for a while
            alone = min(alone, seconds(run, 0, arguments.keyword))
            shared = min(shared, seconds(run, 2, arguments.keyword))
            if run.one_thread:
                at_once = min(at_once, seconds(run, 0, arguments.keyword, at_once=2))
        ratio, given = alone / shared, 2 * alone / at_once
        measures.append(Measure(f"-n 0 over -n 2, {run.name}", ratio, 1.8 if run.one_thread else None, at_least=True))
        row = [run.name, f"{alone:.1f}", f"{shared:.1f}", f"{ratio:.2f}", "", ""]
        if run.one_thread:
            measures.append(Measure(f"what the machine gives: two runs at once, {run.name}", given, at_least=True))
            row[-2:] = f"{at_once:.1f}", f"{given:.2f}"
        rows.append(tuple(row))
    headers = ("run", "-n 0 (s)", "-n 2 (s)", "ratio", "two -n 0 at once (s)", "2 x -n 0 over that")
    report(__doc__, measures, headers, rows, arguments.out, machine())


if __name__ == "__main__":
    main()
