"""Judge a fixed table of wrong ports, and record whether each is detected and what is said of it.

The table (``rows``) was written before the search that it judges was changed, and the search was not looked at for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parity import te
from parity.case.validate import check_case
from parity.comparison import explain_at, judge_at
from parity.judge.limits import packaged
from parity.lab import record
from parity.lab.record import Campaign, FourDigits
from parity.lab.studies import reporting
from parity.lab.studies.rows.names import ROWS, TABLES, Row
from parity.lab.studies.rows.ports import HOSTS, LAYERS, port
from parity.lab.studies.settings import check_names
from parity.mistakes.codes import CODES, UNEXPLAINED
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


def said_of(one: Judgement) -> Said:
    """Judge one port, and search for the cause if that is asked for, without a limit of real time."""
    kernels = te.kernels(one.backend)
    case = port(one.host, ROWS[one.row].mistake if one.row else None)
    (checked,) = check_case(case, kernels.te)
    judged = judge_at(case, checked, PRECISIONS[one.precision], one.seed, kernels, packaged())
    began = time.process_time()
    result = explain_at(judged, 0.0 if one.searched else None)
    seconds = time.process_time() - began
    findings = tuple((one.title, one.message, one.sure) for one in result.findings)
    return Said(result.status, result.margin, findings, result.reason, seconds)


# The report: how often mistakes are detected and named, and what is said of the others.


_DETECTION = ("partial", "kinds")
# A message this long is cut in a table.
_LONG = 160


@dataclass(frozen=True)
class Judged:
    """A row's outcome at one precision.

    Attributes:
        row: what was planted.
        said: what parity said.
    """

    row: Row
    said: Said

    @property
    def detected(self) -> bool:
        """Return whether the port was rejected."""
        return self.said.status == "failed"

    @property
    def causes(self) -> list[tuple[str, str, bool]]:
        """The findings that name a cause, with whether it is told as a fact."""
        return [finding for finding in self.said.findings if CODES.get(finding[0]) not in UNEXPLAINED]

    @property
    def outcome(self) -> str:
        """``named`` if the first cause is right, ``no place`` if only its place or its number is missing, ``second`` if
        a later one is right, ``misnamed`` if a wrong one is told as a fact, ``doubted`` if it is told with doubts,
        ``unnamed`` without a cause, or ``not detected``.
        """
        if not self.detected:
            return "not detected"
        if not self.causes:
            return "unnamed"
        title, message, is_fact = self.causes[0]
        if self.row.is_named_by(title, message):
            return "named"
        if title in self.row.titles:
            return "no place"
        if any(self.row.is_named_by(*cause[:2]) for cause in self.causes):
            return "second"
        return "misnamed" if is_fact else "doubted"


OUTCOMES = ("named", "no place", "second", "doubted", "misnamed", "unnamed", "not detected")


def write(found: Mapping[Judgement, Said], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "names.md", _sections(found, settings))


def _sections(found: Mapping[Judgement, Said], settings: Settings) -> Iterator[str]:
    yield "# Which mistakes of wrong ports are named"
    yield (
        "Wrong ports, written in TE by hand next to a plain reference, and what parity says of them. The table of rows "
        "was written before the search that it judges was changed, and without looking at what the search tries; the "
        "table of near constants was written with the search that finds them. "
        + reporting.made_on(te.kernels(settings.backend), settings.commit)
        + f" Seed {settings.seed}. Seconds are processor time of the search for a cause, on a machine that others use."
    )
    yield (
        "*Named*: the first finding that names a cause has the right title, tells the number and says at which part of "
        "a place the mistake is. *No place*: the title is right, but the number or the part is not told. *Second*: the "
        "right name comes, but another one first. *Doubted*: another cause is told, with what speaks against it. "
        "*Misnamed*: another cause is told as a fact. *Unnamed*: the port "
        "fails, and no cause is told (PAR501, PAR502). A row that is not judged yet counts nowhere."
    )
    yield "## Rates"
    yield reporting.texts(
        list(_rates(found, settings)), ["table", "precision", "judged", *OUTCOMES, "seconds, median and most"]
    )
    yield from _right_ports(found)
    for precision in settings.precisions:
        yield from _detection(found, precision)
    for name in (name for name in settings.tables if name in TABLES):
        for precision in settings.precisions:
            yield from _others(found, name, precision)


def _judged(
    found: Mapping[Judgement, Said], names: Sequence[str], precision: str, only_searched: bool = True
) -> list[Judged]:
    """Return the outcomes of these tables' rows, each once; a verdict is the same whether its cause is searched for."""
    rows = {row.name for name in names for row in TABLES[name]}
    said = {
        one.row: said
        for one, said in found.items()
        if one.row in rows and one.precision == precision and (one.searched or not only_searched)
    }
    return [Judged(ROWS[name], each) for name, each in said.items()]


def _rates(found: Mapping[Judgement, Said], settings: Settings) -> Iterator[list[str]]:
    for name in (name for name in settings.tables if name in TABLES):
        for precision in settings.precisions:
            judged = _judged(found, [name], precision)
            counts = [str(sum(one.outcome == outcome for one in judged)) for outcome in OUTCOMES]
            seconds = [one.said.seconds for one in judged if one.detected]
            times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "–"
            yield [name, f"`{precision}`", f"{len(judged)} of {len(TABLES[name])}", *counts, times]


def _right_ports(found: Mapping[Judgement, Said]) -> Iterator[str]:
    right = {(one.host, one.precision): said for one, said in found.items() if not one.row}
    if not right:
        return
    rejected = [
        f"`{host}` at `{precision}` ({said.status}: {said.reason or said.findings})"
        for (host, precision), said in right.items()
        if said.status != "passed"
    ]
    yield "## Right ports"
    yield ": ".join([f"Of {len(right)} comparisons of right ports, {len(rejected)} did not pass", *rejected])


def _detection(found: Mapping[Judgement, Said], precision: str) -> Iterator[str]:
    judged = _judged(found, tuple(TABLES), precision, only_searched=False)
    if not judged:
        return
    missed = [one for one in judged if not one.detected]
    names = {row.name for name in _DETECTION for row in TABLES[name]}
    kinds = [one for one in judged if one.row.name in names]
    yield f"## Detection at `{precision}`"
    yield (
        f"Of {len(kinds)} kinds (of the tables partial and kinds), {sum(one.detected for one in kinds)} are detected; "
        f"of all {len(judged)} rows, {len(judged) - len(missed)}."
    )
    if missed:
        rows = [
            [one.row.name, one.row.host, one.said.status, f"{one.said.margin:.2g}", one.said.reason] for one in missed
        ]
        yield reporting.texts(rows, ["not detected", "host", "status", "margin", "reason"])


def _others(found: Mapping[Judgement, Said], name: str, precision: str) -> Iterator[str]:
    others = [one for one in _judged(found, [name], precision) if one.outcome not in ("named", "not detected")]
    if not others:
        return
    yield f"## Not named: {name} at `{precision}`"
    rows = [[one.outcome, one.row.name, one.row.titles[0], *_first(one)] for one in others]
    yield reporting.texts(rows, ["outcome", "row", "right name", "said instead", "in words"])


def _first(one: Judged) -> tuple[str, str]:
    title, message, _ = (one.causes or one.said.findings or [("nothing", "", False)])[0]
    message = " ".join(message.split()).replace("|", "\\|")
    return title, message if len(message) <= _LONG else f"{message[:_LONG]}…"
