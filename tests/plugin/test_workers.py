"""Test how many workers there are, where they run, what each is given, and how the run continues when one dies."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import fakes
import pytest
import torch
from plugin_runs import (
    COMPARED,
    PAIRS,
    UNAVAILABLE,
    recorded,
    run,
    run_in_a_process,
    run_with_workers,
    write,
)
from xdist.remote import Producer

from parity.case import registry
from parity.machine.devices import Device
from parity.plugin import workers
from parity.plugin.memory_estimate import largest_need
from parity.plugin.workers import GroupScheduling, first_input, group_of, how_many, size_of
from parity.report import environment
from parity.te import PRECISIONS

# The meaning of ``-n auto``.


pytest_plugins = ["pytester"]
GIB = 2**30
PAIR = "import parity\n@parity.pair('mlp')\ndef mlp(te): ..."


def machine(monkeypatch: pytest.MonkeyPatch, cores: int, memory: int | None) -> None:
    monkeypatch.setattr("parity.machine.devices.cores", lambda: cores)
    monkeypatch.setattr("parity.machine.devices.free_memory", lambda: memory)


def gpus(*free: int | None) -> list[Device]:
    return [Device(str(i), free=bytes_) for i, bytes_ in enumerate(free)]


@pytest.mark.parametrize(
    ("cores", "memory", "devices", "expected"),
    [
        (2, 64 * GIB, [], 2),
        (64, 10 * GIB, [], 5),
        (64, None, [], 64),
        (64, 1 * GIB, [], 1),
        (64, 512 * GIB, gpus(79 * GIB), 9),
        (64, 512 * GIB, gpus(79 * GIB, 20 * GIB), 11),
        (8, 512 * GIB, gpus(79 * GIB, 79 * GIB), 8),
        (64, 16 * GIB, gpus(79 * GIB, 79 * GIB), 4),
        (64, 512 * GIB, gpus(3 * GIB), 1),
        (64, 512 * GIB, gpus(None, None), 2),
        (64, 512 * GIB, [Device("0", free=79 * GIB, processes=1)], 1),
    ],
)
def test_workers_are_as_many_as_find_a_core_and_memory(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory: int | None, devices: Sequence[Device], expected: int
) -> None:
    machine(monkeypatch, cores, memory)
    assert how_many(devices) == expected


@pytest.mark.parametrize(("largest", "expected"), [(1, 18), (10, 14), (30, 4), (39, 4), (60, 4), (1000, 4)])
def test_a_worker_has_room_for_the_largest_case_unless_that_needs_more_than_half_a_gpu(
    monkeypatch: pytest.MonkeyPatch, largest: int, expected: int
) -> None:
    machine(monkeypatch, 64, 512 * GIB)
    assert how_many(gpus(79 * GIB, 79 * GIB), largest * GIB) == expected


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.plugin.largest_need", lambda files: 0)
    fakes.install_gpus(monkeypatch, [dataclasses.replace(gpu, free=17 * GIB) for gpu in fakes.GPUS])


def auto(pytester: pytest.Pytester, *arguments: str) -> int:
    """Return the number of workers that xdist makes of ``-n auto``."""
    config = pytester.parseconfig("-p", "parity.plugin", "-n", "auto", *arguments)
    return config.hook.pytest_xdist_auto_num_workers(config=config)


@pytest.mark.usefixtures("two_gpus")
def test_auto_counts_what_the_visible_gpus_hold(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(test_pairs=PAIR)
    assert auto(pytester) == 4
    assert auto(pytester, "test_pairs.py::mlp[fp32-2]") == 4
    monkeypatch.setenv("PARITY_DEVICES", "0")
    assert auto(pytester) == 2


@pytest.mark.usefixtures("two_gpus")
def test_auto_asks_for_the_largest_case_of_the_files_of_the_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_pairs=PAIR, test_others=PAIR, test_nothing="def test_it(): pass")
    needs = {"test_pairs.py": 4 * GIB, "test_others.py": 12 * GIB}
    monkeypatch.setattr("parity.plugin.largest_need", lambda files: max(needs[file.name] for file in files))
    fakes.install_gpus(monkeypatch, [dataclasses.replace(gpu, free=40 * GIB) for gpu in fakes.GPUS])
    assert auto(pytester, "test_pairs.py") == 10
    assert auto(pytester) == 6


@pytest.mark.usefixtures("two_gpus")
def test_auto_counts_cores_where_the_cpu_kernels_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_pairs=PAIR)
    assert auto(pytester, "--parity-backend=cpu") == 64


@pytest.mark.usefixtures("two_gpus")
def test_auto_stays_xdists_for_a_run_without_cases(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(test_other="def test_other(): pass")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(7), raising=False)
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    assert auto(pytester) == 7


@pytest.mark.usefixtures("two_gpus")
def test_auto_stays_what_the_environment_says(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(test_pairs=PAIR)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert auto(pytester) == 3


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("workers", ["auto", "2", "0"])
def test_a_device_that_is_not_there_is_a_usage_error(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    pytester.makepyfile(test_pairs=PAIR)
    monkeypatch.setenv("PARITY_DEVICES", "5")
    result = pytester.runpytest_inprocess("-p", "parity.plugin", "-n", workers)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*PARITY_DEVICES is '5', but '5' names none of the visible devices, which are 0: *"])


@pytest.mark.usefixtures("two_gpus")
def test_without_workers_parity_devices_chooses_the_gpu(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.install(monkeypatch)
    declared = registry.cases()
    monkeypatch.setenv("PARITY_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-one,GPU-two")
    pytester.makepyfile(test_pairs=PAIR)
    pytester.runpytest_inprocess("-p", "parity.plugin", "--parity-precisions=fp32").assert_outcomes(passed=1)
    registry.restore(declared)
    assert "computed on GPU-two" in (pytester.path / "reports/parity.md").read_text()


# The largest case of a run is found without importing anything into the run's process.


LINEARS = """
import parity, torch
print("a file may print")

@parity.pair("linear_{n}", sizes=[dict(n=64), dict(n={n})])
def linear(te, n):
    reference = torch.nn.Linear(n, n, bias=False)
    return parity.Pair(reference, te.Linear(n, n, bias=False), weights={{"weight": "weight"}},
                       inputs=lambda rng, n: rng.normal(8, n))
"""


def test_it_is_the_most_that_a_case_of_any_file_needs_and_who_asks_imports_neither_torch_nor_te(tmp_path: Path) -> None:
    program = (
        "import sys; from parity.plugin.memory_estimate import largest_need; "
        "print(largest_need(sys.argv[1:]), 'torch' in sys.modules)"
    )
    files = [tmp_path / "small.py", tmp_path / "large.py", tmp_path / "broken.py"]
    for file, text in zip(
        files, (LINEARS.format(n=128), LINEARS.format(n=2**16), "import parity\nnonsense"), strict=True
    ):
        file.write_text(text)
    command = [sys.executable, "-c", program, *map(str, files)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    need, imports_torch = ran.stdout.split()
    weights = 8 * 2**32
    assert 5 * weights < int(need) < 50 * weights
    assert imports_torch == "False"


def test_it_is_unknown_where_the_process_fails(tmp_path: Path) -> None:
    ends = tmp_path / "ends.py"
    ends.write_text("import os; os._exit(1)")
    assert largest_need([ends]) is None


# The plugin with workers: how items are distributed, and how the run continues when a worker dies.


compares_nothing = pytest.mark.usefixtures("stand_ins")


@compares_nothing
def test_one_worker_runs_all_precisions_of_a_case_size_and_dtype_and_results_are_merged(
    pytester: pytest.Pytester,
) -> None:
    write(pytester, PAIRS)
    write(pytester, "def test_other(): pass", "test_other")
    result = run_with_workers(pytester, 2, "my_pairs.py", "test_other.py", "-v", "--parity-seeds=2")
    result.assert_outcomes(passed=COMPARED - 2 + 1, failed=2, skipped=2 * len(UNAVAILABLE))
    merged = recorded(pytester)
    assert len(merged.results) == 2 * COMPARED + 2 * len(UNAVAILABLE)
    assert merged.environment.items == 2 * len(PRECISIONS) + 2
    result.stdout.fnmatch_lines([f"*2 of {COMPARED} items failed*"])
    sizes, dtypes = 2, {precision.dtype for precision in PRECISIONS.values()}
    ran = re.findall(r"\[(gw\d)\].* my_pairs.py::mlp\[(\w+)-(\w+)\]", result.stdout.str())
    assert len(ran) == sizes * len(PRECISIONS)
    assert len({(worker, PRECISIONS[precision].dtype, size) for worker, precision, size in ran}) == sizes * len(dtypes)


@compares_nothing
def test_one_worker_runs_all_dtypes_of_a_size_until_little_is_left(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        import parity

        @parity.pair("mlp", sizes=[dict(batch=100 + i, hidden=64) for i in range(12)])
        def mlp(te, batch, hidden): ...
        """,
    )
    workers = 2
    result = run_with_workers(pytester, workers, "my_pairs.py", "-v")
    ran = re.findall(r"\[(gw\d)\].* my_pairs.py::mlp\[\w+-(\w+)\]", result.stdout.str())
    assert len(ran) == 12 * len(PRECISIONS)
    split = {size for _, size in ran if len({worker for worker, of in ran if of == size}) > 1}
    at_the_end = {f"{100 + i}x64" for i in range(2 * workers + 1)}  # two for each, and one that has begun
    assert split <= at_the_end


@compares_nothing
def test_a_worker_that_crashes_fails_only_its_own_item(pytester: pytest.Pytester) -> None:
    crash = "\n    @parity.pair('kills_its_worker', sizes=[dict(n=8)], precisions=['fp32'])\n    def k(te, n): ...\n"
    write(pytester, "\n    import parity" + crash + PAIRS)
    result = run_with_workers(pytester, 1, "my_pairs.py", "--parity-precisions=fp32", "-k", "not fails")
    results = recorded(pytester).results
    assert sorted((result.case, result.status) for result in results) == [
        ("kills_its_worker", "error"), *[("mlp", "passed")] * 2
    ]  # fmt: skip
    result.stdout.fnmatch_lines(["its worker ended with exit code 3 *", "*1 of 3 items failed*"])


@compares_nothing
def test_without_workers_a_broken_device_is_not_blamed_on_the_ports_that_follow(pytester: pytest.Pytester) -> None:
    breaks = "\n    @parity.pair('breaks_the_device', sizes=[dict(n=8)], precisions=['fp32'])\n    def k(te, n): ...\n"
    write(pytester, "\n    import parity" + breaks + PAIRS)
    run(pytester, "my_pairs.py", "-k", "breaks or mlp and fp32 and 2x64").assert_outcomes(failed=2)
    broken, after = recorded(pytester).results
    assert broken.device_error == "broken"
    assert (after.status, after.device_error) == ("error", "")
    assert after.reason.startswith("not compared, because my_pairs.py::breaks_the_device[fp32-8] broke the CUDA")
    assert "use -n 1 or more" in after.reason


@compares_nothing
def test_what_is_reported_of_the_gpu_was_asked_before_an_item_could_break_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_the_device, measure = fakes.MISHAPS["breaks_the_device"], environment.measure
    is_broken: list[bool] = []

    def breaks() -> None:
        is_broken.append(True)
        break_the_device()

    monkeypatch.setitem(fakes.MISHAPS, "breaks_the_device", breaks)
    monkeypatch.setattr(environment, "measure", lambda *asked: break_the_device() if is_broken else measure(*asked))
    write(
        pytester,
        "import parity\n@parity.pair('breaks_the_device', sizes=[dict(n=8)], precisions=['fp32'])\ndef k(te, n): ...",
    )
    run(pytester, "my_pairs.py").assert_outcomes(failed=1)
    assert recorded(pytester).results[0].device_error == "broken"


@compares_nothing
@pytest.mark.parametrize("precision", PRECISIONS)
def test_items_of_one_case_size_and_dtype_form_a_group(precision: str) -> None:
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[PRECISIONS[precision].dtype]
    group = group_of(f"cases/mlp.py::swiglu-2.1[{precision}-2x64-ffn_8]")
    assert group == f"cases/mlp.py::swiglu-2.1[{dtype}-2x64-ffn_8]"


@compares_nothing
def test_attention_backends_of_one_case_and_size_are_of_its_group() -> None:
    ids = [f"cases/attention.py::causal[bf16-2x64{suffix}]" for suffix in ("", "-flash", "-fused", "-unfused")]
    assert {group_of(node_id) for node_id in ids} == {"cases/attention.py::causal[bf16-2x64]"}


@compares_nothing
class Node:
    """Stands in for a worker of xdist, which can be reached until it ends."""

    shutting_down, gateway = False, SimpleNamespace(id="gw")

    def __init__(self) -> None:
        self.given: list[int] = []
        self.reachable = True

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        if not self.reachable:
            raise OSError("cannot send (already closed?)")
        self.given += indices

    def shutdown(self) -> None: ...


def test_workers_that_end_at_once_cost_what_they_ran_alone(pytester: pytest.Pytester) -> None:
    ids = [f"my_pairs.py::pair{number}[bf16-2x64]" for number in range(8)]
    first, second, third = Node(), Node(), Node()
    scheduling = GroupScheduling(pytester.parseconfig("--noconftest", "--tx=2*popen"), Producer("tests"))

    def begins(*nodes: Node) -> None:
        for node in nodes:
            scheduling.add_node(node)
            scheduling.add_node_collection(node, ids)
        scheduling.schedule()

    begins(first, second)
    first.reachable = second.reachable = False  # xdist reports them one after the other
    crashed = [ids.index(scheduling.remove_node(node)) for node in (first, second)]
    assert crashed == [first.given[0], second.given[0]]
    begins(third)
    for index in third.given:  # it grows meanwhile
        scheduling.mark_test_complete(third, index)
    assert sorted([*crashed, *third.given]) == list(range(8))


def test_workers_are_given_the_largest_sizes_first(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        import parity

        @parity.pair("mlp", sizes=[dict(batch=batch, hidden=64) for batch in (1, 4, 3, 2)], precisions=["bf16"])
        def mlp(te, batch, hidden): ...
        """,
    )
    result = run_with_workers(pytester, 1, "my_pairs.py", "-v")
    begun = re.findall(r"PASSED \S+mlp\[bf16-(\d)x64\]", result.stdout.str())
    assert begun == ["4", "3", "2", "1"]


@compares_nothing
@pytest.mark.parametrize(
    ("node_id", "elements"),
    [("cases/mlp.py::mlp[bf16-2x8x64-ffn_8]", 1024), ("cases/mlp.py::mlp[bf16-scalar]", 0), ("test_x.py::y[4x4]", 0)],
)
def test_a_size_is_as_large_as_the_shape_in_its_items_id_says(node_id: str, elements: int) -> None:
    assert first_input(node_id) == elements


@compares_nothing
@pytest.mark.parametrize("size", ["2x64", "scalar", "2x64-ffn_8", "2x64-bf16"])
def test_a_group_tells_its_case_and_size(size: str) -> None:
    assert size_of(f"cases/mlp.py::swiglu[fp16-{size}]") == f"cases/mlp.py::swiglu[{size}]"


@compares_nothing
@pytest.mark.parametrize("node_id", ["tests/test_x.py::test_y", "tests/test_x.py::test_y[a-b]", "t.py::A::test_y[1-2]"])
def test_any_other_test_is_a_group_of_its_own(node_id: str) -> None:
    assert group_of(node_id) == node_id


# Workers on two GPUs that do not exist: where they run, and how a run continues when some of them die. The workers
# are real processes of pytest-xdist, and compare with a stand-in that fails in the way that the case's name says.


SOUND = [f"sound_{i}" for i in range(8)]


LIMIT = "ran longer than 3 s (--parity-timeout, or --timeout of parity run)"
REASONS = {
    "breaks_the_device": "raised AcceleratorError: CUDA error: an illegal memory access was encountered",
    "segfaults_at_seed_1": "its worker died: SIGSEGV",
    "hangs": f"{LIMIT}; its worker was ended and replaced",
    "hangs_for_good": f"{LIMIT}, and kept every Python thread from running; its worker",
}


def test_what_kills_its_worker_costs_no_other_item_and_says_what_happened(tmp_path: Path) -> None:
    """Run on two GPUs with two seeds, where one item breaks its device, one crashes, and two hang."""
    names = [name for pair in zip(REASONS, SOUND[:4], strict=True) for name in pair] + ["never_fits", *SOUND[4:]]
    code, printed, recorded = run_in_a_process(tmp_path, names, "-n", "2", "--parity-timeout=3", "--parity-seeds=2")
    results = {name: [result for result in recorded if result.case == name] for name in names}
    assert code == 1
    assert f"{len(REASONS)} failed, {len(SOUND)} passed, 1 skipped" in printed
    assert all([result.status for result in results[name]] == ["passed", "passed"] for name in SOUND)
    # Every worker has one GPU, and both GPUs have workers.
    notes = {note for name in SOUND for result in results[name] for note in result.notes}
    assert notes == {"computed on GPU-one", "computed on GPU-two"}
    for name, reason in REASONS.items():
        assert results[name][-1].status == "error"
        assert any(result.reason.startswith(reason) for result in results[name])
        assert reason in printed
    # Seeds compared before a crash are recorded, and the output shows where an item hangs.
    of_crash = results["segfaults_at_seed_1"]
    assert [(result.seed, result.status) for result in of_crash] == [(0, "passed"), (1, "error")]
    assert "in _hold_the_interpreter" in printed
    assert "time.sleep(1000)" in printed
    (unfit,) = results["never_fits"]
    assert unfit.status == "skipped"
    assert "does not fit in memory, even in a second attempt with the device to itself" in unfit.reason
    assert "GiB are free; raised OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB" in unfit.reason


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-9, "its worker died: SIGKILL"),
        (-40, "its worker died: signal 40"),
        (3, "its worker ended with exit code 3"),
        (None, "its worker died"),
    ],
)
def test_how_a_worker_ended_is_told_by_its_code(code: int | None, cause: str) -> None:
    process = SimpleNamespace(wait=lambda timeout: code)
    worker = SimpleNamespace(gateway=SimpleNamespace(_io=SimpleNamespace(popen=process)))
    assert workers._cause_of_death(worker) == cause


def test_an_item_that_runs_out_of_memory_beside_others_runs_again_alone(tmp_path: Path) -> None:
    names = ["fits_alone", *(name for name in fakes.MISHAPS if name.startswith("fits_beside"))]
    code, printed, results = run_in_a_process(tmp_path, names, "-n", "2", PARITY_DEVICES="1")
    assert code == 0, printed
    retried = [
        result for result in results if any("ran again with the device to itself" in note for note in result.notes)
    ]
    assert [result.case for result in retried] == ["fits_alone"]
    assert "computed on GPU-two" in retried[0].notes
    assert "ran again with the device to itself" in (tmp_path / "reports/parity.md").read_text()


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_that_is_terminated_keeps_the_seeds_that_were_compared_and_draws_its_report(
    tmp_path: Path, processes: str
) -> None:
    code, _, results = run_in_a_process(tmp_path, ["ends_the_run_at_seed_1"], "-n", processes, "--parity-seeds=3")
    assert code == pytest.ExitCode.INTERRUPTED
    assert [(result.seed, result.status) for result in results] == [(0, "passed"), (1, "error")]
    assert results[-1].reason == "interrupted before all of its seeds were compared"
    assert "1 of 1 item failed" in (tmp_path / "reports/parity.md").read_text()
