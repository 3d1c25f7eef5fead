"""Golden is computed where FP64 is faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from parity.numerics import golden
from parity.numerics.golden import seconds_of_gemm

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def forgets_its_choice() -> Iterator[None]:
    golden.golden_device.cache_clear()
    yield
    golden.golden_device.cache_clear()


@pytest.mark.parametrize(
    ("of_gpu", "of_cpu", "device", "said"),
    [(0.0001, 0.04, GPU, "GPU: "), (0.02, 0.004, CPU, "CPU: ")],
    ids=["as on an H100", "as on an L4 beside many cores"],
)
def test_the_faster_of_gpu_and_cpu_computes_golden(
    of_gpu: float, of_cpu: float, device: torch.device, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "seconds_of_gemm", {GPU: of_gpu, CPU: of_cpu}.__getitem__)
    chosen = golden.golden_device(GPU)
    assert chosen.device == device
    assert chosen.reason.startswith(said)
    assert f"{1e3 * of_gpu:.2g} ms on the GPU, {1e3 * of_cpu:.2g} ms on the CPU" in chosen.reason


def test_a_process_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(golden, "seconds_of_gemm", lambda device: float(len(asked.append(device) or asked)))
    assert golden.golden_device(GPU) is golden.golden_device(GPU)
    assert asked == [GPU, CPU]


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(golden, "seconds_of_gemm")
    assert golden.golden_device(CPU) == golden.GoldenDevice(CPU, "CPU")


def test_a_gemm_takes_time() -> None:
    assert 0 < seconds_of_gemm(CPU) < 60
