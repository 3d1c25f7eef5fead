"""Train pairs from the command line, and draw their losses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from parity import te
from parity.case.registry import checked_steps
from parity.case.validate import check_case
from parity.cli import suite
from parity.judge.band import Band, band_of
from parity.judge.limits import packaged
from parity.passes.refusals import NothingToJudge
from parity.progress import followed
from parity.report import trainings
from parity.report.trainings import Curve
from parity.te import PRECISIONS, why_unavailable
from parity.training import train_at
from parity.user_error import UserError


def train(
    paths: Sequence[str],
    steps: int,
    precisions: Sequence[str] | None,
    seeds: Sequence[int],
    backend: Literal["auto", "gpu", "cpu"],
    out: Path,
    drawn: int,
) -> bool:
    """Train each pair, print a table, and write the report; return whether all of them passed.

    Args:
        drawn: of how many trainings under drawn roundings the band is made; 0 for no band.

    Raises:
        UserError: if a path holds no pair, or no precision of these runs on this machine.
    """
    if not checked_steps(steps):
        raise UserError("--steps must be a whole number, at least 1")
    if drawn < 0 or drawn == 1:
        raise UserError(
            "--band must be the number of trainings from which a band is drawn: 2 or more, or 0 for no band"
        )
    kernels, curves = te.kernels(backend), []
    trained = [
        (case, checked, PRECISIONS[name], seed)
        for case in suite.cases(paths)
        for checked in check_case(case, kernels.te)
        for name in precisions or tuple(PRECISIONS)
        if case.runs_at(name) and why_unavailable(PRECISIONS[name], kernels) is None
        for seed in seeds
    ]
    for case, checked, precision, seed in followed(trained, "training"):
        result = train_at(case, checked, precision, seed, kernels, packaged(), steps)
        band: Band | None = None
        with suppress(NothingToJudge):  # the training is too wild to have one
            if drawn and result.steps:
                band = band_of(case, checked, precision, seed, kernels, len(result.steps), drawn)
        curves.append(Curve(result, band))
    if not curves:
        raise UserError("nothing was trained: no precision of these pairs runs on this machine")
    print(trainings.summary([curve.result for curve in curves]))
    for curve in curves:
        if left := trainings.left(curve):
            print(f"{curve.result.item}, seed {curve.result.seed}: {left}")
    if together := trainings.over_seeds(curves):
        print(together)
    for result in (curve.result for curve in curves if not curve.result.passed):
        print(f"{result.item}: {result.reason}", *(f"{one.name}: {one.message}" for one in result.findings), sep="\n  ")
    trainings.write(curves, out)
    print(f"report: {out}")
    return all(curve.result.passed for curve in curves)
