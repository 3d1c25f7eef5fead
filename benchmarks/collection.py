"""Measure how long pytest takes to collect 10,000 items of parity.

    python benchmarks/collection.py [--out benchmarks/results/collection.json]

A generated file declares MLPs at many sizes. ``pytest --collect-only`` collects an item for each size and precision, in
a new process, which also imports torch and TE. Both modules of every size are built without allocating memory, and
their weight map is checked.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import Measure, environment, machine, median, parser, report, wall_seconds

PRECISIONS = 8
PAIRS = """
import parity
from parity import reference


def declare(number, sizes):
    @parity.pair(f"mlp_{{number}}", sizes=[dict(batch=2, seq=8 * (i + 1), hidden=64, ffn=128) for i in range(sizes)])
    def case(te, hidden, ffn, **_):
        return parity.Pair(
            reference=reference.GatedMLP(hidden, ffn, "swiglu"),
            candidate=te.LayerNormMLP(hidden, ffn, normalization="RMSNorm", activation="swiglu", bias=False),
            weights={{
                "norm.weight": "layer_norm_weight",
                parity.stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
                "down_proj.weight": "fc2_weight",
            }},
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
        )


for number in range({cases}):
    declare(number, {sizes})
"""


def collect(folder: Path, cases: int, sizes: int) -> None:
    """Collect ``cases * sizes * PRECISIONS`` items."""
    file = folder / f"many_{cases}.py"
    file.write_text(PAIRS.format(cases=cases, sizes=sizes), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += [f"--rootdir={folder}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment())
    expected = cases * sizes * PRECISIONS
    if f"{file.name}: {expected}" not in done.stdout:
        raise SystemExit(f"not {expected} items were collected:\n{done.stdout[-500:]}{done.stderr[-500:]}")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=3)
    arguments = made.parse_args()
    rows, seconds = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for cases, sizes in ((1, 1), (1, 125), (10, 125)):
            collect(Path(folder), cases, sizes)  # the first run compiles TE's code and keeps it
            times = [
                wall_seconds(lambda cases=cases, sizes=sizes: collect(Path(folder), cases, sizes))
                for _ in range(arguments.repeats)
            ]
            items = cases * sizes * PRECISIONS
            seconds[items] = median(times)
            rows.append((f"{items:,}", f"{median(times):.2f}", f"{min(times):.2f}", f"{max(times):.2f}"))
    most = max(seconds)
    measures = [
        Measure(f"collection of {most:,} items, imports included", seconds[most], 5.0, "s"),
        Measure("an item, imports left out", 1e3 * (seconds[most] - seconds[min(seconds)]) / most, unit="ms"),
    ]
    report(__doc__, measures, ("items", "median (s)", "least", "most"), rows, arguments.out, machine())


if __name__ == "__main__":
    main()
