"""What throughput records, reports and accepts on the command line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import forked
import pytest
import samples

from parity.cli import machine
from parity.machine.files import claimed
from parity.measuring.throughput import command, record
from parity.measuring.throughput import command as report
from parity.measuring.throughput.measure import row_without
from parity.measuring.throughput.record import EMULATED, GpuState, Peak
from parity.measuring.throughput.workload import COMPILED, EAGER, TE, Implementation, Workload
from parity.user_error import UserError

# The record of a measurement, and the numbers computed from it.


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
        samples.row("TE", "fp8_current", peak_format="fp8"),  # its peak could not be measured
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


# The report of a measurement.


def cells(text: str, name: str) -> list[str]:
    """Return the cells of the last table row that begins with a name, which is the one in the workload's own table."""
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


# ``parity throughput`` as a whole: files, ended processes, and mistakes.


TINY = Path(__file__).with_name("tiny_pairs.py")
WORK = Workload(TINY, "tiny_linear", dict(batch=16, hidden=16))
BOTH = [Implementation(EAGER, "bf16"), Implementation(TE, "bf16"), Implementation(TE, "fp32")]


class Processes:
    """Stands in for processes that each measure one implementation and then end as the test says."""

    def __init__(self, file: Path, *answers: bool | None) -> None:
        self.file, self.answers = file, list(answers)
        self.asked: list[int] = []

    def __call__(self, workload: Workload, chosen: list[Implementation]) -> bool | None:
        self.asked.append(len(chosen))
        answer = self.answers.pop(0)
        for each in chosen if answer else chosen[: int(answer is False)]:
            record.append(self.file, row_without(workload, each, "measured"))
        return answer


def reasons(file: Path) -> list[str]:
    return [row.why_none for row in record.read(file).rows]


def test_a_process_that_a_kernel_ends_loses_that_row_alone(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "lines", None, True)
    command._measure_workload(WORK, BOTH, processes, tmp_path / "lines")
    assert reasons(tmp_path / "lines") == ["the process ended in this measurement", "measured", "measured"]
    assert processes.asked == [3, 2]


def test_after_an_error_of_the_gpu_another_process_goes_on(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "lines", False, True)
    command._measure_workload(WORK, BOTH, processes, tmp_path / "lines")
    assert reasons(tmp_path / "lines") == ["measured"] * 3


def test_processes_that_are_ended_again_and_again_leave_a_row_each(tmp_path: Path) -> None:
    command._measure_workload(WORK, BOTH, Processes(tmp_path / "lines", None, None, None), tmp_path / "lines")
    assert reasons(tmp_path / "lines") == ["the process ended in this measurement"] * 3


def test_compiled_modules_come_after_all_else() -> None:
    other = Workload(TINY, "unknown_flops", dict(batch=16, hidden=16))
    rounds = command._plan_rounds([WORK, other], [Implementation(EAGER, "bf16"), Implementation(COMPILED, "bf16")])
    found = [(workload.case, each.kind) for workload, some in rounds for each in some]
    assert found == [(case, kind) for kind in (EAGER, COMPILED) for case in ("tiny_linear", "unknown_flops")]


def test_the_function_of_a_process_that_ended_returns_none_and_the_next_is_called() -> None:
    with command._replaced_processes() as call:
        assert call(os._exit, 3) is None
        assert call(int, "7") == 7


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (dict(sizes="huge"), "large"),
        (dict(precisions="fp7"), "fp7"),
        (dict(keyword="gemv"), "no workload has 'gemv'"),
        (dict(backend="tpu"), "tpu"),
    ],
)
def test_wrong_options_are_told(tmp_path: Path, option: dict[str, str], told: str) -> None:
    options = dict(precisions="", backend="cpu", sizes="auto", keyword="") | option
    with pytest.raises(UserError, match=told):
        machine.run(None, **options, repeats=1, compiled="none", minutes=None, folder=tmp_path)


def test_the_command_leaves_record_report_and_plot(tmp_path: Path) -> None:
    arguments = [
        str(TINY),
        "-k",
        "tiny_linear",
        "--precisions=bf16",
        "--compiled=none",
        "--repeats=1",
        f"--out={tmp_path}",
    ]
    done = forked.run("-m", "parity", "throughput", "--backend=cpu", *arguments)
    assert done.returncode == 0, done.stderr
    found = record.read(tmp_path / "throughput.jsonl")
    assert [row.name for row in found.rows] == ["eager bf16", "TE bf16"]
    assert [peak.format for peak in found.peaks] == ["bf16"]
    assert found.is_emulated
    assert "emulated" in (tmp_path / "throughput.md").read_text()
    assert (tmp_path / "throughput.png").exists()


def test_two_measurements_do_not_share_a_folder(tmp_path: Path) -> None:
    with claimed(tmp_path / "throughput.jsonl") as claim:
        claim.begin(b"the other's\n")
        with pytest.raises(UserError, match=r"another run is writing to .*throughput\.jsonl"):
            command.run(command.Settings([WORK], ("bf16",), "cpu"), tmp_path)
    assert (tmp_path / "throughput.jsonl").read_text() == "the other's\n"
