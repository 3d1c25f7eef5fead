"""Draw the report of the study ``ranks``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from parity.lab.studies.ranks import Port, Said, Settings
from parity.lab.studies.reports.shared import made_on, outcome, rates
from parity.report.numbers import markdown_table, short
from parity.te import kernels


def write(found: Mapping[Port, Said], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    path = folder / "ranks.md"
    path.write_text("\n\n".join(_sections(found, settings)) + "\n", encoding="utf-8")
    return path


def _sections(found: Mapping[Port, Said], settings: Settings) -> Iterator[str]:
    yield "# Which mistakes over ranks are detected and named"
    yield (
        "TE's modules over 2 and 4 ranks that talk by gloo on one machine, wrong on purpose or right, against their "
        "references in one process. "
        + (f"Measured at commit {settings.commit}. " if settings.commit else "")
        + made_on(kernels("cpu"))
        + " Seconds are by the clock, with all ranks, on a machine of two cores that others use."
    )
    wrong = {one: said for one, said in found.items() if one.is_wrong}
    right = {one: said for one, said in found.items() if not one.is_wrong}
    yield rates(wrong, right, settings.precisions, lambda one, said: said.is_named(one))
    yield "*Named*: the first finding has the right title."
    yield "## Right ports: the largest margin of all seeds"
    yield _table(right, settings, lambda several: short(max(said.margin for _, said in several)))
    yield "## Wrong ports"
    yield _table(wrong, settings, lambda several: outcome(several[0][1].status, several[0][1].is_named(several[0][0])))
    missed = [(one, said) for one, said in wrong.items() if outcome(said.status, said.is_named(one)) != "named"]
    rejected_ones = [(one, said) for one, said in right.items() if said.status != "passed"]
    for title, some in (("Not named", missed), ("Right ports that did not pass", rejected_ones)):
        if some:
            yield f"## {title}"
            yield markdown_table(
                (
                    (one.host, one.variant, one.ranks, one.precision, one.seed, said.status, *_told(said))
                    for one, said in some
                ),
                ("module", "port", "ranks", "precision", "seed", "status", "said", "in words"),
                left=8,
            )


def _told(said: Said) -> tuple[str, str]:
    return said.findings[0] if said.findings else ("", said.reason)


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
