"""The plugin with workers: who is given what, and what becomes of the run when one of them dies."""

from __future__ import annotations

import re

import fakes
import pytest
import torch
from plugin_runs import (
    COMPARED,
    PAIRS,
    UNAVAILABLE,
    recorded,
    run,
    run_with_workers,
    write,
)

from parity.plugin.workers import first_input, group_of, size_of
from parity.report import environment
from parity.te.precision import PRECISIONS

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("stand_ins")


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
    group = group_of(f"cases/mlp.py::swiglu-2.1[{precision}-2x64-ffn_8]")
    assert group == f"cases/mlp.py::swiglu-2.1[{dtype}-2x64-ffn_8]"


def test_attention_backends_of_one_case_and_size_are_of_its_group() -> None:
    ids = [f"cases/attention.py::causal[bf16-2x64{suffix}]" for suffix in ("", "-flash", "-fused", "-unfused")]
    assert {group_of(node_id) for node_id in ids} == {"cases/attention.py::causal[bf16-2x64]"}


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
    assert first_input(node_id) == elements


@pytest.mark.parametrize("size", ["2x64", "scalar", "2x64-ffn_8", "2x64-bf16"])
def test_a_group_tells_its_case_and_size(size: str) -> None:
    assert size_of(f"cases/mlp.py::swiglu[fp16-{size}]") == f"cases/mlp.py::swiglu[{size}]"


@pytest.mark.parametrize("node_id", ["tests/test_x.py::test_y", "tests/test_x.py::test_y[a-b]", "t.py::A::test_y[1-2]"])
def test_any_other_test_is_a_group_of_its_own(node_id: str) -> None:
    assert group_of(node_id) == node_id
