"""Test which GPUs a run may use, on imaginary machines that a fake NVML describes."""

from __future__ import annotations

from types import SimpleNamespace

import fakes
import pytest

from parity.machine import devices
from parity.machine.devices import Device
from parity.user_error import UserError

GIB = 2**30


class FakeNvml:
    """The part of NVML that parity uses, for GPUs given as (uuid, uuids of its slices); an empty uuid is a gap.

    A GPU's uuid also tells its mode.
    """

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, NVML_DEVICE_MIG_ENABLE = 2, 3, 1

    def __init__(self, *gpus: tuple[str, tuple[str, ...]], driver: bool = True) -> None:
        self.gpus, self.driver = gpus, driver

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.gpus[index][0]

    def nvmlDeviceGetMaxMigDeviceCount(self, uuid: str) -> int:
        return 7 if dict(self.gpus)[uuid] else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, uuid: str, index: int) -> str:
        slices = dict(self.gpus)[uuid]
        if index >= len(slices) or not slices[index]:
            raise self.NVMLError("Not Found")
        return slices[index]

    def nvmlDeviceGetUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetName(self, uuid: str) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetComputeMode(self, uuid: str) -> int:
        if uuid.startswith("MIG"):
            raise self.NVMLError("Not Supported")
        return {"GPU-prohibited": 2, "GPU-exclusive": 3}.get(uuid, 0)

    def nvmlDeviceGetMigMode(self, uuid: str) -> list[int]:
        if uuid == "GPU-one":
            raise self.NVMLError("Not Supported")
        enabled = int(uuid == "GPU-mig")
        return [enabled, enabled]

    def nvmlDeviceGetMemoryInfo(self, uuid: str) -> SimpleNamespace:
        if uuid.startswith("GPU-unified"):
            raise self.NVMLError("Not Supported")
        if dict(self.gpus).get(uuid):
            raise self.NVMLError("Insufficient Permissions")  # as in a container that sees only slices
        return SimpleNamespace(free=10 * GIB if uuid.startswith("MIG") else 79 * GIB)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, FakeNvml(("GPU-one", ()), ("GPU-two", ())))


def machine(monkeypatch: pytest.MonkeyPatch, nvml: object) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)


def identifiers(**environment: str) -> list[str]:
    return [device.identifier for device in devices.chosen(environment)]


def test_every_gpu_is_visible_unless_something_is_said() -> None:
    assert devices.chosen({}) == [
        Device("GPU-one", "NVIDIA H100", "GPU-one", 79 * GIB),
        Device("GPU-two", "NVIDIA H100", "GPU-two", 79 * GIB),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        ("GPU-two", ["GPU-two"]),
        ("GPU-t", ["GPU-two"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["0"]),
        ("0,0", []),
        ("GPU-", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value: str, expected: list[str]) -> None:
    assert identifiers(CUDA_VISIBLE_DEVICES=value) == expected


def test_a_gpu_in_mig_mode_is_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, FakeNvml(("GPU-one", ("MIG-a", "MIG-b")), ("GPU-two", ())))
    assert identifiers() == ["MIG-a", "MIG-b", "GPU-two"]
    assert identifiers(CUDA_VISIBLE_DEVICES="MIG-b,MIG-a") == ["MIG-b", "MIG-a"]
    assert [device.free for device in devices.chosen({"CUDA_VISIBLE_DEVICES": "0"})] == [10 * GIB]


def test_a_gpu_whose_memory_is_not_told_is_listed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, FakeNvml(("GPU-unified", ()), ("GPU-two", ())))
    assert [(device.uuid, device.free) for device in devices.chosen({})] == [
        ("GPU-unified", None),
        ("GPU-two", 79 * GIB),
    ]


@pytest.mark.parametrize("unusable", ["GPU-prohibited", "GPU-mig"])
@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}])
def test_a_gpu_whose_mode_lets_no_process_use_it_is_left_out(
    unusable: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, FakeNvml((unusable, ()), ("GPU-two", ())))
    assert [device.uuid for device in devices.chosen(environment)] == ["GPU-two"]


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_a_gpu_for_exclusive_processes_takes_one(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, FakeNvml(("GPU-exclusive", ())))
    assert [device.processes for device in devices.chosen(environment)] == [1]


def test_more_processes_than_exclusive_gpus_take_are_an_error_that_says_how_many_they_take() -> None:
    gpus = [Device("0", free=80 * GIB, processes=1), Device("1", free=40 * GIB, processes=1)]
    assert devices.spread(gpus, 2) == gpus
    with pytest.raises(UserError, match=r"3 workers are asked for, but the GPUs take 2.*give -n 2"):
        devices.spread(gpus, 3)


def test_others_take_what_exclusive_gpus_do_not() -> None:
    exclusive, shared = Device("0", free=80 * GIB, processes=1), Device("1", free=10 * GIB)
    assert devices.spread([exclusive, shared], 3) == [exclusive, shared, shared]


def test_a_slice_that_was_given_up_hides_none_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, FakeNvml(("GPU-one", ("MIG-a", "", "MIG-c"))))
    assert identifiers() == ["MIG-a", "MIG-c"]


def test_parity_devices_chooses_among_the_visible_ones() -> None:
    assert identifiers(PARITY_DEVICES="1") == ["GPU-two"]
    assert identifiers(PARITY_DEVICES="1, 0") == ["GPU-two", "GPU-one"]
    assert identifiers(PARITY_DEVICES="GPU-o") == ["GPU-one"]
    assert identifiers(PARITY_DEVICES="0", CUDA_VISIBLE_DEVICES="1") == ["1"]
    assert identifiers(PARITY_DEVICES="") == ["GPU-one", "GPU-two"]


@pytest.mark.parametrize("value", ["2", "0,2", "GPU-x", "GPU-", "all", "0,,1", "-1"])
def test_what_parity_devices_cannot_mean_is_an_error_that_lists_the_devices(value: str) -> None:
    with pytest.raises(UserError, match=r"of the visible devices, which are 0: NVIDIA H100 GPU-one; 1: .* GPU-two"):
        devices.chosen({"PARITY_DEVICES": value})


def test_a_device_that_is_asked_for_twice_is_an_error() -> None:
    with pytest.raises(UserError, match="names a device twice"):
        devices.chosen({"PARITY_DEVICES": "0,GPU-one"})


def test_a_machine_without_a_driver_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, FakeNvml(driver=False))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert devices.chosen({}) == []
    with pytest.raises(UserError, match="none at all"):
        devices.chosen({"PARITY_DEVICES": "0"})


@pytest.mark.parametrize("nvml", [None, FakeNvml(driver=False)], ids=["no package", "no library"])
def test_without_nvml_pytorch_counts_the_devices(monkeypatch: pytest.MonkeyPatch, nvml: object) -> None:
    machine(monkeypatch, nvml)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert identifiers() == ["0", "1"]
    assert identifiers(CUDA_VISIBLE_DEVICES="3,GPU-x") == ["3", "GPU-x"]
    assert identifiers(PARITY_DEVICES="1") == ["1"]


def test_processes_are_spread_evenly_over_equal_devices() -> None:
    assert [device.uuid for device in devices.spread(fakes.GPUS, 5)] == [
        "GPU-one", "GPU-two", "GPU-one", "GPU-two", "GPU-one"
    ]  # fmt: skip


def test_a_device_with_more_free_memory_gets_more_processes() -> None:
    large, small = Device("0", free=60 * GIB), Device("1", free=20 * GIB)
    assert devices.spread([small, large], 4).count(large) == 3
