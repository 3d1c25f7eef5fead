"""The record of a measurement, and what is computed from it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import samples

from parity.lab.throughput import record
from parity.lab.throughput.record import GpuState, Peak


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "throughput.jsonl"
    hot = samples.row("TE", error=math.inf, after=GpuState(None, 2619.0, 80.0, None, ("power cap",)))
    failed = samples.row("compiled", times=None, error=None, before=None, why_none="RuntimeError: no compiler")
    for line in (samples.GPU, Peak("bf16", 8e14, 8192), hot, failed):
        record.append(file, line)
    found = record.read(file)
    assert found == record.Record(samples.GPU, (Peak("bf16", 8e14, 8192),), (hot, failed))


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "throughput.jsonl"
    record.append(file, samples.row())
    file.write_text(file.read_text() + '{"row": {"workl')
    assert record.read(file).rows == (samples.row(),)


@pytest.mark.parametrize(("environment", "emulated"), [(samples.CPU, True), (samples.GPU, False)])
def test_the_first_line_says_whether_kernels_were_emulated(tmp_path: Path, environment: object, emulated: bool) -> None:
    record.append(tmp_path / "lines", environment)  # type: ignore[arg-type]
    line = json.loads((tmp_path / "lines").read_text())
    assert line["emulated"] == emulated
    assert ("emulated" in line["note"] and "nothing about a GPU" in line["note"]) == emulated


def test_the_share_of_the_peak_is_the_rate_of_both_passes_over_it() -> None:
    assert samples.record().peak_share(samples.row()) == pytest.approx(300 / 800)


def test_a_row_is_held_against_the_peak_of_its_own_format() -> None:
    assert samples.record().peak_share(samples.row("TE", "fp32", peak_format="tf32")) == pytest.approx(300 / 400)


@pytest.mark.parametrize(
    "row",
    [
        samples.row("TE", "fp8_current", peak_format="fp8"),  # whose peak could not be measured
        samples.row("TE", "nvfp4", peak_format=None),
        samples.row(flops_forward=0, flops_backward=0),
        samples.row(times=None),
    ],
)
def test_without_a_peak_flops_or_times_there_is_no_share(row: record.Row) -> None:
    assert samples.record().peak_share(row) is None


def test_emulated_kernels_have_no_share_of_a_peak() -> None:
    emulated = samples.record(environment=samples.CPU)
    assert emulated.peak_share(samples.row("TE")) is None
    assert emulated.peak_share(samples.row("eager")) is not None
