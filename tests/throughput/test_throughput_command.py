"""``parity throughput`` as a whole: files, processes that are ended, and mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import pytest

from parity.cli import machine
from parity.lab.throughput import command, record
from parity.lab.throughput.measure import row_without
from parity.lab.throughput.workload import COMPILED, EAGER, TE, Implementation, Workload
from parity.machine.files import claimed
from parity.user_error import UserError

TINY = Path(__file__).with_name("tiny_pairs.py")
WORK = Workload(TINY, "tiny_linear", dict(batch=16, hidden=16))
BOTH = [Implementation(EAGER, "bf16"), Implementation(TE, "bf16"), Implementation(TE, "fp32")]


class Processes:
    """Stands for processes of which each measures one implementation and is then ended, in the words of the test."""

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
    command._measure(WORK, BOTH, processes, tmp_path / "lines")
    assert reasons(tmp_path / "lines") == ["the process ended in this measurement", "measured", "measured"]
    assert processes.asked == [3, 2]


def test_after_an_error_of_the_gpu_another_process_goes_on(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "lines", False, True)
    command._measure(WORK, BOTH, processes, tmp_path / "lines")
    assert reasons(tmp_path / "lines") == ["measured"] * 3


def test_processes_that_are_ended_again_and_again_leave_a_row_each(tmp_path: Path) -> None:
    command._measure(WORK, BOTH, Processes(tmp_path / "lines", None, None, None), tmp_path / "lines")
    assert reasons(tmp_path / "lines") == ["the process ended in this measurement"] * 3


def test_compiled_modules_come_after_all_else() -> None:
    other = Workload(TINY, "unknown_flops", dict(batch=16, hidden=16))
    rounds = command._rounds([WORK, other], [Implementation(EAGER, "bf16"), Implementation(COMPILED, "bf16")])
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
        (dict(keyword="gemv"), "no workload contains 'gemv'"),
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
