"""The pytest plugin, on stand-ins for the comparison; ``test_cli`` runs the real one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import fakes
import pytest
import torch

from parity import registry
from parity.plugin import scheduling
from parity.precision import PRECISIONS
from parity.report import environment, record

pytest_plugins = ["pytester"]

PAIRS = """
    import parity

    @parity.pair("mlp", sizes=[dict(batch=2, hidden=64), dict(batch=4, hidden=128)], marks=["slow_one"])
    def mlp(te, batch, hidden): ...

    @parity.pair("fails", sizes=[dict(batch=2, hidden=64)], precisions=["bf16", "fp32"])
    def fails(te, batch, hidden): ...
"""
ITEMS_OF_FAILS = ["fails[fp32-2x64]", "fails[bf16-2x64]"]
AVAILABLE = [name for name, precision in PRECISIONS.items() if precision.recipe is None]
UNAVAILABLE = [name for name in PRECISIONS if name not in AVAILABLE]
COMPARED = 2 * len(AVAILABLE) + len(ITEMS_OF_FAILS)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fakes.install(monkeypatch)
    declared = registry.cases()
    yield
    registry.restore(declared)


def write(pytester: pytest.Pytester, text: str, name: str = "my_pairs") -> Path:
    return pytester.makepyfile(**{name: textwrap.dedent(text)})


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*plugin_arguments(), *arguments)


def run_with_workers(pytester: pytest.Pytester, workers: int, *arguments: str) -> pytest.RunResult:
    """Workers are processes of their own, where a conftest puts the stand-ins in place; this one is the controller."""
    tests = str(Path(fakes.__file__).parent)
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {tests!r})\nimport fakes, pytest\nfakes.install(pytest.MonkeyPatch())"
    )
    return run(pytester, "-n", str(workers), *arguments)


def plugin_arguments() -> list[str]:
    return ["-p", "parity.plugin", "-p", "no:hypothesispytest"]


def names(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    """The ids that pytest selects."""
    listed = run(pytester, "--collect-only", "-q", *arguments).outlines
    return [line.split("::", 1)[1] for line in listed if "::" in line]


def recorded(pytester: pytest.Pytester, name: str = "parity") -> record.Record:
    return record.read(pytester.path / "reports" / f"{name}.jsonl")


def test_loading_the_plugin_imports_neither_torch_nor_te() -> None:
    code = "import parity.plugin, sys; print([name for name in ('torch', 'transformer_engine') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_recording_results_and_drawing_the_report_imports_neither_torch_nor_te() -> None:
    code = (
        "import parity.plugin.recorder, parity.report.digest, parity.report.markdown, parity.report.record, sys; "
        "print([name for name in ('torch', 'transformer_engine') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


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


def test_marks_are_registered(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py", "--strict-markers", "-W", "error", "-k", "mlp")
    result.assert_outcomes(passed=2 * len(AVAILABLE), skipped=2 * len(UNAVAILABLE), deselected=2)


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
    monkeypatch.setattr("parity.validate.check_case", lambda case, te: 1 / 0)
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["E *ZeroDivisionError: division by zero"])


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
    ],
)
def test_a_bad_option_is_a_usage_error_that_lists_what_is_valid(
    pytester: pytest.Pytester, option: str, message: str
) -> None:
    result = run(pytester, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--parity-report=my_pairs.py", "*--parity-report is */my_pairs.py: that is a file, but a folder is due*"),
        ("--parity-report=my_pairs.py/deep", "*lies below */my_pairs.py*"),
        ("--parity-calibration=nope.json", "*--parity-calibration: there is no calibration table */nope.json*"),
        ("--parity-calibration=my_pairs.py", "*my_pairs.py is no calibration table*"),
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


def test_an_emulated_gpu_that_does_not_exist_is_refused_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARITY_EMULATED_GPU", "volta")
    write(pytester, PAIRS)
    result = pytester.runpytest_subprocess(*plugin_arguments(), "my_pairs.py", "-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: PARITY_EMULATED_GPU='volta' names no GPU*ada, hopper, blackwell"])


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
    result.stdout.fnmatch_lines(["*ERROR collecting my_pairs.py*", "*'mlp' is declared already*"])
    assert "raise UserError" not in result.stdout.str()


def test_an_unknown_precision_of_a_pair_is_reported_at_collection(pytester: pytest.Pytester) -> None:
    write(pytester, "import parity\n@parity.pair('mlp', precisions=['fp33'])\ndef mlp(te): ...")
    run(pytester, "my_pairs.py").stdout.fnmatch_lines(["*fp33*"])


def test_a_precision_that_is_not_available_is_skipped_with_its_reason(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py::mlp[fp8_current-2x64]", "--parity-seeds=5", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *my_pairs.py:3: no FP8 on this machine"])
    assert [(result.status, result.seed) for result in recorded(pytester).results] == [("skipped", 0)]


def test_a_failure_shows_margin_worst_tensor_findings_and_how_to_reproduce_it(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py::fails[bf16-2x64]", "--parity-seeds=3")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "margin 102 at output (2 of 3 seeds: 0, 2; worst 2)",
            "worst tensor: output (output, 2x64)",
            "*relative L2*0.31*0.003*0.001",
            "PAR101 gate-up-swapped: *",
            "reproduce: pytest 'my_pairs.py::fails[[]bf16-2x64[]]' --parity-seeds=2, --parity-backend=cpu *-n 0",
        ]
    )
    result.stdout.fnmatch_lines(["FAILED my_pairs.py::fails* - margin 102 at output*"])
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


def test_workers_results_are_merged_into_one_report(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    write(pytester, "def test_other(): pass", "test_other")
    result = run_with_workers(pytester, 2, "my_pairs.py", "test_other.py", "--parity-seeds=2")
    result.assert_outcomes(passed=COMPARED - 2 + 1, failed=2, skipped=2 * len(UNAVAILABLE))
    merged = recorded(pytester)
    assert len(merged.results) == 2 * COMPARED + 2 * len(UNAVAILABLE)
    assert merged.environment.items == 2 * len(PRECISIONS) + 2
    result.stdout.fnmatch_lines([f"*2 of {COMPARED} items failed*"])


def test_one_worker_runs_all_precisions_of_a_case_size_and_dtype(pytester: pytest.Pytester) -> None:
    sizes, dtypes = 2, {precision.dtype for precision in PRECISIONS.values()}
    write(pytester, PAIRS)
    result = run_with_workers(pytester, 2, "my_pairs.py", "-v", "-k", "mlp")
    ran = re.findall(r"\[(gw\d)\].* my_pairs.py::mlp\[(\w+)-(\w+)\]", result.stdout.str())
    assert len(ran) == sizes * len(PRECISIONS)
    assert len({(worker, PRECISIONS[precision].dtype, size) for worker, precision, size in ran}) == sizes * len(dtypes)


def test_one_worker_runs_all_dtypes_of_a_size_until_little_is_left(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        import parity

        @parity.pair("mlp", sizes=[dict(batch=100 + i, hidden=64) for i in range(12)])
        def mlp(te, batch, hidden): ...
        """,
    )
    workers = 2
    result = run_with_workers(pytester, workers, "my_pairs.py", "-v")
    ran = re.findall(r"\[(gw\d)\].* my_pairs.py::mlp\[\w+-(\w+)\]", result.stdout.str())
    assert len(ran) == 12 * len(PRECISIONS)
    split = {size for _, size in ran if len({worker for worker, of in ran if of == size}) > 1}
    at_the_end = {f"{100 + i}x64" for i in range(2 * workers + 1)}  # two for each, and one that is begun
    assert split <= at_the_end


def test_a_worker_that_crashes_fails_only_its_own_item(pytester: pytest.Pytester) -> None:
    crash = "\n    @parity.pair('kills_its_worker', sizes=[dict(n=8)], precisions=['fp32'])\n    def k(te, n): ...\n"
    write(pytester, "\n    import parity" + crash + PAIRS)
    result = run_with_workers(pytester, 1, "my_pairs.py", "--parity-precisions=fp32", "-k", "not fails")
    results = recorded(pytester).results
    assert sorted((result.case, result.status) for result in results) == [
        ("kills_its_worker", "error"), *[("mlp", "passed")] * 2
    ]  # fmt: skip
    result.stdout.fnmatch_lines(["its worker ended with exit code 3 *", "*1 of 3 items failed*"])


def test_without_workers_a_broken_device_is_not_blamed_on_the_ports_that_follow(pytester: pytest.Pytester) -> None:
    breaks = "\n    @parity.pair('breaks_the_device', sizes=[dict(n=8)], precisions=['fp32'])\n    def k(te, n): ...\n"
    write(pytester, "\n    import parity" + breaks + PAIRS)
    run(pytester, "my_pairs.py", "-k", "breaks or mlp and fp32 and 2x64").assert_outcomes(failed=2)
    broken, after = recorded(pytester).results
    assert broken.device_error == "broken"
    assert (after.status, after.device_error) == ("error", "")
    assert after.reason.startswith("not compared, since my_pairs.py::breaks_the_device[fp32-8] broke CUDA's context")
    assert "with -n 1 or more" in after.reason


def test_what_is_reported_of_the_gpu_was_asked_before_an_item_could_break_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_the_device, measure = fakes.MISHAPS["breaks_the_device"], environment.measure
    is_broken: list[bool] = []

    def breaks() -> None:
        is_broken.append(True)
        break_the_device()

    monkeypatch.setitem(fakes.MISHAPS, "breaks_the_device", breaks)
    monkeypatch.setattr(environment, "measure", lambda *asked: break_the_device() if is_broken else measure(*asked))
    write(
        pytester,
        "import parity\n@parity.pair('breaks_the_device', sizes=[dict(n=8)], precisions=['fp32'])\ndef k(te, n): ...",
    )
    run(pytester, "my_pairs.py").assert_outcomes(failed=1)
    assert recorded(pytester).results[0].device_error == "broken"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_items_of_one_case_size_and_dtype_form_a_group(precision: str) -> None:
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[PRECISIONS[precision].dtype]
    group = scheduling.group_of(f"cases/mlp.py::swiglu-2.1[{precision}-2x64-ffn_8]")
    assert group == f"cases/mlp.py::swiglu-2.1[{dtype}-2x64-ffn_8]"


def test_attention_backends_of_one_case_and_size_are_of_its_group() -> None:
    ids = [f"cases/attention.py::causal[bf16-2x64{suffix}]" for suffix in ("", "-flash", "-fused", "-unfused")]
    assert {scheduling.group_of(node_id) for node_id in ids} == {"cases/attention.py::causal[bf16-2x64]"}


def test_workers_are_given_the_largest_sizes_first(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        import parity

        @parity.pair("mlp", sizes=[dict(batch=batch, hidden=64) for batch in (1, 4, 3, 2)], precisions=["bf16"])
        def mlp(te, batch, hidden): ...
        """,
    )
    result = run_with_workers(pytester, 1, "my_pairs.py", "-v")
    begun = re.findall(r"PASSED \S+mlp\[bf16-(\d)x64\]", result.stdout.str())
    assert begun == ["4", "3", "2", "1"]


@pytest.mark.parametrize(
    ("node_id", "elements"),
    [("cases/mlp.py::mlp[bf16-2x8x64-ffn_8]", 1024), ("cases/mlp.py::mlp[bf16-scalar]", 0), ("test_x.py::y[4x4]", 0)],
)
def test_a_size_is_as_large_as_the_shape_in_its_items_id_says(node_id: str, elements: int) -> None:
    assert scheduling.first_input(node_id) == elements


@pytest.mark.parametrize("size", ["2x64", "scalar", "2x64-ffn_8", "2x64-bf16"])
def test_a_group_tells_its_case_and_size(size: str) -> None:
    assert scheduling.size_of(f"cases/mlp.py::swiglu[fp16-{size}]") == f"cases/mlp.py::swiglu[{size}]"


@pytest.mark.parametrize("node_id", ["tests/test_x.py::test_y", "tests/test_x.py::test_y[a-b]", "t.py::A::test_y[1-2]"])
def test_any_other_test_is_a_group_of_its_own(node_id: str) -> None:
    assert scheduling.group_of(node_id) == node_id
