"""Hands xdist's workers the items of one case, size and dtype together: they share golden, which a worker keeps."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScheduling, LoadScopeScheduling
from xdist.workermanage import WorkerController

# Controllers know items by their ids only, and need not import torch to know the precisions' names.
_ITEM_ID = re.compile(
    r"(?P<case>.+::[^:\[]+)\[(?P<precision>(?:mxfp|nvfp|fp|bf)\d+(?:_\w+)?)-(?P<size>.*?)(?:-(?:flash|fused|unfused))?\]"
)
_GROUPS_AT_THE_END = 6  # for each worker: two sizes in three dtypes
_WITH_A_DTYPE_OF_THEIR_OWN = ("fp32", "fp16")  # of the precisions; all others compute in BF16


def group_of(node_id: str) -> str:
    """``cases/mlp.py::swiglu[bf16-2x64]`` for that case and size in BF16 or FP8; any other test is one of its own."""
    match = _ITEM_ID.fullmatch(node_id)
    if not match:
        return node_id
    dtype = match["precision"] if match["precision"] in _WITH_A_DTYPE_OF_THEIR_OWN else "bf16"
    return f"{match['case']}[{dtype}-{match['size']}]"


def first_input(node_id: str) -> int:
    """Elements of the first input of the item's size, whose label begins with its shape; 0 for any other test."""
    match = _ITEM_ID.fullmatch(node_id)
    shape = re.match(r"\d+(x\d+)*", match["size"]) if match else None
    return math.prod(map(int, shape[0].split("x"))) if shape else 0


def size_of(group: str) -> str:
    """A group's case and size: ``cases/mlp.py::swiglu[2x64]``."""
    return re.sub(r"\[(fp32|fp16|bf16)-(?=[^\[]*\]$)", "[", group)


class GroupScheduling(LoadScopeScheduling):
    """xdist's scheduling by scope, where a scope is a case at a size in a dtype.

    The largest sizes go first, since what a worker begins last keeps the others waiting at the end. A worker is given
    all dtypes of a size, whose tensors the processor's cache then holds but once, except at the end: by dtype, what is
    left divides more evenly.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not any(self.assigned_work.values()):
            self._sort()
        group = next(iter(self.workqueue))
        super()._assign_work_unit(node)
        if len(self.workqueue) > _GROUPS_AT_THE_END * len(self.nodes):
            for other in self._of_size[size_of(group)]:
                if other in self.workqueue:
                    self.workqueue.move_to_end(other, last=False)
                    super()._assign_work_unit(node)

    def _sort(self) -> None:
        """The largest first, and see what belongs together."""
        for group in sorted(self.workqueue, key=lambda group: -first_input(next(iter(self.workqueue[group])))):
            self.workqueue.move_to_end(group)
        self._of_size: dict[str, list[str]] = defaultdict(list)
        for group in self.workqueue:
            self._of_size[size_of(group)].append(group)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker at least two items, a replacement too, since it runs none before it knows the next."""
        if node not in self.registered_collections:  # it is asked again when it has collected
            return
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()

    def remove_node(self, node: WorkerController) -> str | None:
        """Give a lost worker's items to the others, all but the one that it died of: that would kill them too.

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
    """Groups where there are parity items, xdist's default where there are none.

    The ids that decide are known only once the first worker has collected; until then both schedulers hear of the
    workers, afterwards one of them is asked everything.
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
