"""Measure how long the commands that need neither torch nor TransformerEngine take.

    python benchmarks/commands.py [--out benchmarks/results/commands.json]

Each command runs several times, in a new process each time; the result is the median wall time.
"""

from __future__ import annotations

import subprocess
import sys

from measuring import Measure, environment, machine, median, parser, report, wall_seconds

COMMANDS = {
    "parity --help": (["-m", "parity", "--help"], 0.5),
    "pytest --version, with parity's plugin": (["-m", "pytest", "--version"], None),
    "python -c pass": (["-c", "pass"], None),
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=7)
    arguments = made.parse_args()
    measures, rows = [], []
    for name, (command, limit) in COMMANDS.items():

        def run(command=command) -> None:
            subprocess.run([sys.executable, *command], capture_output=True, check=True, env=environment())

        run()  # compiles Python's modules and keeps them
        times = [wall_seconds(run) for _ in range(arguments.repeats)]
        rows.append((name, f"{median(times):.3f}", f"{min(times):.3f}", f"{max(times):.3f}"))
        if limit is not None:
            measures.append(Measure(name, median(times), limit, "s"))
    report(__doc__, measures, ("command", "median (s)", "least", "most"), rows, arguments.out, machine())


if __name__ == "__main__":
    main()
