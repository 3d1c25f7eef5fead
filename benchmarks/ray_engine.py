"""Measure what an item costs the recording process of a run over a Ray cluster: recording, messages and tasks.

    python benchmarks/ray_engine.py [ITEMS]

Times are processor time of that process, so other processes on the machine matter little. The benchmark needs Ray.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import parity.plugin.ray_engine as engine
from parity.report import environment, record
from parity.report.earlier import Asked
from parity.result import Result


def result(number: int, bytes_of_notes: int) -> Result:
    """Return a result whose size is typical."""
    return Result(
        case=f"case{number}",
        precision="bf16",
        size={"n": 2},
        size_label="2",
        seed=0,
        backend="cpu",
        status="passed",
        reason="",
        path="pairs.py",
        notes=("x" * bytes_of_notes,),
    )


class AtOnce:
    """A stand-in for a cluster, on which tasks end as soon as they begin, and all items pass."""

    cpus, gpus, most_gpus, nodes, at_once, with_gpus = 1000, 0, 0, 125, 1000, False

    def __init__(self, items: int, size: int) -> None:
        self._items, self._size, self._said = items, size, dict[int, list[list[str]]]()
        self.environment = record.environment_line(environment.measure("cpu", (0,), items, asked=Asked({}, "", {})))

    def start(self, job: Any, processes: int) -> int:
        number = len(self._said)
        if job["node_ids"] is None:
            items = [(f"pairs.py::case{n}[bf16-2]", "key", 1, "{}" * 200) for n in range(self._items)]
            self._said[number] = [[json.dumps({"planned": items}), json.dumps({"environment": self.environment})]]
        else:
            self._said[number] = [[json.dumps({"begun": each}), self._ended(each)] for each in job["node_ids"]]
        return number

    def _ended(self, node_id: str) -> str:
        line = record.result_line(result(int(node_id.split("case")[1].split("[")[0]), self._size))
        reports = []
        for when in ("setup", "call", "teardown"):
            data = pytest.TestReport(node_id, ("pairs.py", 1, "case"), {}, "passed", None, when)._to_json()
            lines = {"parity_lines": {"results": [line]}} if when == "call" else {}
            reports.append(data | {"$report_type": "TestReport"} | lines)
        return json.dumps({"ended": node_id, "reports": reports})

    def heard(self, streams: Sequence[int]) -> list[int]:
        return list(streams)

    def messages(self, stream: int) -> list[str] | None:
        return self._said[stream].pop(0) if self._said[stream] else None

    def stop(self, streams: Sequence[int]) -> None: ...

    def leave(self) -> None: ...

    def brings_files(self) -> bool:
        return False


def recording(items: int, size: int) -> None:
    """Print what an item costs this process from its message to the record, including pytest's own reporting."""
    spent = []

    class Timed(engine.RayEngine):
        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            begun = time.process_time()
            try:
                return super().pytest_runtestloop(session)
            finally:
                spent.append(time.process_time() - begun)

    cluster = AtOnce(items, size)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        patch.setattr(engine, "Cluster", lambda address, backend: cluster)
        patch.setattr(engine, "RayEngine", Timed)
        Path("pairs.py").write_text("import parity\n")
        begun = time.process_time()
        pytest.main(["pairs.py", "-p", "parity.plugin", "--parity-engine=ray", "-q", "-p", "no:cacheprovider"])
        whole = time.process_time() - begun
        written = Path("reports/parity.jsonl").stat().st_size / items
    print(f"{items} items of {written:.0f} bytes: {1e3 * spent[0] / items:.2f} ms an item, {whole:.1f} s with all else")


def rays(messages: int, tasks: int, size: int) -> None:
    """Print what a message and a task cost this process, and what waiting costs if many tasks are queued."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def say(count: int, size: int) -> Any:
        for _ in range(count):
            yield ["x" * size]

    task = ray.remote(say).options(num_returns="streaming", max_retries=0, num_cpus=1)
    list(task.remote(1, 1))  # starts a process

    def heard(streams: list[Any], most: float = 1e9) -> tuple[int, int]:
        waits, count = 0, 0
        while streams and waits < most:
            ray.wait(streams, num_returns=1, fetch_local=False)
            ready, _ = ray.wait(streams, num_returns=len(streams), timeout=0, fetch_local=False)
            waits += 1
            for stream in ready:
                try:
                    ray.get(next(stream))
                    count += 1
                except StopIteration:
                    streams.remove(stream)
        return waits, count

    begun, wall = time.process_time(), time.monotonic()
    _, count = heard([task.remote(messages // 2, size) for _ in range(2)])
    spent = time.process_time() - begun
    print(f"{1e3 * spent / count:.2f} ms a message ({time.monotonic() - wall:.1f} s for {count})")
    begun, wall = time.process_time(), time.monotonic()
    heard([task.remote(1, size) for _ in range(tasks)])
    spent = time.process_time() - begun
    print(f"{1e3 * spent / tasks:.2f} ms a task of one message ({time.monotonic() - wall:.1f} s for {tasks} at once)")
    queue = [task.remote(10**6, size) for _ in range(2)] + [task.remote(1, size) for _ in range(2_000)]
    heard(queue[:2], 10)
    begun = time.process_time()
    waits, count = heard(queue, 100)
    spent = time.process_time() - begun
    print(f"{1e3 * spent / waits:.2f} ms to wait for one of {len(queue)} tasks ({count} messages)")
    ray.shutdown()


if __name__ == "__main__":
    items = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    recording(items, 3_000)
    rays(items, items // 10, 3_000)
