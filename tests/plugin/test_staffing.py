"""How many workers ``-n auto`` means."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import fakes
import pytest

from parity.case import registry
from parity.machine.devices import Device
from parity.plugin.workers import how_many

pytest_plugins = ["pytester"]
GIB = 2**30
PAIR = "import parity\n@parity.pair('mlp')\ndef mlp(te): ..."


def machine(monkeypatch: pytest.MonkeyPatch, cores: int, memory: int | None) -> None:
    monkeypatch.setattr("parity.machine.host.cores", lambda: cores)
    monkeypatch.setattr("parity.machine.host.free_memory", lambda: memory)


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
    """What xdist makes of ``-n auto``."""
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
