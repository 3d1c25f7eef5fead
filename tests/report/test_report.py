"""Reports: the markdown of a run's record, repairs that can be copied, and trainings' bands."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import ENVIRONMENT, GATE_UP_SWAPPED, result, tensor
from hypothesis import given
from hypothesis import strategies as st

from parity.judge import limits
from parity.judge.limits import Difference, OfPrecision
from parity.mistakes.codes import finding
from parity.plugin.options import Options
from parity.plugin.recorder import Recorder
from parity.report import changes, earlier, environment, failure, markdown, numbers, record
from parity.report.changes import Comparison, Kind, Noise, between
from parity.report.earlier import Asked
from parity.report.environment import Environment
from parity.report.markdown import MOST_RESULTS, Curve, Digest, digest, left, over_seeds, repair, write
from parity.report.record import Item, Record, Uncollected, draw_matrix
from parity.result import Check, Code, Finding, Result, Step
from parity.trainings.band import Band, Left
from te_on_cpu import cuda
from te_on_cpu.cuda import emulated

# The markdown of a run's record, and of the changes since another record.


# The markdown of a run's record.


def digest_of(*results: Result, planned: int | None = None) -> Digest:
    found = digest(Record(ENVIRONMENT, results))
    found.environment = replace(ENVIRONMENT, items=found.counts.total() if planned is None else planned)
    return found


def gathered(*results: Result) -> list[Item]:
    return digest_of(*results).items


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.4321, "0.43"),
        (1.0, "1"),
        (99.6, "100"),
        (140.2, "140"),
        (0.000287, "0.00029"),
        (2.87e-6, "2.9e-6"),
        (999.4, "999"),
        (33078.0, "3.3e4"),
        (1.2e9, "1.2e9"),
        (-31.24, "-31"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (math.nan, "–"),
    ],
)
def test_a_number_has_two_significant_digits(value: float, text: str) -> None:
    assert numbers.short(value) == text


@given(st.floats(min_value=1e-30, max_value=1e30))
def test_a_short_number_is_within_five_percent(value: float) -> None:
    assert float(numbers.short(value)) == pytest.approx(value, rel=0.0501)


def test_a_cosine_near_one_shows_its_distance_from_one() -> None:
    assert numbers.cosine(1 - 4.2e-8) == "1 - 4.2e-8"
    assert numbers.cosine(1.0) == "1"
    assert numbers.cosine(0.5) == "0.5"


def test_seeds_that_follow_each_other_are_a_range() -> None:
    assert numbers.seeds(tuple(range(20))) == "0 to 19"
    assert numbers.seeds((0, 3, 7)) == "0, 3, 7"
    assert numbers.seeds((4,)) == "4"


def test_the_environment_names_the_gpu_that_is_emulated() -> None:
    assert environment.measure("cpu", (0,), 1).device == "CPU, as an emulated Hopper (compute capability 9.0)"
    with emulated(cuda.BLACKWELL):
        assert environment.measure("cpu", (0,), 1).device == "CPU, as an emulated Blackwell (compute capability 10.0)"


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"top_level.txt": "some_package\n"}, "Its-Name"),
        ({"RECORD": "some_package/__init__.py,,\n"}, "Its-Name"),
        ({"top_level.txt": "another_package\n"}, "some_package"),
    ],
)
def test_who_installed_a_package_is_told_by_what_it_declares_or_by_its_files(
    files: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, package = tmp_path / "its_name-1.0.dist-info", tmp_path / "some_package"
    for each in (folder, package):
        each.mkdir()
    (package / "__init__.py").touch()
    for file, text in {"METADATA": "Metadata-Version: 2.1\nName: Its-Name\nVersion: 1.0\n", **files}.items():
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert environment.distribution("some_package") == name


def test_the_environment_names_versions_but_no_folder() -> None:
    measured = environment.measure("cpu", (0, 1), 7)
    assert "" not in (measured.torch, measured.python, measured.transformer_engine, measured.cpu, measured.date)
    assert measured.kernels.startswith("emulated")
    assert not [
        text for text in vars(measured).values() if str(Path.home()) in str(text) or str(Path.cwd()) in str(text)
    ]


def test_a_gpus_libraries_and_driver_are_in_the_report() -> None:
    gpu = replace(ENVIRONMENT, cublas="13.2.0", cudnn="91500", driver="580.65.06", golden="GPU: measured")
    text = markdown.draw(digest(Record(gpu, (result(),))), "run")
    for row in ("cuBLAS | 13.2.0", "cuDNN | 91500", "driver | 580.65.06", "golden in FP64 | GPU: measured"):
        assert row in re.sub(" +", " ", text)


def test_cublas_is_asked_of_the_extension_and_the_driver_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    extension = SimpleNamespace(get_cublasLt_version=lambda: 120804)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", extension)
    assert environment.cublas_version() == "12.8.4"
    monkeypatch.delitem(sys.modules, "transformer_engine_torch")
    assert environment.cublas_version() == ""
    said = SimpleNamespace(stdout="580.65.06\n580.65.06\n")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: said)
    assert environment.driver_version() == "580.65.06"


def test_a_driver_that_nvidia_smi_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment.driver_version() == ""


def test_a_case_says_which_attention_ran_where() -> None:
    ran = [result(precision="bf16", attention="fused (F16)"), result(precision="fp32", attention="unfused")]
    forced = result(precision="bf16", attention="unfused", forced_attention="unfused")
    text = markdown.draw(digest_of(*ran, forced), "run")
    assert re.search(r"\| bf16 +\| 2x64-unfused \|", text)
    assert "Attention: unfused in fp32-2x64, bf16-2x64-unfused; fused (F16) in bf16-2x64." in text
    assert "bf16-2x64-unfused]' --parity-seeds=0, --parity-backend=cpu" in failure.reproduce(forced)
    assert failure.reproduce(forced).endswith("--parity-attention=unfused -n 0")


def test_limits_from_a_table_are_told_and_are_part_of_the_command() -> None:
    run = digest_of(result(margin=140.0))
    run.environment = replace(run.environment, limits="my limits.json")
    text = markdown.draw(run, "run")
    assert re.search(r"\| limits +\| my limits.json ", text)
    assert "--parity-calibration='my limits.json' -n 0" in section(text, "Failed")
    assert "calibration" not in markdown.draw(digest_of(result(margin=140.0)), "run")


OF_BF16 = OfPrecision(
    "bf16",
    shared=24,
    wider=23,
    tighter=0,
    widest=Difference("output", "norm", 351.2, 1.728),
    tightest=Difference("output", "shift", 2.0, 1.6),
    unknown=1,
    accepted="23 limits far outside of the packaged ones",
)


def test_limits_that_are_wider_than_the_packaged_ones_are_told_in_the_verdict_and_by_precision() -> None:
    run = digest_of(result())
    run.environment = replace(run.environment, limits="mine.json", limits_compared=(OF_BF16,))
    told = (
        "mine.json (bf16 norm of outputs 351 instead of 1.7, 203 times as wide, is the largest difference; 23 of 24 "
        "limits are more than 2 times as wide as the packaged ones; accepted when the table was made)"
    )
    text = markdown.draw(run, "run")
    assert markdown.verdict(run).endswith(f"; limits of {told}")
    assert f"| {told} |" in text
    row = next(line for line in section(text, "Limits").splitlines() if line.startswith("| bf16"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("bf16", "23", "0", "24", "norm of outputs 351 instead of 1.7", "203"),
        *("shift of outputs 2 instead of 1.6", "1.2", "1", "23 limits far outside of the packaged ones"),
    ]


@pytest.mark.parametrize(
    ("compared", "told"),
    [
        (None, "mine.json (this record does not say how they differ from the packaged ones)"),
        ((), "mine.json (the same as the packaged ones)"),
        (
            (replace(OF_BF16, wider=0, tighter=5, widest=Difference("output", "norm", 1.5, 1.6)),),
            "mine.json (none is wider than the packaged ones, and 5 of 24 less than 1/2 as wide)",
        ),
        (
            (OfPrecision("bf16", 0, 0, 0, None, None, 3),),
            "mine.json (the packaged table has none for these precisions, so that they were compared with nothing)",
        ),
    ],
)
def test_other_limits_are_told_as_far_as_they_are_known(compared: tuple[OfPrecision, ...] | None, told: str) -> None:
    run = digest_of(result())
    run.environment = replace(run.environment, limits="mine.json", limits_compared=compared)
    assert markdown.verdict(run).endswith(f"; limits of {told}")


def test_the_packaged_limits_are_not_told() -> None:
    assert "limits of" not in markdown.verdict(digest_of(result()))
    assert "## Limits" not in markdown.draw(digest_of(result()), "run")


def test_what_could_not_be_collected_is_told_before_what_failed() -> None:
    run = digest_of(result(margin=140.0))
    run.uncollected["my_pairs.py::misfits"] = Uncollected("my_pairs.py::misfits", "fc1.weight is 128x64")
    text = markdown.draw(run, "run")
    assert "; 1 pair not collected; " in markdown.verdict(run)
    assert "`my_pairs.py::misfits`:\n\n```text\nfc1.weight is 128x64\n```" in section(text, "Not collected")
    assert text.index("## Not collected") < text.index("## Failed")


def test_a_precision_that_a_damaged_record_names_is_text_in_the_verdict() -> None:
    skipped = result(precision="<script>alert(1)</script>", status="skipped")
    assert "; 1 skipped (&lt;script>alert(1)&lt;/script>); " in markdown.verdict(digest_of(result(), skipped))


def test_an_item_is_as_bad_as_its_worst_seed() -> None:
    [item] = gathered(result(seed=2, margin=3.0), result(seed=0), result(seed=1, margin=5.0))
    assert (item.status, item.worst.seed, [bad.seed for bad in item.bad]) == ("failed", 1, [1, 2])


def test_an_error_is_worse_than_a_failure() -> None:
    [item] = gathered(result(margin=9.0), result(seed=1, status="error", tensors=(), reason="no"))
    assert item.status == "error"


@given(st.permutations([("mlp", "fp32"), ("mlp", "fp8_current"), ("mlp", "bf16"), ("linear", "fp16")]))
def test_the_order_of_items_does_not_depend_on_that_of_arrival(arrival: list[tuple[str, str]]) -> None:
    items = gathered(*(result(case, precision) for case, precision in arrival))
    assert [(item.case, item.precision) for item in items] == [
        ("linear", "fp16"), ("mlp", "fp32"), ("mlp", "bf16"), ("mlp", "fp8_current")
    ]  # fmt: skip


def test_sizes_are_ordered_by_their_numbers() -> None:
    items = gathered(*(result(size_label=label) for label in ("128x64", "16x64", "2x64")))
    assert [item.size_label for item in items] == ["2x64", "16x64", "128x64"]


def test_an_item_that_ended_before_its_first_result_leaves_the_report_to_the_others(tmp_path: Path) -> None:
    recorder = Recorder(Options(None, "cpu", (0,), tmp_path, "run"))
    for lines in ([], [record.result_line(result())]):
        sent = {"environment": record.environment_line(ENVIRONMENT), "results": lines}
        recorder.pytest_runtest_logreport(SimpleNamespace(parity_lines=sent))  # type: ignore[arg-type]
    recorder.finish()
    assert "1 of 1 item passed" in (tmp_path / "run.md").read_text()


def test_results_of_an_item_that_arrive_apart_are_one_item() -> None:
    first, other, second = result(margin=0.2), result("norm"), result(seed=1, margin=3.0)
    run = Digest(ENVIRONMENT)
    for one in (first, other, second):
        run.add([one])
    assert run.counts == {"failed": 1, "passed": 1}
    assert [len(item.results) for item in run.items if item.case == first.case] == [2]


def test_of_a_long_run_the_worst_items_of_each_case_and_precision_are_kept_and_all_are_counted() -> None:
    run = Digest(ENVIRONMENT)
    for i in range(3 * MOST_RESULTS):
        run.add([result("mlp" if i % 3 else "norm", size_label=str(i), margin=(i + 1) / (3 * MOST_RESULTS))])
    run.add([result("linear")])
    kept = run.items
    assert run.counts.total() == 3 * MOST_RESULTS + 1
    assert len(kept) <= MOST_RESULTS
    assert {item.case for item in kept} == {"linear", "mlp", "norm"}
    worst = [item.size_label for item in kept if item.case == "mlp"]
    assert worst[-1] == str(3 * MOST_RESULTS - 1)
    assert min(map(int, worst)) > 3 * MOST_RESULTS / 2


def test_the_statistics_of_what_passed_are_not_kept_since_no_report_shows_them() -> None:
    run = digest_of(result("mlp"), result("norm", margin=9.0))
    kept = {item.case: [bool(tensor.checks) for tensor in item.worst.tensors] for item in run.items}
    assert kept == {"mlp": [False, False], "norm": [True, True]}


def test_a_report_says_the_same_as_if_all_of_each_result_were_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [result(case, precision) for case in ("mlp", "norm") for precision in ("fp32", "bf16")]
    results += [result("linear", seed=0), result("linear", seed=1, margin=9.0)]
    kept = digest_of(*results)
    monkeypatch.setattr(markdown, "_trim_result", lambda result, _: result)
    whole = digest_of(*results)
    assert kept.items != whole.items
    assert markdown.draw(kept, "run") == markdown.draw(whole, "run")


def test_results_share_the_names_and_shapes_that_are_alike() -> None:
    first, second = (record.result_of(record.result_line(result(case))) for case in ("mlp", "norm"))
    kept = [item.worst.tensors[0] for item in digest_of(first, second).items]
    assert kept[0].name is kept[1].name
    assert kept[0].shape is kept[1].shape


def test_the_report_of_a_long_run_says_how_many_items_it_leaves_out() -> None:
    run = digest_of(*(result(size_label=str(i)) for i in range(MOST_RESULTS + 1)))
    text = markdown.draw(run, "run")
    assert f"Of {MOST_RESULTS + 1:,} items" in text
    assert f"the other {MOST_RESULTS + 1 - len(run.items):,} as well" in text
    assert f"{MOST_RESULTS + 1} of {MOST_RESULTS + 1} items passed" in text


def test_the_report_shows_every_tensor_of_a_failure_and_the_worst_of_an_item_that_passed() -> None:
    passed = result("passes", tensors=tuple(tensor(f"output[{i}]", margin=(i + 1) / 8) for i in range(8)))
    fails = result("fails", margin=140.0)
    shown = section(markdown.draw(digest_of(passed, fails), "run"), "Case by case")
    assert [f"`output[{i}]`" for i in range(8) if f"`output[{i}]`" in shown] == ["`output[7]`"]
    assert "`d fc1.weight`" in shown


def test_the_matrix_shows_the_worst_margin_over_sizes_and_seeds() -> None:
    text = draw_matrix(
        gathered(
            *[
                result(margin=0.2),
                result(seed=1, margin=0.43),
                result(size_label="4x128", margin=0.3),
                result(precision="fp32", margin=0.3),
                result(precision="fp32", size_label="4x128", margin=140.0),
                result(precision="fp16", status="skipped", tensors=()),
                result(precision="fp8_current", status="error", tensors=()),
                result(case="norm"),
            ]
        )
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0] == ["case", "fp32", "bf16", "fp16", "fp8_current"]
    assert rows[2] == ["`mlp`", "❌ 140", "✅ 0.43", "–", "💥 error"]
    assert rows[3] == ["`norm`", "", "✅ 0.43", "", ""]


def test_the_matrix_has_a_row_for_each_number_of_ranks() -> None:
    over = [result(size_label=f"2x64-{ranks}", ranks=ranks, margin=0.3) for ranks in ("tp2", "tp2-sp")]
    text = draw_matrix(gathered(result(), *over, result(size_label="4x64-tp2", ranks="tp2", margin=140.0)))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[2:] == [["`mlp`", "✅ 0.43"], ["`mlp`, tp2", "❌ 140"], ["`mlp`, tp2-sp", "✅ 0.3"]]


def test_the_verdict_counts_items_that_ran() -> None:
    skipped = result("norm", status="skipped", tensors=(), reason="no FP8")
    assert markdown.verdict(digest_of(result(), skipped)) == (
        "✅ 1 of 1 item passed, worst margin 0.43 at `mlp[bf16-2x64]`; 1 skipped (bf16); emulated kernels"
    )
    assert markdown.verdict(digest_of(result(), result("norm", margin=140.0))) == (
        "❌ 1 of 2 items failed, worst margin 140 at `norm[bf16-2x64]`; emulated kernels"
    )


def test_skips_alone_are_no_success() -> None:
    skipped = result(status="skipped", tensors=(), reason="no FP8")
    assert markdown.verdict(digest_of(skipped)).startswith("⚠️ nothing was compared")


def test_items_without_a_result_show_in_the_verdict() -> None:
    verdict = markdown.verdict(digest_of(result(), planned=3))
    assert verdict.startswith("⚠️ 1 of 1 item passed")
    assert "2 items without a result: the run was cut short or a worker crashed" in verdict


def test_the_report_says_prominently_whether_kernels_were_emulated() -> None:
    assert "**emulated: " in markdown.draw(digest_of(result()), "run")
    real = Record(replace(ENVIRONMENT, backend="gpu", device="NVIDIA H100", cuda="13.0"), (result(),))
    text = markdown.draw(digest(real), "run")
    assert "**real: " in text
    assert "NVIDIA H100" in text


def test_the_report_explains_how_tolerances_are_set() -> None:
    assert limits.describe() in markdown.draw(digest_of(result()), "run")


def test_the_report_shows_the_expected_fp32_error_as_that_of_tf32() -> None:
    text = markdown.draw(digest_of(result(precision="fp32")), "run")
    assert "Expected FP32 error (TF32 in GEMMs) of `output` at 2x64: relative L2 0.001, max abs 0.004." in text
    assert "TF32" not in markdown.draw(digest_of(result(precision="bf16")), "run")


def test_failures_come_with_findings_and_a_command() -> None:
    text = section(markdown.draw(digest_of(result(margin=140.0, seed=3)), "run"), "Failed")
    assert "### ❌ 140 `mlp[bf16-2x64]`" in text
    assert "- **PAR101 gate-up-swapped**: fc1_weight matches with its halves exchanged" in text
    assert "pytest 'my_pairs.py::mlp[bf16-2x64]' --parity-seeds=3, --parity-backend=cpu" in text


def test_a_note_is_counted_once_an_item_though_every_seed_or_part_of_it_repeats_it() -> None:
    run = Digest(ENVIRONMENT)
    run.add([result(seed=seed, notes=("no TE",)) for seed in (0, 1)])
    run.add([result(seed=2, notes=("no TE",))])
    run.add([result("norm", notes=("no TE", "zero"))])
    assert run.notes == {"no TE": 2, "zero": 1}


def test_a_terminal_shows_the_commonest_notes_and_how_many_others_there_are() -> None:
    told = list(
        failure.lines(Counter({"rare": 1, **{f"common {i}": 2 for i in range(failure.MOST_LINES)}, "rarer": 1}))
    )
    assert told[0] == "note of 2 items: common 0"
    assert told[-1] == "and 2 more in the report"
    assert len(told) == failure.MOST_LINES + 1


def test_a_long_note_is_cut_for_a_terminal() -> None:
    [line] = failure.lines(Counter({"zero: " + ", ".join(f"d layer{i}.weight" for i in range(500)): 1}))
    assert line.endswith(" ...")
    assert len(line) < 250


def test_notes_of_items_that_the_report_leaves_out_are_in_it() -> None:
    run = digest_of(*(result(size_label=str(i), notes=(f"note {i // 900}",)) for i in range(2 * MOST_RESULTS)))
    told = section(markdown.draw(run, "run"), "Notes")
    assert all(f"- note {i} (" in told for i in range(3))
    assert "items not shown here)" in told


def test_a_run_without_failures_has_no_section_for_them() -> None:
    text = markdown.draw(digest_of(result()), "run")
    assert "## Failed" not in text
    assert "## Skipped" not in text


def test_skipped_items_are_listed_by_reason() -> None:
    skips = [result(case, status="skipped", tensors=(), reason="no FP8") for case in ("mlp", "norm")]
    assert "- no FP8: `mlp[bf16-2x64]`, `norm[bf16-2x64]`" in markdown.draw(digest_of(*skips), "run")


def test_a_tensors_row_is_that_of_its_own_worst_seed() -> None:
    results = [
        result(seed=0, margin=9.0, tensors=(tensor(margin=9.0), tensor("x", "input gradient", 0.2))),
        result(seed=1, margin=3.0, tensors=(tensor(margin=3.0), tensor("x", "input gradient", 0.7))),
    ]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in markdown.draw(digest_of(*results), "run").splitlines()
        if line.startswith("| bf16")
    ]
    assert [(row[2], row[-2], row[-1]) for row in rows] == [
        ("`output`", "❌ 9", "0 of 2"),
        ("`d x`", "✅ 0.7", "1 of 2"),
    ]


def test_a_nan_is_counted_and_located() -> None:
    bad = tensor(margin=math.inf, nans=3, first_non_finite=(0, 7))
    text = markdown.draw(digest_of(result(margin=math.inf, tensors=(bad,))), "run")
    assert "3 NaN, first at [0, 7]" in section(text, "Case by case")
    assert "❌ ∞" in text


def test_details_are_folded_and_closed() -> None:
    text = markdown.draw(digest_of(result(), result("norm")), "run")
    assert text.count("<details>") == text.count("</details>") == 3  # one of them explains the words


def test_the_message_of_a_failure_repeats_no_finding() -> None:
    [item] = gathered(*(result(seed=seed, margin=9.0) for seed in range(3)))
    assert failure.message(item).count("PAR101") == 1


WHAT = "what: mlp[bf16-2x64] differs from the reference at output: "


def test_the_message_of_a_failure_tells_what_why_the_evidence_and_how_to_see_it_again() -> None:
    further = Finding("PAR401", "eps", "the norm has another eps")
    [item] = gathered(result(margin=9.0, findings=(GATE_UP_SWAPPED, further)))
    first, what, why, also, worst, *evidence, reproduce = failure.message(item).splitlines()
    assert first == "PAR101 gate-up-swapped: margin 9 at output (seed 0)"
    assert what == f"{WHAT}the error is up to 9 times its limit (the margin; up to 1 passes)"
    assert (why, also) == (f"why: {GATE_UP_SWAPPED.message}", "why, too: PAR401 eps: the norm has another eps")
    assert worst == "worst tensor: output (2x64; output)"
    assert [" ".join(line.split()) for line in evidence[-3:]] == [
        "(expected: what rounding to bf16 costs the reference; tolerance: the most that passes)",
        "error of the over expected limit",
        "whole tensor 16x 1.8x",
    ]
    assert reproduce == f"reproduce: {failure.reproduce(item.worst)}"


def test_a_finding_begins_with_its_place() -> None:
    placed = replace(GATE_UP_SWAPPED, place="in layers.2, between the inputs and the 1st 'linear' of down")
    [item] = gathered(result(margin=9.0, findings=(placed,)))
    where, why = failure.message(item).splitlines()[2:4]
    assert where == f"where: the candidate departs from the reference {placed.place}"
    assert why == f"why: {placed.message}"
    text = markdown.draw(digest_of(result(findings=(placed,), margin=9.0)), "run")
    assert f"**PAR101 gate-up-swapped**: {placed.place}: " in text


@pytest.mark.parametrize(
    ("message", "repair", "told"),
    [
        ("it falls to 0.1 if you pass eps=1e-6. But so it does by x", "pass eps=1e-6",
         ["why: it falls to 0.1 with this repair. But so it does by x", "repair: pass eps=1e-6"]),
        ("it contains 1 times what eps changes; pass eps=1e-6", "pass eps=1e-6",
         ["why: it contains 1 times what eps changes", "repair: pass eps=1e-6"]),
        ("its repair is said otherwise", "pass eps=1e-6",
         ["why: its repair is said otherwise", "repair: pass eps=1e-6"]),
        ("halves are exchanged", "", ["why: halves are exchanged"]),
    ],
)  # fmt: skip
def test_a_repair_follows_its_finding_in_a_line_of_its_own(message: str, repair: str, told: list[str]) -> None:
    finding = Finding("PAR201", "norm-eps", message, repair=repair)
    [item] = gathered(result(margin=9.0, findings=(finding,)))
    lines = failure.message(item).splitlines()
    assert [line for line in lines if line.startswith(("why", "repair"))] == told


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (Check("norm", 95.0, 1.7), "whole tensor 95x 1.7x"),
        (Check("largest", 127.0, 2.3, "element 23, 38"), "largest element, at [23, 38] 127x 2.3x"),
        (Check("largest", 127.0, 2.3, "element "), "largest element 127x 2.3x"),  # of a single number
        (Check("row", 9.0, 1.8, "row at 0, 7"), "worst row, at [0, 7] 9x 1.8x"),
        (Check("slice", 8.7e3, 2.2, "dim 0 at 18"), "slice 18 of dimension 0 8.7e3x 2.2x"),
        (Check("slice", 9.0, 2.2, "row at 3, 5"), "worst slice, at [3, 5] 9x 2.2x"),
        (Check("shift", 101.0, 1.7), "mean over rows, as a bias would shift it 101x 1.7x"),
        (Check("gain", -118.0, 6.1), "all of it, by one factor -118 σ 6.1 σ"),
        (Check("mistake", 9.0, 6.1, "norm eps=1e-6"), "along the change of a known mistake: norm eps=1e-6 9 σ 6.1 σ"),
    ],
)
def test_each_check_that_failed_is_told_in_words(check: Check, told: str) -> None:
    bad = replace(tensor(margin=9.0), checks=(check, Check("norm", 0.9, 1.7)))
    [item] = gathered(result(margin=9.0, tensors=(bad,)))
    evidence = [" ".join(line.split()) for line in failure.measures(item.worst)]
    assert told in evidence
    assert ("(σ: standard deviations of what rounding alone does)" in evidence) == ("σ" in told)
    assert not any("0.9" in line for line in evidence)


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ({"nans": 3, "first_non_finite": (0, 7)}, "there are numbers that are not finite"),
        ({}, "no error is expected there"),
    ],
)
def test_a_margin_without_a_number_is_told_by_its_cause(counts: dict[str, Any], told: str) -> None:
    bad = tensor(margin=math.inf, **counts)
    [item] = gathered(result(margin=math.inf, tensors=(bad,), findings=()))
    assert failure.message(item).splitlines()[1] == WHAT + told


def test_what_could_not_be_compared_is_told_by_its_reason_alone() -> None:
    [item] = gathered(ERROR)
    first, *others = failure.message(item).splitlines()
    assert first == "the candidate raised ValueError: no (seed 0)"
    assert [line.split()[0] for line in others] == ["reproduce:"]


def test_the_message_of_a_failure_without_findings_begins_with_the_margin() -> None:
    [item] = gathered(result(margin=9.0, findings=()))
    first, _, evidence, *_ = failure.message(item).splitlines()
    assert (first, evidence.split(":")[0]) == ("margin 9 at output (seed 0)", "worst tensor")


def test_what_is_emulated_is_part_of_the_command_that_reproduces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_EMULATED_GPU", "blackwell")
    [item] = gathered(result(margin=9.0))
    assert "\nreproduce: PARITY_EMULATED_GPU=blackwell pytest 'my_pairs.py::mlp[bf16-2x64]'" in failure.message(item)


def test_a_training_is_reproduced_with_its_steps() -> None:
    assert " --parity-steps=3 " in failure.reproduce(result(size_label="2x64-steps3-resume"))
    assert " --parity-decoding=yes " in failure.reproduce(result(size_label="2x64-decoding"))
    assert "--parity-steps" not in failure.reproduce(result())


def test_the_report_of_a_failure_has_its_findings_before_its_numbers() -> None:
    text = section(markdown.draw(digest_of(result(margin=9.0)), "run"), "Failed")
    assert text.index("**PAR101 gate-up-swapped**") < text.index("worst tensor: output")


def test_a_failure_says_at_how_many_seeds() -> None:
    [item] = gathered(result(seed=0), result(seed=4, margin=9.0), result(seed=5, margin=7.0))
    assert failure.headline(item) == "margin 9 at output (2 of 3 seeds: 4, 5; worst 4)"


# What changed from one run to another, and how it is shown.


FAILED = result(margin=9.0)
ERROR = result(status="error", tensors=(), reason="the candidate raised ValueError: no")
SKIPPED = result(status="skipped", tensors=(), reason="no FP8")


def with_check(check: Check, golden: float = 1.0, digest: str = "", seed: int = 0) -> Result:
    """Return a result whose only tensor, of 65,536 elements, has this statistic."""
    errors = replace(tensor().errors, golden_rms=golden)
    one = replace(tensor(), shape=(256, 256), checks=(check,), margin=check.margin, errors=errors, digest=digest)
    return result(tensors=(one,), seed=seed)


def with_norm(value: float, **fields: Any) -> Result:
    return with_check(Check("norm", value, limits.packaged().limit("bf16", "output", "norm")), **fields)


def with_gain(value: float, **fields: Any) -> Result:
    return with_check(Check("gain", value, limits.packaged().limit("bf16", "output", "gain")), **fields)


def compared(before: list[Result], after: list[Result], then: Environment = ENVIRONMENT) -> Comparison:
    return Comparison(Record(then, tuple(before)), Record(ENVIRONMENT, tuple(after)), ("old", "new"))


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (result(), FAILED, "newly failing"),
        (result(), ERROR, "newly failing"),
        (SKIPPED, FAILED, "newly failing"),
        (None, FAILED, "newly failing"),
        (FAILED, result(), "newly passing"),
        (ERROR, result(), "newly passing"),
        (SKIPPED, result(), "newly passing"),
        (None, result(), "new"),
        (FAILED, None, "gone"),
        (FAILED, ERROR, "otherwise"),
        (result(), SKIPPED, "otherwise"),
        (with_norm(1.0), with_norm(1.4), "regressed"),
        (with_norm(1.0), with_norm(1.01), "within noise"),
        (with_norm(0.2), with_norm(0.9), "within noise"),  # an expected error is no regression
        (with_norm(1.4), with_norm(1.0), "improved"),
        (FAILED, result(margin=90.0), "regressed"),
        (FAILED, result(margin=math.inf), "regressed"),
        (with_gain(0.5), with_gain(4.9), "regressed"),
        (with_gain(-2.0), with_gain(2.5), "regressed"),
        (with_gain(0.5), with_gain(1.5), "within noise"),
        (with_norm(1.0, golden=1.0), with_norm(1.4, golden=1.1), "other numbers"),
        (with_norm(1.0, digest="one"), with_norm(1.0, digest="one"), "same bytes"),
        (with_norm(1.0, digest="one"), with_norm(1.4, digest="one"), "same bytes"),  # parity expects less than before
        (with_norm(1.0, digest="one"), with_norm(1.0, digest="two"), "within noise"),
        (with_norm(1.0, digest="one"), with_norm(1.4, digest="two"), "regressed"),
        (SKIPPED, SKIPPED, "not compared"),
        (result(margin=math.inf), result(margin=math.inf), "within noise"),
    ],
)
def test_an_item_has_one_kind_of_change(before: Result | None, after: Result | None, kind: Kind) -> None:
    [change] = between(filter(None, [before]), filter(None, [after]))
    assert change.kind(Noise("alike", len(change.statistics))) == kind


def test_what_other_kernels_may_do_is_told_and_is_no_regression() -> None:
    [change] = between([with_norm(1.0)], [with_norm(1.4)])
    assert change.kind(Noise("others", len(change.statistics))) == "grown"


def test_one_seed_is_enough_to_regress() -> None:
    [change] = between([with_norm(1.0), with_norm(1.0, seed=1)], [with_norm(1.0), with_norm(1.4, seed=1)])
    assert [each.seed for each in change.grown(Noise("alike", 2))] == [1]


def test_the_more_is_compared_the_more_noise_may_have_made() -> None:
    [change] = between([with_gain(0.5)], [with_gain(2.8)])
    assert [change.kind(Noise("alike", count)) for count in (1, 20_000)] == ["regressed", "within noise"]


@pytest.mark.parametrize(
    ("field", "value", "alike"),
    [
        ("date", "2027-01-01T00:00Z", True),
        ("cpu", "another", True),
        ("python", "3.12.0", True),
        ("torch", "2.14.0", False),
        ("transformer_engine", "2.21.0", False),
        ("device", "NVIDIA B200", False),
        ("cublas", "13.9.0", False),
        ("driver", "999.0", False),
        ("asked", Asked({"--parity-attention": "fused"}), False),
        ("asked", Asked({}, code={earlier.VARIABLES: "two"}), False),
        ("asked", None, False),
    ],
)
def test_what_noise_is_depends_on_what_differs(field: str, value: Any, alike: bool) -> None:
    then = replace(ENVIRONMENT, asked=Asked({}, code={earlier.VARIABLES: "one"}))
    assert earlier.kernels_round_alike(then, replace(then, **{field: value})) is alike


def test_an_item_is_the_same_wherever_the_run_was_started() -> None:
    [change] = between([result(path="my_pairs.py")], [result(path="models/my_pairs.py")])
    assert change.kind(Noise("alike", 1)) == "within noise"


def test_the_verdict_counts_every_kind_of_change() -> None:
    before = [result(), result("norm", margin=3.0), result("linear"), result("rope")]
    after = [FAILED, result("norm"), result("linear", margin=0.9), result("attention")]
    assert changes.verdict(compared(before, after)) == (
        "❌ 1 item newly failing, 1 grown as other kernels could explain, 1 newly passing, 1 new, 1 gone"
    )
    assert changes.verdict(compared(before, before)) == "✅ nothing regressed, 4 changed within noise"


def test_a_regression_is_told_tensor_by_tensor_with_what_noise_alone_does() -> None:
    then = replace(ENVIRONMENT, asked=Asked({}))
    runs = Comparison(Record(then, (with_norm(1.0),)), Record(then, (with_norm(1.4),)), ("old", "new"))
    assert "regressed: mlp[bf16-2x64], output (seed 0): norm 1, now 1.4, 1.4 times; noise: " in "\n".join(
        changes.lines(runs)
    )
    [row] = [row for row in changes.draw(runs).splitlines() if row.startswith("| `mlp[bf16-2x64]`")]
    assert [cell.strip() for cell in row.strip("|").split("|")][1:7] == [
        *("0", "`output`", "norm", "1 (margin 0.58)", "1.4 (margin 0.81)", "1.4 times"),
    ]


def test_what_differs_between_the_runs_comes_first() -> None:
    then = replace(ENVIRONMENT, torch="2.12.0", asked=Asked({"--parity-attention": "auto"}))
    now = replace(ENVIRONMENT, asked=Asked({"--parity-attention": "fused"}))
    runs = Comparison(Record(then, (result(),)), Record(now, (result(),)), ("old", "new"))
    first = ["PyTorch: 2.12.0, now 2.13.0", "--parity-attention was 'auto', now it is 'fused'"]
    assert list(changes.lines(runs))[:2] == [f"differs: {each}" for each in first]
    text = changes.draw(runs)
    assert text.index("PyTorch: 2.12.0") < text.index("nothing regressed")


def test_runs_that_have_nothing_in_common_are_told_to() -> None:
    assert changes.verdict(compared([result("norm")], [result()])).startswith("⚠️ the runs have no item in common; ")


def test_the_report_shows_margins_before_and_now_with_the_finding() -> None:
    rows = changes.draw(compared([result()], [FAILED])).splitlines()
    [row] = [row for row in rows if row.startswith("| `mlp[bf16-2x64]`")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["`mlp[bf16-2x64]`", "✅ 0.43", "❌ 9", "`output`", "PAR101 gate-up-swapped"]


def test_the_report_names_both_machines_and_versions_and_marks_what_differs() -> None:
    then = replace(ENVIRONMENT, cpu="An Older Processor", transformer_engine="2.19.0", torch="2.12.0", seeds=(0, 1))
    text = changes.draw(compared([result()], [result()], then))
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("|")]
    assert ["processor", "An Older Processor", "A Processor", "≠"] in rows
    assert ["TransformerEngine", "2.19.0", "2.20.2", "≠"] in rows
    assert ["PyTorch", "2.12.0", "2.13.0", "≠"] in rows
    assert ["Python", "3.11.7", "3.11.7", ""] in rows
    assert ["seeds", "0, 1", "0", "≠"] in rows


def test_what_could_not_be_collected_is_named() -> None:
    runs = compared([result()], [result()])
    broken = replace(runs.after, uncollected=(Uncollected("my_pairs.py::misfits", "fc1.weight is 128x64"),))
    assert re.search(r"\| not collected +\| +\| my_pairs.py::misfits +\| ≠", changes.draw(replace(runs, after=broken)))


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (result(), "<Result mlp[bf16-2x64], seed 0: passed, margin 0.43>"),
        (result(margin=80.0), "<Result mlp[bf16-2x64], seed 0: failed, margin 80; PAR101 gate-up-swapped>"),
        (result(status="failed", margin=0.5), "<Result mlp[bf16-2x64], seed 0: failed, within its limits>"),
        (result(status="skipped", tensors=(), reason="no FP8"), "<Result mlp[bf16-2x64], seed 0: skipped, no FP8>"),
    ],
)
def test_a_result_is_shown_in_a_line(one: Result, told: str) -> None:
    assert repr(one) == told


def test_what_was_not_compared_comes_with_its_reason() -> None:
    assert "| – no FP8 |" in changes.draw(compared([result()], [SKIPPED]))


@pytest.mark.parametrize("page", ["docs/design.md", "docs/statistics.md", "the report"])
def test_a_margin_is_defined_by_the_same_words_everywhere(page: str) -> None:
    if page == "the report":
        text = markdown.draw(digest_of(result()), "mine")
    else:
        text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    assert limits.MARGIN in text


# What can be copied of a finding's repair.


@pytest.mark.parametrize(
    ("sentence", "now", "then"),
    [
        ('pass normalization="RMSNorm"; TE subtracts the mean', [], ['normalization="RMSNorm"']),
        (
            "give TE window_size=(-1, 0), the number of keys that a query sees before and after its own; "
            "in the port, it sees 16",
            [],
            ["window_size=(-1, 0)"],
        ),
        (
            "give TE num_attention_heads=8, as the reference has; the port has 4, of 32 channels",
            [],
            ["num_attention_heads=8"],
        ),
        ("exchange the halves of fc1_weight; the gate comes first", [], []),
        ("", [], []),
    ],
)
def test_a_repair_is_a_change_of_lines_where_it_names_code(sentence: str, now: list[str], then: list[str]) -> None:
    found = repair(finding("norm-eps", "the error falls", repair=sentence))
    assert (list(found.now), list(found.then)) == (now, then)
    assert found.to_copy == ("\n".join(then) or sentence)


def test_lines_that_a_finding_has_come_before_what_its_sentence_names() -> None:
    code = Code(("eps=1e-05",), ("eps=1e-06",))
    found = repair(finding("norm-eps", "the error falls", repair="give it eps=0.1; it has eps=0.2", code=code))
    assert (found.now, found.then, found.to_copy) == (("eps=1e-05",), ("eps=1e-06",), "eps=1e-06")


# What a report says of the bands of trainings.


def of_training(seed: int = 0) -> Result:
    steps = tuple(Step(number, 5.0 - number, 5.0 - number, 0.5) for number in (1, 2))
    return Result("mlp", "bf16", {}, "s", seed, "cpu", "passed", steps=steps)


def curve(loss: Left | None = None, weights: Left | None = None, seed: int = 0, deviation: float = 1.0) -> Curve:
    return Curve(of_training(seed), Band((4.0, 3.0), 6, (3.9, 2.9), (4.1, 3.1), loss, weights, deviation))


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (Curve(of_training()), ""),
        (curve(), ""),
        (curve(Left(2)), "the loss leaves its band at step 2"),
        (curve(weights=Left(1, ("a",))), "after step 1, a is farther from"),
        (curve(Left(2), Left(1, tuple("abcd"))), "at step 2; after step 1, a, b, c and 1 more are farther"),
    ],
)
def test_where_a_training_leaves_its_band_is_told(one, told):
    assert told in left(one)
    assert bool(told) == bool(left(one))


def test_seeds_are_told_together():
    assert over_seeds([curve()]) == ""
    told = over_seeds([curve(seed=seed, deviation=2.0) for seed in range(4)])
    assert "|       4 |" in told
    assert "0 ± 0.61" in told


def test_the_report_has_the_band(tmp_path):
    path = tmp_path / "training.md"
    write([curve(Left(2))], path)
    text = path.read_text()
    assert "| low" in text
    assert "| 3.9" in text
    assert "The loss leaves its band at step 2." in text
    assert "once in 20 times" in text
    write([Curve(of_training())], path)
    assert "band" not in path.read_text().replace("the band says", "")
