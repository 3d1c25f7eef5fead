"""Compare wrong ports and right ones over ranks, and record whether each is detected and what is said of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from parity import te
from parity.case.validate import check_case
from parity.judge.limits import packaged
from parity.lab import record
from parity.lab.record import Campaign
from parity.lab.studies import reporting
from parity.lab.studies.rows import ranks as rows
from parity.lab.studies.rows import staged
from parity.lab.studies.rows import trained_over_ranks as trained
from parity.lab.studies.settings import Said, check_names
from parity.parallel import compare_over_ranks_at
from parity.ranks.layout import degrees
from parity.report.numbers import markdown_table, short
from parity.te import PRECISIONS, why_unavailable
from parity.training import train_at

RECORD = "ranks.jsonl"
WRONG = (*rows.WRONG, *staged.WRONG, *trained.WRONG)
RIGHT = (*rows.RIGHT, *staged.RIGHT, *trained.RIGHT)


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        precisions: at which ports are judged; those that the machine does not run are left out.
        seeds: how many seeds each right port has; wrong ones have one.
        commit: at which this is measured, as the report is to say.
    """

    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block")
    seeds: int = 3
    commit: str = ""


FULL = Settings()
QUICK = Settings(precisions=("bf16",), seeds=1)


@dataclass(frozen=True)
class Port:
    """One port over ranks.

    Attributes:
        host: of ``rows.HOSTS``, ``staged.HOSTS`` or ``trained.HOSTS``.
        variant: the mistake, or which right port it is.
        ranks: how many ranks there are by axis, as items are called.
        is_wrong: whether it is in ``WRONG``.
        precision: of ``parity.te.PRECISIONS``.
        seed: of weights and inputs.
    """

    host: str
    variant: str
    ranks: str
    is_wrong: bool
    precision: str
    seed: int


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Port, Said], Settings]:
    """Make the comparisons that the folder's record lacks, each with its ranks.

    Returns:
        What ``report.write`` is given, but for the folder.

    Raises:
        UserError: for a precision that there is not.
    """
    check_names("precisions", settings.precisions, PRECISIONS)
    campaign: Campaign[Port, Said] = Campaign(folder / RECORD, Said, code=record.code_of(__name__))
    return campaign.complete(ports(settings), said_of, "port"), settings


def ports(settings: Settings) -> list[Port]:
    """Return all ports: a precision after the other, wrong ones first."""
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
    """Make one comparison, without a limit of real time for the search for a cause."""
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


# The report: what was detected and named, and which right ones did not pass.


def write(found: Mapping[Port, Said], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "ranks.md", _sections(found, settings))


def _sections(found: Mapping[Port, Said], settings: Settings) -> Iterator[str]:
    yield "# Which mistakes over ranks are detected and named"
    yield (
        "TE's modules over 2 and 4 ranks that talk by gloo on one machine, wrong on purpose or right, against their "
        "references in one process. "
        + reporting.made_on(te.kernels("cpu"), settings.commit)
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
    """Return a table of ports by precisions."""
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
