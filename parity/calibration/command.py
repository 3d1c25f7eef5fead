"""``parity calibrate``: samples from many cases in parallel, laws from samples, a table and its report."""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.progress import track

from parity import te
from parity.calibration import right_ports, table
from parity.calibration.enough import check_enough
from parity.calibration.measure import Sample, draw, laws
from parity.calibration.sizes import drawn
from parity.calibration.table import Table
from parity.case import Case
from parity.declaring.validate import check_case
from parity.precision import PRECISIONS, Precision, why_unavailable
from parity.report import environment
from parity.te import Backend
from parity.user_error import UserError


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        files: of pairs that are known to agree, or ``right_ports.ZOO``.
        precisions: names; those that this machine cannot run are left out.
        seeds: of weights and inputs.
        draws: random kernels a case, precision and seed.
        backend: whose kernels run the TE modules.
    """

    files: tuple[str, ...]
    precisions: tuple[str, ...]
    seeds: tuple[int, ...]
    draws: int
    backend: Backend | Literal["auto"]


def make_table(settings: Settings, workers: int, output: Path, report_file: Path | None) -> None:
    """Measure, and write the table; laws of other precisions that the file has already stay.

    Raises:
        UserError: if nothing could be measured, too few tensors are, or the file is no table.
    """
    before = table.load(output) if output.exists() else Table({}, {})
    _check_enough(settings)
    samples = _measure(settings, workers)
    if not samples:
        raise UserError("nothing was measured: no precision of these cases runs on this machine")
    measured = {sample.precision for sample in samples}
    kept = {key: law for key, law in before.laws.items() if key[0] not in measured}
    provenance = {**before.provenance, **dict.fromkeys(sorted(measured), _provenance(settings))}
    made = Table(kept | laws(samples), provenance)
    output.parent.mkdir(parents=True, exist_ok=True)
    table.save(made, output)
    if report_file is not None:
        from parity.calibration import report

        report.write(made, samples, report_file)


def _check_enough(settings: Settings) -> None:
    kernels = te.kernels(settings.backend)
    cases = [case for file in settings.files for case in right_ports.cases(file)]
    check_enough(cases, _available(settings, kernels), settings.seeds, kernels.te)


def _available(settings: Settings, kernels: te.Kernels) -> list[Precision]:
    precisions = map(PRECISIONS.__getitem__, settings.precisions)
    return [precision for precision in precisions if why_unavailable(precision, kernels) is None]


def _measure(settings: Settings, workers: int) -> list[Sample]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        jobs = [
            pool.submit(_measure_case, settings, file, case.name)
            for file in settings.files
            for case in right_ports.cases(file)
        ]
        return [sample for job in track(as_completed(jobs), "calibrating", total=len(jobs)) for sample in job.result()]


def _measure_case(settings: Settings, file: str, name: str) -> list[Sample]:
    """All samples of one case, at its own sizes and at one drawn for each seed; in a process of its own."""
    import torch

    torch.set_num_threads(1)
    kernels = te.kernels(settings.backend)
    case = right_ports.case(file, name)
    precisions = [precision for precision in _available(settings, kernels) if case.runs_at(precision.name)]
    return [
        sample
        for seed in settings.seeds
        for precision in precisions
        for checked in check_case(_sized(case, precision, seed), kernels.te)
        for sample in draw(case, checked, precision, seed, kernels, settings.draws)
    ]


def _sized(case: Case, precision: Precision, seed: int) -> Case:
    return dataclasses.replace(case, sizes=(*case.sizes, drawn(case, precision, seed)))


def _provenance(settings: Settings) -> dict[str, Any]:
    here = environment.measure(te.kernels(settings.backend).backend, settings.seeds, 0)
    return {
        "kernels": here.kernels,
        "device": here.device,
        "transformer_engine": here.transformer_engine,
        "torch": here.torch,
        "date": here.date,
        "seeds": list(settings.seeds),
        "draws": settings.draws,
        "files": [Path(file).name for file in settings.files],
    }
