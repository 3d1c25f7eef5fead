"""Go on with a run that did not end, or keep what it left: what the record that is there means to a new run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from parity import reading
from parity.machine import files
from parity.machine.files import Claim
from parity.plugin import ending
from parity.plugin.options import Options
from parity.report import earlier
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.plugin.item import ParityItem
    from parity.report.environment import Environment
    from parity.report.record import Record

# The record of a run that did not end, for the run that goes on with it.


@dataclass(frozen=True)
class Unfinished:
    """A record to go on with.

    Attributes:
        record: what is kept of it: the results of items that were compared to their end.
        content: the same as bytes, line by line.
        finished: the items' ids.
    """

    record: Record
    content: bytes
    finished: frozenset[str]

    def check(self, environment: Environment) -> None:
        """Make sure that the run that goes on is the same.

        Args:
            environment: that run's.

        Raises:
            UserError: if not; says what differs.
        """
        from parity.report.earlier import differences

        found = differences(self.record.environment, environment)
        if found:
            raise UserError(_not_the_same(found))


def unfinished(claim: Claim, options: Options) -> Unfinished | None:
    """Return what the claimed record has of a run that asked for the same; None if it has nothing.

    An item of which not every seed was compared is left out, and so is one that was cut short from outside.

    Raises:
        UserError: if it is not a record, or options or parity's code differ.
    """
    from parity.report import earlier, record
    from parity.result import Result

    if not claim.content():
        return None
    lines = record.lines(claim.path)
    found = record.of_lines(lines)
    asked, environment = found.environment.asked, found.environment
    differ = []
    if asked is None:
        differ = ["the record does not say what its run was asked for, as those of older versions do not"]
    else:
        differ += earlier.differences_of_options(asked.options, options.as_asked)
        changed = earlier.changed_code(asked.code, {earlier.PARITY: earlier.code_of_parity()})
        differ += [f"{name} changed" for name in changed]
    if environment.seeds != options.seeds:
        differ.append(f"seeds were {_listed(environment.seeds)}, now they are {_listed(options.seeds)}")
    if differ:
        raise UserError(_not_the_same(differ))
    by_item: dict[str, list[tuple[int, bool]]] = {}
    skipped = set()
    for result in found.results:
        key = f"{result.path}::{result.item}"
        by_item.setdefault(key, []).append((result.seed, result.cut_short))
        if result.status == "skipped":
            skipped.add(key)
    finished = {
        key
        for key, seeds in by_item.items()
        if not any(cut for _, cut in seeds)
        and len(seeds) == len(dict(seeds))
        and (key in skipped or set(dict(seeds)) == set(options.seeds))
    }
    kept = tuple(each for each in found.results if f"{each.path}::{each.item}" in finished)
    left = record.Record(environment, kept, found.uncollected)
    dropped = {f"{each.path}::{each.item}" for each in found.results} - finished
    content = b"".join(
        lines.raw[number - 1] + b"\n"
        for number, each in lines.good
        if not (isinstance(each, Result) and f"{each.path}::{each.item}" in dropped)
    )
    return Unfinished(left, content, frozenset(finished))


def ended_its_process(path: Path) -> str:
    """Return the item of a record with which a process ended; empty if there is none, or no record."""
    from parity.report import record

    try:
        results = record.read(path).results if path.exists() else ()
    except (UserError, OSError):  # is told when the record is claimed
        return ""
    return next((f"{each.path}::{each.item}" for each in results if ending.took_its_process_along(each)), "")


def _listed(seeds: Sequence[int]) -> str:
    from parity.report.numbers import seeds as in_words

    return in_words(tuple(seeds))


def _not_the_same(differences: Sequence[str]) -> str:
    return (
        f"cannot go on with the record, which is of another run: {'; '.join(differences)}. Ask for the same again, or "
        "leave out --resume (--parity-resume): a new run keeps the record under another name"
    )


# The items that a run leaves out, since the record has them.


def leave_out(session: pytest.Session, items: Sequence[ParityItem], finished: frozenset[str]) -> None:
    """Note what the run is to compare in all, and take from the session what is finished."""
    ending.note_planned(session, items)
    done = {item for item in items if item.key in finished}
    if done:
        session.items[:] = [item for item in session.items if item not in done]
        session.config.hook.pytest_deselected(items=[item for item in items if item in done])


# A record that no run goes on with: it is kept under another name, unless it has nothing.


Left = Literal["nothing", "unfinished", "complete"]


def left_by(content: bytes) -> Left:
    """Return what a file holds: results of a run that did not end, or something that is no record at all, or results of
    one that did.
    """
    first, *lines = (_parsed(line) for line in content.removesuffix(b"\n").split(b"\n"))
    environment = first.get("environment")
    if not isinstance(environment, Mapping):
        return "unfinished" if content.strip(b"\0\n ") else "nothing"
    results = [line["result"] for line in lines if isinstance(line.get("result"), Mapping)]
    names = ("path", "case", "precision", "size_label", "forced_attention")
    items = {str([result.get(name) for name in names]): bool(result.get("cut_short")) for result in results}
    if not items:
        return "nothing"
    return "unfinished" if any(items.values()) or len(items) != environment.get("items") else "complete"


def set_aside(claim: Claim, report: Path, left: Left, most: int) -> str:
    """Give the record of a run before this one, and its report, another name; return a sentence about it.

    Args:
        claim: the record.
        report: where its report is.
        left: ``unfinished``, which is kept beside it, or ``complete``, which becomes an earlier run with a number.
        most: how many earlier runs of this name are kept; those with the smallest numbers are removed.

    Raises:
        OSError: if the record cannot be renamed.
    """
    record = claim.path
    if left == "unfinished":
        aside = files.free_name(record, "unfinished")
        told = f"{record} was of a run that did not end; it is kept as {aside}"
    else:
        folder = record.parent / earlier.RUNS
        known = earlier.numbers(folder, record.stem)
        aside = earlier.numbered(folder, record.stem, max(known, default=0) + 1, record.suffix)
        told = f"the run before is kept as {aside}"
        for number in known[: max(0, len(known) + 1 - most)]:
            for suffix in (record.suffix, *_DRAWN):
                with suppress(OSError):
                    earlier.numbered(folder, record.stem, number, suffix).unlink()
    claim.set_aside(aside)
    for suffix in _DRAWN:
        with suppress(OSError):
            os.replace(report.with_suffix(suffix), aside.with_suffix(suffix))
    return told


# What a run draws beside its record.
_DRAWN = (".md", ".html")


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        return reading.parsed(line, lambda content: content if isinstance(content, Mapping) else {})
    except reading.NotReadableError:
        return {}


def report_meanwhile(name: str, record: Path) -> str:
    """Return what stands in the report's place until it is drawn, so that an older one does not pass for it."""
    return (
        f"# Parity report: {name}\n\nThis run has not ended, or it was killed: its report is not drawn yet. "
        f"`parity report {record.name}` draws what the record has so far, and the run's own command with `--resume` "
        "(`--parity-resume=yes` for pytest) goes on with it.\n"
    )
