"""A run over the nodes of a Ray cluster: how it is divided, what is lost with a node, and what is told."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import forked
import pytest

from parity.plugin.ray_engine import Planned, divided
from parity.report import record

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'te-parity[ray]'")

PAIRS = """
    import parity

    @parity.pair("sound", sizes=[dict(n=n) for n in range(2, 14)], precisions=["fp32", "bf16"])
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
LONGEST = 240.0  # seconds that a run may take before the test fails


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, with a core each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            patch.delenv(name)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            started.add_node(num_cpus=1)
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
        except forked.subprocess.TimeoutExpired:
            continue


def results(folder: Path, name: str) -> Counter[str]:
    """How often a record has each result, but for the time that it took."""
    found = record.read(folder / "reports" / f"{name}.jsonl").results
    return Counter(re.sub(r'"seconds": [^,]*', "", record.result_line(each)) for each in found)


def report(folder: Path, name: str) -> str:
    drawn = (folder / "reports" / f"{name}.md").read_text()
    return re.sub(r"\| date +\| [^|]*\|", "", drawn).replace(name, "NAME")


def test_each_item_ends_once_though_the_run_is_killed_and_then_a_node(cluster: Any, folder: Path) -> None:
    assert begin(folder, "-n", "2", "--parity-name=here").wait(LONGEST) == 1
    over_nodes = "--parity-engine=ray", f"--parity-address={cluster.address}", "--parity-name=there"

    killed = begin(folder, *over_nodes)
    wait_for_lines(folder, "there", 8, killed)
    killed.kill()
    killed.wait(LONGEST)
    before = lines(folder, "there")
    assert "This run has not ended" in report(folder, "there")

    resumed = begin(folder, *over_nodes, "--parity-resume=yes")
    wait_for_lines(folder, "there", before + 8, resumed)
    (lost,) = (node for node in cluster.list_all_nodes() if not node.is_head())
    cluster.remove_node(lost, allow_graceful=False)
    assert resumed.wait(LONGEST) == 1

    output = (folder / "output").read_text()
    assert re.search(r"went on with \S+/there.jsonl, which had \d+ of 27 items", output)
    assert "items go to another task" in output
    assert set(results(folder, "there").values()) == {1}
    assert results(folder, "there") == results(folder, "here")
    assert report(folder, "there") == report(folder, "here")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--parity-backend=gpu"], "the Ray cluster has no GPU"),
        (["pairs.py::absent"], "not found: .*pairs.py::absent"),
        (["--pdb"], "--pdb needs the comparison in this process"),
    ],
)
def test_what_the_cluster_cannot_do_is_told(cluster: Any, folder: Path, options: list[str], told: str) -> None:
    run = begin(folder, "--parity-engine=ray", f"--parity-address={cluster.address}", *options)
    assert run.wait(LONGEST) == pytest.ExitCode.USAGE_ERROR
    assert re.search(told, (folder / "output").read_text())


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("ray://127.0.0.1:10001", "is that of Ray's client server"),
    ],
)
def test_an_address_without_a_cluster_is_told(folder: Path, address: str, told: str) -> None:
    run = begin(folder, "--parity-engine=ray", f"--parity-address={address}")
    assert run.wait(LONGEST) == pytest.ExitCode.USAGE_ERROR
    assert told in (folder / "output").read_text()


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
