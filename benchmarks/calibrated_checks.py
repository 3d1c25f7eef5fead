"""Measure how much longer a calibrated check takes than one with a fixed tolerance.

    python benchmarks/calibrated_checks.py [CASE...] [--out benchmarks/results/calibrated_checks.json]

The check with a fixed tolerance makes the passes that any check against an expected error needs (golden, the rounding
model once, and the candidate, on the drawn and on the probing inputs), and measures every tensor's error. The next two
checks each add something: calibration adds the second rounding model, and seven statistics with limits from the
packaged table; the matched filters add a pass for each subtle mistake. Precisions of the same dtype share golden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measuring import Measure, machine, processor_seconds, report
from suite_cases import as_in_a_run, case_parser, cases, precisions

from parity import te
from parity.case.case import Case
from parity.case.validate import CheckedSize
from parity.judge.judge import judge
from parity.judge.limits import packaged
from parity.numerics.errors import measure
from parity.numerics.freedom import FUSED, UNFUSED
from parity.passes.all_passes import golden_truths, model_tensors, run_candidate
from parity.passes.prepare import forget, prepare
from parity.passes.refusals import judgeable_golden
from parity.te import Kernels, Precision

Check = Callable[[Case, CheckedSize, Precision, Kernels], object]


def fixed(case: Case, checked: CheckedSize, precision: Precision, kernels: Kernels) -> None:
    """Measure the expected and the actual error of every tensor."""
    prepared = prepare(case, checked, precision.dtype, 0, kernels)
    model = model_tensors(prepared, precision.rounding, FUSED)
    candidate, _ = run_candidate(case, checked, prepared, precision, 0, kernels)
    for key, truth in judgeable_golden(golden_truths(prepared), [model]).items():
        measure(candidate[key], truth.exact, precision.dtype)
        measure(model[key], truth.exact, precision.dtype)


def calibrated(case: Case, checked: CheckedSize, precision: Precision, kernels: Kernels) -> None:
    """Judge everything that has limits, except the components along known mistakes."""
    prepared = prepare(case, checked, precision.dtype, 0, kernels)
    models = [model_tensors(prepared, precision.rounding, freedom) for freedom in (FUSED, UNFUSED)]
    candidate, _ = run_candidate(case, checked, prepared, precision, 0, kernels)
    judge(judgeable_golden(golden_truths(prepared), models), models, candidate, precision, packaged(), ())


def main() -> None:
    arguments = case_parser(__doc__).parse_args()
    kernels = te.kernels()
    checks: tuple[Check, ...] = (fixed, calibrated, as_in_a_run)
    rows, totals = [], [0.0] * len(checks)
    for case, checked in cases(arguments.cases, kernels):

        def all_precisions(check: Check, case=case, checked=checked) -> None:
            for precision in precisions(case, kernels):
                check(case, checked, precision, kernels)

        times: list[list[float]] = [[] for _ in checks]
        for _ in range(arguments.repeats):
            for check, seconds in zip(checks, times, strict=True):
                forget()
                seconds.append(processor_seconds(lambda check=check: all_precisions(check)))
        best = [min(seconds) for seconds in times]
        totals = [total + seconds for total, seconds in zip(totals, best, strict=True)]
        rows.append(_row(case.name, checked.label, best))
    rows.append(_row("all", "", totals))
    report(
        __doc__,
        [
            Measure("calibrated over fixed tolerance", totals[1] / totals[0], 1.5),
            Measure("calibrated, with matched filters, over fixed tolerance", totals[2] / totals[0]),
        ],
        ("case", "size", "fixed (s)", "calibrated (s)", "ratio", "with matched filters (s)", "ratio"),
        rows,
        arguments.out,
        machine(torch.get_num_threads(), kernels.backend),
    )


def _row(name: str, size: str, seconds: list[float]) -> tuple[str, ...]:
    plain, judged, filtered = seconds
    ratios = (f"{judged / plain:.2f}", f"{filtered / plain:.2f}")
    return name, size, f"{plain:.2f}", f"{judged:.2f}", ratios[0], f"{filtered:.2f}", ratios[1]


if __name__ == "__main__":
    main()
