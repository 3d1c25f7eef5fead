"""What a study computes on."""

from __future__ import annotations

from typing import Literal

from parity import te
from parity.report.environment import cpu_model, gpu_name
from parity.te import Backend, BackendUnavailable, Kernels
from parity.user_error import UserError

_DEVICES: dict[str, Backend | Literal["auto"]] = {"auto": "auto", "cpu": "cpu", "gpu": "gpu"}


def kernels_on(device: str) -> Kernels:
    """TE's kernels on a device: ``cpu``, ``gpu``, or ``auto`` for the GPU where TE's own kernels can run on one.

    Raises:
        UserError: for another name, or if the device cannot be had.
    """
    if device not in _DEVICES:
        raise UserError(f"device: there is no {device!r}; there are {', '.join(_DEVICES)}")
    try:
        return te.kernels(_DEVICES[device])
    except BackendUnavailable as error:
        raise UserError(f"device: {error}") from None


def name_of(kernels: Kernels) -> str:
    """The GPU, or the CPU's model."""
    return gpu_name() if kernels.backend == "gpu" else cpu_model()
