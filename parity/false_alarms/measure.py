"""Compares right ports, in parallel processes, and records what each was judged by."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.progress import track

from parity import te
from parity.calibration import right_ports
from parity.calibration.sizes import drawn
from parity.case import Case, Size
from parity.comparison import compare_at
from parity.declaring.validate import check_case
from parity.limits.table import packaged
from parity.machine.processes import processes
from parity.precision import PRECISIONS, why_unavailable
from parity.result import Result
from parity.studies import record
from parity.te import Backend

DRAWN = "drawn"


@dataclass(frozen=True)
class Plan:
    """What is compared: each case at one size drawn for each seed, and for some seeds at its own sizes.

    Attributes:
        files: of pairs that are known to agree, or ``right_ports.ZOO``.
        precisions: names; those that this machine cannot run are left out.
        seeds: of weights, inputs and sizes; none that the limits were fitted to.
        own: for how many of the seeds, from the first, the cases' own sizes are compared, too.
        backend: whose kernels run the TE modules.
    """

    files: tuple[str, ...]
    precisions: tuple[str, ...]
    seeds: tuple[int, ...]
    own: int
    backend: Backend | Literal["auto"]


@dataclass(frozen=True)
class Port:
    """A right port.

    Attributes:
        file: of the case.
        case: its name.
        precision: the precision's name.
        seed: of weights and inputs.
        size: one of the case's own, by its index, or ``drawn``.
    """

    file: str
    case: str
    precision: str
    seed: int
    size: int | str


@dataclass(frozen=True)
class Outcome:
    """What became of it.

    Attributes:
        status: ``passed``, ``failed``, ``error`` or ``skipped``.
        label: of the size.
        tensors: how many were compared.
        statistics: how many were judged.
        margins: by statistic, the largest of all tensors; above 1 is a false alarm.
        alarms: each statistic that is above 1, in words.
        reason: why there is no verdict.
    """

    status: str
    label: str
    tensors: int
    statistics: int
    margins: dict[str, float]
    alarms: tuple[str, ...]
    reason: str


def run(plan: Plan, path: Path, workers: int) -> dict[Port, Outcome]:
    """Compare what the record lacks, and return all that was asked for.

    Args:
        plan: what is compared.
        path: of the record, JSON lines; of one version of parity and its limits.
        workers: processes, each with one thread.
    """
    done = {Port(**json.loads(key)): _from_json(entry) for key, entry in record.read(path).items()}
    groups = _groups(plan)
    missing = [group for group in groups if any(port not in done for port in group)]
    with processes(workers) as pool:
        jobs = [pool.submit(_compare, plan, group) for group in missing]
        for job in track(as_completed(jobs), "comparing", total=len(jobs), disable=not jobs):
            for port, outcome in job.result():
                record.append(path, dataclasses.asdict(port), dataclasses.asdict(outcome))
                done[port] = outcome
    return {port: done[port] for group in groups for port in group if port in done}


def _groups(plan: Plan) -> list[list[Port]]:
    """Ports of one case, seed and size together: their precisions share golden."""
    kernels = te.kernels(plan.backend)
    precisions = [name for name in plan.precisions if why_unavailable(PRECISIONS[name], kernels) is None]
    groups = []
    for number, seed in enumerate(plan.seeds):
        for file in plan.files:
            for case in right_ports.cases(file):
                chosen = [name for name in precisions if case.runs_at(name)]
                sizes = [*(range(len(case.sizes)) if number < plan.own else ()), DRAWN]
                groups += [[Port(file, case.name, name, seed, size) for name in chosen] for size in sizes if chosen]
    return groups


def _compare(plan: Plan, ports: Sequence[Port]) -> list[tuple[Port, Outcome]]:
    """Ports of one case, in a process of its own."""
    case = right_ports.case(ports[0].file, ports[0].case)
    return [(port, _outcome(plan, case, port)) for port in ports]


def _outcome(plan: Plan, case: Case, port: Port) -> Outcome:
    kernels = te.kernels(plan.backend)
    sized = dataclasses.replace(case, sizes=(_size(case, port),))
    (checked,) = check_case(sized, kernels.te)
    return _judged(compare_at(sized, checked, PRECISIONS[port.precision], port.seed, kernels, packaged()))


def _size(case: Case, port: Port) -> Size:
    if isinstance(port.size, int):
        return case.sizes[port.size]
    return drawn(case, PRECISIONS[port.precision], port.seed)


def _judged(result: Result) -> Outcome:
    margins: dict[str, float] = {}
    for tensor in result.tensors:
        for check in tensor.checks:
            margins[check.statistic] = max(margins.get(check.statistic, 0.0), check.margin)
    alarms = tuple(
        f"{tensor.label}: {check.statistic} {check.value:.3g}, limit {check.limit:.3g} {check.where}".strip()
        for tensor in result.tensors
        for check in tensor.checks
        if check.margin > 1
    )
    return Outcome(
        result.status,
        result.size_label,
        len(result.tensors),
        sum(len(tensor.checks) for tensor in result.tensors),
        margins,
        alarms,
        result.reason,
    )


def _from_json(entry: dict[str, Any]) -> Outcome:
    return Outcome(**{**entry, "alarms": tuple(entry["alarms"])})
