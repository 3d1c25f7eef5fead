"""``generic_gemm`` against FP64 with bounds from the error analysis of sums, and FP8 sums as tensor cores add them."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from gemm_oracle import added_one_by_one, exponent, in_fp64, operands, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu

from parity import te
from te_on_cpu import cast, float8, gemm, tensor_cores
from te_on_cpu.enums import DType
from te_on_cpu.tensor_cores import ADA, HOPPER, Factor, TensorCore

# ``generic_gemm`` against FP64, with bounds from the error analysis of sums (Higham, 2002, section 3.1).


TE = te.kernels("cpu").te
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
UNIT_ROUNDOFF = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIDE = 64


def tf32_oracle(values: np.ndarray) -> np.ndarray:
    """Round FP32 normal numbers to an 11-bit significand, leading bit included, nearest even, by FP64 arithmetic."""
    significand, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.rint(significand * 2**11) / 2**11, exponent)


def codes(values: Tensor, scale: float = 1.0, **usages: bool) -> Any:
    return cast.quantize(values, TE.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), DType.kFloat8E4M3, **usages))


def test_fp32_products_round_no_operand_where_tf32_is_left_out() -> None:
    values = torch.full((16, 16), 1.0 + 2.0**-20)
    with tensor_cores.left_out():
        exact = run(values, values)[0]
    assert torch.equal(exact, values @ values.t())
    assert not torch.equal(run(values, values)[0], exact)


@given(value=st.floats(2.0**-100, 2.0**100, width=32), negative=st.booleans())
def test_tf32_keeps_ten_mantissa_bits_and_rounds_to_nearest_even(value: float, negative: bool) -> None:
    given = torch.tensor([-value if negative else value])
    ties_and_neighbours = (given.view(torch.int32) & ~0x3FFF) + torch.arange(0, 0x4000, 0x800, dtype=torch.int32)
    values = torch.cat([given, ties_and_neighbours.view(FP32)])
    np.testing.assert_array_equal(tensor_cores.round_to_tf32(values).numpy(), tf32_oracle(values.numpy()))


def test_tf32_keeps_infinities_and_every_nan() -> None:
    bits = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32)
    rounded = tensor_cores.round_to_tf32(bits.view(FP32))
    assert rounded[:2].tolist() == [float("inf"), -float("inf")]
    assert rounded[2:].isnan().all()


@pytest.mark.parametrize("is_fp8", [False, True], ids=["", "FP8"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT", "TT"])
def test_each_layout_stays_within_the_bound_of_fp32_sums(layout: str, dtype: torch.dtype, is_fp8: bool) -> None:
    """Multiply TF32, BF16, FP16, and codes whose scales multiply the sum."""
    given: Any = operands(layout, 48, 32, 80, FP32 if is_fp8 else dtype)
    A, B = given
    scale = torch.ones(1).double()
    if is_fp8:
        given = codes(A, scale=3.0), codes(B, scale=0.7)
        A, B = (float8.decode(tensor._data, E4M3) for tensor in given)
        scale = given[0]._scale_inv.double() * given[1]._scale_inv.double()
    elif dtype == FP32:
        A, B = (torch.from_numpy(tf32_oracle(factor.numpy())).float() for factor in given)
    exact, sizes = in_fp64(A, B, layout) * scale, in_fp64(A.abs(), B.abs(), layout) * scale
    bound = 82 * UNIT_ROUNDOFF[FP32] * 1.01 * sizes + UNIT_ROUNDOFF[dtype] * 1.01 * exact.abs() + 1e-7
    result = run(*given, layout=layout, dtype=dtype if is_fp8 else None)[0]
    assert result.dtype == dtype
    assert ((result.double() - exact).abs() <= bound).all()


def test_a_bf16_product_with_fp32_output_is_not_rounded() -> None:
    A, B = operands("NT", SIDE, SIDE, SIDE, BF16)
    D = torch.zeros(SIDE, SIDE)
    run(A, B, "NT", FP32, D=D)
    torch.testing.assert_close(D.double(), in_fp64(A, B, "NT"), rtol=0, atol=SIDE * 2.0**-24 * 64)


def test_leading_dimensions_of_b_are_kept() -> None:
    A, B = torch.randn(5, 16), torch.randn(2, 3, 16)
    assert run(A, B)[0].shape == (2, 3, 5)
    assert run(torch.randn(2, 3, 5), B, "NT")[0].shape == (16, 5)


def columns(*values: float, side: int = SIDE, dtype: torch.dtype = FP32) -> Tensor:
    """Return a square matrix whose rows begin with these values and go on with zeros."""
    matrix = torch.zeros(side, side)
    matrix[:, : len(values)] = torch.tensor(values)
    return matrix.to(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("bias", "old"), [(1.0, None), (None, 1.0), (2.0, -1.0)])
def test_bias_and_old_result_are_added_before_the_only_rounding(
    dtype: torch.dtype, bias: float | None, old: float | None
) -> None:
    tie = 1 / UNIT_ROUNDOFF[dtype] + 1  # rounds down to the even neighbour; tie + 1 is a number of the dtype
    A, B = columns(1, 1, dtype=dtype), columns(tie - 1, 1, dtype=dtype)
    options: dict[str, Any] = {}
    if bias is not None:
        options["bias"] = torch.full((SIDE,), bias, dtype=dtype)
    if old is not None:
        options |= {"D": torch.full((SIDE, SIDE), old, dtype=dtype), "accumulate": True}
    assert run(A, B)[0].double().unique().tolist() == [tie - 1]
    assert run(A, B, **options)[0].double().unique().tolist() == [tie + 1]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_alpha_scales_the_product_and_beta_the_old_result(dtype: torch.dtype) -> None:
    ones = torch.ones(SIDE, SIDE, dtype=dtype)
    D = torch.full((SIDE, SIDE), 3.0, dtype=dtype)
    assert run(ones, ones, D=D, accumulate=True, alpha=0.25, beta=2.0)[0] is D
    assert D.unique().tolist() == [SIDE / 4 + 6]


def fail_with(message: str) -> Callable[..., Tensor]:
    def fail(*_: Any) -> Tensor:
        raise RuntimeError(message)

    return fail


def test_where_onednn_finds_no_memory_for_its_code_the_product_is_made_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_fits_native_bf16", lambda *_: True)  # as on a CPU with BF16 instructions
    a, b = operands("TN", SIDE, SIDE, SIDE, BF16)
    exact = (b.float() @ a.float().t()).to(BF16)
    monkeypatch.setattr(gemm, "_in_native_bf16", fail_with("could not create a primitive"))
    assert torch.equal(run(a, b)[0], exact)
    monkeypatch.setattr(gemm, "_in_native_bf16", fail_with("another mistake"))
    with pytest.raises(RuntimeError, match="another mistake"):
        run(a, b)


def test_old_contents_do_not_matter_without_accumulation() -> None:
    A, B = operands("TN", SIDE, SIDE, SIDE, BF16)
    D = torch.full((SIDE, SIDE), float("nan"), dtype=BF16)
    assert torch.equal(run(A, B, D=D)[0], run(A, B)[0])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_bias_gradient_sums_b_over_the_inner_dimension_and_leaves_d_unbiased(dtype: torch.dtype) -> None:
    A, B = operands("NT", 24, 40, 56, dtype)
    D, bias_grad, _, _ = run(A, B, "NT", bias=torch.full((24,), 100.0, dtype=dtype), grad=True)
    assert torch.equal(D, run(A, B, "NT")[0])
    torch.testing.assert_close(bias_grad, B.double().sum(0).to(dtype), rtol=UNIT_ROUNDOFF[dtype] * 2, atol=1e-5)
    ones, threes = codes(torch.ones(16, 16)), codes(torch.full((16, 16), 3.0), scale=4.0)
    assert run(ones, threes, "NT", dtype, bias=torch.ones(16), grad=True)[1].tolist() == [48.0] * 16


def tf32_operands(layout: str, dtype: torch.dtype) -> list[Tensor]:
    """Return operands of a product ``[24, 40]`` that TF32 holds exactly."""
    return [tensor_cores.round_to_tf32(factor.float()).to(dtype) for factor in operands(layout, 24, 40, 56, dtype)]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gelu_takes_the_unrounded_sum_and_its_input_is_returned_rounded(dtype: torch.dtype) -> None:
    A, B = tf32_operands("TN", dtype)
    bias = torch.randn(40).to(dtype)
    result, _, before, _ = run(A, B, bias=bias, gelu=True)
    exact = in_fp64(A, B, "TN") + bias.double()
    for actual, expected in ((before, exact), (result, gelu(exact, approximate="tanh"))):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=UNIT_ROUNDOFF[dtype] * 1.01, atol=2e-5)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_gradient_of_gelu_multiplies_the_sum(dtype: torch.dtype) -> None:
    A, B = tf32_operands("NN", dtype)
    before = torch.randn(24, 40).to(dtype)
    exact = before.double().requires_grad_()
    gelu(exact, approximate="tanh").backward(in_fp64(A, B, "NN"))
    assert exact.grad is not None
    result = run(A, B, "NN", gelu=True, grad=True, gelu_in=before)[0]
    torch.testing.assert_close(result.double(), exact.grad, rtol=1e-5 + UNIT_ROUNDOFF[dtype], atol=2e-5)


def test_with_fp8_operands_the_input_of_gelu_has_the_dtype_of_the_bias() -> None:
    operand, bias = codes(torch.ones(16, 16)), torch.full((16,), 1 + 2**-7, dtype=BF16)
    result, _, before, _ = run(operand, operand, dtype=FP32, bias=bias, bias_type=DType.kBFloat16, gelu=True)
    assert (result.dtype, before.dtype) == (FP32, BF16)
    torch.testing.assert_close(result, gelu(torch.full((16, 16), 17 + 2**-7), approximate="tanh"))
    assert before.unique().tolist() == [17.0]


def test_an_fp8_sum_that_a_scale_makes_a_tie_is_rounded_once() -> None:
    left, right = codes(columns(16, 1)), codes(columns(16, 1), scale=4.0)
    assert run(left, right, dtype=BF16)[0].double().unique().tolist() == [256.0]
    assert run(left, right, dtype=BF16, bias=torch.ones(SIDE).to(BF16))[0].double().unique().tolist() == [258.0]


def test_a_delayed_output_scale_casts_the_unrounded_fp8_product() -> None:
    A, B = columns(1, 2**-6, 1), columns(16, 2**-6, 1)
    quantizer = TE.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)
    result = run(codes(A), codes(B), dtype=BF16, quantizer=quantizer)[0]
    assert result.dequantize(dtype=FP32).unique().tolist() == [18.0]  # 17 + 2**-12; 17 is a tie, which goes to 16
    assert quantizer.amax.item() == 17 + 2**-12
    from_bf16 = run(A.bfloat16(), B.bfloat16(), quantizer=quantizer)[0]
    assert from_bf16.dequantize(dtype=FP32).unique().tolist() == [16.0]


@pytest.mark.parametrize(("layout", "name"), [("NN", "A"), ("NT", "A"), ("TN", "B")])
def test_a_missing_direction_of_an_fp8_operand_is_named(layout: str, name: str) -> None:
    present, absent = codes(torch.ones(16, 16)), codes(torch.ones(16, 16), columnwise=False)
    if layout == "TN":
        absent = codes(torch.ones(16, 16))
        absent.update_usage(rowwise_usage=False)
    A, B = (absent, present) if name == "A" else (present, absent)
    with pytest.raises(RuntimeError, match=f"operand {name} .* holds no"):
        run(A, B, layout, BF16)


def test_empty_operands_give_empty_results_zeros_or_the_old_result() -> None:
    A, B = torch.randn(8, 16).to(BF16), torch.empty(0, 4, 16, dtype=BF16)
    assert run(A, B, bias=torch.ones(8, dtype=BF16))[0].shape == (0, 4, 8)
    A, B = torch.empty(0, 8), torch.empty(0, 4)
    D, bias_grad, _, _ = run(A, B, "NT", bias=torch.ones(4), grad=True)
    assert torch.equal(D, torch.zeros(4, 8))
    assert torch.equal(bias_grad, torch.zeros(4))
    assert torch.equal(run(A, B, "NT", D=torch.ones(4, 8), accumulate=True)[0], torch.ones(4, 8))
    empty = codes(torch.empty(0, 32))
    assert run(codes(torch.ones(16, 32)), empty, dtype=BF16)[0].shape == (0, 16)
    assert torch.equal(run(empty, codes(torch.empty(0, 16)), "NT", BF16)[0], torch.zeros(16, 32, dtype=BF16))


ONES = torch.ones(3, 16)
CODES = codes(torch.ones(16, 16))
OWN_SCALE = TE.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)


@pytest.mark.parametrize(
    ("B", "options", "message"),
    [
        (torch.ones(4, 8), {}, "inner dimensions differ"),
        (ONES, {"D": torch.empty(4, 3)}, r"D has shape \(4, 3\), the product has \(3, 3\)"),
        (ONES, {"D": torch.empty(3, 3), "dtype": BF16}, "output_dtype is torch.bfloat16"),
        (ONES, {"beta": 1.0}, "without accumulate"),
        (ONES, {"accumulate": True}, "there is no D"),
        (CODES, {"D": CODES, "quantizer": OWN_SCALE, "accumulate": True}, "quantized D"),
        (CODES, {"dtype": BF16}, r"A torch\.float32, B torch\.float8_e4m3fn"),
    ],
)
def test_misfits_are_told(B: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(ONES, B, **options)


# Sums of FP8 products as a Hopper's tensor cores add them, against exact rational arithmetic.


ONE_PRODUCT = TensorCore(products=1, promote_every=1)


def dot(core: TensorCore, a: Tensor, b: Tensor, split: bool = False) -> float:
    return tensor_cores.product(core, Factor(a[None], E4M3), Factor(b[None], E4M3), split).item()


def fp8(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(E4M3).float()


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 300)),
    dtypes=st.tuples(st.sampled_from([E4M3, E5M2]), st.sampled_from([E4M3, E5M2])),
    spread=st.sampled_from([0, 3, 30]),
    mean=st.sampled_from([0.0, 2.0]),
    core=st.sampled_from([HOPPER, ADA, ONE_PRODUCT, *(TensorCore(bits, 8, 16) for bits in (5, 17, 20, 24))]),
    split=st.booleans(),
    tile=st.sampled_from([1, 100, 1 << 16]),
    at_once=st.sampled_from([1, 500, 1 << 19]),
)
def test_a_product_is_that_of_exact_arithmetic_with_the_same_cuts(
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    spread: int,
    mean: float,
    core: TensorCore,
    split: bool,
    tile: int,
    at_once: int,
) -> None:
    """Multiply magnitudes that differ by up to ``spread`` powers of two, of both signs or one, in tiles of any size."""
    m, n, k = shape
    a, b = (
        ((torch.randn(rows, k) + mean) * 8 * 2.0 ** -torch.randint(spread + 1, (rows, k))).to(dtype).float()
        for rows, dtype in zip((m, n), dtypes, strict=True)
    )
    lowest = [exponent(Fraction(torch.finfo(dtype).smallest_normal)) for dtype in dtypes]
    factors = [Factor(values, dtype) for values, dtype in zip((a, b), dtypes, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_cores, "_TILE_ELEMENTS", tile)
        patch.setattr(tensor_cores, "_PRODUCTS_AT_ONCE", at_once)
        result = tensor_cores.product(core, *factors, split)
    assert torch.equal(result, added_one_by_one(core, a, b, lowest, core.promote_every if split else k))


def test_a_running_sum_keeps_thirteen_fraction_bits_and_cuts_terms_toward_zero() -> None:
    small = torch.full((64,), 2.0**-5)
    small[0] = 1.0
    for term, expected in ((2.0**-8, 1 + 2.0**-13), (2.0**-9, 1.0), (-(2.0**-9), 1.0)):
        assert dot(HOPPER, torch.tensor([1.0, term] + 62 * [0.0]), small) == expected
    # A sum of ones stops growing at 2^14 unless it is promoted.
    ones = torch.ones(32768)
    assert dot(HOPPER, ones, ones, split=False) == 2.0**14
    assert dot(HOPPER, ones, ones, split=True) == 2.0**15


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


def test_block_scaled_gemms_of_te_lose_what_the_tensor_core_cuts_in_a_block() -> None:
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8BlockScaling()
    module = TE.Linear(1024, 128, bias=False, params_dtype=torch.float32)
    x = torch.rand(16, 1024)

    def output(core: TensorCore | None) -> Tensor:
        chosen = tensor_cores.emulated(core) if core else nullcontext()
        with chosen, torch.no_grad(), TE.autocast(enabled=True, recipe=recipe):
            return module(x)

    exact = output(None)
    errors = [(output(TensorCore(bits)) - exact).norm() / exact.norm() for bits in (24, 14, 8)]
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


def linear_pass(split_forward: bool, core: TensorCore | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, input gradient and weight gradient of ``te.Linear`` under current scaling, in FP32."""
    recipe = importlib.import_module("transformer_engine.common.recipe")
    chosen = recipe.Float8CurrentScaling(fp8_gemm_fprop=recipe.MMParams(use_split_accumulator=split_forward))
    torch.manual_seed(0)
    module = TE.Linear(1024, 16, bias=False, params_dtype=torch.float32)
    x = torch.rand(32, 1024, requires_grad=True)
    with tensor_cores.emulated(core) if core else nullcontext():
        with TE.autocast(enabled=True, recipe=chosen):
            y = module(x)
        y.backward(torch.rand_like(y))
    assert x.grad is not None
    return y.detach(), x.grad, module.weight.grad


def test_te_asks_for_fast_sums_forward_unless_the_recipe_says_otherwise_and_for_split_ones_backward() -> None:
    exact = linear_pass(False, None)
    never_short = linear_pass(False, TensorCore(bits=24, promote_every=32))
    short = TensorCore(bits=8, products=32, promote_every=32)
    fast, split = (linear_pass(flag, short) for flag in (False, True))
    errors = [((x - y).norm() / y.norm()).item() for x, y in zip([*fast, split[0]], [*exact, exact[0]], strict=True)]
    assert errors[0] > 3 * max(errors[1:])
    assert min(errors) > 1e-4
    for one, other in zip(never_short, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gemms_that_are_not_fp8_stay_as_they_are() -> None:
    module = TE.Linear(64, 32, params_dtype=torch.bfloat16)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    plain = module(x)
    with tensor_cores.emulated(TensorCore(bits=2)):
        assert torch.equal(module(x), plain)
