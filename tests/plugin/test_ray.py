"""A run on the nodes of a Ray cluster: how it is divided, what is lost with a node, and what it reports."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fakes
import forked
import pytest

from parity.plugin import ray_engine, ray_task
from parity.plugin.ray_engine import Cluster, LostError, Planned, divided
from parity.report import environment as environments
from parity.report import record
from parity.report.earlier import Asked
from parity.user_error import UserError

pytest_plugins = ["pytester"]

PAIRS = """
    import parity

    @parity.pair("sound", sizes=[dict(n=n) for n in range(2, 9)], precisions=["fp32", "bf16"])
    def sound(te, n): ...

    @parity.pair("fails", sizes=[dict(n=2)], precisions=["fp32", "fp8_current"])
    def fails(te, n): ...

    @parity.pair("dies", sizes=[dict(n=2)], precisions=["bf16"])
    def dies(te, n): ...
"""
CONFTEST = f"""
    import sys, time
    sys.path.insert(0, {str(Path(fakes.__file__).parent)!r})
    import fakes, pytest
    from parity import comparison

    patch = pytest.MonkeyPatch()
    fakes.install(patch)
    judge_at = comparison.judge_at

    def judge_slowly(*arguments, **options):
        time.sleep(0.2)
        return judge_at(*arguments, **options)

    patch.setattr(comparison, "judge_at", judge_slowly)
"""
LONGEST = 1000.0  # seconds that a run may take before the test fails


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Yield a cluster of two nodes on this machine, with one core each."""
    utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'te-parity[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            patch.delenv(name)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        started = None
        try:
            started = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
            started.add_node(num_cpus=1)
        except Exception as error:  # a sandbox may allow no ports, or no shared memory
            if started is not None:
                started.shutdown()
            pytest.skip(f"Ray cannot start a cluster on this machine: {error}")
        try:
            yield started
        finally:
            started.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pairs.py").write_text(textwrap.dedent(PAIRS))
    (tmp_path / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    return tmp_path


def begin(folder: Path, *options: str) -> forked.Process:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    outside["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = ["-m", "pytest", "-p", "no:hypothesispytest", "-p", "parity.plugin", "pairs.py", "--parity-seeds=2"]
    with (folder / "output").open("wb") as output, open(os.devnull, "rb") as nothing:
        streams = [nothing.fileno(), output.fileno(), output.fileno()]
        return forked.Process([*command, *options], streams, folder, outside)


def lines(folder: Path, name: str) -> int:
    file = folder / "reports" / f"{name}.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_lines(folder: Path, name: str, count: int, process: forked.Process) -> None:
    ends = time.monotonic() + LONGEST
    while lines(folder, name) < count:
        assert process.returncode is None, (folder / "output").read_text()
        assert time.monotonic() < ends
        time.sleep(0.01)
        try:
            process.wait(0)
        except subprocess.TimeoutExpired:
            continue


def results(folder: Path, name: str) -> Counter[str]:
    """Count each result of a record, ignoring the time that it took."""
    found = record.read(folder / "reports" / f"{name}.jsonl").results
    return Counter(re.sub(r'"seconds": [^,]*', "", record.result_line(each)) for each in found)


def report(folder: Path, name: str) -> str:
    drawn = (folder / "reports" / f"{name}.md").read_text()
    return re.sub(r"\| date +\| [^|]*\|", "", drawn).replace(name, "NAME")


def test_each_item_ends_once_though_the_run_is_killed_and_then_a_node(cluster: Any, folder: Path) -> None:
    assert begin(folder, "-n", "1", "--parity-name=here").wait(LONGEST) == 1
    over_nodes = "--parity-engine=ray", f"--parity-address={cluster.address}", "--parity-name=there"
    assert begin(folder, *over_nodes, "--parity-backend=gpu").wait(LONGEST) == pytest.ExitCode.USAGE_ERROR
    assert "the Ray cluster has no GPU" in (folder / "output").read_text()

    killed = begin(folder, *over_nodes)
    wait_for_lines(folder, "there", 8, killed)
    killed.kill()
    killed.wait(LONGEST)
    before = lines(folder, "there")
    assert "This run has not ended" in report(folder, "there")

    resumed = begin(folder, *over_nodes, "--parity-resume=yes")
    wait_for_lines(folder, "there", before + 4, resumed)
    (lost,) = (node for node in cluster.list_all_nodes() if not node.is_head())
    cluster.remove_node(lost, allow_graceful=False)
    assert resumed.wait(LONGEST) == 1

    output = (folder / "output").read_text()
    assert re.search(r"went on with \S+/there.jsonl, which had \d+ of 17 items", output)
    assert "items go to another task" in output
    assert set(results(folder, "there").values()) == {1}
    assert results(folder, "there") == results(folder, "here")
    assert report(folder, "there") == report(folder, "here")


@pytest.mark.parametrize(
    ("address", "options", "told"),
    [
        ("127.0.0.1:1", [], "no Ray cluster answers at 127.0.0.1:1"),
        ("ray://127.0.0.1:10001", [], "is that of Ray's client server"),
        ("127.0.0.1:1", ["--pdb"], "--pdb needs the comparison in this process"),
    ],
)
def test_a_run_that_cannot_begin_says_why(folder: Path, address: str, options: list[str], told: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'te-parity[ray]'")
    run = begin(folder, "--parity-engine=ray", f"--parity-address={address}", *options)
    assert run.wait(LONGEST) == pytest.ExitCode.USAGE_ERROR
    assert told in (folder / "output").read_text()


def test_without_ray_the_package_is_named(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'te-parity\[ray\]'"):
        Cluster("", "auto")


# What a node does for a task.


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ({"files": ["absent.py"]}, "there is no .*/absent.py"),
        ({"start": "/absent"}, "there is no /absent"),
        ({"arguments": ["absent.py"]}, "file or directory not found: absent.py"),
    ],
    ids=["no file", "no folder", "pytest refuses"],
)
def test_a_node_that_can_compare_nothing_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], told: str
) -> None:
    node = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.5"))
    monkeypatch.setitem(sys.modules, "ray", node)
    asked = {"start": str(tmp_path), "files": [], "variables": {}, "arguments": [], "node_ids": None, **job}
    first, *_, last = (json.loads(line) for lines in ray_task.work(cast(ray_task.Job, asked)) for line in lines)
    assert first == {"node": "10.0.0.5"}
    assert last["exit_code"] > 0
    assert re.search(told, last["told"])


# What the run makes of the tasks' messages. The tasks of a stand-in for a cluster send what a test prescribes.


HERE = environments.measure("cpu", (0,), 2, asked=Asked({}, "items", {}))
ELSEWHERE = dataclasses.replace(HERE, torch="1.0")


class Script:
    """Stands in for a cluster: each task sends its list of messages, and is lost where the list has None."""

    def __init__(self, *tasks: list[dict[str, Any] | None], gpus: int = 0) -> None:
        self.cpus, self.gpus, self.most_gpus, self.nodes, self.at_once = 4, gpus, gpus, 1, 1
        self.with_gpus = gpus > 0
        self.started: list[tuple[Sequence[str] | None, int]] = []
        self._tasks = list(tasks)
        self._said: dict[int, list[dict[str, Any] | None]] = {}

    def start(self, job: ray_task.Job, processes: int) -> int:
        self.started.append((job["node_ids"], processes))
        self._said[len(self.started)] = self._tasks.pop(0)
        return len(self.started)

    def heard(self, streams: Sequence[int]) -> list[int]:
        return [streams[0]]

    def messages(self, stream: int) -> list[str] | None:
        if not self._said[stream]:
            return None
        message = self._said[stream].pop(0)
        if message is None:
            raise LostError("the node 10.0.0.5 is dead")
        return [json.dumps({"node": "10.0.0.5"}), json.dumps(message)]

    def stop(self, streams: Sequence[int]) -> None: ...

    def leave(self) -> None: ...

    def brings_files(self) -> bool:
        return False


def plan(**processes: int) -> list[dict[str, Any] | None]:
    """Return the messages of the task that collects: items with their number of processes."""
    unknown = {
        name: record.result_line(fakes.result(name, "bf16", size_label="2", path="pairs.py")) for name in processes
    }
    items = [(node_id(name), node_id(name), count, unknown[name]) for name, count in processes.items()]
    return [{"planned": items}, {"environment": record.environment_line(HERE)}, {"exit_code": 0, "told": ""}]


def node_id(name: str) -> str:
    return f"pairs.py::{name}[bf16-2]"


def ended(name: str, environment: environments.Environment = HERE) -> dict[str, Any]:
    """Return the message of a task when an item has passed."""
    result = fakes.result(name, "bf16", size_label="2", path="pairs.py")
    lines = {"results": [record.result_line(result)], "environment": record.environment_line(environment)}
    report = pytest.TestReport(node_id(name), ("pairs.py", 1, name), {}, "passed", None, "call")
    data = report._to_json() | {"$report_type": "TestReport", "parity_lines": lines}
    return {"ended": node_id(name), "reports": [data]}


END = {"exit_code": 0, "told": ""}


def run(pytester: pytest.Pytester, script: Script) -> pytest.RunResult:
    pytester.makepyfile(pairs="import parity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parity.plugin.ray_engine.Cluster", lambda address, backend: script)
        return pytester.runpytest_inprocess("-p", "parity.plugin", "-p", "no:hypothesispytest", "--parity-engine=ray")


def recorded(pytester: pytest.Pytester) -> dict[str, str]:
    """Return the reason of each result by case, empty if it passed."""
    found = record.read(pytester.path / "reports/parity.jsonl").results
    return {each.case: each.reason for each in found}


def test_a_lost_task_is_repeated_without_what_it_had_reported(pytester: pytest.Pytester) -> None:
    script = Script(plan(a=1, b=1), [ended("a"), None], [ended("b"), END])
    assert run(pytester, script).ret == 0
    assert recorded(pytester) == {"a": "", "b": ""}
    assert [ids for ids, _ in script.started] == [None, [node_id("a"), node_id("b")], [node_id("b")]]


def test_an_item_that_loses_three_tasks_is_an_error_and_the_others_are_compared(pytester: pytest.Pytester) -> None:
    lost = [{"begun": node_id("a")}, None]
    script = Script(plan(a=1, b=1), *(list(lost) for _ in range(3)), [ended("b"), END])
    assert run(pytester, script).ret == 1
    lost_three_times = "its process was lost 3 times, most recently because the node 10.0.0.5 is dead"
    assert recorded(pytester) == {"a": lost_three_times, "b": ""}


def test_an_item_takes_a_core_for_each_of_its_processes(pytester: pytest.Pytester) -> None:
    script = Script(plan(a=1, over_ranks=2), [ended("over_ranks"), END], [ended("a"), END])
    assert run(pytester, script).ret == 0
    assert script.started[1:] == [([node_id("over_ranks")], 2), ([node_id("a")], 1)]


def test_an_item_that_takes_more_gpus_than_a_node_has_is_an_error(pytester: pytest.Pytester) -> None:
    script = Script(plan(a=1, over_ranks=8), [ended("a"), END], gpus=4)
    assert run(pytester, script).ret == 1
    assert recorded(pytester) == {
        "over_ranks": "it takes 8 GPUs, but no node of the Ray cluster has more than 4",
        "a": "",
    }


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([{"exit_code": 1, "told": "there is no /home/me"}], "node 10.0.0.5 compares nothing: there is no /home/me"),
        (
            [ended("a", ELSEWHERE)],
            f"node 10.0.0.5 differs from the machine .* torch was {re.escape(HERE.torch)}, now it is 1.0",
        ),
    ],
    ids=["no files", "other versions"],
)
def test_a_node_that_is_not_like_the_others_ends_the_run(
    pytester: pytest.Pytester, said: list[dict[str, Any]], told: str
) -> None:
    ran = run(pytester, Script(plan(a=1), said))
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    assert re.search(told, " ".join(ran.errlines))


# How a run is divided.


def planned(*node_ids: str) -> list[Planned]:
    return [Planned(node_id, node_id, 1, "") for node_id in node_ids]


@pytest.mark.parametrize(
    ("node_ids", "places", "tasks"),
    [
        (["f.py::a[fp32-2]"], 8, [1]),
        ([f"f.py::a[{precision}-2]" for precision in ("bf16", "fp8_current", "mxfp8")], 8, [3]),
        ([f"f.py::a[fp32-{n}]" for n in range(1, 41)], 2, [20, 20]),
        ([f"f.py::a[fp32-{n}]" for n in range(1, 301)], 2, [50] * 6),
        ([f"f.py::test_{n}" for n in range(3)], 1, [3]),
        ([], 4, []),
    ],
    ids=["one", "that share golden", "few", "many", "that are not parity's", "none"],
)
def test_items_are_divided_for_the_places_of_a_cluster(node_ids: list[str], places: int, tasks: list[int]) -> None:
    found = divided(planned(*node_ids), places)
    assert [len(task) for task in found] == tasks
    assert sorted(item.node_id for task in found for item in task) == sorted(node_ids)


def test_the_largest_items_go_first() -> None:
    found = divided(planned("f.py::a[fp32-2]", "f.py::a[fp32-64x64]", "f.py::a[fp32-8]"), 3)
    assert [task[0].node_id for task in found] == ["f.py::a[fp32-64x64]", "f.py::a[fp32-8]", "f.py::a[fp32-2]"]


def test_a_cluster_whose_head_is_gone_ends_the_run_instead_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_SECONDS_TO_ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as head:
        host, port = head.getsockname()
        fake = SimpleNamespace(wait=lambda streams, **_: (time.sleep(0.05), ([], streams))[1])
        cluster = object.__new__(Cluster)
        cluster._ray, cluster._head = cast(Any, fake), f"{host}:{port}"
        cluster._answered, cluster._is_lost = 0.0, False
        cluster._check_head()
        assert cluster._answered > 0.0
    with pytest.raises(UserError, match=f"the head of the Ray cluster, {host}:{port}, no longer answers; --resume"):
        cluster.heard(["stream"])
    cluster.stop(["stream"])  # neither calls Ray, which would wait for the head
    cluster.leave()
