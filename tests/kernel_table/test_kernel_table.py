"""The table of CPU kernels against real ones: what it compares, how it shows it, and that it says if it is missing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from parity import te
from parity.cpu import cuda
from parity.lab.kernel_table import table
from parity.lab.kernel_table.bench import KernelCall
from parity.lab.kernel_table.measure import Outcome, select
from parity.lab.kernel_table.table import Comparison, Distance, compare, draw, fraction, ulps
from parity.machine.files import claimed
from parity.report import environment
from parity.user_error import UserError

CALL = KernelCall("Norms", "rmsnorm_fwd", "BF16", "[2, 4]", lambda where: {})


def outcome(**buffers: list[float]) -> Outcome:
    return Outcome({name: torch.tensor(values) for name, values in buffers.items()})


def test_results_are_compared_by_name() -> None:
    distances = compare(CALL, outcome(z=[1.0, 2.0], mu=[1.0]), outcome(mu=[1.0], z=[1.0, 3.0])).distances
    assert distances["mu"] == Distance(1, 0, 0, 0.0)
    assert (distances["z"].elements, distances["z"].different) == (2, 1)


def test_a_result_that_one_side_lacks_is_said_to_be_lacking() -> None:
    compared = compare(CALL, outcome(z=[1.0], transpose=[1.0]), outcome(z=[1.0], amax=[1.0]))
    equal = Distance(1, 0, 0, 0.0)
    assert compared.distances == {"z": equal, "transpose": "on the GPU only", "amax": "on the CPU only"}


def test_results_of_other_shapes_are_told_instead_of_compared() -> None:
    compared = compare(CALL, outcome(z=[1.0]), outcome(z=[1.0, 2.0]))
    assert "cannot be compared" in str(compared.distances["z"])


@pytest.mark.parametrize(
    ("real", "emulated", "why"),
    [
        (Outcome(error="no such GPU"), outcome(z=[1.0]), "GPU: no such GPU"),
        (outcome(z=[1.0]), Outcome(error="not there"), "CPU: not there"),
    ],
)
def test_an_error_on_either_side_is_the_reason_for_no_row(real: Outcome, emulated: Outcome, why: str) -> None:
    assert compare(CALL, real, emulated) == Comparison(CALL, {}, why)


@pytest.mark.parametrize(
    ("distance", "shown"),
    [
        (Distance(4, 0, 0, 0.0), "100 %"),
        (Distance(10**9, 1, 1, 1e-9), "99.999 %"),
        (Distance(4, 4, 1, 1e-3), "0.000 %"),
        (Distance(8, 1, 1, 1e-3), "87.500 %"),
    ],
)
def test_only_what_is_wholly_equal_shows_as_100_percent(distance: Distance, shown: str) -> None:
    assert fraction(distance) == shown


def test_a_nan_on_one_side_is_shown_in_words() -> None:
    assert ulps(Distance(1, 1, math.inf, 0.0)) == "NaN on one side"


def test_the_report_shows_rows_by_family_the_machine_and_what_is_missing() -> None:
    rows = [Comparison(CALL, {"z": Distance(8, 1, 3, 0.0021)}), Comparison(select("to mxfp8")[0], {}, "GPU: too old")]
    machine = environment.measure("cpu", [0], items=1)
    report = draw(rows, machine, "emulated Hopper")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines()]
    assert ["rmsnorm_fwd", "BF16", "[2, 4]", "z", "87.500 %", "3", "0.0021", "-"] in cells
    assert ["device", machine.device] in cells
    assert ["TransformerEngine", machine.transformer_engine] in cells
    assert report.index("## Norms") < report.index("## Not compared") < report.index("GPU: too old")


def test_the_report_names_the_kernels_that_it_leaves_out() -> None:
    report = draw([], environment.measure("gpu" if torch.cuda.is_available() else "cpu", [0], items=0), "")
    assert "dropout_fwd" in report[report.index("## CPU kernels that the table leaves out") :]


def test_a_table_without_a_gpu_says_that_it_is_a_trial() -> None:
    assert "A trial without a GPU" in draw([], environment.measure("cpu", [0], items=0), "")


def test_the_record_has_a_line_for_each_result_and_its_verdict_counts_them(tmp_path: Path) -> None:
    equal, apart = Distance(8, 0, 0, 0.0), Distance(8, 3, math.inf, 0.02)
    rows = [Comparison(CALL, {"z": equal, "mu": apart, "amax": "on the CPU only"}, seconds=1e-5)]
    rows.append(Comparison(select("to mxfp8")[0], {}, "GPU: too old"))
    lines = table.lines_of(rows, environment.measure("cpu", [0], items=2), "emulated Hopper")
    (tmp_path / "table.jsonl").write_text(lines)
    entries = table.read_lines(tmp_path / "table.jsonl")
    assert [entry["result"] for entry in entries] == ["z", "mu", "amax", None]
    assert [entry["different"] for entry in entries] == [0, 3, None, None]
    assert entries[1]["max_ulps"] is None
    assert entries[0]["gpu_seconds"] == 1e-5
    verdict = table.verdict(entries)
    assert verdict.startswith("1 of 2 results equal to the bit; the farthest is 0.02 away: rmsnorm_fwd (BF16, mu)")
    assert verdict.endswith("2 could not be compared")


def test_the_command_can_be_tried_without_a_gpu(tmp_path: Path) -> None:
    table.make_table("compute_amax: BF16", 0, tmp_path / "table.md", reference="cpu")
    assert table.verdict(table.read_lines(tmp_path / "table.jsonl")) == "1 of 1 results equal to the bit"
    assert "A trial without a GPU" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "ada"), ((8, 9), "ada"), ((9, 0), "hopper"), ((10, 0), "blackwell"), ((12, 0), "blackwell")],
)
def test_the_emulated_gpu_is_the_nearest_to_the_real_one(capability: tuple[int, int], name: str) -> None:
    assert table.nearest_gpu(*capability) == name
    assert name in cuda.GPUS


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes machines without a GPU")
def test_without_a_gpu_the_table_is_said_to_be_missing_and_why(tmp_path: Path) -> None:
    report = tmp_path / "kernel-table.md"
    with pytest.raises(UserError, match=r"table.*is missing.*no CUDA device.*parity kernels"):
        table.make_table("", 0, report)
    assert not report.exists()


@pytest.mark.skipif(te.why_no_gpu() is not None, reason="needs TransformerEngine's compiled kernels and a GPU")
def test_on_a_gpu_amaxes_are_equal_to_the_bit(tmp_path: Path) -> None:
    report = tmp_path / "kernel-table.md"
    table.make_table("compute_amax", 0, report)
    assert report.read_text().count("100 %") == 3


def test_two_runs_do_not_write_one_table(tmp_path: Path) -> None:
    with claimed(tmp_path / "table.jsonl"), pytest.raises(UserError, match=r"another run is writing to .*table\.jsonl"):
        table.make_table("compute_amax: BF16", 0, tmp_path / "table.md", reference="cpu")
    assert not (tmp_path / "table.md").exists()
