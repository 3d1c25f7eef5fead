"""Draw reports from records, and suggest the weight map of a pair."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from parity import data_files, shown
from parity.case import registry
from parity.machine import files
from parity.plugin.options import check_file, parse_backend
from parity.progress import Following
from parity.report import changes, failure, html, markdown, record
from parity.report.markdown import digest
from parity.report.numbers import plural
from parity.report.record import Record
from parity.report.verdicts import of_record
from parity.user_error import UserError
from parity.weights.suggest import suggest_map
from parity.weights.suggest.proposal import explain, python, python_over_ranks

# Draw reports of runs from their records.


def draw(file: Path, output: Path | None) -> bool:
    """Draw the report of a run, and return whether the run is complete and everything in it passed.

    Args:
        file: the run's record.
        output: the report's path, whose suffix decides between HTML and markdown; None for one of each next to the
            record.

    Raises:
        UserError: if the record cannot be read, or the report cannot be written, or, after the report was drawn, if
            lines of the record were left out.
    """
    read = _read_record(file)
    run = digest(read)
    targets = [output] if output else [file.with_suffix(".html"), file.with_suffix(".md")]
    for target in targets:
        _write_report(target, (html if _is_html(target) else markdown).draw(run, file.stem), [file])
    print(markdown.verdict(run, shown.line))
    for line in (*failure.skips(run.skips), *failure.lines(run.notes)):
        print(line)
    for target in targets:
        print(f"{'page' if _is_html(target) else 'report'}: {target}")
    _end_if_damaged({file: read})
    return run.complete and not run.failed and not run.compared_nothing


def print_verdicts(file: Path) -> bool:
    """Print the verdicts of a run as JSON, and return whether the run is complete and everything in it passed.

    Raises:
        UserError: if the record cannot be read, or, after the verdicts were printed, if lines of it were left out.
    """
    read = _read_record(file)
    verdicts = of_record(read)
    print(verdicts.model_dump_json(indent=2))
    _end_if_damaged({file: read})
    return verdicts.passed


def compare(file: Path, older: Path, output: Path | None) -> bool:
    """Draw what has changed since another run, and return whether no item newly fails or has regressed.

    Args:
        file: the run's record.
        older: the other run's record.
        output: the report's path, whose suffix decides between HTML and markdown; None for markdown next to the record.

    Raises:
        UserError: if a record cannot be read, or the report cannot be written, or, after the report was drawn, if lines
            of a record were left out or the runs have no item in common.
    """
    runs = changes.Comparison(_read_record(older), _read_record(file), (str(older), str(file)))
    target = output or file.with_name(f"{file.stem}_against_{older.stem}.md")
    drawn = html.draw(digest(runs.after), file.stem, runs) if _is_html(target) else changes.draw(runs)
    _write_report(target, drawn, [file, older])
    for line in changes.lines(runs):
        print(line)
    print(f"{'page' if _is_html(target) else 'report'}: {target}")
    _end_if_damaged({file: runs.after, older: runs.before})
    if not runs.shares_items:
        raise UserError(f"{file} and {older} have no item in common, so nothing was compared")
    return not runs.is_worse


def _read_record(file: Path) -> Record:
    """Return the record, and print which of its lines are damaged."""
    run = record.read(file)
    for sentence in data_files.warnings_for(file, run.left_out):
        print(f"parity: {shown.line(sentence)}", file=sys.stderr)
    return run


def _end_if_damaged(records: Mapping[Path, Record]) -> None:
    """Raise an error if lines of the records were left out, because a report without them proves less.

    Raises:
        UserError: if there are such lines; the message counts them.
    """
    damaged = [
        f"{file}: {plural(len(run.left_out), 'line')} left out, {plural(len(run.results), 'result')} read"
        for file, run in records.items()
        if run.left_out
    ]
    if damaged:
        raise UserError("; ".join(damaged))


def _is_html(target: Path) -> bool:
    return target.suffix.lower() in (".html", ".htm")


def _write_report(target: Path, text: str, records: Sequence[Path]) -> None:
    for file in records:
        if target.exists() and target.samefile(file):
            raise UserError(f"the report would replace its record {file}; name another file by -o")
    if target.suffix.lower() not in (".html", ".htm", ".md", ".markdown", ".txt", ""):
        raise UserError(
            f"-o: a report is HTML or markdown, and {target.name} says that it is neither; name it {target.stem}.html "
            f"or {target.stem}.md"
        )
    check_file(target, "-o")
    try:
        files.replace(target, text)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from None


# Find the pair whose weight map is to be suggested, and print the suggestion.


def suggest(
    target: str, size: int, seed: int, backend: str, keep: bool, max_runs: int, ranks: Sequence[str] = ()
) -> bool:
    """Print a weight map for one pair, and return whether it fits and nothing is left open.

    Args:
        target: ``my_pairs.py::my_mlp``, or only the file if it declares one pair.
        size: the number of one of the case's sizes, from 0.
        seed: the seed of weights and inputs.
        backend: ``auto``, ``gpu`` or ``cpu``.
        keep: whether entries of the pair's existing map stay.
        max_runs: the largest number of alternatives that are run.
        ranks: the ranks over which the candidate is computed, such as ``tp=2,sequence_parallel``; empty for those that
            the pair declares.

    Raises:
        UserError: if there is no such pair or size, the backend is not available, or the pair cannot be built.
    """
    case = registry.only(target)
    chosen = registry.size_of(case, size)
    asked = [_parse_ranks(text) for text in ranks] or None
    with Following("trying weight maps") as following:
        suggestion = suggest_map(case, chosen, seed, parse_backend(backend), keep, max_runs, asked, following.at)
    at = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
    print(f"{case}{f' at {at}' if at else ''}\n")
    for hint in suggestion.hints:
        print(f"{hint}\n")
    print(f"{python(suggestion.written)}\n")
    if suggestion.divided:
        print(f"{python_over_ranks(suggestion.divided)}\n")
    print(explain(suggestion))
    return suggestion.settled


def _parse_ranks(text: str) -> dict[str, int]:
    """Read ranks such as ``tp=2,dp=2`` or ``tp=2,sequence_parallel``.

    Raises:
        UserError: if the text is not of this form.
    """
    asked: dict[str, int] = {}
    for part in text.split(","):
        axis, _, number = part.strip().partition("=")
        if axis == "sequence_parallel" and not number:
            asked[axis] = True
        elif number.isdecimal():
            asked[axis] = int(number)
        else:
            raise UserError(f"--ranks is {text!r}, but must be like tp=2 or tp=2,sequence_parallel")
    return asked
