"""Measures in a process of its own, which a kernel may end; each result is in the record as soon as it exists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from parity import te
from parity.lab.throughput import peak, record
from parity.lab.throughput.clock import clock_of
from parity.lab.throughput.measure import Plan, measure
from parity.lab.throughput.workload import Implementation, Workload
from parity.report import environment
from parity.te import Backend, BackendUnavailable
from parity.te.device_errors import cuda_works

Asked = Backend | Literal["auto"]


def begin(backend: Asked, formats: Sequence[str], workloads: int, file: Path) -> str | None:
    """Write the environment and the device's peaks in these formats; why the backend cannot be had, or None."""
    try:
        kernels = te.kernels(backend)
    except BackendUnavailable as error:
        return str(error)
    record.append(file, environment.measure(kernels.backend, [0], workloads))
    for format in formats:
        record.append(file, peak.measure(format, kernels.device, clock_of(kernels.device)))
    return None


def measure_one(workload: Workload, chosen: Sequence[Implementation], plan: Plan, backend: Asked, file: Path) -> bool:
    """Write the workload's rows; whether this process can go on, which it cannot with a broken CUDA context."""
    kernels = te.kernels(backend)
    for row in measure(workload, chosen, plan, kernels):
        record.append(file, row)
        if not cuda_works():
            return False
    return True
