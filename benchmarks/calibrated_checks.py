"""What a calibrated check costs next to one with a fixed tolerance.

    python benchmarks/calibrated_checks.py [FILE...] [--repeats 3]

The plain check takes the passes that any check against an expected error needs, golden, the rounding model once, the
candidate, and measures every tensor's error. The calibrated one is parity's own: two rounding models, seven statistics
with limits from the packaged table, probing inputs, matched filters. All precisions that run here, golden shared by
those of one dtype in both; all cases by default.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate

from parity import registry, te
from parity.calibration.table import packaged
from parity.case import Case
from parity.cli import suite
from parity.comparison import compare_at
from parity.directions import directions
from parity.errors import measure
from parity.passes import golden_tensors, run_candidate, run_model
from parity.precision import PRECISIONS, Precision, why_unavailable
from parity.prepare import prepare
from parity.rounding import FUSED
from parity.te import Kernels
from parity.validate import CheckedSize, check_case


def plain_check(case: Case, checked: CheckedSize, precision: Precision, kernels: Kernels) -> None:
    """Golden, expected and actual errors of every tensor."""
    prepared = prepare(case, checked, precision.dtype, 0, kernels)
    model = run_model(prepared, precision.rounding, FUSED)
    candidate, _ = run_candidate(case, checked, prepared, precision, 0, kernels)
    for key, truth in golden_tensors(prepared).items():
        measure(candidate[key], truth, precision.dtype)
        measure(model[key], truth, precision.dtype)


def seconds(work: Callable[[], object]) -> float:
    """Of one call, from cold caches."""
    prepare.cache_clear()
    directions.cache_clear()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="files of pairs; the built-in ones by default")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    kernels = te.kernels()
    precisions = [precision for precision in PRECISIONS.values() if why_unavailable(precision, kernels) is None]
    rows, totals = [], [0.0, 0.0]
    for file in suite.files(arguments.files):
        for case in registry.load_file(Path(file)):
            plain_case = dataclasses.replace(case, probe=False)
            for checked in check_case(case, kernels.te):

                def calibrated(case=case, checked=checked) -> None:
                    for precision in precisions:
                        compare_at(case, checked, precision, 0, kernels, packaged())

                def plain(case=plain_case, checked=checked) -> None:
                    for precision in precisions:
                        plain_check(case, checked, precision, kernels)

                best = [min(seconds(work) for _ in range(arguments.repeats)) for work in (calibrated, plain)]
                rows.append((case.name, checked.label, *(f"{time:.3f}" for time in best), f"{best[0] / best[1]:.2f}"))
                totals = [total + time for total, time in zip(totals, best, strict=True)]
    rows.append(("all", "", *(f"{time:.3f}" for time in totals), f"{totals[0] / totals[1]:.2f}"))
    print(tabulate(rows, ["case", "size", "calibrated (s)", "plain (s)", "ratio"], disable_numparse=True))
    print(
        f"\n{kernels.backend} kernels, TransformerEngine {te.version()}, torch {torch.__version__}, "
        f"{platform.machine()}, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
