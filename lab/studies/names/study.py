"""Judge a fixed table of wrong ports, and record whether parity detects each and how it names the mistake.

The table was written before the search that it judges was changed, and without looking at that search.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.corpus.catalogue import GROUPS, MODELS, PORTS, RIGHT
from lab.corpus.judging import Judgement, Said, said_of
from lab.corpus.models import LAYERS
from lab.corpus.port import Port
from lab.studies import reporting
from lab.studies.settings import check_names
from lab.threads import one_thread
from parity import te
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.mistakes.codes import CODES, UNEXPLAINED
from parity.te import PRECISIONS, Backend

# The study: every row and every right port, at each precision.


RECORD = "names.jsonl"


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        tables: groups of the corpus, and ``right`` for the hosts of ``lab/corpus/models.py`` without a mistake.
        precisions: the precisions at which every port is judged, in this order.
        seed: the seed of weights and inputs.
        searches: whether to search for causes. Without, a run is short and only tells which mistakes are detected.
        backend: ``cpu``, or ``gpu`` for TE's compiled kernels.
        workers: how many processes judge in parallel; 0 to judge in this process.
    """

    tables: tuple[str, ...] = ("right", *MODELS)
    precisions: tuple[str, ...] = ("bf16", "fp32", "fp8_current")
    seed: int = 0
    searches: bool = True
    backend: Backend = "cpu"
    workers: int = 0


FULL = Settings()
QUICK = Settings(tables=("right",), precisions=("bf16",))


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Judgement, Said], Settings]:
    """Judge what is missing from the folder's record: first whether ports are rejected, then why.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a table or precision is unknown.
    """
    check_names("tables", settings.tables, ("right", *GROUPS))
    check_names("precisions", settings.precisions, PRECISIONS)
    campaign: Campaign[Judgement, Said] = Campaign(folder / RECORD, Said, code=record.code_of(__name__))
    with one_thread():
        return campaign.complete(judgements(settings), said_of, "judging", settings.workers or None), settings


def judgements(settings: Settings) -> list[Judgement]:
    """Return all judgements: verdicts before causes, then by precision, with whole models last."""
    right = [("", host) for host in RIGHT if host.startswith("models.")] if "right" in settings.tables else []
    wrong = [port.key for name in settings.tables if name in GROUPS for port in GROUPS[name] if port.titles]
    wrong.sort(key=lambda both: both[1].removeprefix("models.") in LAYERS)
    return [
        Judgement(*both, name, settings.seed, searched, settings.backend)
        for searched in ((False, True) if settings.searches else (False,))
        for name in settings.precisions
        for both in right + wrong
        if both[0] == "" or PORTS[both].occurs_at(name)
    ]


# The report: how often mistakes are detected and named, and what parity says of the others.


_DETECTION = ("partial", "kinds")
# Messages are cut to this length in tables.
_LONG = 160


@dataclass(frozen=True)
class Judged:
    """A row's outcome at one precision.

    Attributes:
        row: the planted mistake.
        said: parity's verdict.
    """

    row: Port
    said: Said

    @property
    def detected(self) -> bool:
        """Return whether the port was rejected."""
        return self.said.status == "failed"

    @property
    def causes(self) -> list[tuple[str, str, bool]]:
        """The findings that name a cause, with whether they state it as a fact."""
        return [finding for finding in self.said.findings if CODES.get(finding[0]) not in UNEXPLAINED]

    @property
    def outcome(self) -> str:
        """``named`` if the first cause is right, ``no place`` if only its place or number is missing, ``second`` if a
        later cause is right, ``misnamed`` if the first is wrong and stated as a fact, ``doubted`` if it is wrong and
        stated with doubts, ``unnamed`` if there is no cause, or ``not detected``.
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
        + reporting.made_on(te.kernels(settings.backend))
        + f" Seed {settings.seed}. Seconds are processor time of the search for a cause, on a machine that others use."
    )
    yield (
        "*Named*: the first finding that names a cause has the right title, tells the number and says at which part of "
        "a place the mistake is. *No place*: the title is right, but the number or the part is not told. *Second*: the "
        "right name comes, but another one first. *Doubted*: another cause is told, with what speaks against it. "
        "*Misnamed*: another cause is told as a fact. *Unnamed*: the port "
        "fails, and no cause is named (PAR501, PAR502). Rows that have not been judged yet are not counted."
    )
    yield "## Rates"
    yield reporting.texts(
        list(_rates(found, settings)), ["table", "precision", "judged", *OUTCOMES, "seconds, median and most"]
    )
    yield from _right_ports(found)
    for precision in settings.precisions:
        yield from _detection(found, precision)
    for name in (name for name in settings.tables if name in GROUPS):
        for precision in settings.precisions:
            yield from _others(found, name, precision)


def _judged(
    found: Mapping[Judgement, Said], names: Sequence[str], precision: str, only_searched: bool = True
) -> list[Judged]:
    """Return the outcome of each row of these tables, once. Verdicts do not depend on the search for causes."""
    rows = {port.key for name in names for port in GROUPS[name]}
    said = {
        (one.row, one.host): said
        for one, said in found.items()
        if (one.row, one.host) in rows and one.precision == precision and (one.searched or not only_searched)
    }
    return [Judged(PORTS[key], each) for key, each in said.items()]


def _rates(found: Mapping[Judgement, Said], settings: Settings) -> Iterator[list[str]]:
    for name in (name for name in settings.tables if name in GROUPS):
        for precision in settings.precisions:
            judged = _judged(found, [name], precision)
            counts = [str(sum(one.outcome == outcome for one in judged)) for outcome in OUTCOMES]
            seconds = [one.said.seconds for one in judged if one.detected]
            times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "–"
            yield [
                name,
                f"`{precision}`",
                f"{len(judged)} of {sum(bool(port.titles) for port in GROUPS[name])}",
                *counts,
                times,
            ]


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
    judged = _judged(found, tuple(GROUPS), precision, only_searched=False)
    if not judged:
        return
    missed = [one for one in judged if not one.detected]
    keys = {port.key for name in _DETECTION for port in GROUPS[name]}
    kinds = [one for one in judged if one.row.key in keys]
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
