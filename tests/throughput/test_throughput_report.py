"""The report of a measurement."""

from __future__ import annotations

from pathlib import Path

import samples

from parity.lab.throughput import command as report
from parity.lab.throughput.record import EMULATED, GpuState


def cells(text: str, name: str) -> list[str]:
    """Those of the last table row that begins with a name: that of the workload's own table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return next(row for row in reversed(rows) if row[0] == name)


def test_a_row_shows_times_with_their_spread_rates_share_memory_and_error() -> None:
    shown = cells(report.draw(samples.record(samples.row()), None), "eager bf16")
    assert shown == [
        *("eager bf16", "4 (3.6 to 4.4)", "6 (6 to 6)", "250", "333", "38 %", "3.00", "0.0023"),
        *("1980 → 1980", "41 → 41", "–"),
    ]


def test_a_row_that_could_not_be_measured_stays_and_says_why() -> None:
    failed = samples.row("compiled", times=None, why_none="RuntimeError: no compiler")
    text = report.draw(samples.record(samples.row(), failed), None)
    assert cells(text, "compiled bf16")[-1] == "not measured: RuntimeError: no compiler"
    assert cells(text, "eager bf16")


def test_the_summary_tells_speed_against_eager_bf16_and_the_error() -> None:
    faster = samples.row("TE", "fp8_current", times=samples.times(0.002, 0.003), error=0.037)
    text = report.draw(samples.record(samples.row(), faster), None)
    summary = text[: text.index("## The device's peak")]
    assert cells(summary, "eager bf16")[1] == "1×, 0.0023"
    assert cells(summary, "TE fp8_current")[1] == "2×, 0.037"


def test_throttling_launching_and_missing_errors_are_noted() -> None:
    slow = GpuState(1200.0, 2619.0, 86.0, 700.0, ("power cap",))
    row = samples.row(after=slow, times=samples.times(1e-5, 1e-5, host=1e-4), error=None, why_no_error="out of memory")
    noted = "; ".join(report.notes(row))
    assert "throttled: power cap" in noted
    assert "launch-bound" in noted
    assert "no error: out of memory" in noted


def test_emulated_kernels_are_named_in_heading_text_and_plot() -> None:
    emulated = samples.record(samples.row(), environment=samples.CPU)
    text = report.draw(emulated, None)
    assert text.startswith("# Throughput, on emulated kernels")
    assert EMULATED in text
    assert "emulated" in report.draw_plot(emulated).get_suptitle()


def test_real_kernels_are_not_called_emulated() -> None:
    real = samples.record(samples.row())
    assert "emulated" not in report.draw(real, None)
    assert "emulated" not in report.draw_plot(real).get_suptitle()


def test_a_peak_that_could_not_be_measured_says_why() -> None:
    assert cells(report.draw(samples.record(samples.row()), None), "fp8") == ["fp8", "–", "no FP8 here"]


def test_report_and_plot_are_written_side_by_side(tmp_path: Path) -> None:
    report.write(samples.record(samples.row(), samples.row("TE")), tmp_path / "throughput.md")
    assert "![Speed against error](throughput.png)" in (tmp_path / "throughput.md").read_text()
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_without_any_error_the_report_says_that_there_is_no_plot(tmp_path: Path) -> None:
    report.write(samples.record(samples.row(error=None)), tmp_path / "throughput.md")
    assert "There is no plot" in (tmp_path / "throughput.md").read_text()
    assert not (tmp_path / "throughput.png").exists()


def test_the_plot_has_a_panel_a_workload_and_a_point_a_precision() -> None:
    rows = [samples.row(), samples.row("TE", error=0.0), samples.row("TE", "fp32"), samples.row(workload="norm")]
    drawn = report.draw_plot(samples.record(*rows))
    titles = [axis.get_title() for axis in drawn.axes if axis.get_title()]
    assert titles == ["mlp\nbatch 1, seq 64", "norm\nbatch 1, seq 64"]
    assert {text.get_text() for text in drawn.axes[0].texts} == {"bf16", "fp32"}
