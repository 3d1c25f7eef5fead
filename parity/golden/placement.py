"""Where golden is computed: on the kernels' own device, or on the CPU where its FP64 is faster.

A data-center GPU (compute capability 8.0, 9.0, 10.0) computes FP64 at half the rate of FP32 or better; others (8.9,
12.0) at a 64th, so that a CPU of many cores can be faster. A short measurement decides, since both vary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch

_WIDTH = 1024
_REPEATS = 3


@dataclass(frozen=True)
class GoldenDevice:
    """The choice of a process.

    Attributes:
        device: on which golden is computed.
        reason: the device and what was measured, as a report shows it.
    """

    device: torch.device
    reason: str


@cache
def golden_device(device: torch.device) -> GoldenDevice:
    """The faster of the kernels' device and the CPU; measured once a process.

    Args:
        device: where the kernels run.
    """
    cpu = torch.device("cpu")
    if device.type == "cpu":
        return GoldenDevice(cpu, "CPU")
    here, there = seconds_of_gemm(device), seconds_of_gemm(cpu)
    measured = f"an FP64 GEMM of width {_WIDTH} takes {1e3 * here:.2g} ms on the GPU, {1e3 * there:.2g} ms on the CPU"
    return GoldenDevice(cpu, f"CPU: {measured}") if there < here else GoldenDevice(device, f"GPU: {measured}")


def seconds_of_gemm(device: torch.device) -> float:
    """The shortest time of an FP64 GEMM of ``_WIDTH`` in all three dimensions, after one that is not counted."""
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=torch.float64, device=device)
    times = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the result
        times.append(time.perf_counter() - began)
    return min(times[1:])
