"""The pytest plugin: collects cases as items and records their results in one report.

Every pytest run in an environment loads this plugin, so it imports neither torch nor TransformerEngine before it meets
a case.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import parity
from parity.case.files import imports_parity, is_regular
from parity.machine import devices
from parity.machine.devices import CUDA_VISIBLE_DEVICES, PARITY_DEVICES, Device
from parity.machine.files import Claim
from parity.machine.process import lasting
from parity.plugin import alone, apart, collecting, ending, engines, options, recorder
from parity.plugin.collecting import Module, collected_in_time, too_late, unknown_pairs
from parity.plugin.item import DETAILS, NOT_FORKED, BrokenCase, ParityItem
from parity.plugin.memory_estimate import largest_need
from parity.plugin.options import FINISHED, Options
from parity.plugin.part import ITEMS, narrow
from parity.plugin.recorder import GitHub, Recorder
from parity.plugin.scan import files_of_cases, has_cases
from parity.plugin.workers import Workers, gpus_of, how_many, withhold_pipes
from parity.shown import printable, text
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.case.case import Case
    from parity.te import Kernels


class _Folders(list[str]):
    """The folders of ``parity``: its own, and those of packages of that name that pytest puts on ``sys.path``.

    pytest imports ``tests/parity/test_x.py`` as ``parity.test_x`` if that folder has an ``__init__.py``.
    """

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        for folder in (os.path.join(each, "parity") for each in sys.path):
            if is_regular(Path(folder, "__init__.py")):
                yield folder


parity.__path__ = _Folders(parity.__path__)
_OPTIONS = pytest.StashKey[Options]()
_KERNELS = pytest.StashKey["Kernels"]()
_GPUS = pytest.StashKey[list[Device]]()
_KILLER = pytest.StashKey[str]()
_MOST_TASKS = pytest.StashKey["int | None"]()
_RESUMED = pytest.StashKey["tuple[Claim, recorder.Unfinished | None]"]()
_OF_PAIRS = pytest.StashKey[set[Path]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    options.declare(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, None, None]:
    """Let another process own the exit code, before output is captured, coverage starts or a conftest is imported."""
    alone.watch(early_config)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Set up one of three kinds of process: a worker of xdist's, a run on a Ray cluster, or a run on this machine.

    The run ends here, before any worker starts, if options are bad, files are unusable, or the GPU is missing.
    """
    config.addinivalue_line("markers", "parity: items of parity; each also has its precision's name as a mark")
    try:
        asked = config.stash[_OPTIONS] = options.read(config)
    except UserError as error:
        raise pytest.UsageError(str(error)) from None
    ending.keep_stderr(config)
    if hasattr(config, "workerinput"):
        _set_up_worker(config, config.workerinput)
    elif asked.engine != engines.LOCAL and not config.option.collectonly:
        _set_up_engine(config)
    else:
        _set_up_run_here(config)


def _set_up_worker(config: pytest.Config, given: dict[str, Any]) -> None:
    """Let this process compare the items that the controller gives it, and end after the last of them."""
    if ITEMS in given:
        narrow(config, given[ITEMS])
    if has_cases(config):
        ending.heed_signals(config)
    config.pluginmanager.register(ending.EndsAfterLastReport(), "parity-end")
    withhold_pipes(config)
    _check_backend(config)


def _set_up_engine(config: pytest.Config) -> None:
    """Let the engine that was asked for collect and compare the items of this run."""
    _begin_run(config)
    asked = config.stash[_OPTIONS]
    if config.getoption("usepdb", False):
        raise pytest.UsageError(f"--pdb needs the comparison in this process: leave out the engine {asked.engine}")
    try:
        engine = engines.load_engine(asked.engine)
        plugin = engine(config, asked, config.stash.get(_MOST_TASKS, None), _find_finished_items(config))
    except UserError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(plugin, "parity-engine")


def _set_up_run_here(config: pytest.Config) -> None:
    """Prepare a GPU for each worker or, without workers, choose the first of ``PARITY_DEVICES`` for this process.

    This happens before CUDA starts.
    """
    _begin_run(config)
    if has_cases(config):
        if config.getoption("dist", "no") != "no":
            config.pluginmanager.register(
                Workers(config, _list_gpus(config), _find_finished_items(config)), "parity-workers"
            )
        elif os.environ.get(PARITY_DEVICES) and _list_gpus(config):
            os.environ[CUDA_VISIBLE_DEVICES] = _list_gpus(config)[0].identifier
    _check_backend(config)


def _begin_run(config: pytest.Config) -> None:
    """Check what the run depends on, and claim the record of the run to be resumed."""
    if has_cases(config):
        if config.getoption("forked", False):
            raise pytest.UsageError(f"pairs cannot be compared with --forked: {NOT_FORKED}")
        _check_surroundings(config.stash[_OPTIONS])
        _go_on(config)
        ending.heed_signals(config)


def _check_backend(config: pytest.Config) -> None:
    if config.stash[_OPTIONS].backend == "gpu" and has_cases(config):
        from parity import te

        reason = te.why_no_gpu()
        if reason is not None:
            raise pytest.UsageError(
                f"the backend gpu was asked for, but TransformerEngine's GPU kernels cannot run here: {reason}"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start a worker for a resumed run without workers if one of its items may end its process.

    The run then survives that item. A run of an engine has no workers on this machine.
    """
    option = config.option
    try:
        options.apply_project(config)
    except UserError as error:
        raise pytest.UsageError(str(error)) from None
    if _is_elsewhere(config):
        given = getattr(option, "numprocesses", None)
        config.stash[_MOST_TASKS] = given if isinstance(given, int) and given else None
        option.numprocesses, option.dist, option.tx = 0, "no", []  # as xdist reads -n 0
        return
    without_workers = not getattr(option, "numprocesses", 0) and getattr(option, "dist", "") == "no"
    if without_workers and not (
        hasattr(config, "workerinput") or config.getoption("usepdb", False) or option.collectonly
    ):
        try:
            asked = options.read(config)
        except UserError:  # pytest_configure reports it
            return
        killer = recorder.ended_its_process(asked.record) if asked.resume else ""
        if killer:
            config.stash[_KILLER] = killer
            option.numprocesses, option.dist, option.tx = 1, "load", ["popen"]  # as xdist sets them for -n 1


def _is_elsewhere(config: pytest.Config) -> bool:
    """Return whether items are compared on other machines. Works before the options are in the stash."""
    if hasattr(config, "workerinput") or config.option.collectonly:
        return False
    try:
        return options.read(config).engine != engines.LOCAL
    except UserError:  # pytest_configure reports it
        return False


def _go_on(config: pytest.Config) -> None:
    """Claim the record of the run to be resumed, before any worker is told which items are left."""
    asked = config.stash[_OPTIONS]
    if not asked.resume or config.option.collectonly:
        return
    try:
        claim = Claim(asked.record)
        try:
            unfinished = recorder.unfinished(claim, asked)
        except UserError:
            claim.close()
            raise
    except UserError as error:
        raise pytest.UsageError(f"--parity-resume: {asked.record}: {error}") from None
    config.stash[_RESUMED] = claim, unfinished


def _find_finished_items(config: pytest.Config) -> frozenset[str]:
    """Return the ids of the items that the resumed run had finished."""
    if FINISHED in (given := getattr(config, "workerinput", {})):
        return frozenset(given[FINISHED])
    _, unfinished = config.stash.get(_RESUMED, (None, None))
    return unfinished.finished if unfinished else frozenset()


def _check_surroundings(asked: Options) -> None:
    """Check files and environment variables once, so that not every worker reports the same mistake."""
    try:
        options.check_files(asked)
        if any(name.startswith(("PARITY_EMULATED_", "PARITY_KERNEL_CHOICES")) for name in os.environ):
            from parity.te import emulation

            emulation.check_environment()
    except UserError as error:
        raise pytest.UsageError(str(error)) from None


def _list_gpus(config: pytest.Config) -> list[Device]:
    """Return the run's GPUs, which are listed only once.

    It reads the options itself, because xdist asks for the number of workers before they are in the stash.
    """
    if _GPUS not in config.stash:
        try:
            config.stash[_GPUS] = gpus_of(options.read(config))
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[_GPUS]


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Choose the number of workers for runs with cases, unless the user's environment sets it."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or not has_cases(config):
        return None
    if _is_elsewhere(config):
        return 0
    gpus = _list_gpus(config)
    return how_many(gpus, largest_need(files_of_cases(config)) if gpus else None)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Note the state before tests are imported, and suggest the nearest existing pairs for an id that is not found."""
    config = session.config
    if has_cases(config) and not _is_elsewhere(config) and config.getoption("dist", "no") == "no":
        with suppress(Exception), lasting():  # what is wrong is reported at the first pair
            _load_kernels(config)
            apart.begin(config)
    try:
        return (yield)
    except pytest.UsageError as error:
        registry = sys.modules.get("parity.case.registry")
        if registry is None:
            raise
        start = session.config.invocation_params.dir
        missing = [argument for argument in session.config.args if _is_told(argument, error)]
        told = unknown_pairs(missing, start, registry.cases(), registry.misdeclared)
        raise pytest.UsageError(*error.args, *told) from None


def _is_told(argument: str, error: pytest.UsageError) -> bool:
    """Return whether pytest's error says that this id was not found. The error omits the part in brackets."""
    name = argument.partition("::")[2].partition("[")[0]
    return any(str(line).partition("\n")[0].endswith(f"::{name}") for line in error.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect a file of pairs as a ``Module``, and let it and its models import TransformerEngine.

    Without a GPU, that import needs the CPU kernels.
    """
    if imports_parity(module_path):
        with lasting():
            from parity import te

        te.serve_imports()
        parent.config.stash.setdefault(_OF_PAIRS, set()).add(module_path)
        module: pytest.Module = Module.from_parent(parent, path=module_path)
        return module
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Keep pytest from collecting a case with a name like ``test_mlp`` as a test. ``_make_nodes`` makes its items.

    Raises:
        UserError: for a mark around a case: it replaces the case under its name and has no effect.
    """
    case_module = sys.modules.get("parity.case.case")
    if case_module is None:
        return None
    kind: type[object] = type(obj)  # a proxy may raise when isinstance asks for its __class__
    if kind is pytest.MarkDecorator:
        from parity.case.registry import MARKS_BELONG

        for case in getattr(obj, "args", ()):
            if isinstance(case, case_module.Case):
                raise UserError(f"{case.path}:{case.line}: pair {case.name!r}: {MARKS_BELONG}")
    return [] if issubclass(kind, case_module.Case) else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Add the items of the cases that a module declares, even of cases that are not bound to a name in it.

    A mistake in a user's file is reported by its message alone, because its traceback would lead into parity.
    """
    if isinstance(collector, pytest.Module) and collector.path in collector.config.stash.get(_OF_PAIRS, ()):
        from parity.case.registry import mistakes_kept

        seconds = 0.0 if collector.config.getoption("usepdb", False) else collector.config.stash[_OPTIONS].timeout
        try:
            with apart.imported(collector), collected_in_time(collector, seconds), mistakes_kept():
                report = yield
                if report.passed:
                    report.result.extend(_make_nodes(collector))
        except SystemExit as error:  # pytest would report an internal error, without saying where
            from parity.case.registry import import_failure

            report = pytest.CollectReport(collector.nodeid, "failed", import_failure(collector.path, error), [])
        except KeyboardInterrupt as error:
            if not ending.is_time_up(collector.config):
                raise
            report = too_late(collector, seconds, error)
    else:
        report = yield
    call = getattr(report, "call", None)
    if call is not None and call.excinfo is not None and isinstance(call.excinfo.value, UserError):
        report.longrepr = _describe_error(call.excinfo.value, collector.config.option.verbose >= DETAILS)
    if report.failed and _has_pairs(collector):
        if printable(told := report.longreprtext) != told:
            report.longrepr = text(told)
        collecting.note(report, collector.config.invocation_params.dir)
    return report


def _has_pairs(collector: pytest.Collector) -> bool:
    return isinstance(collector, BrokenCase) or (
        isinstance(collector, pytest.Module) and imports_parity(collector.path)
    )


def _describe_error(error: UserError, details: bool) -> str:
    """Return the error's message and, if details are wanted and the user's code raised it, a traceback."""
    if not details or error.__cause__ is None:
        return str(error)
    from parity.trace.whose import way_there

    return f"{error}\n{way_there(error.__cause__)}"


def _make_nodes(module: pytest.Module) -> Iterator[pytest.Item | pytest.Collector]:
    """Yield one item for each size and precision of the cases declared in this file, but not of imported cases."""
    from parity.case import registry

    file = module.path.resolve()
    for case in registry.cases():
        if case.path != file:
            continue
        try:
            yield from list(_make_items(case, module))
        except Exception as error:
            yield BrokenCase.from_parent(module, name=case.name, error=error)
    for name, mistake in registry.misdeclared(file).items():
        yield BrokenCase.from_parent(module, name=name, error=mistake)


def _make_items(case: Case, module: pytest.Module) -> Iterator[ParityItem]:
    """Yield the items of a case that the run asks for.

    Raises:
        UserError: if the two sides of the case do not fit together at one of its sizes.
    """
    from parity.case.items import items_of
    from parity.settings import PRECISION_NAMES
    from parity.te import precision_named

    options = module.config.stash[_OPTIONS]
    declared = [name for name in case.precisions or () if name not in PRECISION_NAMES]
    asked = options.precisions or (*PRECISION_NAMES, *declared)
    chosen = list(map(precision_named, asked))
    kernels = _load_kernels(module.config)
    is_large = options.sizes == "large" or (options.sizes == "auto" and kernels.backend == "gpu")
    sized = replace(case, sizes=(*case.sizes, *case.large_sizes)) if is_large else case
    asked_ways = options.steps, options.training, options.decoding
    for item in items_of(sized, kernels.te, chosen, options.attention, *asked_ways):
        yield ParityItem.from_parent(
            module,
            name=item.name,
            nodeid=f"{module.nodeid}::{item.name}",  # pytest 9.2 finds items of --lf only by ids that it parsed
            case=case,
            checked=item.checked,
            precision=item.precision,
            attention=item.attention,
            steps=item.steps,
            switch=item.switch,
            ranks=item.ranks,
            decoding=item.decoding,
            kernels=kernels,
            options=options,
        )


def _load_kernels(config: pytest.Config) -> Kernels:
    """Return TE's kernels, which are loaded when the first case is collected.

    Raises:
        UserError: if they cannot be loaded.
    """
    if _KERNELS not in config.stash:
        from parity import te

        _share_cores()
        config.stash[_KERNELS] = te.kernels(config.stash[_OPTIONS].backend)
    return config.stash[_KERNELS]


def _share_cores() -> None:
    """Divide the cores among xdist's workers, unless the user has set the number of threads."""
    workers = devices.workers()
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, devices.cores() // workers))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with apart.compared(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    with apart.set_up(fixturedef, request.config):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the results to pytest's own report, which also carries them from xdist's workers to the controller."""
    if isinstance(item, ParityItem) and call.when == "call":
        _note_properties(item)
    report = yield
    if not isinstance(item, ParityItem) or (call.when == "setup" and report.passed) or call.when == "teardown":
        return report
    if report.skipped and not item.results:
        told = report.longrepr
        skipped = item.skipped(str(told[2] if isinstance(told, tuple) else told))
        if item.options.strict and not hasattr(report, "wasxfail"):
            from parity.result import strictly

            skipped = strictly(skipped)
            report.outcome, report.longrepr = "failed", skipped.reason
        item.results.append(skipped)
    elif report.skipped:
        path, line, _ = item.reportinfo()
        report.longrepr = (str(path), line + 1, f"Skipped: {item.results[-1].reason}")
    elif report.failed and call.excinfo is not None:
        item.note_failure(call.when, call.excinfo.value)
    report.parity_lines = ending.of_item(item)  # type: ignore[attr-defined]
    item.results.clear()
    if ending.BROKEN_BY in item.config.stash:
        ending.announce(report)
    return report


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Let the limit of pytest-timeout end a comparison as parity's own does: it would take its alarm for the pair's."""
    if isinstance(item, ParityItem):
        item.until = time.monotonic() + settings.timeout, ending.too_long(settings.timeout, "pytest-timeout")


def _note_properties(item: ParityItem) -> None:
    """Add the item's results to pytest's JUnit file as properties."""
    if item.results and "junit" in item.options.ci:
        from parity.report import ci

        item.user_properties.extend(ci.properties(item.results))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave out items that the resumed run has finished, after all other plugins have chosen and ordered the items."""
    items = [item for item in session.items if isinstance(item, ParityItem)]
    recorder.leave_out(session, items, _find_finished_items(session.config))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Register the recorder, which writes all results, in the only process or in xdist's controller."""
    stash = session.config.stash
    if not (hasattr(session.config, "workerinput") or ending.RECORDED_ELSEWHERE in stash):
        claim, unfinished = stash.get(_RESUMED, (None, None))
        recorder = Recorder(stash[_OPTIONS], claim, unfinished, stash[ending.STDERR], stash.get(_KILLER, ""))
        session.config.pluginmanager.register(recorder, ending.RECORDER)
        github = GitHub(recorder, stash[_OPTIONS].ci, session.config.invocation_params.dir)
        session.config.pluginmanager.register(github, "parity-github")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Release the GPU memory of a finished worker, since the process lives on until all workers have finished.

    A process that no controller ends could wait forever for threads that a pair has left running, so it ends itself.
    """
    if not hasattr(session.config, "workerinput"):
        session.config.add_cleanup(lambda: alone.end_without_threads(session.config, int(session.exitstatus)))
    kernels = session.config.stash.get(_KERNELS, None)
    if kernels is not None and kernels.backend == "gpu":
        from parity.passes import memory

        memory.release()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule by content, unless the user has named a distribution."""
    if config.getvalue("dist") != "load" or not has_cases(config):
        return None
    from parity.plugin.workers import SchedulingByContent

    return SchedulingByContent(config, log)
