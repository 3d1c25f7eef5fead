"""Measure how long a diagnosis takes, in units of the failed check's own time.

    python benchmarks/diagnosis_cost.py [BUG...] [--precision bf16] [--out benchmarks/results/diagnosis_cost.json]

Each bug of the zoo whose name contains one of the given words is planted in its first host, at the smaller size, and
compared with empty caches. The times are processor time, of the check and of the search for the cause.
"""

from __future__ import annotations

import time

import torch
from measuring import Measure, machine, median, parser, processor_seconds, report

from lab.corpus.catalogue import PLANTED
from lab.corpus.port import Port, at_size
from parity import comparison, te
from parity.case.validate import check_case
from parity.judge.limits import packaged
from parity.passes.prepare import forget
from parity.search import explanation
from parity.te import PRECISIONS


def diagnosed(bug: Port, precision: str, kernels: te.Kernels) -> tuple[float, float, str] | None:
    """Return the seconds of the check and of its diagnosis, and the first finding; None if the check passes."""
    case = at_size(bug.case, "small")
    (checked,) = check_case(case, kernels.te)
    explain, seconds = explanation.explain, []

    def timed(*arguments):
        began = time.process_time()
        found = explain(*arguments)
        seconds.append(time.process_time() - began)
        return found

    forget()
    explanation.explain = timed  # works because a comparison imports it only at its first failure
    try:
        results = []
        whole = processor_seconds(
            lambda: results.append(comparison.compare_at(case, checked, PRECISIONS[precision], 0, kernels, packaged()))
        )
    finally:
        explanation.explain = explain
    if not seconds:
        return None
    findings = results[0].findings
    return whole - seconds[0], seconds[0], findings[0].title if findings else "none"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("bugs", nargs="*")
    made.add_argument("--precision", default="bf16")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    kernels = te.kernels()
    rows, ratios = [], []
    first = {bug.name: bug for ports in PLANTED.values() for bug in reversed(ports)}
    for name, bug in first.items():
        if arguments.bugs and not any(part in name for part in arguments.bugs):
            continue
        if not bug.occurs_at(arguments.precision):
            continue
        found = diagnosed(bug, arguments.precision, kernels)
        if found is None:
            continue
        check, diagnosis, finding = found
        ratios.append(diagnosis / check)
        rows.append((name, bug.host, finding, f"{check:.2f}", f"{diagnosis:.2f}", f"{ratios[-1]:.1f}"))
    rows.sort(key=lambda row: -float(row[-1]))
    report(
        __doc__,
        [
            Measure(f"the longest of {len(ratios)} diagnoses over its check", max(ratios), 20.0),
            Measure("the median one", median(ratios)),
        ],
        ("bug", "host", "first finding", "check (s)", "diagnosis (s)", "ratio"),
        rows,
        arguments.out,
        machine(torch.get_num_threads(), kernels.backend),
    )


if __name__ == "__main__":
    main()
