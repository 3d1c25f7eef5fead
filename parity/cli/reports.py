"""Draws reports of runs from their records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from parity.machine.writable import check_file
from parity.report import against, markdown, notes, record
from parity.report.digest import digest
from parity.report.numbers import plural
from parity.report.record import Record
from parity.user_error import UserError


def draw(file: Path, output: Path | None) -> bool:
    """Draw the report of a run; whether everything that the run was to compare passed.

    Args:
        file: the run's record.
        output: the report; None for one beside the record.

    Raises:
        UserError: if the record cannot be read, or the report cannot be written.
    """
    run = digest(_read(file))
    target = output or file.with_suffix(".md")
    _write(target, markdown.draw(run, file.stem), [file])
    print(markdown.verdict(run))
    for line in notes.lines(run.notes):
        print(line)
    print(f"report: {target}")
    return run.complete and not run.failed


def compare(file: Path, older: Path, output: Path | None, factor: float) -> bool:
    """Draw what changed since another run; whether no item newly fails.

    Args:
        file: the run's record.
        older: the other run's.
        output: the report; None for one beside the record.
        factor: by which a margin has to change to be told.

    Raises:
        UserError: if a record cannot be read, or the report cannot be written.
    """
    runs = against.Comparison(_read(older), _read(file), (str(older), str(file)), factor)
    target = output or file.with_name(f"{file.stem}_against_{older.stem}.md")
    _write(target, against.draw(runs), [file, older])
    print(against.verdict(runs))
    print(f"report: {target}")
    return "newly failing" not in runs.changes


def _read(file: Path) -> Record:
    """The record; what of it is damaged is told, and what is left."""
    run = record.read(file)
    if run.damaged:
        first, last = run.damaged[0], run.damaged[-1]
        lines = f"line {first} is" if first == last else f"lines {first} to {last} are"
        read = f"{plural(len(run.results), 'result')} {'was' if len(run.results) == 1 else 'were'} read"
        print(f"parity: {file}: {lines} damaged or cut short, and left out; {read}", file=sys.stderr)
    return run


def _write(target: Path, text: str, records: Sequence[Path]) -> None:
    for file in records:
        if target.exists() and target.samefile(file):
            raise UserError(f"the report would replace its record {file}; name another file by -o")
    check_file(target, "-o")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from None
