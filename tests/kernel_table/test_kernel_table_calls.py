"""The calls of the table, made on the CPU kernels, which also stand in for the real ones here."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from parity import te
from parity.cpu import cuda, extension, mhc, versions
from parity.lab.kernel_table import measure
from parity.lab.kernel_table.bench import Bench, KernelCall, bench, unpack
from parity.lab.kernel_table.measure import CALLS, NOT_CALLED, Outcome, select
from parity.lab.kernel_table.table import Distance, compare
from parity.user_error import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from emulated_gpu import emulated

FAMILIES = list(dict.fromkeys(call.family for call in CALLS))


@pytest.fixture(scope="module")
def blackwell() -> Iterator[te.Kernels]:
    """The CPU kernels on a GPU that has every format."""
    with emulated(cuda.BLACKWELL):
        yield te.kernels("cpu")


def of_family(family: str) -> list[KernelCall]:
    return [call for call in CALLS if call.family == family]


def test_no_two_calls_share_a_name() -> None:
    assert len({call.name for call in CALLS}) == len(CALLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_computes_the_same_twice_and_something_finite(blackwell: te.Kernels, family: str) -> None:
    for call in of_family(family):
        first, second = (measure.make(call, blackwell, seed=0) for _ in range(2))
        assert first.error is None, f"{call.name}: {first.error}"
        assert first.buffers, call.name
        compared = compare(call, first, second)
        assert all(distance.different == 0 for distance in compared.distances.values()), compared
        for name, buffer in first.buffers.items():
            assert buffer.float().isfinite().all(), f"{call.name}: {name}"
            assert buffer.float().abs().max() > 0, f"{call.name}: {name}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_made_again_on_its_tape_computes_the_same(blackwell: te.Kernels, family: str) -> None:
    """As when it is timed: also the calls that write to their inputs."""
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
    kernels = {name for family in extension.KERNEL_FAMILIES for name in family.__all__}
    called: set[str] = set()
    for name in kernels:
        monkeypatch.setattr(tex, name, noted(name, getattr(tex, name), called))
    for call in CALLS:
        call.run(bench(blackwell, seed=0))
    called.discard("get_num_cublas_streams")  # which TE asks once in a process
    assert kernels - called == NOT_CALLED.keys()


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
    """The CPU kernels, one of them made wrong, stand in for the real ones."""
    tex = importlib.import_module("transformer_engine_torch")
    right = tex.swap_first_dims
    call = select("swap_first_dims: BF16")[0]
    emulated_outcome = measure.make(call, blackwell, seed=0)
    monkeypatch.setattr(tex, "swap_first_dims", lambda x, out: (right(x).view(torch.int16) + 1).view(torch.bfloat16))
    (distance,) = compare(call, measure.make(call, blackwell, seed=0), emulated_outcome).distances.values()
    assert isinstance(distance, Distance)
    assert (distance.different, distance.max_ulps) == (distance.elements, 1.0)
    assert 2**-10 < distance.relative < 2**-7


def test_another_seed_makes_other_results(blackwell: te.Kernels) -> None:
    for call in select("quantize: BF16"):
        pair = [measure.make(call, blackwell, seed) for seed in (0, 1)]
        distances = compare(call, *pair).distances
        assert any(distance.different > distance.elements / 2 for distance in distances.values()), call.name


def test_two_calls_do_not_share_their_inputs(blackwell: te.Kernels) -> None:
    seen = []
    call = KernelCall("", "", "", "", lambda where: seen.append(where.normal(8)) or {})
    for variant in ("one", "another"):
        measure.make(dataclasses.replace(call, variant=variant), blackwell, seed=0)
    assert not torch.equal(*seen)


def test_every_format_that_te_offers_is_quantized(blackwell: te.Kernels) -> None:
    dtypes = set()
    for call in select("quantize: BF16"):
        dtypes |= {buffer.dtype for buffer in measure.make(call, blackwell, seed=0).buffers.values()}
    codes = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8}
    scales = {torch.float32, torch.float8_e8m0fnu}
    assert codes | scales <= dtypes


def test_a_format_that_the_gpu_lacks_is_told_in_te_s_words() -> None:
    with emulated(cuda.HOPPER):
        call = select("to mxfp8")[0]
        outcome = measure.make(call, te.kernels("cpu"), seed=0)
    assert outcome.error is not None
    assert "compute capability 10.0" in outcome.error
    assert not outcome.buffers


def test_an_exception_of_a_kernel_is_its_outcome(blackwell: te.Kernels) -> None:
    def fails(where: Bench) -> dict[str, torch.Tensor]:
        raise RuntimeError("misaligned address\nand a long trace")

    call = KernelCall("GEMM", "generic_gemm", "BF16", "[1]", fails)
    assert measure.make(call, blackwell, seed=0) == Outcome(error="RuntimeError: misaligned address")


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
    assert measure.make_all(calls[:2], 1, blackwell, 0, tmp_path)
    made = measure.read(1, tmp_path)
    assert made is not None
    assert made.buffers
    assert [measure.read(index, tmp_path) for index in (0, 2)] == [None, None]


def test_a_keyword_in_no_call_is_refused() -> None:
    with pytest.raises(UserError, match="no kernel call contains 'gemv'"):
        select("gemv")
