"""The pytest plugin, on stand-ins for the comparison; ``test_cli`` runs the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_runs import (
    COMPARED,
    PAIRS,
    UNAVAILABLE,
    plugin_arguments,
    recorded,
    run,
    write,
)

from parity.report import record
from parity.te.precision import PRECISIONS

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("stand_ins")


def test_loading_the_plugin_imports_neither_torch_nor_te() -> None:
    code = "import parity.plugin, sys; print([name for name in ('torch', 'transformer_engine') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_recording_results_and_drawing_the_report_imports_neither_torch_nor_te() -> None:
    code = (
        "import parity.plugin.recorder, parity.report.markdown, parity.report.record, sys; "
        "print([name for name in ('torch', 'transformer_engine') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_options_choose_precisions_and_seeds(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    run(pytester, "my_pairs.py", "-k", "mlp and 2x64", "--parity-precisions=bf16,fp16", "--parity-seeds=3,7")
    assert [(result.precision, result.seed) for result in recorded(pytester).results] == [
        ("bf16", 3), ("bf16", 7), ("fp16", 3), ("fp16", 7)
    ]  # fmt: skip


def test_the_options_may_stand_in_the_ini_file(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    pytester.makeini("[pytest]\nparity_seeds = 2\nparity_precisions = fp32\nparity_report = out\nparity_name = night")
    run(pytester, "my_pairs.py", "-k", "fails")
    assert [result.seed for result in record.read(pytester.path / "out" / "night.jsonl").results] == [0, 1]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--parity-precisions=fp33", "*unknown precision 'fp33'*fp32, bf16, fp16, fp8_delayed, fp8_current*"),
        ("--parity-backend=tpu", "*'tpu', but must be one of auto, gpu, cpu*"),
        ("--parity-seeds=0", "*'0', but must be a count of at least 1*"),
        ("--parity-seeds=1,x", "*'1,x', but must be a count*"),
        ("--parity-seeds=9-3", "*'9-3', but must be a count*"),
        ("--parity-determinism=maybe", "*'maybe', but must be yes or no*"),
        ("--parity-attention=cudnn", "*'cudnn', but must be one of auto, flash, fused, unfused, all*"),
        ("--parity-name=a/b", "*'a/b', but must be a file name*"),
        ("--parity-timeout=soon", "*'soon', but must be a number of seconds*"),
        ("--parity-diagnosis=maybe", "*--parity-diagnosis is 'maybe', but must be yes, no, or a number of seconds*"),
        ("--parity-diagnosis=-1", "*'-1', but must be yes, no, or a number of seconds*"),
        ("--parity-diagnosis=nan", "*'nan', but must be yes, no, or a number of seconds*"),
    ],
)
def test_a_bad_option_is_a_usage_error_that_lists_what_is_valid(
    pytester: pytest.Pytester, option: str, message: str
) -> None:
    result = run(pytester, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_the_environment_may_choose_the_backend_which_is_checked_under_its_name(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(pytester, PAIRS)
    pytester.makeini("[pytest]\nparity_backend = gpu")
    monkeypatch.setenv("PARITY_BACKEND", "cpu")
    run(pytester, "my_pairs.py", "-k", "fails").assert_outcomes(failed=2)
    monkeypatch.setenv("PARITY_BACKEND", "tpu")
    result = run(pytester, "my_pairs.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: PARITY_BACKEND is 'tpu', but must be one of auto, gpu, cpu"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--parity-report=my_pairs.py", "*--parity-report is */my_pairs.py: that is a file, but should be a folder*"),
        ("--parity-report=my_pairs.py/deep", "*lies below */my_pairs.py*"),
        ("--parity-calibration=nope.json", "*--parity-calibration: there is no calibration table */nope.json*"),
        ("--parity-calibration=my_pairs.py", "*my_pairs.py is not a calibration table: line * is not JSON; make*"),
        ("--parity-calibration=.", "*cannot read the calibration table */*: Is a directory"),
    ],
)
def test_files_that_cannot_serve_are_refused_once_before_any_worker_starts(
    pytester: pytest.Pytester, option: str, message: str
) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py", "-n", "2", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    assert "created:" not in result.stdout.str()
    assert len([line for line in result.errlines if line]) == 1


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("PARITY_EMULATED_GPU", "volta", "names no GPU*ada, hopper, blackwell"),
        ("PARITY_KERNEL_CHOICES", "tf32-cut", "names no choice of kernels*tf32-truncated, *"),
    ],
)
def test_an_emulated_gpu_that_does_not_exist_is_refused_once(
    variable: str, value: str, told: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    write(pytester, PAIRS)
    result = pytester.runpytest_subprocess(*plugin_arguments(), "my_pairs.py", "-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {variable}='{value}' {told}"])


def test_a_report_whose_folder_is_lost_meanwhile_is_saved_elsewhere_with_the_whole_record(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_folder(path: Path, line: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("parity.report.record.append", break_folder)
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py", "-k", "fails")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*could not write*No space left*", f"record: {tmp_path}/*/parity.jsonl"])
    (saved,) = tmp_path.glob("*/parity.jsonl")
    assert [kept.precision for kept in record.read(saved).results] == ["fp32", "bf16"]


def test_a_gpu_that_is_not_there_is_a_usage_error(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.te.why_no_gpu", lambda: "PyTorch sees no CUDA device")
    result = run(pytester, "--parity-backend=gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*PyTorch sees no CUDA device*"])


def test_a_precision_that_is_not_available_is_skipped_with_its_reason(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py::mlp[fp8_current-2x64]", "--parity-seeds=5", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *my_pairs.py:3: no FP8 on this machine"])
    assert [(result.status, result.seed) for result in recorded(pytester).results] == [("skipped", 0)]


def test_a_failure_shows_findings_margin_worst_tensor_and_how_to_reproduce_it(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py::fails[bf16-2x64]", "--parity-seeds=3")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "PAR101 gate-up-swapped: margin 102 at output (2 of 3 seeds: 0, 2; worst 2)",
            "fc1_weight matches with its halves exchanged",
            "worst tensor: output (output, 2x64)",
            "*relative L2*0.31*0.003*0.001",
            "reproduce: pytest 'my_pairs.py::fails[[]bf16-2x64[]]' --parity-seeds=2, --parity-backend=cpu *-n 0",
        ]
    )
    result.stdout.fnmatch_lines(["FAILED my_pairs.py::fails* - PAR101 gate-up-swapped: *"])
    assert "Traceback" not in result.stdout.str()
    assert "item.py" not in result.stdout.str()


def test_the_reproducing_command_runs_the_failing_seed_alone(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py::fails[bf16-2x64]", "--parity-seeds=3")
    command = next(line for line in result.outlines if line.startswith("reproduce: pytest "))
    run(pytester, *command.removeprefix("reproduce: pytest ").replace("'", "").split())
    assert [result.seed for result in recorded(pytester, "reproduce").results] == [2]
    assert len(recorded(pytester).results) == 3


def test_a_candidate_that_raises_fails_with_the_reason(pytester: pytest.Pytester) -> None:
    write(pytester, "import parity\n@parity.pair('raises', sizes=[dict(n=2)])\ndef raises(te, n): ...")
    result = run(pytester, "my_pairs.py::raises[bf16-2]")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the candidate raised ValueError: no (seed 0)"])


def test_the_traceback_of_what_raised_is_in_the_report_and_shown_where_details_are_asked_for(
    pytester: pytest.Pytester,
) -> None:
    write(pytester, "import parity\n@parity.pair('raises', precisions=['fp32'])\ndef raises(te): ...")
    assert "line 6, in forward" not in run(pytester, "my_pairs.py", "-v").stdout.str()
    assert "line 6, in forward" in run(pytester, "my_pairs.py", "-vv").stdout.str()
    assert "line 6, in forward" in (pytester.path / "reports" / "parity.md").read_text()


def test_last_failed_runs_what_failed(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    run(pytester, "my_pairs.py")
    run(pytester, "my_pairs.py", "--lf").assert_outcomes(failed=2)


def test_the_summary_says_the_verdict_and_where_the_report_is(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    report = pytester.path / "reports" / "parity.md"
    result = run(pytester, "my_pairs.py")
    result.stdout.fnmatch_lines(
        ["*= parity =*", f"*2 of {COMPARED} items failed*{2 * len(UNAVAILABLE)} skipped*", f"report: {report}"]
    )
    assert "my_pairs.py::fails[bf16-2x64]" in report.read_text()


def test_the_summary_shows_what_items_that_passed_leave_unproven(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-one")  # of which the stand-in makes a note
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py::mlp", "--parity-precisions=fp32")
    result.stdout.fnmatch_lines(["*2 of 2 items passed*", "note of 2 items: computed on GPU-one", "report: *"])


def test_the_record_starts_with_the_environment(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    run(pytester, "my_pairs.py", "-k", "mlp", "--parity-seeds=2")
    first = (pytester.path / "reports" / "parity.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["environment"]["seeds"] == [0, 1]
    assert json.loads(first)["environment"]["items"] == 2 * len(PRECISIONS)


def test_a_run_without_parity_items_writes_nothing(pytester: pytest.Pytester) -> None:
    write(pytester, "def test_other(): pass", "test_other")
    result = run(pytester)
    result.assert_outcomes(passed=1)
    assert "parity" not in result.stdout.str().split("collected")[1]
    assert not (pytester.path / "reports").exists()
