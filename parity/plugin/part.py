"""Run pytest in a process on a cluster's node, on behalf of a run elsewhere: to plan the items, or to compare a part.

Start it with ``python -c "import sys; from parity.plugin import part; sys.exit(part.main())"`` in the run's folder;
``ray_task`` does. It reads its task as a line of JSON from standard input, ``{"arguments": [...], "node_ids": [...]}``:
pytest's arguments, with ``--parity-engine=local --parity-resume=no`` at their end, and the items, or null to be told
which there are. It writes its messages as lines of JSON to standard output:

- ``{"planned": [[node id, id in the record, processes, line], ...]}``: the items; ``line`` is the record's for an item
  that is given up. Then ``{"environment": line}``, the first line of the record.
- ``{"uncollected": report}``: a file could not be collected; the report goes to ``pytest_collectreport``.
- ``{"begun": node id}``: an item begins, so if the process is lost, it may be the cause.
- ``{"ended": node id, "reports": [...]}``: an item has ended; each report goes to ``pytest_runtest_logreport``, after
  ``config.hook.pytest_report_from_serializable(config=config, data=report)``.

Everything else that is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

import pytest

from parity.machine.process import withheld
from parity.plugin import ending
from parity.plugin.item import ParityItem

ITEMS = "parity-items"  # ids of the items that a part's worker collects
_AT_ONCE = 500  # items in a line of a plan
_GRACE_SECONDS = 60.0  # for this process to end by itself when nobody listens any more


class Messages:
    """Write this process's messages to the run, one line for each."""

    def __init__(self, file: IO[str]) -> None:
        self._file = withheld(file)

    def send(self, **message: Any) -> None:
        with suppress(BrokenPipeError):  # this process is about to end, see ``_end_with_parent``
            self._file.write(json.dumps(message, default=str) + "\n")
            self._file.flush()


class Plan:
    """A pytest plugin that compares nothing, but sends all items and everything that could not be collected."""

    def __init__(self, messages: Messages) -> None:
        self._send = messages.send
        self._config: pytest.Config | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[ending.RECORDED_ELSEWHERE] = True
        self._config = config

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed and self._config is not None:
            self._send(uncollected=_as_data(self._config, report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        own = [item for item in session.items if isinstance(item, ParityItem)]
        planned = [_describe_item(item) for item in session.items]
        for start in range(0, len(planned), _AT_ONCE):
            self._send(planned=planned[start : start + _AT_ONCE])
        self._send(environment=ending.environment_line(own[0]) if own else "")
        return True


def _describe_item(item: pytest.Item) -> tuple[str, str, int, str]:
    """Return an item's id, its id in a record, its number of processes, and its line if it is never compared.

    For a test that is not parity's, only the first is known.
    """
    if not isinstance(item, ParityItem):
        return item.nodeid, "", 1, ""
    (line,) = ending.of_results([item.cut_short("")])
    return item.nodeid, item.key, item.ranks.count if item.ranks else 1, line


class Part:
    """A pytest plugin that lets a worker compare these items, and sends the reports on each item when it has ended.

    If something ends this process, the items without such a message are compared elsewhere.
    """

    def __init__(self, messages: Messages, node_ids: Sequence[str]) -> None:
        self._send, self._node_ids = messages.send, node_ids
        self._reports: dict[str, list[dict[str, Any]]] = {}
        self._crashed: set[str] = set()

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[ending.RECORDED_ELSEWHERE] = True
        narrow(config, self._node_ids)
        self._config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[ITEMS] = self._node_ids

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send(begun=nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self._crashed.add(crashitem)  # the next report on it is the last

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(_as_data(self._config, report))
        if report.when == "teardown" or report.nodeid in self._crashed:
            self._send(ended=report.nodeid, reports=self._reports.pop(report.nodeid))


def narrow(config: pytest.Config, node_ids: Sequence[str]) -> None:
    """Make pytest collect only these items. Options that select items, such as --last-failed, have been applied."""
    config.args[:] = node_ids
    config.option.keyword, config.option.markexpr, config.option.deselect = "", "", None
    for name in ("lfplugin", "nfplugin", "stepwiseplugin"):  # the run itself keeps what failed
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)


def _as_data(config: pytest.Config, report: pytest.CollectReport | pytest.TestReport) -> dict[str, Any]:
    data: dict[str, Any] = config.hook.pytest_report_to_serializable(config=config, report=report)
    data.pop("node", None)  # xdist's handle of the worker here
    return data


def _end_with_parent(source: IO[str]) -> None:
    """End this process when its parent has ended, which closes the other end of the pipe."""
    source.read()
    os.kill(os.getpid(), signal.SIGTERM)  # pytest ends its workers, whatever they do
    threading.Event().wait(_GRACE_SECONDS)
    os._exit(1)


def main() -> int:
    """Do the task that standard input asks for, and return pytest's exit code."""
    source, messages = withheld(os.fdopen(os.dup(0), encoding="utf-8")), Messages(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    asked = json.loads(source.readline())
    threading.Thread(target=_end_with_parent, args=(source,), daemon=True).start()
    node_ids = asked["node_ids"]
    plugin = Plan(messages) if node_ids is None else Part(messages, node_ids)
    return pytest.main(asked["arguments"], plugins=[plugin])
