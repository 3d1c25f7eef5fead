"""How much longer a run takes than the bare forward and backward passes that it needs.

    python benchmarks/overhead.py [FILE...]

A comparison needs, for each dtype, the reference in FP64, and for each precision the reference in FP32 (for the
expected error) and the TE module as often as its recipe asks. This prints the time of whole comparisons over the time
of those passes alone, on built modules and ready inputs, both measured in this process. One seed, all precisions that
run here, all cases by default.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate

from parity import registry, te
from parity.calibration.table import packaged
from parity.cli import suite
from parity.comparison import compare_at
from parity.execute import run
from parity.precision import PRECISIONS, Precision, why_unavailable
from parity.prepare import build, cast, prepare
from parity.validate import check_case


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bare_passes(case, checked, kernels, precisions: list[Precision]) -> float:
    """Time of the passes alone; building, copying, rounding and judging are left out."""
    total = 0.0
    dtypes_seen = set()
    for precision in precisions:
        prepared = prepare(case, checked, precision.dtype, 0, kernels)

        def cotangents(outputs, prepared=prepared):
            return {name: prepared.cotangents[name].to(output.dtype) for name, output in outputs.items()}

        if precision.dtype not in dtypes_seen:
            dtypes_seen.add(precision.dtype)
            module = prepared.reference.double()
            inputs = cast(prepared.inputs, torch.float64)
            total += seconds(lambda m=module, x=inputs, p=prepared, c=cotangents: run(m, p.call, x, p.input_names, c))
        module = prepared.reference.float()
        inputs = cast(prepared.inputs, torch.float32)
        total += seconds(lambda m=module, x=inputs, p=prepared, c=cotangents: run(m, p.call, x, p.input_names, c))
        pair = build(case, checked, 0, kernels)
        candidate = pair.candidate.to(precision.dtype)
        for _ in range(1 + precision.warmup_passes):
            total += seconds(
                lambda p=prepared, c=cotangents, pair=pair, m=candidate, precision=precision: run(
                    m, pair.call_candidate, p.inputs, p.input_names, c, precision.autocast(kernels)
                )
            )
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="files of pairs; the built-in ones by default")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    kernels = te.kernels()
    precisions = [precision for precision in PRECISIONS.values() if why_unavailable(precision, kernels) is None]
    rows, total, total_bare = [], 0.0, 0.0
    for file in suite.files(arguments.files):
        for case in registry.load_file(Path(file)):
            for checked in check_case(case, kernels.te):
                whole = bare = float("inf")
                for _ in range(arguments.repeats):
                    bare = min(bare, bare_passes(case, checked, kernels, precisions))
                    prepare.cache_clear()
                    whole = min(
                        whole,
                        seconds(
                            lambda case=case, checked=checked: [
                                compare_at(case, checked, precision, 0, kernels, packaged()) for precision in precisions
                            ]
                        ),
                    )
                rows.append((case.name, checked.label, f"{whole:.3f}", f"{bare:.3f}", f"{whole / bare:.2f}"))
                total, total_bare = total + whole, total_bare + bare
    rows.append(("all", "", f"{total:.3f}", f"{total_bare:.3f}", f"{total / total_bare:.2f}"))
    print(tabulate(rows, ["case", "size", "run (s)", "bare passes (s)", "ratio"], disable_numparse=True))
    print(
        f"\n{kernels.backend} kernels, TransformerEngine {te.version()}, torch {torch.__version__}, "
        f"{platform.machine()}, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
