"""Whether cases have enough tensors for a law, as far as that is known before anything runs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from types import ModuleType

from parity.calibration.sizes import drawn
from parity.case import Case
from parity.declaring.validate import check_case
from parity.limits.law import FEWEST_TENSORS, too_few
from parity.precision import Precision
from parity.result import Kind
from parity.user_error import UserError


def check_enough(cases: Sequence[Case], precisions: Iterable[Precision], seeds: Sequence[int], te: ModuleType) -> None:
    """Make sure that laws can be fitted to the gradients; how many outputs modules have, only running them tells.

    Args:
        cases: that are measured.
        precisions: at which.
        seeds: for each of which a size is drawn, besides the case's own.
        te: the module ``transformer_engine.pytorch``.

    Raises:
        UserError: if too few different inputs or weights get gradients; or as ``check_case``.
    """
    for precision in precisions:
        found: Counter[Kind] = Counter()
        for case in cases:
            if found and min(found.values()) >= FEWEST_TENSORS:
                break
            if case.runs_at(precision.name):
                found += _gradients(case, precision, seeds, te)
        for kind, count in found.items():
            if count < FEWEST_TENSORS:
                raise UserError(f"{kind}s in {precision.name}: {too_few(count)}")


def _gradients(case: Case, precision: Precision, seeds: Sequence[int], te: ModuleType) -> Counter[Kind]:
    """Different ones, over all sizes; two of one size are one."""
    sized = dataclasses.replace(case, sizes=(*case.sizes, *(drawn(case, precision, seed) for seed in seeds)))
    by_label = {checked.label: checked for checked in check_case(sized, te)}.values()
    found: Counter[Kind] = Counter()
    found["input gradient"] = sum(checked.inputs for checked in by_label)
    found["weight gradient"] = sum(checked.trained for checked in by_label)
    return +found
