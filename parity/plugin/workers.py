"""Staff a run with xdist's workers: decide how many there are, which GPU each uses, and which items each gets."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScheduling, LoadScopeScheduling
from xdist.workermanage import WorkerController

from parity.machine import devices
from parity.machine.devices import CUDA_VISIBLE_DEVICES, Device
from parity.machine.process import withheld
from parity.plugin import ending
from parity.plugin.ending import Notes
from parity.plugin.options import FINISHED, KEY, Options, Workplace
from parity.user_error import UserError

# In xdist's controller: give each worker a device, and record the results that a dead worker leaves behind.


_CPU = "cpu"


class Workers:
    """A pytest plugin for xdist's controller, which knows only what the workers report and say meanwhile."""

    def __init__(self, config: pytest.Config, gpus: Sequence[Device], finished: Collection[str] = ()) -> None:
        self._config, self._gpus, self._finished = config, gpus, sorted(finished)
        self._folder = Path(tempfile.mkdtemp(prefix="parity-"))
        self._shares: dict[str, int | None] = {}
        self._notes: defaultdict[str, Notes] = defaultdict(Notes)
        self._announced: set[str] = set()
        self._reported: set[str] = set()
        self._died_of: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Make each worker, and any replacement of it, see only its own GPU before it imports anything."""
        if not self._gpus:
            free = devices.free_memory()
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
        channel = node.gateway.newchannel()
        channel.setcallback(self._notes[node.gateway.id].hear)
        folder, share = str(self._folder), self._shares[device]
        node.workerinput[KEY] = {"folder": folder, "device": device, "share": share, "channel": channel}
        node.workerinput[FINISHED] = self._finished

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._reported.add(report.nodeid)
        if ending.is_last(report):
            self._announced.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """End the run if a file ends the worker that collects it, because it would end every replacement, too."""
        session: Any = self._config.pluginmanager.getplugin("dsession")
        if ending.is_last(report) and session is not None:
            session.shouldstop = f"{report.nodeid} cannot be collected, and ends each worker that tries"

    def pytest_keyboard_interrupt(self) -> None:
        ending.keep_finished_seeds_of_workers(self._config, self._notes.values(), self._reported)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """Change xdist's report of a crash.

        If the worker announced its end, make the report the missing teardown; else make it a failure with a result.
        """
        if crashitem in self._announced:
            report.when, report.outcome, report.longrepr = "teardown", "passed", None
        else:
            worker = report.node.gateway.id
            _attach_results(crashitem, self._notes[worker], Workplace(worker, self._folder).stacks, report)
        if crashitem not in self._died_of:
            self._died_of.add(crashitem)
            self._allow_one_more_worker()

    def _allow_one_more_worker(self) -> None:
        """Raise xdist's limit of replacements, which is there to stop endless crashes during collection.

        A crash in an item need not count, because an item kills only one worker.
        """
        session: Any = self._config.pluginmanager.getplugin("dsession")
        limit = getattr(session, "_max_worker_restart", None)
        if limit is not None and self._config.option.maxworkerrestart is None:
            session._max_worker_restart = limit + 1

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _attach_results(node_id: str, notes: Notes, file: Path | None, report: Any) -> None:
    """Attach to the report of a crash the results of the worker's item, with an error for the seed that killed it."""
    from parity.report import record

    if notes.last is None or notes.last[0].node_id != node_id:
        return
    entry, finished = notes.last
    stacks = file.read_text(encoding="utf-8", errors="replace") if file and file.exists() else ""
    cause = _cause_of_death(report.node)
    if stacks:
        cause = f"{entry.limit}, and kept every Python thread from running; its worker was ended and replaced"
        report.sections.append(("where it was", stacks))
    results = [*finished, entry.ended_by(cause, from_outside=not stacks)]
    report.parity_lines = {"environment": entry.environment, "results": results}
    report.when = "call"
    report.longrepr = f"{ending.summary_line(list(map(record.result_of, results)))} ({report.longrepr})"
    path, name = node_id.split("::", 1)
    report.location = (path, None, name)


def _cause_of_death(worker: Any) -> str:
    process = getattr(getattr(worker.gateway, "_io", None), "popen", None)
    try:
        code = process.wait(timeout=10) if process else None
    except subprocess.TimeoutExpired:
        code = None
    if code is None:
        return f"{ending.WORKER} died"
    if code >= 0:
        return f"{ending.WORKER} ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}  # without most of the real-time ones
    return f"{ending.WORKER} died: {names.get(-code, f'signal {-code}')}"


def withhold_pipes(config: pytest.Config) -> None:
    """Let the controller notice when this worker ends, even if a process that a case has forked lives on."""
    channels = (getattr(plugin, "channel", None) for plugin in config.pluginmanager.get_plugins())
    for channel in filter(None, channels):
        withheld(channel.gateway._io.infile)
        withheld(channel.gateway._io.outfile)


# The number of workers that ``-n auto`` starts, and the GPUs that they share, both decided before collection.


# The least memory that a worker should have. On the GPU: for its CUDA context, cuBLAS's workspaces and a case of a few
# GiB. On the host: for Python with PyTorch and TE, which take 0.45 GiB without CUDA, and for a case.
GPU_BYTES = 8 * 2**30
HOST_BYTES = 2 * 2**30
HOST_BYTES_WITH_CUDA = 4 * 2**30


def gpus_of(options: Options) -> list[Device]:
    """Return the GPUs that the run's processes share; an empty list if the CPU kernels run.

    Raises:
        UserError: if ``PARITY_DEVICES`` names none of them.
    """
    if options.backend == "cpu" or not devices.is_installed():
        return []
    return devices.chosen(os.environ)


def how_many(gpus: Sequence[Device], largest: int | None = None) -> int:
    """Return the number of workers for ``-n auto``: as many as have a core, host memory and GPU memory each.

    A GPU whose memory is unknown gets one worker.

    Args:
        gpus: the GPUs that the workers share.
        largest: bytes that the largest case needs; None if they are unknown.
    """
    limits = [devices.cores()]
    free = devices.free_memory()
    if free is not None:
        limits.append(free // (HOST_BYTES_WITH_CUDA if gpus else HOST_BYTES))
    if gpus:
        limits.append(sum(_count_workers(gpu, largest or 0) for gpu in gpus))
    return max(1, min(limits))


def _count_workers(gpu: Device, largest: int) -> int:
    """Return how many workers can share a GPU."""
    found = 1 if gpu.free is None else gpu.free // _compute_worker_memory(gpu.free, largest)
    return found if gpu.processes is None else min(found, gpu.processes)


def _compute_worker_memory(free: int, largest: int) -> int:
    """Return the GPU memory for a worker: room for the largest case up to half of it, but at least ``GPU_BYTES``.

    A case that needs more runs alone while the others wait. With one worker per GPU, every case would run alone.
    """
    return max(GPU_BYTES, min(largest, free // 2))


# Give each of xdist's workers all items of one case, size and dtype: they share a golden, which the worker keeps.


# A controller knows only the ids of items, and need not import torch to recognise the precisions' names.
_ITEM_ID = re.compile(
    r"(?P<case>.+::[^:\[]+)\[(?P<precision>(?:mxfp|nvfp|fp|bf)\d+(?:_\w+)?)-(?P<size>.*?)(?:-(?:flash|fused|unfused))?\]"
)
_GROUPS_AT_THE_END = 6  # per worker: two sizes in three dtypes
_WITH_A_DTYPE_OF_THEIR_OWN = ("fp32", "fp16")  # all other precisions compute in BF16


def is_item(node_id: str) -> bool:
    """Return whether an id is that of an item of parity."""
    return _ITEM_ID.fullmatch(node_id) is not None


def group_of(node_id: str) -> str:
    """Return an item's group: ``cases/mlp.py::swiglu[bf16-2x64]`` for that case and size in BF16 or FP8.

    A test that is not an item of parity is a group of its own.
    """
    match = _ITEM_ID.fullmatch(node_id)
    if not match:
        return node_id
    dtype = match["precision"] if match["precision"] in _WITH_A_DTYPE_OF_THEIR_OWN else "bf16"
    return f"{match['case']}[{dtype}-{match['size']}]"


def first_input(node_id: str) -> int:
    """Return the number of elements of the first input, whose shape begins the size's label; 0 for any other test."""
    match = _ITEM_ID.fullmatch(node_id)
    shape = re.match(r"\d+(x\d+)*", match["size"]) if match else None
    return math.prod(map(int, shape[0].split("x"))) if shape else 0


def size_of(group: str) -> str:
    """Return a group's case and size: ``cases/mlp.py::swiglu[2x64]``."""
    return re.sub(r"\[(fp32|fp16|bf16)-(?=[^\[]*\]$)", "[", group)


class GroupScheduling(LoadScopeScheduling):
    """xdist's scheduling by scope, where a scope is a case at a size in a dtype.

    The largest sizes go first, so that no worker starts one last and keeps the run from ending. A worker gets all
    dtypes of a size, so that the processor's cache holds the size's tensors only once. Towards the end it gets single
    dtypes, because the rest divides more evenly that way.

    Two workers may end at once. xdist reports them one after the other, so the second may be assigned items that can no
    longer be sent to it. These items then wait for another worker.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self._unreachable: set[WorkerController] = set()

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not any(self.assigned_work.values()):
            self._sort_groups()
        group = next(iter(self.workqueue))
        if self._try_to_send(node, group) and len(self.workqueue) > _GROUPS_AT_THE_END * len(self.nodes):
            for other in self._of_size[size_of(group)]:
                if other in self.workqueue:
                    self.workqueue.move_to_end(other, last=False)
                    if not self._try_to_send(node, other):
                        return

    def _try_to_send(self, node: WorkerController, group: str) -> bool:
        """Give a worker the first group; return whether it could be reached."""
        try:
            super()._assign_work_unit(node)
        except OSError:
            self._unreachable.add(node)
            self.workqueue[group] = self.assigned_work[node].pop(group)
            self.workqueue.move_to_end(group, last=False)
        return node not in self._unreachable

    def _sort_groups(self) -> None:
        """Sort the groups, the largest inputs first, and note which groups have the same case and size."""
        for group in sorted(self.workqueue, key=lambda group: -first_input(next(iter(self.workqueue[group])))):
            self.workqueue.move_to_end(group)
        self._of_size: dict[str, list[str]] = defaultdict(list)
        for group in self.workqueue:
            self._of_size[size_of(group)].append(group)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker, also a replacement, at least two items, because it runs none before it knows the next."""
        # xdist calls this again when the node has collected, and reports a node that has ended.
        if node not in self.registered_collections or node in self._unreachable:
            return
        super()._reschedule(node)
        while (
            self.workqueue
            and not (node.shutting_down or node in self._unreachable)
            and self._pending_of(self.assigned_work[node]) < 2
        ):
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()

    def remove_node(self, node: WorkerController) -> str | None:
        """Give a lost worker's items to the others, except for the one that killed it and would kill them, too.

        Returns:
            The item that the worker was running, or None if it had nothing left to run.
        """
        workload = self.assigned_work.pop(node)
        unfinished = [(group, name) for group, unit in workload.items() for name, done in unit.items() if not done]
        if not unfinished:
            return None
        group, crashed = unfinished[0]
        workload[group][crashed] = True
        self.workqueue.update({group: unit for group, unit in workload.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed


class SchedulingByContent:
    """A scheduler that assigns groups if there are items of parity, and works like xdist's default if there are none.

    The ids, on which this depends, are known only once the first worker has collected. Until then, both schedulers are
    told about the workers; afterwards, only the chosen one is used.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        self._schedulings: list[LoadScheduling | GroupScheduling] = [
            LoadScheduling(config, log),
            GroupScheduling(config, log),
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedulings[0], name)

    def add_node(self, node: WorkerController) -> None:
        for scheduling in self._schedulings:
            scheduling.add_node(node)

    def remove_node(self, node: WorkerController) -> str | None:
        crashed = [scheduling.remove_node(node) for scheduling in self._schedulings]
        return crashed[0]

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        if len(self._schedulings) > 1:
            has_parity_items = any(_ITEM_ID.fullmatch(node_id) for node_id in collection)
            self._schedulings = [self._schedulings[int(has_parity_items)]]
        self._schedulings[0].add_node_collection(node, collection)
