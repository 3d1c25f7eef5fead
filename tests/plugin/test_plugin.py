"""The pytest plugin, with stand-ins for the comparison; ``test_cli`` runs the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plugin_runs import (
    AVAILABLE,
    CASE,
    COMPARED,
    ITEMS_OF_FAILS,
    PAIRS,
    UNAVAILABLE,
    names,
    plugin_arguments,
    recorded,
    run,
    run_with_workers,
    write,
)

from parity import te
from parity.report import record
from parity.te import PRECISIONS

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
        (
            "--parity-precisions=fp33",
            "*unknown precision 'fp33' in --parity-precisions; did you mean fp32? *",
        ),
        ("--parity-backend=tpu", "*'tpu', but must be one of auto, gpu, cpu*"),
        ("--parity-seeds=,", "*',', but must be a count*"),
        (f"--parity-steps={'9' * 5_000}", "*, but must be a whole number from 0 to 100000*"),
        ("--parity-seeds=1,x", "*'1,x', but must be a count*"),
        ("--parity-seeds=9-3", "*'9-3', but must be a count*"),
        ("--parity-determinism=maybe", "*'maybe', but must be yes or no*"),
        ("--parity-attention=cudnn", "*'cudnn', but must be one of auto, flash, fused, unfused, all*"),
        ("--parity-sizes=huge", "*'huge', but must be one of auto, small, large*"),
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
        ("--parity-report=my_pairs.py/deep", "*is below */my_pairs.py*"),
        ("--parity-calibration=nope.json", "*--parity-calibration: there is no calibration table */nope.json*"),
        ("--parity-calibration=my_pairs.py", "*my_pairs.py is not a calibration table: not JSON: line *; make*"),
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
        ("PARITY_EMULATED_GPU", "volta", "is not a GPU*ada, hopper, blackwell, rtx_blackwell"),
        ("PARITY_KERNEL_CHOICES", "tf32-cut", "names 'tf32-cut', which is not among*tf32-truncated, *"),
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
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("parity.machine.files.os.write", full)
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py", "-k", "fails")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*could not write*No space left*", f"record: {tmp_path}/*/parity.jsonl"])
    (saved,) = tmp_path.glob("*/parity.jsonl")
    assert [kept.precision for kept in record.read(saved).results] == ["fp32", "bf16"]


def test_a_gpu_that_is_not_there_is_a_usage_error(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.te.why_no_gpu", lambda: "PyTorch sees no CUDA device")
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py", "--parity-backend=gpu")
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
            "what: fails[[]bf16-2x64[]] differs from the reference at output: the error is up to 102 times its limit *",
            "why: fc1_weight matches with its halves exchanged",
            "worst tensor: output (2x64; output)",
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-one")  # the stand-in makes a note of it
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


# The items that the plugin collects, and what it says of pairs from which it can make none.


def test_a_case_becomes_an_item_for_each_size_and_precision(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    mlp = [f"mlp[{precision}-{size}]" for size in ("2x64", "4x128") for precision in PRECISIONS]
    assert names(pytester, "my_pairs.py") == [*mlp, *ITEMS_OF_FAILS]


def test_an_id_selects_its_item(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    assert names(pytester, "my_pairs.py::mlp[bf16-2x64]") == ["mlp[bf16-2x64]"]


@pytest.mark.parametrize(
    ("item", "advice"),
    [
        ("mpl", "*there is no pair 'mpl' in my_pairs.py; did you mean my_pairs.py::mlp?*"),
        ("attention", "*there is no pair 'attention' in my_pairs.py; it declares mlp, fails*"),
        ("mlp[bf16-3x3]", "*the pair 'mlp' of my_pairs.py has no item 'mlp?bf16-3x3?'; *--collect-only*"),
    ],
)
def test_an_id_that_is_not_there_comes_with_those_that_are(pytester: pytest.Pytester, item: str, advice: str) -> None:
    write(pytester, PAIRS)
    result = run(pytester, f"my_pairs.py::{item}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([advice])


def test_keywords_and_marks_select_items(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    assert names(pytester, "my_pairs.py", "-k", "mlp and bf16 and 4x128") == ["mlp[bf16-4x128]"]
    assert names(pytester, "my_pairs.py", "-m", "fp32 and not slow_one") == ["fails[fp32-2x64]"]


def test_only_a_case_with_attention_has_an_item_for_each_backend(pytester: pytest.Pytester) -> None:
    attention = (
        "\n    @parity.pair('attention', sizes=[dict(n=2)], attention=['unfused', 'fused'])\n    def a(te, n): ...\n"
    )
    write(pytester, PAIRS + attention)
    options = ("--parity-precisions=bf16", "-k", "attention or fails")
    own, fused, everything = (
        names(pytester, "my_pairs.py", *options, *more)
        for more in ([], ["--parity-attention=fused"], ["--parity-attention=all"])
    )
    assert own == ["fails[bf16-2x64]", "attention[bf16-2-fused]", "attention[bf16-2-unfused]"]
    assert fused == ["fails[bf16-2x64]", "attention[bf16-2-fused]"]
    assert everything == ["fails[bf16-2x64]", *(f"attention[bf16-2-{name}]" for name in ("flash", "fused", "unfused"))]


def test_large_sizes_are_items_where_a_gpu_is_or_if_asked_for(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized = "\n    @parity.pair('sized', sizes=[dict(n=2)], large_sizes=[dict(n=4096)])\n    def a(te, n): ...\n"
    write(pytester, PAIRS + sized)
    options = ("my_pairs.py", "--parity-precisions=bf16", "-k", "sized")
    assert names(pytester, *options) == names(pytester, *options, "--parity-sizes=small") == ["sized[bf16-2]"]
    assert names(pytester, *options, "--parity-sizes=large") == ["sized[bf16-2]", "sized[bf16-4096]"]
    on_cpu = te.kernels()
    monkeypatch.setattr(te, "kernels", lambda backend: replace(on_cpu, backend="gpu"))
    assert names(pytester, *options) == ["sized[bf16-2]", "sized[bf16-4096]"]


def test_marks_are_registered(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py", "--strict-markers", "-W", "error", "-k", "mlp")
    result.assert_outcomes(passed=2 * len(AVAILABLE), skipped=2 * len(UNAVAILABLE), deselected=2)


def test_folders_may_have_files_of_pairs_of_the_same_name(pytester: pytest.Pytester) -> None:
    for model in ("llama", "mixtral"):
        folder = pytester.mkdir(model)
        (folder / f"{model}_sizes.py").write_text("N = 2")
        (folder / "pairs.py").write_text(f"import {model}_sizes\nimport parity\n{CASE.format(name=model)}")
    run(pytester, "llama/pairs.py", "mixtral/pairs.py").assert_outcomes(passed=2)
    assert [result.case for result in recorded(pytester).results] == ["llama", "mixtral"]


def test_a_case_is_collected_only_where_it_is_declared_and_once(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    write(
        pytester,
        "from my_pairs import fails\nimport parity\nalias = fails\nmine = parity.pair('mine')(lambda te: 0)\n"
        "again = mine",
        "others",
    )
    assert names(pytester, "others.py", "--parity-precisions=fp32") == ["mine[fp32-]"]


def test_cases_that_are_declared_in_a_loop_are_all_collected(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        import parity

        for activation in ("gelu", "relu"):
            @parity.pair(f"mlp_{activation}", sizes=[dict(n=2)])
            def test_case(te, n): ...
        """,
    )
    found = names(pytester, "my_pairs.py", "--parity-precisions=fp32", "-W", "error")
    assert found == ["mlp_gelu[fp32-2]", "mlp_relu[fp32-2]"]


HELPER = """
    import parity

    def declare(name):
        def factory(te): ...
        return parity.pair(name, precisions=["fp32"])(factory)
"""


@pytest.mark.parametrize("options", [(), ("--import-mode=importlib", "-p", "no:cacheprovider")])
def test_pairs_that_a_helper_in_another_file_declares_are_collected(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    write(pytester, HELPER + "\n    declare('shared')", "helper")
    write(pytester, "from helper import declare\ndeclare('one')\n", "uses_one")
    write(pytester, "from helper import declare\ndeclare('two')\n", "uses_two")
    pytester.syspathinsert()
    found = names(pytester, "uses_one.py", "uses_two.py", "helper.py", *options)
    assert found == ["one[fp32-]", "two[fp32-]", "shared[fp32-]"]


def test_pairs_that_a_helper_declares_run_in_workers(pytester: pytest.Pytester) -> None:
    write(pytester, HELPER, "helper")
    write(pytester, "from helper import declare\nfor n in 'abc':\n    declare(n)\n")
    run_with_workers(pytester, 2, "my_pairs.py").assert_outcomes(passed=3)


def test_what_parity_did_not_expect_is_a_collection_error_too(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parity.case.validate.check_case", lambda case, te: 1 / 0)
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["E *ZeroDivisionError: division by zero"])


def test_a_pair_that_does_not_fit_is_reported_at_collection_without_a_traceback(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS + "\n    @parity.pair('misfits')\n    def misfits(te): ...\n")
    result = run(pytester, "my_pairs.py")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        ["*ERROR collecting my_pairs.py*", "pair 'misfits': fc1.weight is 128x64, but *", "ERROR my_pairs.py::misfits*"]
    )
    assert "parity/" not in result.stdout.str().split("short test summary")[0].split("ERRORS")[1]


def test_a_duplicate_name_is_reported_at_collection_without_a_traceback(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS + "\n    @parity.pair('mlp')\n    def mlp_again(te): ...\n")
    result = run(pytester, "my_pairs.py")
    result.stdout.fnmatch_lines(["*ERROR collecting my_pairs.py*", "*'mlp' is already declared*"])
    assert "raise UserError" not in result.stdout.str()


@pytest.mark.parametrize(
    ("declaration", "told"),
    [
        ("'wrong', precisions=['bf61']", "unknown precision 'bf61' in precisions; did you mean bf16?*"),
        ("'wrong', sizes=[]", "sizes is empty*"),
        ("'wrong name'", "a name may only have letters*"),
        ("'wrong', steps='many'", "steps must be a whole number*"),
    ],
)
def test_a_wrong_declaration_is_told_at_its_pair_and_the_others_are_compared(
    pytester: pytest.Pytester, declaration: str, told: str
) -> None:
    write(pytester, f"import parity\n@parity.pair({declaration})\ndef test_it(te): ..." + CASE.format(name="right"))
    result = run(pytester, "my_pairs.py", "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, errors=1)
    name = declaration.split("'")[1]
    result.stdout.fnmatch_lines([f"*my_pairs.py:2: pair '{name}': {told}", f"ERROR my_pairs.py::{name} - *"])
    assert [kept.case for kept in recorded(pytester).results] == ["right"]
    assert [kept.node_id for kept in recorded(pytester).uncollected] == [f"my_pairs.py::{name}"]


def test_an_id_of_a_pair_that_is_declared_wrongly_tells_what_is_wrong(pytester: pytest.Pytester) -> None:
    write(pytester, "import parity\n@parity.pair('mlp', precisions=['fp33'])\ndef mlp(te): ...")
    result = run(pytester, "my_pairs.py::mlp[fp32-2x64]")
    result.stderr.fnmatch_lines(["*my_pairs.py:2: pair 'mlp': unknown precision 'fp33'*did you mean fp32?*"])


def test_a_file_that_exits_while_it_is_imported_costs_no_other_file(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    write(pytester, "import parity, sys\n\nsys.exit(3)", "exits")
    result = run(pytester, "my_pairs.py", "exits.py", "-k", "fails", "--continue-on-collection-errors")
    result.assert_outcomes(failed=2, errors=1, deselected=2 * len(PRECISIONS))
    result.stdout.fnmatch_lines(["*/exits.py:3: importing the file raised SystemExit: 3"])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_could_not_be_collected_is_in_the_record_and_the_report_of_the_others(
    pytester: pytest.Pytester, workers: int
) -> None:
    write(pytester, PAIRS + "\n    @parity.pair('misfits')\n    def misfits(te): ...\n")
    write(pytester, "import parity\n\nraise ValueError('no')", "raises")
    write(pytester, "import nothing_of_parity", "test_other")
    files = ("my_pairs.py", "raises.py", "test_other.py", "--continue-on-collection-errors")
    result = run_with_workers(pytester, workers, *files)
    assert {each.node_id: each.message for each in recorded(pytester).uncollected} == {
        "my_pairs.py::misfits": "my_pairs.py::misfits: pair 'misfits': fc1.weight is 128x64, but fc1_weight is 64x128",
        "raises.py": "raises.py:3: ValueError: no",
    }
    result.stdout.fnmatch_lines(["*; 1 pair and 1 file not collected; *"])
    report = (pytester.path / "reports" / "parity.md").read_text()
    assert report.count("not collected") == 1
    assert "fc1.weight is 128x64" in report


def test_a_mark_around_a_pair_is_told_where_marks_belong(pytester: pytest.Pytester) -> None:
    write(pytester, "import parity, pytest\n@pytest.mark.skip(reason='later')\n@parity.pair('mlp')\ndef mlp(te): ...")
    run(pytester, "my_pairs.py").stdout.fnmatch_lines(["*my_pairs.py:3: pair 'mlp': pytest marks*marks=?\"slow\"?*"])


def test_an_item_that_a_conftest_skips_is_recorded_with_the_reason(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    skip_first = "items[0].add_marker(pytest.mark.skip('too slow'))"
    pytester.makeconftest(f"import pytest\ndef pytest_collection_modifyitems(items):\n    {skip_first}")
    run(pytester, "my_pairs.py", "--parity-precisions=fp32", "-k", "mlp")
    assert [(result.status, result.reason) for result in recorded(pytester).results] == [
        ("skipped", "too slow"), ("passed", "")
    ]  # fmt: skip


def test_only_ids_that_are_not_there_are_told(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py::mlp", "my_pairs.py::mpl")
    assert [line for line in result.errlines if "pair" in line and "not found" not in line and "match" not in line] == [
        "ERROR: there is no pair 'mpl' in my_pairs.py; did you mean my_pairs.py::mlp?"
    ]


def test_a_pair_that_is_not_compared_at_the_precisions_of_the_run_is_told_with_its_own(
    pytester: pytest.Pytester,
) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py::fails", "--parity-precisions=fp16")
    result.stderr.fnmatch_lines(
        ["*the pair 'fails' of my_pairs.py has no item in this run; its precisions are bf16, fp32"]
    )
