"""Compare on the nodes of a Ray cluster: connect to it, hand parts of the run to its tasks, record their reports."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest

from parity.plugin import ending, ray_task
from parity.plugin.options import Options
from parity.plugin.ray_task import Job
from parity.plugin.workers import first_input, group_of
from parity.report.numbers import plural
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.report.environment import Environment

LOCAL = "local"  # the address of a cluster that is started for the run, on this machine
_PREFIXES = ("NVTE_", "PARITY_", "PYTEST_ADDOPTS")
_SECONDS_TO_ANSWER = 10.0
_OF_THIS_MACHINE = "PARITY_DEVICES"


class LostError(Exception):
    """Raised if a task's process or node no longer answers."""


class Cluster:
    """A cluster that this process is connected to until it calls ``leave``.

    Args:
        address: the address for Ray; empty for the cluster that ``RAY_ADDRESS`` names, or that runs on this machine.
        backend: which kernels run; ``auto`` takes GPUs if the cluster has some.

    Raises:
        UserError: if Ray is not installed, there is no such cluster, or it has no GPUs and they were asked for.
    """

    def __init__(self, address: str, backend: Literal["auto", "gpu", "cpu"]) -> None:
        self._ray = _connect_to_cluster(address)
        self._head, self._answered, self._is_lost = self._ray.get_runtime_context().gcs_address, time.monotonic(), False
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self.cpus, self.gpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
        self.nodes = len(nodes)
        self._most_cpus, self.most_gpus = (int(max(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
        self.with_gpus = backend != "cpu" and self.gpus > 0
        try:
            if backend == "gpu" and not self.gpus:
                raise UserError(
                    f"the backend gpu was asked for, but the Ray cluster has no GPU, on {self.nodes} nodes with "
                    f"{self.cpus} CPUs; `ray status` lists its resources; `ray start --num-gpus` sets those of a node"
                )
            if not self.cpus:
                raise UserError("the Ray cluster has no CPUs; `ray start --num-cpus` sets those of a node")
        except UserError:
            self.leave()
            raise
        self._task = self._ray.remote(ray_task.work)

    @property
    def at_once(self) -> int:
        """Return how many items can be compared at the same time."""
        return max(1, self.gpus if self.with_gpus else self.cpus)

    def start(self, job: Job, processes: int) -> Any:
        """Start a task on one node, with a core and, if the cluster has GPUs, a GPU for each process.

        Returns:
            The stream of the task's messages.
        """
        return self._task.options(
            num_returns="streaming",
            max_retries=0,  # a retry would repeat comparisons that have been reported
            num_cpus=min(processes, self._most_cpus),  # processes may share cores
            num_gpus=processes if self.with_gpus else 0,
        ).remote(job)

    def heard(self, streams: Sequence[Any]) -> list[Any]:
        """Wait until a stream has a message or has ended, and return all such streams.

        Raises:
            UserError: if the cluster's head no longer answers. Ray would end this process a minute later.
        """
        while not self._ray.wait(streams, num_returns=1, timeout=_SECONDS_TO_ANSWER / 4, fetch_local=False)[0]:
            self._check_head()
        self._check_head()
        ready, _ = self._ray.wait(streams, num_returns=len(streams), timeout=0, fetch_local=False)
        return list(ready)

    def messages(self, stream: Any) -> list[str] | None:
        """Return a stream's next messages; None if it has ended.

        Raises:
            LostError: if its process or its node is lost.
            UserError: if Ray cannot run it at all.
        """
        from ray import exceptions

        try:
            lines: list[str] = self._ray.get(next(stream))
            return lines
        except StopIteration:
            return None
        except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError, exceptions.TaskUnschedulableError) as error:
            raise UserError(f"Ray could not run a part of this run: {_first_line(error)}") from None
        except exceptions.RayError as error:
            raise LostError(_first_line(error)) from None

    def _check_head(self) -> None:
        host, _, port = self._head.rpartition(":")
        with suppress(OSError):
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()
            self._answered = time.monotonic()
        if time.monotonic() - self._answered > _SECONDS_TO_ANSWER:
            self._is_lost = True
            raise UserError(
                f"the head of the Ray cluster, {self._head}, no longer answers; --resume continues this run"
            )

    def stop(self, streams: Sequence[Any]) -> None:
        """End these tasks, unless the cluster is lost, with which they end."""
        for stream in () if self._is_lost else streams:
            self._ray.cancel(stream)

    def leave(self) -> None:
        """Disconnect from the cluster. Ray ends the tasks of this process that still run."""
        if not self._is_lost:  # else Ray would wait for it
            self._ray.shutdown()

    def brings_files(self) -> bool:
        """Return whether Ray has taken the run's files to the nodes, as ``ray job submit --working-dir`` does."""
        return bool(self._ray.get_runtime_context().runtime_env.get("working_dir"))


def variables() -> dict[str, str]:
    """Return the environment variables that comparisons depend on and that local workers would inherit."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(_PREFIXES) and name != _OF_THIS_MACHINE
    }


def _connect_to_cluster(address: str) -> Any:
    """Return the module ``ray``, connected to the cluster.

    Raises:
        UserError: if Ray is not installed or no cluster answers.
    """
    try:
        import ray
    except ImportError:
        raise UserError("the engine ray needs the package ray: pip install 'te-parity[ray]'") from None
    if address.startswith("ray://"):
        raise UserError(
            f"the address {address} is that of Ray's client server, which has no streams; start the run on a node of "
            "the cluster, or with `ray job submit`"
        )
    ray.cloudpickle.register_pickle_by_value(ray_task)
    options: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()
        ray.init(address or "auto", log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"at {address}" if address else "on this machine, and RAY_ADDRESS names none"
        raise UserError(
            f"no Ray cluster answers {where}: {_first_line(error)}; `ray start --head` starts one, and "
            f"--address {LOCAL} one for this run alone"
        ) from None
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler would end this process without a report
    return ray


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1 if "Traceback" in str(error) else 0]


# The items to compare, as a process on a node has collected them, and their division into tasks.


@dataclass(frozen=True)
class Planned:
    """An item of the run.

    Attributes:
        node_id: the item's id in pytest.
        key: its id in a record; empty if it is a test that is not parity's.
        processes: how many processes it computes in.
        line: the record's line for it if it is never compared: an error without a reason.
    """

    node_id: str
    key: str
    processes: int
    line: str


_TASKS_FOR_EACH_PLACE = 3  # so that little is left to do when the first places have run out of tasks
_FULL = 20  # with this many items, the start of a task's processes hardly matters
_TASKS_AHEAD = 2  # tasks that are started for each place, so that none waits for this process


def divided(items: Sequence[Planned], places: int) -> list[list[Planned]]:
    """Divide items evenly into tasks, the largest items first. Items that share a golden stay together.

    Args:
        items: items that all compute in the same number of processes.
        places: how many tasks the cluster runs at the same time.
    """
    groups: dict[str, list[Planned]] = {}
    for item in items:
        groups.setdefault(group_of(item.node_id), []).append(item)
    fair = math.ceil(len(items) / places)
    most = max(math.ceil(fair / _TASKS_FOR_EACH_PLACE), min(fair, _FULL))
    tasks: list[list[Planned]] = []
    for group in sorted(groups.values(), key=lambda group: -first_input(group[0].node_id)):
        if not tasks or len(tasks[-1]) + len(group) > most:
            tasks.append([])
        tasks[-1] += group
    return tasks


# The running tasks, and the run itself.


@dataclass
class _Running:
    """A task that runs.

    Attributes:
        left: the items that it has not reported yet, by id.
        begun: the id of the item that it is comparing; empty for none.
        started: whether it has begun any item.
        node: the node's address.
    """

    left: dict[str, Planned]
    begun: str = ""
    started: bool = False
    node: str = "?"


_MOST_LOSSES = 3  # an item that was lost with this many processes or nodes is taken for the cause
_ON_EVERY_NODE = (
    "every node needs what the run uses: the folder in which it starts, with the files of pairs and what they import, "
    "at the same path or brought by `ray job submit --working-dir`; and Python with parity and the same versions"
)


class RayEngine:
    """A pytest plugin that collects and compares on the cluster instead of in this process.

    Args:
        config: the run's configuration.
        options: the run's options.
        most: how many tasks may run at the same time; None for as many as the cluster can run.
        finished: ids of the items that the resumed run had finished.
    """

    def __init__(self, config: pytest.Config, options: Options, most: int | None, finished: Collection[str]) -> None:
        self._config, self._most, self._finished = config, most, finished
        self._cluster = Cluster(options.address, options.backend)
        config.add_cleanup(self._cluster.leave)
        self._start = config.invocation_params.dir
        self._waiting: deque[list[Planned]] = deque()
        self._running: dict[Any, _Running] = {}
        self._losses: Counter[str] = Counter()
        self._environment: Environment | None = None
        self._environment_line = ""
        self._told: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Let a node collect, because nodes have the devices, which this process may lack."""
        planned = list(self._collect_items())
        left = [item for item in planned if item.key not in self._finished]
        session.testscollected = len(left)
        recorder = self._config.pluginmanager.getplugin(ending.RECORDER)
        if recorder is not None and self._environment is not None:
            recorder.claim_record()
        places = min(self._cluster.at_once, self._most or self._cluster.at_once)
        for processes in sorted({item.processes for item in left}, reverse=True):
            alike = [item for item in left if item.processes == processes]
            self._waiting.extend(divided(alike, max(1, places // processes)))
        gpus = f" and {plural(self._cluster.gpus, 'GPU')}" if self._cluster.with_gpus else ""
        self._tell_user(
            f"{plural(len(left), 'item')} in {plural(len(self._waiting), 'task')}, for "
            f"{plural(self._cluster.nodes, 'node')} with {plural(self._cluster.cpus, 'CPU')}{gpus}"
        )
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._leave_out_what_no_node_can()
        try:
            while self._waiting or self._running:
                self._start_tasks()
                for stream in self._cluster.heard(list(self._running)):
                    self._receive_messages(stream)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
        finally:
            self._cluster.stop(list(self._running))
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for sentence in self._told[1:]:
            terminalreporter.write_line(f"ray: {sentence}")

    def _collect_items(self) -> Iterator[Planned]:
        """Yield the run's items, which a task collects, and report everything that it could not collect.

        Raises:
            pytest.UsageError: if the task could not collect at all.
        """
        stream, node = self._cluster.start(self._make_job(None, []), 1), "?"
        while True:
            try:
                lines = self._cluster.messages(stream)
            except (UserError, LostError) as error:
                raise pytest.UsageError(f"the items were not collected: {error}") from None
            for message in map(json.loads, lines or ()):
                node = message.get("node", node)
                if "uncollected" in message:
                    self._config.hook.pytest_collectreport(report=self._restore_report(message["uncollected"]))
                yield from (Planned(*item) for item in message.get("planned", ()))
                if message.get("environment"):
                    self._set_environment(message["environment"])
                if message.get("exit_code", 0) not in (
                    pytest.ExitCode.OK,
                    pytest.ExitCode.TESTS_FAILED,
                    pytest.ExitCode.NO_TESTS_COLLECTED,
                ):
                    raise pytest.UsageError(f"node {node} could not collect the items: {message['told']}")
            if lines is None:
                return

    def _set_environment(self, line: str) -> None:
        from parity.report import record

        self._environment_line, self._environment = line, record.environment_of(line)

    def _make_job(self, node_ids: Sequence[str] | None, files: Sequence[str]) -> Job:
        given = (*self._config.invocation_params.args, "--parity-engine=local", "--parity-resume=no")
        return Job(
            start="" if self._cluster.brings_files() else str(self._start),
            files=files,
            variables=variables(),
            arguments=[*map(str, given), "-n", "0" if node_ids is None else "1"],
            node_ids=node_ids,
        )

    def _leave_out_what_no_node_can(self) -> None:
        """Report items that take more GPUs than any node has as errors. Ray would wait forever for such a node."""
        if not self._cluster.with_gpus:
            return
        most = self._cluster.most_gpus
        for task in [task for task in self._waiting if task[0].processes > most]:
            self._waiting.remove(task)
            for item in task:
                self._give_up(
                    item, f"it takes {item.processes} GPUs, but no node of the Ray cluster has more than {most}"
                )

    def _start_tasks(self) -> None:
        most = self._most or _TASKS_AHEAD * self._cluster.at_once
        while self._waiting and len(self._running) < most:
            task = self._waiting.popleft()
            ids = [item.node_id for item in task]
            job = self._make_job(ids, sorted({node_id.partition("::")[0] for node_id in ids}))
            self._running[self._cluster.start(job, task[0].processes)] = _Running({i.node_id: i for i in task})

    def _receive_messages(self, stream: Any) -> None:
        """Handle a task's next messages, or its end."""
        task = self._running[stream]
        try:
            lines = self._cluster.messages(stream)
        except LostError as lost:
            del self._running[stream]
            self._reassign_items(task, str(lost))
            return
        if lines is None:
            del self._running[stream]
        for message in map(json.loads, lines or ()):
            self._handle_message(task, message)

    def _handle_message(self, task: _Running, message: dict[str, Any]) -> None:
        if "node" in message:
            task.node = message["node"]
        elif "begun" in message:
            task.begun, task.started = message["begun"], True
        elif "ended" in message:
            task.begun = ""
            if task.left.pop(message["ended"], None) is not None:
                self._replay_reports(message["ended"], message["reports"], task.node)
        elif task.left:  # its process has ended
            code, told = message["exit_code"], message["told"]
            if not task.started and code > 0:
                raise UserError(f"node {task.node} compares nothing: {told}; {_ON_EVERY_NODE}")
            self._reassign_items(task, f"its process on node {task.node} ended with exit code {code}: {told}")

    def _replay_reports(self, node_id: str, reports: Sequence[dict[str, Any]], node: str) -> None:
        """Repeat a node's reports on an item in this process."""
        from parity.report import record

        hook = self._config.hook
        location = (node_id.partition("::")[0], None, node_id)
        hook.pytest_runtest_logstart(nodeid=node_id, location=location)
        for report in map(self._restore_report, reports):
            lines = getattr(report, "parity_lines", None)
            if lines is not None:
                if "environment" in lines:
                    self._check_environment(record.environment_of(lines["environment"]), node)
                lines["environment"] = self._environment_line
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=node_id, location=location)

    def _restore_report(self, data: dict[str, Any]) -> Any:
        """Return the report from its JSON, and restore the tuple that JSON turned into a list."""
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        if isinstance(report.longrepr, list):
            report.longrepr = tuple(report.longrepr)
        return report

    def _check_environment(self, there: Environment, node: str) -> None:
        """Make sure that a node's environment matches that of the node that collected the items.

        Raises:
            UserError: if not; the run ends, because its record has only one environment.
        """
        from parity.report import earlier

        here = self._environment
        if here is None or here.asked is None or there.asked is None:
            return
        asked = dataclasses.replace(there.asked, items=here.asked.items)
        cpu = here.cpu if here.backend == "gpu" else there.cpu
        differ = earlier.differences(here, dataclasses.replace(there, items=here.items, cpu=cpu, asked=asked))
        if differ:
            raise UserError(
                f"node {node} differs from the machine that collected the items: {'; '.join(differ)}. All results of a "
                "record must come from the same kind of machine, with the same files and versions; --resume continues "
                "this run once they match"
            )

    def _reassign_items(self, task: _Running, cause: str) -> None:
        """Hand the unreported items of a lost task to another one, except for items that were lost too often."""
        blamed = [task.begun] if task.begun in task.left else list(task.left)
        self._losses.update(blamed)
        left = []
        for node_id, item in task.left.items():
            if self._losses[node_id] >= _MOST_LOSSES:
                self._give_up(item, f"its process was lost {_MOST_LOSSES} times, most recently because {cause}")
            else:
                left.append(item)
        self._tell_user(f"{cause} ({plural(len(left), 'item')} {'goes' if len(left) == 1 else 'go'} to another task)")
        if left:
            self._waiting.appendleft(left)

    def _give_up(self, item: Planned, reason: str) -> None:
        """Report an item as an error that a resumed run compares again."""
        file, _, name = item.node_id.partition("::")
        report = pytest.TestReport(item.node_id, (file, None, name), {}, "failed", reason, "call")
        if item.line:
            line = json.loads(item.line)
            line["result"]["reason"] = reason
            lines = [json.dumps(line, ensure_ascii=False) + "\n"]
            report.parity_lines = {"environment": self._environment_line, "results": lines}  # type: ignore[attr-defined]
        self._config.hook.pytest_runtest_logreport(report=report)

    def _tell_user(self, sentence: str) -> None:
        self._told.append(sentence)
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"ray: {sentence}")
