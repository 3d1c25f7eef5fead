"""One workload measured on the CPU: who is measured, and what becomes of those who fail."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from parity import te
from parity.case.validate import check_case
from parity.lab.throughput import measure, workload
from parity.lab.throughput.measure import Plan
from parity.lab.throughput.record import Row
from parity.lab.throughput.workload import COMPILED, EAGER, TE, Implementation, Workload, implementations
from parity.te import PRECISIONS

TINY = Path(__file__).with_name("tiny_pairs.py")
SIZE = dict(batch=16, hidden=16)
PLAN = Plan(repeats=2)


@pytest.fixture(scope="module")
def kernels() -> te.Kernels:
    return te.kernels("cpu")


def rows(kernels: te.Kernels, case: str, *chosen: tuple[str, str], plan: Plan = PLAN) -> list[Row]:
    asked = [Implementation(*each) for each in chosen]
    return list(measure.measure(Workload(TINY, case, SIZE), asked, plan, kernels))


def test_each_implementation_has_a_row_with_times_error_and_no_gpu_s_figures(kernels: te.Kernels) -> None:
    measured = rows(kernels, "tiny_linear", (EAGER, "bf16"), (TE, "bf16"), (TE, "fp8_delayed"))
    assert [row.name for row in measured] == ["eager bf16", "TE bf16", "TE fp8_delayed"]
    for row in measured:
        assert row.times is not None, row.why_none
        assert row.times.repeats == 2
        assert row.times.forward.median > 0
        assert row.times.backward.median > 0
        assert (row.memory, row.before, row.after, row.times.host) == (None, None, None, None)


def test_errors_are_those_of_the_precision(kernels: te.Kernels) -> None:
    measured = rows(kernels, "tiny_linear", (EAGER, "bf16"), (TE, "bf16"), (TE, "fp8_current"))
    eager, bf16, fp8 = (row.error or 0.0 for row in measured)
    assert 2**-11 < eager < 2**-7
    assert 2**-11 < bf16 < 2**-7
    assert 2**-7 < fp8 < 2**-3


def test_flops_are_those_of_module_flops_and_the_same_for_all(kernels: te.Kernels) -> None:
    for row in rows(kernels, "tiny_linear", (EAGER, "bf16"), (TE, "fp8_current")):
        assert (row.flops_forward, row.flops_backward) == (2 * 16 * 16 * 32, 4 * 16 * 16 * 32)


def test_flops_of_an_unknown_module_are_counted_by_watching_it(kernels: te.Kernels) -> None:
    (row,) = rows(kernels, "unknown_flops", (TE, "bf16"))
    assert (row.flops_forward, row.flops_backward) == (2 * 16 * 16 * 32, 4 * 16 * 16 * 32)


def test_a_failing_implementation_says_why_and_loses_no_other(kernels: te.Kernels) -> None:
    plain, port, fp32 = rows(kernels, "refuses_bf16", (EAGER, "bf16"), (TE, "bf16"), (EAGER, "fp32"))
    assert plain.why_none == "RuntimeError: no BF16 here"
    assert port.times is not None
    assert fp32.times is not None


def test_a_precision_that_the_gpu_lacks_is_told_in_te_s_words(kernels: te.Kernels) -> None:
    (row,) = rows(kernels, "tiny_linear", (TE, "mxfp8"))
    assert row.times is None
    assert "compute capability 10.0" in row.why_none


def test_compilation_that_fails_is_the_reason_for_no_times(
    kernels: te.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(module: torch.nn.Module) -> torch.nn.Module:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(measure, "compile_afresh", fails)
    (row,) = rows(kernels, "tiny_linear", (COMPILED, "bf16"))
    assert row.why_none == "RuntimeError: no C++ compiler"


def test_when_the_time_is_over_rows_say_so(kernels: te.Kernels) -> None:
    (row,) = rows(kernels, "tiny_linear", (EAGER, "bf16"), plan=Plan(repeats=2, ends=time.time() - 1))
    assert row.why_none == "the time for all measurements was over"


def test_a_workload_that_cannot_be_built_has_a_row_for_each(kernels: te.Kernels) -> None:
    broken = Workload(TINY, "tiny_linear", dict(batch=4, hidden=-1))
    asked = [Implementation(EAGER, "bf16"), Implementation(TE, "bf16")]
    found = list(measure.measure(broken, asked, PLAN, kernels))
    assert [bool(row.why_none) for row in found] == [True, True]


def test_within_a_dtype_the_compiled_module_comes_last_and_bf16_comes_first() -> None:
    found = [
        f"{each.kind} {each.precision}"
        for each in implementations(("fp32", "bf16", "fp8_block"), ("fp32", "bf16"), True)
    ]
    assert found == [
        *("eager bf16", "TE bf16", "TE fp8_block", "compiled bf16"),
        *("eager fp32", "eager tf32", "TE fp32", "compiled fp32", "compiled tf32"),
    ]


def test_only_a_gpu_has_tf32() -> None:
    assert "tf32" not in {each.precision for each in implementations(tuple(PRECISIONS), ("fp32",), on_gpu=False)}


@pytest.mark.parametrize("large", [True, False])
def test_every_built_in_workload_fits_its_case(kernels: te.Kernels, large: bool) -> None:
    """Without memory: the large ones take gigabytes."""
    for each in workload.built_in(large):
        assert check_case(dataclasses.replace(each.load(), sizes=[each.size]), kernels.te), each.name


def test_workloads_are_chosen_by_words_in_their_names() -> None:
    found = workload.select(workload.built_in(large=True), "rmsnorm, mlp")
    assert [each.case for each in found] == ["layernorm_mlp_swiglu", "rmsnorm"]
