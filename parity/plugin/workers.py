"""What xdist's controller does for parity: gives each worker a device, and records what a dead one leaves behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from parity.machine import devices, host
from parity.machine.devices import CUDA_VISIBLE_DEVICES, Device
from parity.plugin import ending, interruption
from parity.plugin.diary import Diary
from parity.plugin.workplace import KEY
from parity.user_error import UserError

_CPU = "cpu"


class Workers:
    """A pytest plugin for xdist's controller; it knows of tests only what workers report and leave in their diaries."""

    def __init__(self, config: pytest.Config, gpus: Sequence[Device]) -> None:
        self._config, self._gpus = config, gpus
        self._folder = Path(tempfile.mkdtemp(prefix="parity-"))
        self._shares: dict[str, int | None] = {}
        self._announced: set[str] = set()
        self._reported: set[str] = set()
        self._died_of: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Each worker sees its own GPU alone, before it imports anything; so does the worker that replaces it."""
        if not self._gpus:
            free = host.free_memory()
            self._shares[_CPU] = None if free is None else free // len(specs)
            return
        try:
            places = devices.spread(self._gpus, len(specs))
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
        workers = Counter(gpu.identifier for gpu in places)
        for spec, gpu in zip(specs, places, strict=True):
            spec.env[CUDA_VISIBLE_DEVICES] = gpu.identifier
            self._shares[gpu.identifier] = None if gpu.free is None else gpu.free // workers[gpu.identifier]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        device = node.gateway.spec.env[CUDA_VISIBLE_DEVICES] if self._gpus else _CPU
        node.workerinput[KEY] = {"folder": str(self._folder), "device": device, "share": self._shares[device]}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._reported.add(report.nodeid)
        if ending.is_last(report):
            self._announced.add(report.nodeid)

    def pytest_keyboard_interrupt(self) -> None:
        interruption.keep_finished_seeds_of_workers(self._config, Diary.all_in(self._folder), self._reported)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """Change xdist's report of a crash: to the teardown that a worker which announced its end left out, else to a
        failure with a recorded result."""
        if crashitem in self._announced:
            report.when, report.outcome, report.longrepr = "teardown", "passed", None
        else:
            _record(crashitem, Diary(self._folder, report.node.gateway.id), report)
        if crashitem not in self._died_of:
            self._died_of.add(crashitem)
            self._allow_one_more_worker()

    def _allow_one_more_worker(self) -> None:
        """xdist limits how many it replaces, lest collection kills them for ever; an item kills one only once."""
        session: Any = self._config.pluginmanager.getplugin("dsession")
        limit = getattr(session, "_max_worker_restart", None)
        if limit is not None and self._config.option.maxworkerrestart is None:
            session._max_worker_restart = limit + 1

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _record(node_id: str, diary: Diary, report: Any) -> None:
    """Attach to the report of a crash what the worker had compared, and the comparison that it died of."""
    from parity.report import record

    left = diary.read(node_id)
    if left is None:
        return
    entry, finished = left
    stacks = diary.stacks.read_text(encoding="utf-8", errors="replace") if diary.stacks.exists() else ""
    cause = _cause_of_death(report.node)
    if stacks:
        limit = f"ran longer than {entry.limit:g} s (--parity-timeout, or --timeout of parity run)"
        cause = f"{limit}, and let no thread of Python run; its worker was ended and replaced"
        report.sections.append(("where it was", stacks))
    results = [*finished, entry.ended_by(cause)]
    report.parity_lines = {"environment": entry.environment, "results": results}
    report.when, report.longrepr = "call", f"{ending.told(list(map(record.result_of, results)))} ({report.longrepr})"
    path, name = node_id.split("::", 1)
    report.location = (path, None, name)


def _cause_of_death(worker: Any) -> str:
    process = getattr(getattr(worker.gateway, "_io", None), "popen", None)
    try:
        code = process.wait(timeout=10) if process else None
    except subprocess.TimeoutExpired:
        code = None
    if code is None:
        return "its worker died"
    if code >= 0:
        return f"its worker ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}  # without most of the real-time ones
    return f"its worker died: {names.get(-code, f'signal {-code}')}"
