"""Judge a fixed table of wrong ports, and record whether each is detected and what is said of it.

The table (``rows``) was written before the search that it judges was changed, and the search was not looked at for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parity import te
from parity.case.validate import check_case
from parity.comparison import explain_at, judge_at
from parity.judge.limits import packaged
from parity.lab import record
from parity.lab.campaign import Campaign, FourDigits
from parity.lab.studies.rows.names import ROWS, TABLES
from parity.lab.studies.rows.ports import HOSTS, LAYERS, port
from parity.lab.studies.settings import check_names
from parity.te import PRECISIONS, Backend

RECORD = "names.jsonl"


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        tables: names of ``rows.TABLES``, and ``right`` for the hosts without a mistake.
        precisions: at which every port is judged, one after the other.
        seed: of weights and inputs.
        searches: whether the cause is searched for; without, a run is short and tells what is detected.
        commit: at which this is measured, as the report is to say.
        backend: ``cpu``, or ``gpu`` for TE's compiled kernels.
        workers: processes that judge at a time; 0 for this process.
    """

    tables: tuple[str, ...] = ("right", *TABLES)
    precisions: tuple[str, ...] = ("bf16", "fp32", "fp8_current")
    seed: int = 0
    searches: bool = True
    commit: str = ""
    backend: Backend = "cpu"
    workers: int = 0


FULL = Settings()
QUICK = Settings(tables=("right",), precisions=("bf16",))


@dataclass(frozen=True)
class Judgement:
    """One port at one precision.

    Attributes:
        row: a name of ``rows.ROWS``; empty for a right port.
        host: of ``ports.HOSTS``.
        precision: of ``parity.te.PRECISIONS``.
        seed: of weights and inputs.
        searched: whether the cause was searched for.
        backend: on whose kernels.
    """

    row: str
    host: str
    precision: str
    seed: int
    searched: bool = True
    backend: Backend = "cpu"


@dataclass(frozen=True)
class Said:
    """Hold what parity said.

    Attributes:
        status: ``passed``, ``failed`` or ``error``.
        margin: the largest.
        findings: titles, messages, and whether they are told as a fact, the first first.
        reason: of an error.
        seconds: processor time of the search for the cause.
    """

    status: str
    margin: FourDigits
    findings: tuple[tuple[str, str, bool], ...]
    reason: str
    seconds: FourDigits


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Judgement, Said], Settings]:
    """Judge what the folder's record lacks: first whether ports are rejected, then why.

    Returns:
        What ``report.write`` is given, but for the folder.

    Raises:
        UserError: for a table or a precision that there is not.
    """
    check_names("tables", settings.tables, FULL.tables)
    check_names("precisions", settings.precisions, PRECISIONS)
    campaign: Campaign[Judgement, Said] = Campaign(folder / RECORD, Said, code=record.code_of(__name__))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return campaign.complete(judgements(settings), said_of, "judging", settings.workers or None), settings
    finally:
        torch.set_num_threads(threads)


def judgements(settings: Settings) -> list[Judgement]:
    """Return all that is judged: verdicts before causes, a precision after the other, whole models last."""
    right = [("", host) for host in HOSTS] if "right" in settings.tables else []
    wrong = [(row.name, row.host) for name in settings.tables if name in TABLES for row in TABLES[name]]
    wrong.sort(key=lambda both: both[1] in LAYERS)
    return [
        Judgement(*both, name, settings.seed, searched, settings.backend)
        for searched in ((False, True) if settings.searches else (False,))
        for name in settings.precisions
        for both in right + wrong
    ]


@functools.cache
def _limits() -> Any:
    return packaged()


def said_of(one: Judgement) -> Said:
    """Judge one port, and search for the cause if that is asked for, without a limit of real time."""
    kernels = te.kernels(one.backend)
    case = port(one.host, ROWS[one.row].mistake if one.row else None)
    (checked,) = check_case(case, kernels.te)
    judged = judge_at(case, checked, PRECISIONS[one.precision], one.seed, kernels, _limits())
    began = time.process_time()
    result = explain_at(judged, 0.0 if one.searched else None)
    seconds = time.process_time() - began
    findings = tuple((one.title, one.message, one.sure) for one in result.findings)
    return Said(result.status, result.margin, findings, result.reason, seconds)
