"""Clocks, temperature and throttling, from what nvidia-smi answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parity.lab.throughput import record
from parity.lab.throughput.record import GpuState


def test_an_answer_is_read_with_its_units_left_out() -> None:
    assert record.parse_state("1980, 2619, 45, 310.20, 0x0000000000000000\n") == GpuState(1980.0, 2619.0, 45.0, 310.2)


@pytest.mark.parametrize(
    ("mask", "throttles"),
    [
        ("0x0000000000000001", ()),  # idle
        ("0x0000000000000002", ()),  # clocks that somebody set
        ("0x0000000000000004", ("power cap",)),
        ("0x0000000000000048", ("hardware slowdown", "thermal slowdown (hardware)")),
        ("[N/A]", ()),
    ],
)
def test_only_what_slows_a_busy_gpu_is_throttling(mask: str, throttles: tuple[str, ...]) -> None:
    state = record.parse_state(f"1200, 2619, 88, 700.0, {mask}")
    assert state is not None
    assert state.throttles == throttles


def test_what_a_mig_slice_does_not_say_is_none() -> None:
    assert record.parse_state("[N/A], [N/A], 45, [N/A], [N/A]") == GpuState(None, None, 45.0, None)


def test_a_driver_that_does_not_know_the_new_field_is_asked_for_the_old_one() -> None:
    asked: list[str] = []

    def old_driver(arguments: Sequence[str]) -> str | None:
        asked.append(arguments[0])
        return None if "clocks_event_reasons" in arguments[0] else "1980, 2619, 45, 310.2, 0x4"

    state = record.gpu_state("ab-12", old_driver)
    assert state is not None
    assert state.throttles == ("power cap",)
    assert len(asked) == 2


def test_the_gpu_is_asked_for_by_its_uuid() -> None:
    seen: list[str] = []
    record.gpu_state("ab-12", lambda arguments: seen.append(arguments[-1]))
    record.gpu_state("MIG-cd", lambda arguments: seen.append(arguments[-1]))
    assert set(seen) == {"--id=GPU-ab-12", "--id=MIG-cd"}


def test_without_nvidia_smi_there_is_no_state() -> None:
    assert record.gpu_state("ab-12", lambda arguments: None) is None
    assert record.parse_state("No devices were found") is None
