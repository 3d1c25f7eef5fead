"""Measure what a result costs the process that records it, and whether memory grows with the number of results.

    python benchmarks/controller.py [--out benchmarks/results/controller.json]

Under xdist, the recorder is the only part of the controller that handles results. Here it gets results of a comparison
of eight tensors, in the form in which pytest's reports carry them. It writes each result to the record, and draws the
report at the end. For each number of results, a new process measures the processor time per result and the peak
memory, both without pytest's own lists of reports and ids. A plot beside the JSON file shows both.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from measuring import Measure, machine, parser, report

NUMBERS = (1_000, 3_000, 10_000, 30_000, 100_000)
CASES, TENSORS, PRECISIONS = 25, 8, ("fp32", "bf16", "fp16", "fp8_current")


def record(number: int) -> dict[str, float]:
    """Return the seconds per result, without and with its share of the report, and this process's peak memory in MB."""
    from parity.plugin.options import Options
    from parity.plugin.recorder import Recorder

    environment, results = _lines(number)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Options(None, "cpu", (0,), Path(folder), "run"))
        arriving = 0.0
        for line in results:
            began = time.process_time()
            sent = {"environment": environment, "results": [line]}
            recorder.pytest_runtest_logreport(SimpleNamespace(parity_lines=sent))
            arriving += time.process_time() - began
        began = time.process_time()
        recorder.finish()
        drawing = time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"arriving": arriving / number, "whole": (arriving + drawing) / number, "memory": memory}


def _lines(number: int) -> tuple[str, Iterator[str]]:
    """Return the environment's line, and an iterator over the lines of this number of results."""
    from parity.report import record as lines
    from parity.report.environment import Environment
    from parity.result import Check, Errors, Result, TensorResult

    texts = {field.name: "" for field in dataclasses.fields(Environment)}
    environment = Environment(**{**texts, "backend": "cpu", "seeds": (0,), "items": number})
    errors = Errors(3.1e-3, 1.4e-2, 1.7, 1 - 4.8e-6, 50.2, 1.01)
    names = ("norm", "largest", "gain", "slice", "row", "shift", "mistake")
    checks = tuple(Check(name, 1.03, 2.4, "dim 2 at 5") for name in names)
    kinds = ("output", "probed output", "input gradient", *["weight gradient"] * (TENSORS - 3))
    tensors = tuple(
        TensorResult(f"tensor{i}", kind, (2, 128, 256), errors, errors, 7e-3, 3e-2, 0.43, checks)
        for i, kind in enumerate(kinds)
    )

    def results() -> Iterator[str]:
        for i in range(number):
            case, precision = f"case_{i % CASES}", PRECISIONS[i // CASES % len(PRECISIONS)]
            label = f"2x{i}x256"
            one = Result(case, precision, {"seq": i}, label, 0, "cpu", "passed", tensors=tensors, path="cases/many.py")
            yield lines.result_line(one)

    return lines.environment_line(environment), results()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--number", type=int, help="of results to record in this process; prints what it costs")
    arguments = made.parse_args()
    if arguments.number:
        print(json.dumps(record(arguments.number)))
        return
    found = {}
    for number in NUMBERS:
        command = [sys.executable, __file__, "--number", str(number)]
        found[number] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    least, most = found[NUMBERS[0]], found[NUMBERS[-1]]
    rows = [
        (f"{number:,}", f"{1e3 * one['arriving']:.2f}", f"{1e3 * one['whole']:.2f}", f"{one['memory']:.0f}")
        for number, one in found.items()
    ]
    report(
        __doc__,
        [
            Measure("memory at 100,000 results over that at 1,000", most["memory"] / least["memory"], 1.25),
            Measure("time a result at 100,000 results over that at 1,000", most["whole"] / least["whole"], 1.25),
        ],
        ("results", "ms a result, arriving", "with the report", "memory (MB)"),
        rows,
        arguments.out,
        machine(),
    )
    if arguments.out:
        plot(found, arguments.out.with_suffix(".png"))


def plot(found: dict[int, dict[str, float]], path: Path) -> None:
    """Plot the time per result and the memory against the number of results."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    times.plot(list(found), [1e3 * one["whole"] for one in found.values()], "o-")
    times.set(xscale="log", xlabel="results", ylabel="processor time a result (ms)", ylim=(0, None))
    memory.plot(list(found), [one["memory"] for one in found.values()], "o-")
    memory.set(xscale="log", xlabel="results", ylabel="largest memory (MB)", ylim=(0, None))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
