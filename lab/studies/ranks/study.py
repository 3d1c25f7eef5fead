"""Compare wrong and right ports over ranks, and record whether parity detects each mistake and how it names it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.corpus.ranked_ports import ranks as rows
from lab.corpus.ranked_ports import staged
from lab.corpus.ranked_ports import trained_over_ranks as trained
from lab.studies import reporting
from lab.studies.settings import Said, check_names
from parity import te
from parity.case.validate import check_case
from parity.judge.limits import packaged
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.ranks.layout import degrees
from parity.report.numbers import markdown_table, short
from parity.te import PRECISIONS, why_unavailable
from parity.trainings.parallel import compare_over_ranks_at
from parity.trainings.training import train_at

RECORD = "ranks.jsonl"
WRONG = (*rows.WRONG, *staged.WRONG, *trained.WRONG)
RIGHT = (*rows.RIGHT, *staged.RIGHT, *trained.RIGHT)


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        precisions: the precisions to judge at; those that the machine cannot run are skipped.
        seeds: number of seeds of each right port; wrong ports have one.
    """

    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block")
    seeds: int = 3


FULL = Settings()
QUICK = Settings(precisions=("bf16",), seeds=1)


@dataclass(frozen=True)
class Port:
    """One port over ranks.

    Attributes:
        host: a name in ``rows.HOSTS``, ``staged.HOSTS`` or ``trained.HOSTS``.
        variant: the name of the mistake or of the right port.
        ranks: the number of ranks by axis, as in the names of test items.
        is_wrong: whether the port is in ``WRONG``.
        precision: a name in ``parity.te.PRECISIONS``.
        seed: the seed of weights and inputs.
    """

    host: str
    variant: str
    ranks: str
    is_wrong: bool
    precision: str
    seed: int


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Port, Said], Settings]:
    """Make the comparisons that are missing from the folder's record, each over its ranks.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a precision is unknown.
    """
    check_names("precisions", settings.precisions, PRECISIONS)
    campaign: Campaign[Port, Said] = Campaign(folder / RECORD, Said, code=record.code_of(__name__))
    return campaign.complete(ports(settings), said_of, "port"), settings


def ports(settings: Settings) -> list[Port]:
    """Return all ports, ordered by precision, with wrong ones first."""
    found = []
    for name in settings.precisions:
        if why_unavailable(PRECISIONS[name], te.kernels("cpu")) is not None:
            continue
        found += [
            Port(row.host, row.variant, degrees(row.ranks).label, True, name, 0) for row in WRONG if row.exists_at(name)
        ]
        found += [
            Port(right.host, right.variant, degrees(right.ranks).label, False, name, seed)
            for right in RIGHT
            for seed in range(settings.seeds)
            if right.exists_at(name)
        ]
    return found


def said_of(port: Port) -> Said:
    """Make one comparison, without a time limit for the search for a cause."""
    kernels = te.kernels("cpu")
    made = next(
        degrees(row.ranks)
        for row in (*WRONG, *RIGHT)
        if (row.host, row.variant, degrees(row.ranks).label) == (port.host, port.variant, port.ranks)
    )
    is_trained = port.host in trained.HOSTS
    of = next(some for some in (rows, staged, trained) if port.host in some.HOSTS)
    case = dataclasses.replace(of.case_of(port.host, port.variant), ranks=(made,))
    (checked,) = check_case(case, kernels.te)
    began = time.perf_counter()
    at = case, checked, PRECISIONS[port.precision], port.seed, kernels, packaged()
    result = (
        train_at(*at, trained.STEPS, trained.SWITCHES.get(port.host, ""), made=made)
        if is_trained
        else compare_over_ranks_at(*at, made)
    )
    return Said.by(result, time.perf_counter() - began)


# The report: which mistakes were detected and named, and which right ports did not pass.


def write(found: Mapping[Port, Said], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "ranks.md", _sections(found, settings))


def _sections(found: Mapping[Port, Said], settings: Settings) -> Iterator[str]:
    yield "# Which mistakes over ranks are detected and named"
    yield (
        "TE's modules over 2 and 4 ranks that talk by gloo on one machine, wrong on purpose or right, against their "
        "references in one process. "
        + reporting.made_on(te.kernels("cpu"))
        + " Seconds are by the clock, with all ranks, on a machine of two cores that others use."
    )
    wrong = {one: said for one, said in found.items() if one.is_wrong}
    right = {one: said for one, said in found.items() if not one.is_wrong}
    yield reporting.rates(wrong, right, settings.precisions, _outcome)
    yield "*Named*: the first finding has the right title."
    yield "## Right ports: the largest margin of all seeds"
    yield _table(right, settings, lambda several: short(max(said.margin for _, said in several)))
    yield "## Wrong ports"
    yield _table(wrong, settings, lambda several: _outcome(*several[0]))
    missed = [(one, said) for one, said in wrong.items() if _outcome(one, said) != "named"]
    rejected_ones = [(one, said) for one, said in right.items() if said.status != "passed"]
    for title, some in (("Not named", missed), ("Right ports that did not pass", rejected_ones)):
        if some:
            yield f"## {title}"
            told = (said.findings[0] if said.findings else ("", said.reason) for _, said in some)
            yield markdown_table(
                (
                    (one.host, one.variant, one.ranks, one.precision, one.seed, said.status, *words)
                    for (one, said), words in zip(some, told, strict=True)
                ),
                ("module", "port", "ranks", "precision", "seed", "status", "said", "in words"),
                left=8,
            )


def _outcome(one: Port, said: Said) -> str:
    of = one.host, one.variant, one.ranks
    return said.outcome(next(row.titles for row in WRONG if (row.host, row.variant, degrees(row.ranks).label) == of))


def _table(found: Mapping[Port, Said], settings: Settings, shown: Callable[[list[tuple[Port, Said]]], str]) -> str:
    """Return a table with a row for each port and a column for each precision."""
    rows = dict.fromkeys((one.host, one.variant, one.ranks) for one in found)
    names = [name for name in settings.precisions if any(one.precision == name for one in found)]

    def cell(row: tuple[str, str, str], name: str) -> str:
        several = [
            (one, said)
            for one, said in found.items()
            if ((one.host, one.variant, one.ranks), one.precision) == (row, name)
        ]
        return shown(several) if several else ""

    return markdown_table(
        ((*row, *(cell(row, name) for name in names)) for row in rows),
        ("module", "port", "ranks", *(f"`{name}`" for name in names)),
        left=3,
    )
