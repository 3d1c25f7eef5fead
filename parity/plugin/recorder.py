"""Write each result of a pytest run as it arrives, draw the report at the end, and tell what changed since a baseline.

Once a result is written, only the parts that the report shows stay in memory. This module does not import torch,
because a process whose workers compare only listens.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from parity import data_files, shown
from parity.machine import files
from parity.machine.files import Claim
from parity.plugin import collecting, ending
from parity.plugin.alone import Waiter
from parity.plugin.options import Options
from parity.plugin.workers import is_item
from parity.report import earlier
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.plugin.item import ParityItem
    from parity.report.ci import Place
    from parity.report.environment import Environment
    from parity.report.markdown import Digest
    from parity.report.record import Record, Uncollected
    from parity.result import Result


class Recorder:
    """A pytest plugin that records results, in the process that receives every report: the only one or the controller.

    It touches no file before items of parity are collected. Lines that can no longer be written, for example because
    the disk is full, are kept and go into a folder for temporary files at the end.

    Args:
        options: the run's options.
        claim: the record, if the run has claimed it already.
        unfinished: what the resumed run left; None if no run is resumed.
        stderr: a descriptor of standard error that nobody captures.
        killer: the item that ended the resumed run's process, if this run has a worker because of it; else empty.
    """

    def __init__(
        self,
        options: Options,
        claim: Claim | None = None,
        unfinished: Unfinished | None = None,
        stderr: int = 2,
        killer: str = "",
    ) -> None:
        self._options = options
        self._record, self._report, self._page, self._name = options.record, options.report, options.page, options.name
        self._digest: Digest | None = None
        self._since: Told | None = None
        self._verdict = ""
        self._begun = False
        self._others = False  # whether anything but pairs ran
        self._meanwhile: int | None = None
        self._waiter: Waiter | None = None
        self._stderr = stderr
        self._uncollected: dict[str, Uncollected] = {}
        self._unwritten: list[str] = []
        self._lost = False
        self._troubles: list[str] = []
        self._known: set[tuple[str, int]] = set()
        self._claim, self._unfinished, self._refused = claim, unfinished, False
        if claim is not None:
            claim.told = self._add_to_summary
        if unfinished is not None:
            from parity.report.markdown import digest
            from parity.report.numbers import plural

            self._uncollected = {each.node_id: each for each in unfinished.record.uncollected}
            self._digest = digest(unfinished.record)
            self._digest.uncollected = self._uncollected
            self._known = {(f"{each.path}::{each.item}", each.seed) for each in unfinished.record.results}
            done, items = len(unfinished.finished), plural(unfinished.record.environment.items, "item")
            self._add_to_summary(f"went on with {self._record}, which had {done} of {items}")
        if killer:
            self._add_to_summary(
                f"compared in a worker, because the last run's process ended while it was comparing {killer}"
            )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Claim the record if there is something to write."""
        if ending.planned(session) and not session.config.option.collectonly:
            self.claim_record()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        if any(map(is_item, ids)):
            self.claim_record()

    def claim_record(self) -> None:
        """Claim the record before anything is compared, so that no other run writes it.

        Raises:
            pytest.UsageError: if another run has claimed it.
        """
        if self._claim is not None:
            return
        try:
            self._claim = Claim(self._record, self._add_to_summary)
        except UserError as error:
            self._refused = True
            raise pytest.UsageError(str(error)) from None
        except OSError as error:
            self._add_to_summary(f"could not write: {error}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines: dict[str, Any] = getattr(report, "parity_lines", {})
        if lines:
            del report.parity_lines  # pytest keeps every report until its end
            self.record(lines)
        elif report.when == "call" and not report.skipped:
            self._others = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        message = collecting.noted(report)
        if message and report.nodeid not in self._uncollected:  # each of xdist's workers collects and reports it
            from parity.report.record import Uncollected, uncollected_line

            self._uncollected[report.nodeid] = Uncollected(report.nodeid, message)
            if self._begun:
                self._write_lines(uncollected_line(self._uncollected[report.nodeid]))

    def record(self, lines: dict[str, Any]) -> None:
        """Write an item's lines, see ``ending.of_item``, in place of its provisional ones."""
        from parity.report import record

        if self._refused:
            return
        self._remove_provisional_lines()
        digest = self._begin_record(lines.get("environment", ""))
        fresh = {line: result for line in lines["results"] if self._is_new(result := record.result_of(line))}
        if fresh:  # an item in which parity itself failed has none
            self._write_lines("".join(fresh))
            digest.add(list(fresh.values()))

    def _is_new(self, result: Result) -> bool:
        """Return whether this comparison has no result yet. A pair that forks may report itself twice."""
        key = (f"{result.path}::{result.item}", result.seed)
        if key in self._known:
            self._add_to_summary(
                f"{key[0]} reported seed {result.seed} a second time, which was ignored; the pair may have forked"
            )
            return False
        self._known.add(key)
        return True

    def record_meanwhile(self, node_id: str, environment: str, results: Sequence[str]) -> None:
        """Write provisional results of an item before its comparison ends, in case this process dies first.

        Args:
            node_id: the item's id.
            environment: the record's first line.
            results: lines, which the next call of this method or of ``record`` replaces.
        """
        from parity.report import record

        if self._refused:
            return
        self._remove_provisional_lines()
        self._begin_record(environment)
        if self._claim is not None and not self._unwritten:
            with suppress(OSError):  # the item's own lines will report it
                self._claim.append(b"")
                size = self._claim.size
                self._claim.append(record.data("".join(results)))
                self._meanwhile = size
        if self._waiter is None:
            with suppress(OSError):
                self._waiter = Waiter(self._record, [self._report, self._page], ending.RESUME, self._stderr)
        if self._waiter is not None:
            self._waiter.tell(node_id)

    def _remove_provisional_lines(self) -> None:
        """Remove the provisional lines."""
        if self._waiter is not None:
            self._waiter.tell("")
        if self._meanwhile is not None and self._claim is not None:
            with suppress(OSError):
                self._claim.cut(self._meanwhile)
        self._meanwhile = None

    def _begin_record(self, environment: str) -> Digest:
        """Write the lines that come before the first result, but only once."""
        from parity.report import record
        from parity.report.markdown import Digest

        if self._begun and self._digest is not None:
            return self._digest
        self.claim_record()
        here = record.environment_of(environment)
        if self._unfinished is not None and self._digest is not None:
            self._check_environment(here)
            content, digest = self._unfinished.content.decode(), self._digest
            known = {each.node_id for each in self._unfinished.record.uncollected}
        else:
            content, digest, known = environment, Digest(here, uncollected=self._uncollected), set()
        content += "".join(record.uncollected_line(each) for key, each in self._uncollected.items() if key not in known)
        self._digest, self._begun = digest, True
        if not self._try_to_write(lambda: self._replace_old_record(record.data(content))):
            self._unwritten.append(content)
        return digest

    def _check_environment(self, environment: Environment) -> None:
        """End the run if it does not match the one that it resumes."""
        assert self._unfinished is not None
        try:
            self._unfinished.check(environment)
        except UserError as error:
            self._refused, self._digest = True, None
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)

    def _replace_old_record(self, content: bytes) -> None:
        """Replace an older run's record, which is kept under another name, by the first lines of this one."""
        if self._claim is None:
            raise OSError(f"{self._record} could not be opened")
        before = self._claim.content()
        if self._unfinished is not None:
            if before != content:
                self._claim.replace(content)
        else:
            left = left_by(before)
            if left != "nothing" and (self._options.keep_runs or left == "unfinished"):
                self._add_to_summary(set_aside(self._claim, self._report, left, self._options.keep_runs))
            self._claim.begin(content)
        try:
            files.replace(self._report, report_meanwhile(self._name, self._record))
        except OSError:
            with suppress(OSError):  # an older report would be taken for this run's
                self._report.unlink(missing_ok=True)
        with suppress(OSError):
            self._page.unlink(missing_ok=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.finish()
        if self._lost and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.INTERRUPTED  # the run passed, but no file says so
        if self._unfinished is not None and self._digest is not None:
            session.exitstatus = self._exit_code(session.exitstatus)
        is_empty = self._digest is not None and self._digest.compared_nothing
        if is_empty and not self._others and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        if self._since is not None and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = self._since.code

    def finish(self) -> None:
        """Draw the report and then the page, because the disk may have room only for the report."""
        self._remove_provisional_lines()
        if self._waiter is not None:
            self._waiter.dismiss()
            self._waiter = None
        if self._digest is None or self._refused:
            return
        from parity.report import html, markdown

        digest = self._digest
        drawn, self._verdict = markdown.draw(digest, self._name), markdown.verdict(digest, shown.line)
        if self._claim is not None:
            with suppress(OSError):
                self._claim.append(b"")  # notices what others did to the file since the last line
            self._record = self._claim.path
        if self._unwritten or not self._try_to_write(lambda: files.replace(self._report, drawn)):
            self._lost = not self._try_to_write(lambda: self._save_elsewhere(drawn))
            if self._lost:
                self._add_to_summary(
                    "so this run has no complete record and report; free some disk space, and run it again"
                )
                return
        self._try_to_write(lambda: files.replace(self._page, html.draw(digest, self._name)))
        if (target := self._options.json) is not None:
            self._try_to_write(lambda: files.replace(target, draw_verdicts(self._record)))
        if self._options.save_as:
            self._try_to_write(
                lambda: self._add_to_summary(keep_baseline(self._options, self._record, digest.complete))
            )
        if self._options.against:
            self._since = compare_with_baseline(self._options, self._record)

    @property
    def digest(self) -> Digest | None:
        """Return the run as its report shows it; None if nothing was recorded."""
        return self._digest

    @property
    def name(self) -> str:
        """Return the report's name."""
        return self._name

    def _exit_code(self, code: int) -> int:
        """Return the exit code of the whole run, as if it had not been interrupted and resumed."""
        assert self._digest is not None
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return pytest.ExitCode.TESTS_FAILED if self._digest.failed else pytest.ExitCode.OK
        return code

    def pytest_unconfigure(self) -> None:
        if self._claim is not None:
            with suppress(OSError):
                self._claim.close()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._digest is None:
            return
        from parity.report import failure

        terminalreporter.section("parity")
        failed = self._digest.failed > 0
        terminalreporter.write_line(self._verdict, bold=True, red=failed, green=self._digest.complete and not failed)
        for line in failure.lines_of_failures(self._digest.items, self._digest.failed):
            terminalreporter.write_line(line)
        for note in (*failure.skips(self._digest.skips), *failure.lines(self._digest.notes)):
            terminalreporter.write_line(note)
        for trouble in self._troubles:
            terminalreporter.write_line(shown.text(trouble))
        for line in self._since.lines if self._since is not None else ():
            terminalreporter.write_line(line)
        if not self._lost:
            if self._page.exists():
                terminalreporter.write_line(f"page: {self._page}")
            terminalreporter.write_line(f"report: {self._report}")
            terminalreporter.write_line(f"record: {self._record}")

    def _write_lines(self, lines: str) -> None:
        """Add lines to the record, or keep them if they, or any before them, cannot be written."""
        from parity.report import record

        claim = self._claim
        if claim is None or self._unwritten or not self._try_to_write(lambda: claim.append(record.data(lines))):
            self._unwritten.append(lines)

    def _try_to_write(self, write: Callable[[], object]) -> bool:
        """Return whether a file could be written."""
        try:
            write()
        except OSError as error:
            self._add_to_summary(f"could not write: {error}")
            return False
        return True

    def _add_to_summary(self, sentence: str) -> None:
        """Keep a sentence for the summary, unless it is there already."""
        if sentence not in self._troubles:
            self._troubles.append(sentence)

    def _save_elsewhere(self, drawn: str) -> None:
        """Put the report, and the record if it is incomplete, into a new folder."""
        from parity.report import record

        folder = Path(tempfile.mkdtemp(prefix="parity-report-"))
        written = self._claim.content() if self._claim is not None and self._unwritten else b""
        files.replace(folder / self._report.name, drawn)
        self._page, self._report = folder / self._page.name, folder / self._report.name
        if self._unwritten:
            files.replace(folder / self._record.name, written + record.data("".join(self._unwritten)))
            self._record = folder / self._record.name


def draw_verdicts(record: Path) -> str:
    """Return the verdicts of a run as JSON."""
    from parity.report.record import read
    from parity.report.verdicts import of_record

    return of_record(read(record)).model_dump_json(indent=2)


# Keep a run's record as a baseline, and tell at the end of a run what has changed since one.


@dataclass(frozen=True)
class Told:
    """Describe what has changed.

    Attributes:
        lines: the lines for the terminal.
        code: pytest's exit code if the run itself passes.
    """

    lines: tuple[str, ...]
    code: pytest.ExitCode


def keep_baseline(options: Options, record: Path, complete: bool) -> str:
    """Keep the record as a baseline under the name from the run's options, and return a sentence about it."""
    from parity.report import earlier

    if not complete:
        return f"no baseline {options.save_as} was made, since not everything was compared"
    target, replaced = earlier.keep(record, options.save_as, options.start)
    return f"baseline: {target}{', in place of the one before' if replaced else ''}"


def compare_with_baseline(options: Options, record: Path) -> Told:
    """Draw what has changed since the baseline from the run's options."""
    from parity.report import changes, earlier
    from parity.report.record import read

    try:
        older = earlier.find(options.against, options.start, "--parity-against")
        runs = changes.Comparison(read(older), read(record), (options.against, options.name))
    except (UserError, OSError) as error:  # it was readable when the run began
        return Told((f"nothing was compared with {options.against}: {error}",), pytest.ExitCode.USAGE_ERROR)
    target = record.with_name(f"{record.stem}_against_{older.stem}.md")
    lines = [f"against {options.against}: {line}" for line in changes.lines(runs)]
    try:
        files.replace(target, changes.draw(runs))
        lines.append(f"report: {target}")
    except OSError as error:
        lines.append(f"could not write: {error}")
    if not runs.shares_items:
        return Told(tuple(lines), pytest.ExitCode.USAGE_ERROR)
    return Told(tuple(lines), pytest.ExitCode.TESTS_FAILED if runs.is_worse else pytest.ExitCode.OK)


# Report the findings to GitHub if the run takes place there.


# https://docs.github.com/en/actions/reference/workflows-and-actions/variables
_IS_GITHUB = "GITHUB_ACTIONS"
_SUMMARY = "GITHUB_STEP_SUMMARY"
_CHECKOUT = "GITHUB_WORKSPACE"


class GitHub:
    """A pytest plugin that writes annotations and a summary for GitHub, in the process that receives every report.

    Args:
        recorder: the recorder of the results.
        asked: the kinds of output that are asked for, a subset of ``options.CI``.
        start: the folder where pytest was started.
    """

    def __init__(self, recorder: Recorder, asked: frozenset[str], start: Path) -> None:
        self._recorder, self._start = recorder, start
        self._annotates = "annotations" in asked and os.environ.get(_IS_GITHUB) == "true"
        self._summary = os.environ.get(_SUMMARY, "") if "summary" in asked else ""
        self._found: list[tuple[Place, str, str]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note where a failed item's pair is declared, and what is wrong."""
        if self._annotates and report.failed and hasattr(report, "parity_lines"):
            file, line, name = report.location
            self._found.append((self._make_place(file, (line or 0) + 1), name, _describe_failure(report)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        message = collecting.noted(report)
        if self._annotates and message:
            found = (self._make_place(report.nodeid.partition("::")[0]), "not collected", message)
            if found not in self._found:  # each of xdist's workers collects
                self._found.append(found)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        digest = self._recorder.digest
        if digest is None:
            return
        from parity.report import ci

        if self._summary:
            with suppress(OSError), Path(self._summary).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(ci.summary(digest, self._recorder.name))
        for found in self._found[: ci.MOST_ANNOTATIONS]:
            terminalreporter.write_line(ci.annotation(*found))
        if len(self._found) > ci.MOST_ANNOTATIONS:
            terminalreporter.write_line(ci.others(len(self._found) - ci.MOST_ANNOTATIONS))

    def _make_place(self, file: str, line: int = 0) -> Place:
        """Return the place with its file relative to the repository, as GitHub expects it."""
        from parity.report.ci import Place

        path = Path(os.path.normpath(self._start / file))
        checkout = Path(os.environ.get(_CHECKOUT) or self._start)
        return Place((path.relative_to(checkout) if path.is_relative_to(checkout) else path).as_posix(), line)


def _describe_failure(report: pytest.TestReport) -> str:
    """Return what is wrong with an item or, if it has no results, pytest's own text, which names the worker."""
    from parity.report import failure, record
    from parity.report.record import Item

    results = tuple(map(record.result_of, report.parity_lines["results"]))
    item = Item(results) if results else None
    return failure.message(item) if item is not None and item.bad else report.longreprtext


# The record of a run that did not end, for the run that resumes it.


@dataclass(frozen=True)
class Unfinished:
    """The part of a record that a resumed run keeps.

    Attributes:
        record: the results of the items that were compared to their end.
        content: the lines of that record, as bytes.
        finished: the ids of these items.
    """

    record: Record
    content: bytes
    finished: frozenset[str]

    def check(self, environment: Environment) -> None:
        """Make sure that the resuming run matches the record.

        Args:
            environment: the environment of the resuming run.

        Raises:
            UserError: if not; the message says what differs.
        """
        from parity.report.earlier import differences

        found = differences(self.record.environment, environment)
        if found:
            raise UserError(_not_the_same(found))


def unfinished(claim: Claim, options: Options) -> Unfinished | None:
    """Return the part of the claimed record that a run with these options can keep; None if the file is empty.

    Leaves out items with seeds that were not compared, and items that were cut short from outside.

    Raises:
        UserError: if the file is not a record, or if options or parity's code differ.
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
        differ.append(f"seeds were {_list_seeds(environment.seeds)}, now they are {_list_seeds(options.seeds)}")
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
    """Return the item of a record that ended its process; empty if there is no such item or no record."""
    from parity.report import record

    try:
        results = record.read(path).results if path.exists() else ()
    except (UserError, OSError):  # reported when the record is claimed
        return ""
    return next((f"{each.path}::{each.item}" for each in results if ending.took_its_process_along(each)), "")


def _list_seeds(seeds: Sequence[int]) -> str:
    from parity.report.numbers import seeds as in_words

    return in_words(tuple(seeds))


def _not_the_same(differences: Sequence[str]) -> str:
    return (
        f"cannot resume from this record, because it belongs to a different run: {'; '.join(differences)}. Repeat the "
        "same run, or leave out --resume (--parity-resume): a new run keeps the record under another name"
    )


# The items that a run leaves out because the record has them.


def leave_out(session: pytest.Session, items: Sequence[ParityItem], finished: frozenset[str]) -> None:
    """Note all items of the run, and remove the finished ones from the session."""
    ending.note_planned(session, items)
    done = {item for item in items if item.key in finished}
    if done:
        session.items[:] = [item for item in session.items if item not in done]
        session.config.hook.pytest_deselected(items=[item for item in items if item in done])


# A record that is not resumed is kept under another name, unless it has no results.


Left = Literal["nothing", "unfinished", "complete"]


def left_by(content: bytes) -> Left:
    """Return which results a file holds: none, those of a complete run, or those of an unfinished one.

    A file that is not a record counts as unfinished, so that it is kept.
    """
    first, *lines = (_parse_line(line) for line in content.removesuffix(b"\n").split(b"\n"))
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
    """Rename the record and the report of an older run, and return a sentence about it.

    Args:
        claim: the record.
        report: the path of its report.
        left: ``unfinished`` for a record that stays in its folder, or ``complete`` for one that becomes a numbered
            earlier run.
        most: how many earlier runs of this name are kept; those with the smallest numbers are removed.

    Raises:
        OSError: if the record cannot be renamed.
    """
    record = claim.path
    if left == "unfinished":
        aside = files.free_name(record, "unfinished")
        told = f"{record} belonged to a run that did not finish; it is kept as {aside}"
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


# The suffixes of the files that a run draws next to its record.
_DRAWN = (".md", ".html")


def _parse_line(line: bytes) -> Mapping[str, Any]:
    try:
        return data_files.parsed(line, lambda content: content if isinstance(content, Mapping) else {})
    except data_files.NotReadableError:
        return {}


def report_meanwhile(name: str, record: Path) -> str:
    """Return the text that replaces an older report until this run's is drawn, so that nobody confuses them."""
    return (
        f"# Parity report: {name}\n\nThis run has not ended, or it was killed: its report is not drawn yet. "
        f"`parity report {record.name}` draws what the record has so far, and the run's own command with `--resume` "
        "(`--parity-resume=yes` for pytest) goes on with it.\n"
    )
