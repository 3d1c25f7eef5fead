"""Clocks, temperature and throttling of a GPU, as ``nvidia-smi`` tells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parity.machine import devices

# Bits of NVML's "clocks event reasons" (nvml.h, nvmlClocksEventReason...) that slow a GPU that has work to do.
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}
_FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
# The field had the second name before driver 535.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


@dataclass(frozen=True)
class GpuState:
    """A GPU at one moment; None where the driver does not say, as for a MIG slice.

    Attributes:
        sm_mhz, memory_mhz: clocks.
        celsius: of the chip.
        watts: drawn.
        throttles: why the clocks are lower than they could be; none if they are not.
    """

    sm_mhz: float | None
    memory_mhz: float | None
    celsius: float | None
    watts: float | None
    throttles: tuple[str, ...] = ()


def query(uuid: str, ask: Callable[[Sequence[str]], str | None] = devices.ask) -> GpuState | None:
    """Return the state of the GPU with this UUID; None if ``nvidia-smi`` is not there or does not know it.

    Args:
        uuid: as PyTorch gives it, ``GPU-...`` or without the prefix.
        ask: what ``nvidia-smi`` answers to arguments, None for no answer.
    """
    device = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    for reasons in _REASONS:
        fields = ",".join((*_FIELDS, reasons))
        answer = ask([f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={device}"])
        if answer is not None:
            return parse(answer)
    return None


def parse(answer: str) -> GpuState | None:
    """Return a state from ``1980, 2619, 45, 310.20, 0x0000000000000004``; None for anything else."""
    cells = [cell.strip() for cell in answer.strip().split(",")]
    if len(cells) != len(_FIELDS) + 1:
        return None
    sm, memory, celsius, watts = map(_number, cells[:-1])
    return GpuState(sm, memory, celsius, watts, _throttles(cells[-1]))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _throttles(mask: str) -> tuple[str, ...]:
    try:
        bits = int(mask, 16)
    except ValueError:
        return ()
    return tuple(reason for bit, reason in _THROTTLES.items() if bits & bit)
