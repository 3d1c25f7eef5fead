"""The cases that a benchmark runs, each at each of its sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from parity import registry
from parity.case import Case
from parity.directions import directions
from parity.passes import run_model
from parity.precision import PRECISIONS, Precision, why_unavailable
from parity.prepare import prepare
from parity.te import Kernels
from parity.validate import CheckedSize, check_case

CASES = Path(__file__).parents[1] / "cases"


def cases(names: Sequence[str], kernels: Kernels) -> Iterator[tuple[Case, CheckedSize]]:
    """The built-in cases whose names contain one of these; all for none."""
    for file in sorted(CASES.glob("[a-z]*.py")):
        for case in registry.load_file(file):
            if not names or any(name in case.name for name in names):
                yield from ((case, checked) for checked in check_case(case, kernels.te))


def precisions(case: Case, kernels: Kernels) -> list[Precision]:
    """Those of the case that run here."""
    return [
        precision
        for precision in PRECISIONS.values()
        if (case.precisions is None or precision.name in case.precisions)
        and why_unavailable(precision, kernels) is None
    ]


def forget() -> None:
    """Clear what one comparison keeps for the next."""
    for kept in (prepare, run_model, directions):
        kept.cache_clear()
