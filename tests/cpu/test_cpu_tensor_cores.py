"""Sums of FP8 products as a Hopper's tensor cores make them, against exact rational arithmetic."""

from __future__ import annotations

import importlib
import threading
from fractions import Fraction
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parity import te
from parity.cpu import tensor_cores
from parity.cpu.tensor_cores import HOPPER, Factor, TensorCore

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE_PRODUCT = TensorCore(products=1, promote_every=1)


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


def numbers(dtype: torch.dtype, codes: list[int]) -> Tensor:
    values = torch.tensor(codes, dtype=torch.uint8).view(dtype).float()
    return torch.where(values.isfinite(), values, 1.0)


def dot(core: TensorCore, a: Tensor, b: Tensor, split: bool = False, dtype: torch.dtype = E4M3) -> float:
    return tensor_cores.product(core, Factor(a[None], dtype), Factor(b[None], dtype), split).item()


def fp8(*shape: int, dtype: torch.dtype = E4M3, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).float()


def exponent(value: Fraction, lowest: int = -1000) -> int:
    """The power of two of a number's leading bit, at least ``lowest``; far below for 0."""
    if value == 0:
        return -10_000
    size = abs(value)
    found = size.numerator.bit_length() - size.denominator.bit_length()
    return max(found if size >= Fraction(2) ** found else found - 1, lowest)


def cut(value: Fraction, unit: Fraction) -> Fraction:
    """The multiple of ``unit`` next to ``value``, toward zero."""
    return int(value / unit) * unit


def oracle(core: TensorCore, a: list[float], b: list[float], split: bool, lowest: int) -> Fraction:
    """One dot product, term by term, in exact arithmetic; FP32 sums of promoted parts by PyTorch."""
    promoted, running = torch.zeros(()), Fraction(0)
    for start in range(0, len(a), core.products):
        if split and start % core.promote_every == 0:
            promoted, running = promoted + float(running), Fraction(0)
        factors = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True)][start : start + core.products]
        exponents = [exponent(x, lowest) + exponent(y, lowest) for x, y in factors]
        unit = Fraction(2) ** (max([*exponents, exponent(running), -500]) - core.bits + 1)
        running = cut(running, unit) + sum(cut(x * y, unit) for x, y in factors)
        if running:
            running = cut(running, Fraction(2) ** (exponent(running) - core.bits + 1))
    return Fraction((promoted + float(running)).item())


@given(
    codes=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=1, max_size=40),
    dtype=st.sampled_from([E4M3, E5M2]),
    split=st.booleans(),
    bits=st.sampled_from([5, 14, 17, 20, 24]),
)
def test_a_sum_is_that_of_exact_arithmetic_with_the_same_cuts(
    codes: list[tuple[int, int]], dtype: torch.dtype, split: bool, bits: int
) -> None:
    core = TensorCore(bits, products=8, promote_every=16)
    a, b = (numbers(dtype, [pair[i] for pair in codes]) for i in (0, 1))
    lowest = exponent(Fraction(torch.finfo(dtype).smallest_normal))
    assert Fraction(dot(core, a, b, split, dtype)) == oracle(core, a.tolist(), b.tolist(), split, lowest)


@given(codes=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=1, max_size=40))
def test_sums_that_are_promoted_after_each_product_are_fp32_sums(codes: list[tuple[int, int]]) -> None:
    a, b = (numbers(E4M3, [pair[i] for pair in codes]) for i in (0, 1))
    total = torch.zeros(())
    for term in a * b:
        total = total + term
    assert dot(ONE_PRODUCT, a, b, split=True) == total.item()


def test_a_running_sum_keeps_thirteen_fraction_bits() -> None:
    ones = torch.ones(64)
    kept, lost = ones.clone(), ones.clone()
    kept[1:], lost[1:] = 0, 0
    kept[1] = 2.0**-8
    lost[1] = 2.0**-9
    small = torch.full((64,), 2.0**-5)
    small[0] = 1.0
    assert dot(HOPPER, kept, small) == 1 + 2.0**-13
    assert dot(HOPPER, lost, small) == 1.0


def test_a_term_is_cut_toward_zero_whatever_its_sign() -> None:
    a, b = torch.zeros(32), torch.zeros(32)
    a[0], b[0] = 1.0, 1.0
    a[1], b[1] = -(2.0**-7), 2.0**-7
    assert dot(HOPPER, a, b) == 1.0


def test_a_sum_of_ones_stops_growing_at_two_to_the_fourteen_unless_it_is_promoted() -> None:
    ones = torch.ones(32768)
    assert dot(HOPPER, ones, ones, split=False) == 2.0**14
    assert dot(HOPPER, ones, ones, split=True) == 2.0**15


@given(st.integers(0, 10_000), st.sampled_from([32, 96, 256]), st.booleans())
def test_the_error_stays_below_the_sum_of_the_units_cut(seed: int, inner: int, split: bool) -> None:
    a, b = fp8(4, inner, seed=seed), fp8(3, inner, seed=seed + 1)
    result = tensor_cores.product(HOPPER, Factor(a, E4M3), Factor(b, E4M3), split)
    exact, sizes = b.double() @ a.double().t(), b.double().abs() @ a.double().abs().t()
    instructions = -(-inner // HOPPER.products)
    unit = 2.0**-13  # of the largest term, which is no larger than the sum of all magnitudes
    assert ((result - exact).abs() <= instructions * (HOPPER.products + 2) * unit * sizes).all()


def test_a_matrix_is_its_dot_products_also_in_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = fp8(5, 96, seed=1), fp8(7, 96, seed=2)
    whole = tensor_cores.product(HOPPER, Factor(a, E4M3), Factor(b, E4M3), True)
    assert whole.tolist() == [[dot(HOPPER, x, y, True) for x in a] for y in b]
    monkeypatch.setattr(tensor_cores, "_TILE_ELEMENTS", 400)
    assert torch.equal(tensor_cores.product(HOPPER, Factor(a, E4M3), Factor(b, E4M3), True), whole)


def test_nans_and_infinities_come_out_as_of_a_plain_product() -> None:
    a = torch.ones(2, 32)
    a[0, 3] = float("inf")
    b = torch.ones(3, 32)
    b[1, 5], b[2, 3] = float("nan"), 0.0
    result = tensor_cores.product(HOPPER, Factor(a, E5M2), Factor(b, E5M2), False)
    torch.testing.assert_close(result, b @ a.t(), equal_nan=True, rtol=0, atol=0)


def test_block_scales_multiply_the_sum_of_each_block_which_begins_anew() -> None:
    a, b = fp8(5, 320, seed=1), fp8(7, 320, seed=2)
    scales_a, scales_b = (torch.rand(rows, 3, generator=torch.Generator().manual_seed(rows)) + 0.5 for rows in (5, 7))
    result = tensor_cores.product(HOPPER, Factor(a, E4M3, scales_a), Factor(b, E4M3, scales_b), False)
    expected = torch.zeros(7, 5)
    for block, (part_a, part_b) in enumerate(zip(a.split(128, 1), b.split(128, 1), strict=True)):
        part = tensor_cores.product(HOPPER, Factor(part_a, E4M3), Factor(part_b, E4M3), False)
        expected += part * (scales_b[:, block, None] * scales_a[:, block])
    assert torch.equal(result, expected)


def test_block_scales_need_their_like_and_instructions_that_fill_a_block() -> None:
    plain, scaled = Factor(torch.ones(2, 256), E4M3), Factor(torch.ones(2, 256), E4M3, torch.ones(2, 2))
    with pytest.raises(ValueError, match="one factor has block scales"):
        tensor_cores.product(HOPPER, plain, scaled, True)
    with pytest.raises(ValueError, match="instructions of 48 products do not fill blocks of 128"):
        tensor_cores.product(TensorCore(products=48, promote_every=48), scaled, scaled, True)


def test_block_scaled_gemms_of_te_lose_what_the_tensor_core_cuts_in_a_block(te_module: ModuleType) -> None:
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8BlockScaling()
    module = te_module.Linear(1024, 256, bias=False, params_dtype=torch.float32)
    x = torch.rand(64, 1024)
    outputs = []
    for core in (None, TensorCore(bits=24), HOPPER, TensorCore(bits=8)):
        with te_module.autocast(enabled=True, recipe=recipe), torch.no_grad():
            if core is None:
                outputs.append(module(x))
            else:
                with tensor_cores.emulated(core):
                    outputs.append(module(x))
    exact, *emulated = outputs
    errors = [((output - exact).norm() / exact.norm()).item() for output in emulated]
    assert errors[0] < 1e-6 < 10 * errors[1] < errors[2]


@pytest.mark.parametrize("fields", [{"bits": 1}, {"bits": 25}, {"products": 0}, {"promote_every": 100}])
def test_a_tensor_core_that_cannot_be_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"bits|multiple of products"):
        TensorCore(**fields)


def test_it_is_off_unless_asked_for_in_this_thread_and_off_again_after_an_exception() -> None:
    assert tensor_cores.current() is None
    seen = []

    def look_around_and_fail() -> None:
        with tensor_cores.emulated():
            thread = threading.Thread(target=lambda: seen.append(tensor_cores.current()))
            thread.start()
            thread.join()
            with tensor_cores.emulated(ONE_PRODUCT):
                seen.append(tensor_cores.current())
            seen.append(tensor_cores.current())
            raise KeyError

    with pytest.raises(KeyError):
        look_around_and_fail()
    assert seen == [None, ONE_PRODUCT, HOPPER]
    assert tensor_cores.current() is None


def linear_pass(te_module: ModuleType, split_forward: bool, core: TensorCore | None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and weight gradient of ``te.Linear`` under current scaling, in FP32."""
    recipe = importlib.import_module("transformer_engine.common.recipe")
    chosen = recipe.Float8CurrentScaling(fp8_gemm_fprop=recipe.MMParams(use_split_accumulator=split_forward))
    torch.manual_seed(0)
    module = te_module.Linear(1024, 16, bias=False, params_dtype=torch.float32)
    x = torch.rand(32, 1024, requires_grad=True)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        with te_module.autocast(enabled=True, recipe=chosen):
            y = module(x)
        y.backward(torch.rand_like(y))
        assert x.grad is not None
        return y.detach(), x.grad, module.weight.grad

    if core is None:
        return step()
    with tensor_cores.emulated(core):
        return step()


def test_te_asks_for_fast_sums_forward_and_for_split_ones_backward(te_module: ModuleType) -> None:
    exact = linear_pass(te_module, False, None)
    never_short = linear_pass(te_module, False, TensorCore(bits=24, promote_every=32))
    fast = linear_pass(te_module, False, TensorCore(bits=8, products=32, promote_every=32))
    errors = [((x - y).norm() / y.norm()).item() for x, y in zip(fast, exact, strict=True)]
    assert errors[0] > 3 * max(errors[1:])
    assert min(errors) > 1e-4
    for one, other in zip(never_short, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_recipe_can_ask_for_split_sums_forward(te_module: ModuleType) -> None:
    exact = linear_pass(te_module, True, None)[0]
    fast, split = (linear_pass(te_module, flag, HOPPER)[0] for flag in (False, True))
    # Terms of random sign: a partial sum of 128 is about sqrt(128 / 1024) of the whole, and so is what it loses.
    assert (split - exact).norm() < 0.5 * (fast - exact).norm()


def test_gemms_that_are_not_fp8_stay_as_they_are(te_module: ModuleType) -> None:
    module = te_module.Linear(64, 32, params_dtype=torch.bfloat16)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    plain = module(x)
    with tensor_cores.emulated(TensorCore(bits=2)):
        assert torch.equal(module(x), plain)
