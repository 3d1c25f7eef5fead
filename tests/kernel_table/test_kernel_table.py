"""The kernel table: its calls, distances, processes and the table itself."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from parity import te
from parity.machine.files import claimed
from parity.measuring.kernel_table import table
from parity.measuring.kernel_table.bench import Bench, KernelCall, bench, unpack
from parity.measuring.kernel_table.table import (
    CALLS,
    ENDED,
    GPU_LOST,
    NOT_CALLED,
    TIME_OVER,
    Comparison,
    Distance,
    Outcome,
    compare,
    distance_of,
    draw,
    fraction,
    make_call,
    ordinal,
    outcomes_of,
    run,
    select,
    ulps,
)
from parity.report import environment
from parity.user_error import UserError
from te_on_cpu import cuda, extension, mhc, versions

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from emulated_gpu import emulated

# The table of CPU kernels against real ones: what it compares and shows, and that it says when it is missing.


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
    [((8, 0), "ada"), ((8, 9), "ada"), ((9, 0), "hopper"), ((10, 0), "blackwell"), ((12, 0), "rtx_blackwell")],
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


# The table's calls, made on the CPU kernels, which also stand in for the real ones here.


FAMILIES = list(dict.fromkeys(call.family for call in CALLS))


@pytest.fixture(scope="module")
def blackwell() -> Iterator[te.Kernels]:
    """Yield the CPU kernels on a GPU that has every format."""
    with emulated(cuda.BLACKWELL):
        yield te.kernels("cpu")


def of_family(family: str) -> list[KernelCall]:
    return [call for call in CALLS if call.family == family]


def test_no_two_calls_share_a_name() -> None:
    assert len({call.name for call in CALLS}) == len(CALLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_computes_the_same_twice_and_something_finite(blackwell: te.Kernels, family: str) -> None:
    for call in of_family(family):
        first, second = (make_call(call, blackwell, seed=0) for _ in range(2))
        assert first.error is None, f"{call.name}: {first.error}"
        assert first.buffers, call.name
        compared = compare(call, first, second)
        assert all(distance.different == 0 for distance in compared.distances.values()), compared
        for name, buffer in first.buffers.items():
            assert buffer.float().isfinite().all(), f"{call.name}: {name}"
            assert buffer.float().abs().max() > 0, f"{call.name}: {name}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_made_again_on_its_tape_computes_the_same(blackwell: te.Kernels, family: str) -> None:
    """Timing repeats calls like this, including calls that write to their inputs."""
    for call in of_family(family):
        where = bench(blackwell, seed=1)
        first = Outcome(unpack(call.run(where)))
        where.tape.rewind()
        compared = compare(call, first, Outcome(unpack(call.run(where))))
        assert all(isinstance(each, Distance) and each.different == 0 for each in compared.distances.values()), (
            call.name
        )


def test_every_kernel_of_the_cpu_s_is_called_or_left_out_for_a_reason(
    blackwell: te.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    tex = importlib.import_module("transformer_engine_torch")
    called: set[str] = set()
    for name in extension.KERNELS:
        monkeypatch.setattr(tex, name, noted(name, getattr(tex, name), called))
    for call in CALLS:
        call.run(bench(blackwell, seed=0))
    called.discard("get_num_cublas_streams")  # TE asks for it once in a process
    assert extension.KERNELS.keys() - called == NOT_CALLED.keys()


@pytest.mark.skipif(versions.installed_version() < Version("2.15"), reason="TE has hyper-connections from 2.15 on")
def test_every_triton_kernel_of_hyper_connections_is_launched(
    blackwell: te.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    defined = vars(importlib.import_module("transformer_engine.common.triton.mhc"))
    kernels = mhc.KERNELS.keys() & defined.keys()
    launched: set[str] = set()
    for name in kernels:
        monkeypatch.setattr(defined[name], "_launch", noted(name, defined[name]._launch, launched))
    for call in select("mhc_fused"):
        call.run(bench(blackwell, seed=0))
    assert launched == kernels


def noted(name: str, kernel: Callable[..., Any], called: set[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        called.add(name)
        return kernel(*arguments, **options)

    return call


def test_a_kernel_that_is_off_by_an_ulp_is_seen_to_be(blackwell: te.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU kernels stand in for the real ones, and one of them is made wrong."""
    tex = importlib.import_module("transformer_engine_torch")
    right = tex.swap_first_dims
    call = select("swap_first_dims: BF16")[0]
    emulated_outcome = make_call(call, blackwell, seed=0)
    monkeypatch.setattr(tex, "swap_first_dims", lambda x, out: (right(x).view(torch.int16) + 1).view(torch.bfloat16))
    (distance,) = compare(call, make_call(call, blackwell, seed=0), emulated_outcome).distances.values()
    assert isinstance(distance, Distance)
    assert (distance.different, distance.max_ulps) == (distance.elements, 1.0)
    assert 2**-10 < distance.relative < 2**-7


def test_another_seed_makes_other_results(blackwell: te.Kernels) -> None:
    for call in select("quantize: BF16"):
        pair = [make_call(call, blackwell, seed) for seed in (0, 1)]
        distances = compare(call, *pair).distances
        assert any(distance.different > distance.elements / 2 for distance in distances.values()), call.name


def test_two_calls_do_not_share_their_inputs(blackwell: te.Kernels) -> None:
    seen = []
    call = KernelCall("", "", "", "", lambda where: seen.append(where.normal(8)) or {})
    for variant in ("one", "another"):
        make_call(dataclasses.replace(call, variant=variant), blackwell, seed=0)
    assert not torch.equal(*seen)


def test_every_format_that_te_offers_is_quantized(blackwell: te.Kernels) -> None:
    dtypes = set()
    for call in select("quantize: BF16"):
        dtypes |= {buffer.dtype for buffer in make_call(call, blackwell, seed=0).buffers.values()}
    codes = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8}
    scales = {torch.float32, torch.float8_e8m0fnu}
    assert codes | scales <= dtypes


def test_a_format_that_the_gpu_lacks_is_told_in_te_s_words() -> None:
    with emulated(cuda.HOPPER):
        call = select("to mxfp8")[0]
        outcome = make_call(call, te.kernels("cpu"), seed=0)
    assert outcome.error is not None
    assert "compute capability 10.0" in outcome.error
    assert not outcome.buffers


def test_an_exception_of_a_kernel_is_its_outcome(blackwell: te.Kernels) -> None:
    def fails(where: Bench) -> dict[str, torch.Tensor]:
        raise RuntimeError("misaligned address\nand a long trace")

    call = KernelCall("GEMM", "generic_gemm", "BF16", "[1]", fails)
    assert make_call(call, blackwell, seed=0) == Outcome(error="RuntimeError: misaligned address")


def test_unpacked_fp4_codes_are_the_quantized_values_in_their_order(blackwell: te.Kernels) -> None:
    where = bench(blackwell, seed=3)
    quantized = where.quantizer("nvfp4")(where.normal(128, 128))
    codes = unpack({"x": quantized})["x rowwise_codes"]
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = magnitudes[codes.abs().long()] * codes.sign()
    scales = unpack({"x": quantized})["x rowwise_scale_inv"].float()[:128, :8].repeat_interleave(16, 1)
    global_scale = quantized._amax_rowwise / (6.0 * 448.0)
    torch.testing.assert_close(values * scales * global_scale, quantized.dequantize(dtype=torch.float32))


def test_outcomes_outlive_the_process_that_made_them(blackwell: te.Kernels, tmp_path: Path) -> None:
    calls = select("compute_amax")
    assert table.make_all(calls[:2], 1, blackwell, 0, tmp_path)
    made = table.kept(1, tmp_path)
    assert made is not None
    assert made.buffers
    assert [table.kept(index, tmp_path) for index in (0, 2)] == [None, None]


def test_a_keyword_in_no_call_is_refused() -> None:
    with pytest.raises(UserError, match="no kernel call has 'gemv'"):
        select("gemv")


# Test how far two tensors are apart, in bits and in numbers of their format.


FORMATS = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
CODES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", FORMATS[1:3])
def test_numbers_in_order_have_ordinals_in_order(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[~numbers.isnan()]
    by_value, by_ordinal = numbers.double().sort().values, numbers[ordinal(numbers).argsort()].double()
    assert torch.equal(by_value, by_ordinal)


@pytest.mark.parametrize("dtype", FORMATS[3:])
def test_fp8_codes_have_the_order_of_their_values(dtype: torch.dtype) -> None:
    numbers = CODES.view(dtype)
    numbers = numbers[~numbers.float().isnan()]
    steps = ordinal(numbers)[numbers.float().argsort()].diff()
    assert set(steps.tolist()) <= {0, 1}


def test_e8m0_scales_are_one_apart_for_each_factor_of_two() -> None:
    scales = torch.tensor([1.0, 2.0, 0.25]).to(torch.float8_e8m0fnu)
    assert ordinal(scales).diff().tolist() == [1, -3]


@given(st.integers(0, 0x7F000000), st.sampled_from([1.0, -1.0]), st.integers(1, 9))
def test_stepping_through_the_numbers_counts_as_many_ulps(bits: int, sign: float, steps: int) -> None:
    x = torch.tensor([bits], dtype=torch.int32).view(torch.float32) * sign
    y = x
    for _ in range(steps):
        y = torch.nextafter(y, torch.tensor(math.inf))
    assert distance_of(x, y).max_ulps == steps


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_tensor_is_equal_to_itself_nans_included(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -0.0, math.nan, 448.0]).to(dtype)
    assert distance_of(x, x.clone()) == distance_of(x, x)
    assert (distance_of(x, x).different, distance_of(x, x).max_ulps) == (0, 0)


def test_zeros_of_other_sign_differ_in_a_bit_and_are_no_ulp_apart() -> None:
    distance = distance_of(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (distance.elements, distance.different, distance.max_ulps) == (2, 1, 0)


def test_nans_of_other_bits_are_no_ulp_apart() -> None:
    x, y = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert (distance_of(x, y).different, distance_of(x, y).max_ulps) == (1, 0)


def test_a_nan_on_one_side_is_infinitely_far() -> None:
    assert distance_of(torch.tensor([math.nan, 1.0]), torch.tensor([2.0, 1.0])).max_ulps == math.inf


def test_infinity_is_one_number_from_the_largest() -> None:
    assert distance_of(torch.tensor([math.inf]), torch.tensor([torch.finfo(torch.float32).max])).max_ulps == 1


def test_empty_tensors_are_equal() -> None:
    assert distance_of(torch.empty(0), torch.empty(0)).max_ulps == 0


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)])
def test_tensors_of_other_shape_or_dtype_are_not_compared(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        distance_of(torch.zeros(2), other)


def test_the_relative_distance_is_the_difference_s_norm_over_the_first_tensor_s() -> None:
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert distance_of(x, y).relative == pytest.approx(0.1)


def test_elements_that_are_not_finite_have_no_part_in_the_relative_distance() -> None:
    x, y = torch.tensor([3.0, 4.0, math.inf]), torch.tensor([3.0, 4.5, math.nan])
    assert distance_of(x, y).relative == pytest.approx(0.1)


def test_integers_may_be_names_and_have_no_relative_distance() -> None:
    assert math.isnan(distance_of(torch.tensor([1, 2]), torch.tensor([1, 3])).relative)


# Processes that make the calls, where a new process takes over if a kernel ends one.


COUNT = 12


def processes(folder: Path, fatal: set[int], poisonous: set[int], begun: list[int]) -> Callable[[int], int]:
    """Return a process that makes calls until one ends it, or until it has written an outcome and loses the GPU."""

    def start(first: int) -> int:
        begun.append(first)
        for index in range(first, COUNT):
            if index in fatal:
                return -11
            table.keep(Outcome({"x": torch.tensor([index])}), index, folder)
            if index in poisonous:
                return GPU_LOST
        return 0

    return start


calls = st.sets(st.integers(0, COUNT - 1))


@settings(max_examples=40)
@given(calls, calls)
def test_a_kernel_that_ends_its_process_loses_no_outcome_but_its_own(
    tmp_path_factory: pytest.TempPathFactory, fatal: set[int], poisonous: set[int]
) -> None:
    """Outcomes are lost only if several calls in succession end their processes."""
    fatal = {index for index in fatal if not {index - 1, index - 2} <= fatal}
    folder = tmp_path_factory.mktemp("outcomes")
    found = outcomes_of(processes(folder, fatal, poisonous - fatal, []), COUNT, folder)
    assert [index for index, outcome in enumerate(found) if outcome == ENDED] == sorted(fatal)
    assert all(outcome.buffers for index, outcome in enumerate(found) if index not in fatal)


def test_no_process_is_started_without_need(tmp_path: Path) -> None:
    begun: list[int] = []
    outcomes_of(processes(tmp_path, {4}, {7}, begun), COUNT, tmp_path)
    assert begun == [0, 5, 8]


def test_processes_that_do_not_come_to_life_are_not_started_for_ever(tmp_path: Path) -> None:
    begun: list[int] = []
    found = outcomes_of(processes(tmp_path, set(range(COUNT)), set(), begun), COUNT, tmp_path)
    assert begun == [0, 1, 2]
    assert [outcome.error for outcome in found[3:]] == ["no process came to this call"] * (COUNT - 3)


def test_when_the_time_is_over_what_was_made_stays_and_the_rest_says_so(tmp_path: Path) -> None:
    def start(first: int) -> None:
        table.keep(Outcome({"x": torch.tensor([first])}), first, tmp_path)

    first, *others = outcomes_of(start, 3, tmp_path)
    assert first.buffers
    assert others == [TIME_OVER, TIME_OVER]


def python(program: str, folder: Path, **limits: float) -> int | None:
    limits = {"ends": time.monotonic() + 100, **limits}
    return run([sys.executable, "-c", program], dict(os.environ), folder, **limits)


def test_a_process_ends_by_itself_at_the_time_that_is_set_or_when_a_kernel_hangs(tmp_path: Path) -> None:
    hangs = "import time; time.sleep(1000)"
    assert python("raise SystemExit(3)", tmp_path) == 3
    assert python(hangs, tmp_path, ends=time.monotonic()) is None
    assert python(hangs, tmp_path, longest=0.0) == -signal.SIGKILL


def test_after_an_error_of_the_gpu_the_process_gives_up_only_if_the_gpu_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: Any = SimpleNamespace()
    made: Any = ["misaligned", "refused"]
    monkeypatch.setattr(table, "make_call", lambda call, kernels, seed: Outcome(error=call))
    for works in (True, False):
        monkeypatch.setattr(table, "cuda_works", lambda works=works: works)
        assert table.make_all(made, 0, kernels, 0, tmp_path) is works
