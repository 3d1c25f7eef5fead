"""Run cases for ``parity run``, with its options and exit codes, and train pairs for ``parity train``."""

from __future__ import annotations

import io
import os
import shlex
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import pytest
from tabulate import tabulate

from parity import te
from parity.case.case import checked_steps
from parity.case.files import MODULE, checkout, imports_parity
from parity.case.validate import check_case
from parity.judge.limits import packaged
from parity.machine import process
from parity.passes.refusals import NothingToJudge
from parity.plugin import collecting, engines, options
from parity.plugin.collecting import unknown_pairs
from parity.plugin.options import check_file
from parity.progress import Following, followed, is_quiet
from parity.report import markdown
from parity.report.markdown import Curve
from parity.settings import PRECISION_NAMES, of_project
from parity.te import precision_named, why_unavailable
from parity.trainings.band import Band, band_of
from parity.trainings.training import train_at
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.case.case import Case, Size


# The files of pairs that a run compares: the named ones, or the default suite.


GROUP = "parity.pairs"


def files(paths: Sequence[str] | None) -> list[str]:
    """Return the files and pytest ids to compare.

    Args:
        paths: files, folders, or ids such as ``my_pairs.py::mlp[bf16-2x64]``; None or empty for the default suite. That
            consists of the modules that installed packages declare under the entry point group ``parity.pairs`` and, in
            a checkout, of the folder ``cases`` next to the package ``parity``.

    Returns:
        The files and ids, with each folder replaced by its files that import parity.

    Raises:
        UserError: if a path does not exist, holds no pairs, or there is no default suite.
    """
    found = [name for path in paths for name in _expand_path(path)] if paths else list(_default_files())
    if not found:
        raise UserError(
            f"there is no default suite: no package declares an entry point {GROUP!r}; name a file of pairs"
        )
    return list(dict.fromkeys(found))


def right_ports(paths: Sequence[str] | None) -> tuple[str, ...]:
    """Return files of pairs that are known to agree: the named ones, or the default suite and the zoo's hosts.

    Raises:
        UserError: as for ``files``.
    """
    from parity.measuring.right_ports import ZOO

    return (*files(paths), *(() if paths else (ZOO,)))


def cases(paths: Sequence[str] | None) -> list[Case]:
    """Return the cases of files or ids, in the order of declaration.

    Files without pairs are allowed in a folder, since they may be helpers of other files.

    Raises:
        UserError: as for ``files`` and ``registry.load``.
    """
    from parity.case import registry

    found: dict[str, Case] = {}
    for name in files(paths):
        try:
            found.update({case.name: case for case in registry.load(name)})
        except registry.NoPairError:
            if not paths or name in paths:
                raise
    return list(found.values())


def table(found: Iterable[Case]) -> str:
    """Return a table of cases with their sizes, precisions and places, for a terminal."""
    rows = [
        (
            case.name,
            "\n".join(map(_format_size, case.sizes)),
            ", ".join(case.precisions or ("all",)),
            _format_place(case),
        )
        for case in found
    ]
    return tabulate(rows, ["case", "sizes", "precisions", "declared"], tablefmt="simple", disable_numparse=True)


def _expand_path(path: str) -> Iterator[str]:
    file = Path(path.split("::")[0])
    if not file.exists():
        raise UserError(f"there is no file or folder {file}")
    if not file.is_dir():
        if file.suffix != ".py":
            raise UserError(f"{file}: a file of pairs is a Python file, its name ends in .py")
        yield path
        return
    pairs = [child for child in sorted(file.rglob("*.py")) if not _is_hidden(child, file) and imports_parity(child)]
    if not pairs:
        raise UserError(f"no Python file in {file} imports parity")
    yield from map(str, pairs)


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)


def _default_files() -> Iterator[str]:
    """Yield the files of the default suite. A checkout uses its own cases, even if another copy is installed."""
    cases = checkout()
    entry_points = [
        entry_point
        for entry_point in metadata.entry_points(group=GROUP)
        if cases is None or entry_point.module.rpartition(".")[0] != MODULE
    ]
    found = [file for entry_point in entry_points for file in _module_files(entry_point)]
    if cases is not None:
        found += [file for file in sorted(cases.rglob("*.py")) if imports_parity(file)]
    yield from dict.fromkeys(_from_here(file.resolve()) for file in found)


def _module_files(entry_point: metadata.EntryPoint) -> list[Path]:
    """Return the file of a module, or the files of a package that import parity."""
    try:
        spec = util.find_spec(entry_point.module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(
            f"the entry point {entry_point.name!r} of {GROUP} names {entry_point.module}, which does not exist"
        )
    folders = spec.submodule_search_locations or ()
    if not folders:
        return [Path(spec.origin)]
    return [file for folder in folders for file in sorted(Path(folder).rglob("*.py")) if imports_parity(file)]


def _from_here(file: Path) -> str:
    """Return the file relative to the current folder if it is below."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _format_size(size: Size) -> str:
    return " ".join(f"{key}={value}" for key, value in size.items()) or "-"


def _format_place(case: Case) -> str:
    return f"{_from_here(case.path.resolve())}:{case.line}"


# Show the progress of ``parity run`` instead of pytest's dots.


PLAIN = ("-o", "console_output_style=classic")  # without pytest's percentages, which make no sense without its dots


class ItemsFollowed:
    """A pytest plugin that shows how many items have been compared, here or in workers.

    It shows nothing if pytest is asked for details by ``-v``, or may open a debugger.

    Args:
        file: the file to write to, since pytest captures standard error itself while a pair's code runs.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._following: Following | None = None
        self._seen: set[str] = set()
        self._failed = 0
        self._is_wanted = True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        option = session.config.option
        self._is_wanted = option.verbose <= 0 and not (option.usepdb or option.collectonly)
        reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
        if self._is_wanted and reporter is not None:
            reporter.showfspath = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._begin_following(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._begin_following(len(ids))

    def _begin_following(self, items: int) -> None:
        if self._is_wanted and self._following is None and items:
            self._following = Following("comparing", items, self._file).__enter__()

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Generator[None, Any, Any]:
        """Keep pytest's counts, but remove its letters."""
        category, letter, word = yield
        return (category, "", "") if self._is_wanted else (category, letter, word)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self._seen or (report.when != "call" and report.passed) or self._following is None:
            return
        self._seen.add(report.nodeid)
        self._failed += report.failed
        self._following.step(doing=f"comparing, {self._failed} failed" if self._failed else "comparing")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.end()

    def end(self) -> None:
        """Remove the progress bar."""
        if self._following is not None:
            self._following.end()


@contextmanager
def uncaptured_stderr() -> Iterator[TextIO]:
    """Yield the current standard error, which stays usable when pytest captures it later."""
    try:
        copy = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError, AttributeError):  # it has no descriptor, as in a notebook
        yield sys.stderr
        return
    with copy:
        yield copy


# Run pytest for ``parity run``, and turn its exit codes into parity's.


PASSED, FAILED, MISTAKE = 0, 1, 2
# pytest wants to rewrite the asserts of its plugins, but parity is already imported and has none to rewrite.
_NOT_REWRITTEN = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
# A wrong pair or file does not keep the others from being compared; in workers, pytest always goes on.
# pytest's own list of failures is off (-rN), because the recorder lists them with their causes.
_OPTIONS = ("-p", "parity.plugin", "-W", _NOT_REWRITTEN, "--continue-on-collection-errors", "-rN", *PLAIN)


class _CollectionErrors:
    """A pytest plugin that keeps a message, without a traceback, about everything that could not be collected.

    Attributes:
        is_begun: whether an item has a report, even if it was skipped.
        messages: the messages, by id.
        skipped: a sentence with the reason for each file that skips itself, by id.
    """

    def __init__(self) -> None:
        self.is_begun = False
        self.messages: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self) -> None:
        self.is_begun = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.messages.setdefault(report.nodeid, collecting.message(report))
            report.longrepr = collecting.without_traceback(report.longreprtext)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skipped.setdefault(report.nodeid, f"{report.nodeid} skips itself: {report.longrepr[2]}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Leave errors out of pytest's summary if all are of collection, because ``run`` prints these at its end."""
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        if all(isinstance(each, pytest.CollectReport) for each in terminal.stats.get("error", ())):
            terminal.summary_errors = lambda: None


def run(files: Sequence[str], arguments: Sequence[str]) -> int:
    """Compare the pairs of these files in this process, or in xdist's workers.

    Args:
        files: paths or pytest ids.
        arguments: further arguments for pytest.

    Returns:
        0 if everything passed, 1 if something failed, 2 if nothing could be run, or if any pair or file could not be
        collected. With 2, a sentence on stderr says why.
    """
    if _selects_nothing(files, arguments):
        print(f"parity: nothing to compare: {_without_a_match(files, arguments)}", file=sys.stderr)
        return MISTAKE
    errors = _CollectionErrors()
    quietly = ["-q"] * is_quiet()
    try:
        with uncaptured_stderr() as stderr:
            followed = ItemsFollowed(stderr)
            try:
                code = pytest.main([*files, *_OPTIONS, *quietly, *arguments], plugins=[errors, followed])
            finally:
                followed.end()
    except BrokenPipeError:
        print("parity: the output was closed, so the run ended before everything was compared", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return MISTAKE
    if errors.messages:
        for message in errors.messages.values():
            print(f"parity: {message}", file=sys.stderr)
        return MISTAKE
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and not errors.is_begun:
        reasons = [*errors.skipped.values(), *_explain_unknown_ids(files)] or [_without_a_match(files, arguments)]
        print(f"parity: nothing to compare: {'; '.join(reasons)}", file=sys.stderr)
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return PASSED if code == pytest.ExitCode.OK else FAILED
    return MISTAKE


@contextmanager
def verdicts_on_stdout(wanted: bool) -> Iterator[list[str]]:
    """Yield further arguments for a run, whose verdicts are printed as JSON at the end and all else to stderr.

    Args:
        wanted: whether the verdicts are wanted; if not, nothing is changed.
    """
    if not wanted:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        file = Path(folder, "verdicts.json")
        with redirect_stdout(sys.stderr):
            yield [f"--parity-json={file}"]
        if file.exists():
            print(file.read_text(encoding="utf-8"))


def run_in_this_process(files: Sequence[str], arguments: Sequence[str], processes: str) -> int:
    """Compare like ``run``, in a process that runs nothing but parity.

    Without workers, a case that ends its process must not make the run look finished. So a child process compares, and
    this process owns the exit code. Then this function returns only in the child.

    Args:
        files, arguments: as for ``run``.
        processes: the number of workers, as text for ``workers``.
    """
    word = process.supervised() if _compares_itself(processes) and process.possible() else None
    code = run(files, arguments)
    if word is not None:
        word.say(code)
    return code


def _compares_itself(processes: str) -> bool:
    """Return whether the run has neither workers nor a debugger, which expects it in the process that was started."""
    count = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", "") if processes == "auto" else processes
    try:
        asked = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    except ValueError:  # pytest reports it
        asked = []
    return bool(count) and set(count) == {"0"} and not {"--pdb", "--trace"} & set(asked)


def _selects_nothing(files: Sequence[str], arguments: Sequence[str]) -> bool:
    """Return whether a keyword matches no item.

    If the files' text suggests that, the files are collected without workers to make sure.
    """
    keyword = _find_keyword(arguments)
    if keyword is None or collecting.may_match(keyword, files):
        return False
    alone = [*files, *_OPTIONS, *arguments, "-n", "0", "--collect-only", "-q"]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return pytest.main(alone) == pytest.ExitCode.NO_TESTS_COLLECTED


def _find_keyword(arguments: Sequence[str]) -> str | None:
    return arguments[arguments.index("-k") + 1] if "-k" in arguments else None


def _without_a_match(files: Sequence[str], arguments: Sequence[str]) -> str:
    keyword = _find_keyword(arguments)
    if keyword is None:
        return f"there is no pair in {', '.join(files)}"
    return f"no pair in {', '.join(files)} matches -k {keyword!r}; `parity list` shows the pairs' names"


def _explain_unknown_ids(files: Sequence[str]) -> Iterator[str]:
    """Yield suggestions for ids that workers did not find. Loads their files, which only the workers have imported."""
    ids = [file for file in files if "::" in file]
    if not ids:
        return
    from parity.case import registry

    for path in dict.fromkeys(name.partition("::")[0] for name in ids):
        with suppress(UserError), registry.mistakes_kept():  # the workers have reported them already
            registry.load_file(path)
    yield from unknown_pairs(ids, Path.cwd(), registry.cases(), registry.misdeclared)


# Turn the options of ``parity run`` into the plugin's, and check each under the name that the user gave.


def as_plugins(
    precision: Sequence[str] | None,
    backend: str | None,
    seeds: str | None,
    attention: str | None,
    determinism: bool,
    stages: bool,
    timeout: str | None,
    diagnosis: str | None,
    calibration: Path | None,
    report: Path | None,
    name: str | None,
    resume: bool = False,
    steps: str | None = None,
) -> list[str]:
    """Return arguments for pytest, without options that the user left out.

    Raises:
        UserError: if a value is not valid; the message names the option of ``parity run``.
    """
    if precision:
        options.parse_precisions(",".join(precision), "--precision")
    if backend is not None:
        options.parse_backend(backend)
    if seeds is not None:
        options.parse_seeds(seeds)
    if attention is not None:
        options.parse_attention(attention)
    if timeout is not None:
        options.parse_timeout(timeout)
    if diagnosis is not None:
        options.parse_diagnosis(diagnosis)
    if steps is not None:
        options.parse_steps(steps, "--steps")
    if name is not None:
        options.parse_name(name, "--name")
    if calibration is not None:
        options.check_calibration(calibration, "--calibration")
    if report is not None:
        for ending in ("jsonl", "md"):
            check_file(report.absolute() / f"{name or 'parity'}.{ending}", "--report")
    given = {
        "precisions": ",".join(precision) if precision else None,
        "backend": backend,
        "seeds": seeds,
        "attention": attention,
        "determinism": "yes" if determinism else None,
        "stages": "yes" if stages else None,
        "timeout": timeout,
        "diagnosis": diagnosis,
        "calibration": None if calibration is None else str(calibration),
        "report": None if report is None else str(report),
        "name": name,
        "resume": "yes" if resume else None,
        "steps": steps,
    }
    return [f"--parity-{option}={value}" for option, value in given.items() if value is not None]


def engine(name: str | None, address: str | None) -> list[str]:
    """Return the plugin's arguments for the engine that compares the items.

    Raises:
        UserError: if there is no such engine, or if it takes no address but one is given.
    """
    if name is not None:
        options.parse_engine(name)
    if address is not None and name in (None, engines.LOCAL):
        raise UserError("--address is for a Ray cluster: add --engine ray")
    given = {"engine": name, "address": address}
    return [f"--parity-{option}={value}" for option, value in given.items() if value is not None]


def kept(save_as: str | None, against: str | None, keep_runs: str | None, ci: str | None) -> list[str]:
    """Return the plugin's arguments for baselines, earlier runs, and the output for a CI system.

    Raises:
        UserError: if a value is not valid; the message names the option of ``parity run``.
    """
    if save_as is not None:
        options.parse_name(save_as, "--save-as")
    if against is not None:
        options.check_against(against, Path(), "--against")
    if keep_runs is not None:
        options.parse_keep_runs(keep_runs, "--keep-runs")
    if ci is not None:
        options.parse_ci(ci, "--ci")
    given = {"save-as": save_as, "against": against, "keep-runs": keep_runs, "ci": ci}
    return [f"--parity-{option}={value}" for option, value in given.items() if value is not None]


def workers_of_project(files: Iterable[str]) -> str:
    """Return the number of processes from the project's defaults, as text for ``workers``.

    Raises:
        UserError: if one of the defaults is not valid.
    """
    paths = [Path(file.split("::")[0]).resolve() for file in files]
    return of_project(paths, Path.cwd(), options.OF_PROJECT).get("workers", "auto")


def workers(text: str) -> list[str]:
    """Return pytest-xdist's arguments for a number of processes, or for ``auto``.

    Raises:
        UserError: if the text is neither.
    """
    if text != "auto" and not text.isdecimal():
        raise UserError(f"-n (workers) is {text!r}, but must be a number of processes or auto")
    return ["-n", text]


# Train pairs from the command line, and draw their losses.


def train(
    paths: Sequence[str],
    steps: int,
    precisions: Sequence[str] | None,
    seeds: Sequence[int],
    backend: Literal["auto", "gpu", "cpu"],
    out: Path,
    drawn: int,
) -> bool:
    """Train each pair, print a table, write the report, and return whether all trainings passed.

    Args:
        drawn: the number of trainings with drawn roundings from which the band is made; 0 for no band.

    Raises:
        UserError: if an argument is not valid, a path holds no pair, or none of the precisions runs on this machine.
    """
    if not checked_steps(steps):
        raise UserError("--steps must be a whole number, at least 1")
    if drawn < 0 or drawn == 1:
        raise UserError(
            "--band must be the number of trainings from which a band is drawn: 2 or more, or 0 for no band"
        )
    kernels, curves = te.kernels(backend), []
    trained = [
        (case, checked, precision_named(name), seed)
        for case in cases(paths)
        for checked in check_case(case, kernels.te)
        for name in precisions or PRECISION_NAMES
        if case.runs_at(name) and why_unavailable(precision_named(name), kernels) is None
        for seed in seeds
    ]
    for case, checked, precision, seed in followed(trained, "training"):
        result = train_at(case, checked, precision, seed, kernels, packaged(), steps)
        band: Band | None = None
        with suppress(NothingToJudge):  # the training is too chaotic to have a band
            if drawn and result.steps and not result.steps[0].precision:  # a band is of one precision
                band = band_of(case, checked, precision, seed, kernels, len(result.steps), drawn)
        curves.append(Curve(result, band))
    if not curves:
        raise UserError("nothing was trained: no precision of these pairs runs on this machine")
    print(markdown.summary([curve.result for curve in curves]))
    for curve in curves:
        if left := markdown.left(curve):
            print(f"{curve.result.item}, seed {curve.result.seed}: {left}")
    if together := markdown.over_seeds(curves):
        print(together)
    for result in (curve.result for curve in curves if not curve.result.passed):
        print(f"{result.item}: {result.reason}", *(f"{one.name}: {one.told}" for one in result.findings), sep="\n  ")
    markdown.write(curves, out)
    print(f"report: {out}")
    return all(curve.result.passed for curve in curves)
