"""Give benchmarks the built-in cases, each at all of its sizes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from measuring import parser

from parity.case import registry
from parity.case.case import Case
from parity.case.validate import CheckedSize, check_case
from parity.comparison import compare_at
from parity.judge.limits import packaged
from parity.te import PRECISIONS, Kernels, Precision, why_unavailable

CASES = Path(__file__).parents[1] / "cases"


def cases(names: Sequence[str], kernels: Kernels) -> Iterator[tuple[Case, CheckedSize]]:
    """Yield the built-in cases whose names contain one of these words, or all cases if there are none."""
    for file in sorted(CASES.glob("[a-z]*.py")):
        for case in registry.load_file(file):
            if not names or any(name in case.name for name in names):
                yield from ((case, checked) for checked in check_case(case, kernels.te))


def precisions(case: Case, kernels: Kernels) -> list[Precision]:
    """Return the precisions of the case that run here."""
    return [
        precision
        for precision in PRECISIONS.values()
        if case.runs_at(precision.name) and why_unavailable(precision, kernels) is None
    ]


def case_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the command line parser of a benchmark of these cases, and make PyTorch compute in one thread."""
    torch.set_num_threads(1)
    made = parser(doc)
    made.add_argument("cases", nargs="*")
    made.add_argument("--repeats", type=int, default=3)
    return made


def as_in_a_run(case: Case, checked: CheckedSize, precision: Precision, kernels: Kernels) -> None:
    """Compare a case as a run does."""
    compare_at(case, checked, precision, 0, kernels, packaged())
