"""``generic_gemm`` against FP64, with bounds from the error analysis of sums (Higham, 2002, section 3.1)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu

from parity import te
from parity.cpu import cast, float8, gemm, tensor_cores
from parity.cpu.enums import DType

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TE_DTYPE = {FP32: DType.kFloat32, BF16: DType.kBFloat16, FP16: DType.kFloat16}
UNIT_ROUNDOFF = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}
SMALL, LARGE = 16, 64  # sides of squares that PyTorch multiplies with different BF16 kernels


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


def run(left: Any, right: Any, layout: str = "TN", dtype: torch.dtype | None = None, **options: Any) -> list[Any]:
    """``generic_gemm`` with the arguments that TE's ``general_gemm`` gives it by default."""
    arguments: dict[str, Any] = {
        "D": None,
        "quantizer": None,
        "bias": None,
        "bias_type": DType.kBFloat16,
        "gelu": False,
        "gelu_in": None,
        "grad": False,
        "accumulate": False,
    }
    return gemm.generic_gemm(
        A=left,
        transA=layout[0] == "T",
        B=right,
        transB=layout[1] == "T",
        output_dtype=None if dtype is None else TE_DTYPE[dtype],
        workspace=torch.empty(1),
        workspace_size=1,
        use_split_accumulator=False,
        **(arguments | options),
    )


def factors(layout: str, dtype: torch.dtype, n: int = 24, m: int = 40, k: int = 56) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    A = torch.randn(*((m, k) if layout[0] == "T" else (k, m))).to(dtype)
    B = torch.randn(*((k, n) if layout[1] == "T" else (n, k))).to(dtype)
    return A, B


def in_fp64(left: Tensor, right: Tensor, layout: str) -> Tensor:
    return (right.t() if layout[1] == "T" else right).double() @ (left.t() if layout[0] == "T" else left).double()


def tf32_oracle(values: np.ndarray) -> np.ndarray:
    """FP64 arithmetic on the significand: 11 bits with the leading one, nearest even; FP32 normal numbers only."""
    significand, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.rint(significand * 2**11) / 2**11, exponent)


def codes(te_module: ModuleType, values: Tensor, scale: float = 1.0, **usages: bool) -> Any:
    return cast.quantize(
        values, te_module.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), DType.kFloat8E4M3, **usages)
    )


def test_fp32_products_round_no_operand_where_tf32_is_left_out() -> None:
    values = torch.full((16, 16), 1.0 + 2.0**-20)
    with tensor_cores.left_out():
        exact = run(values, values)[0]
    assert torch.equal(exact, values @ values.t())
    assert not torch.equal(run(values, values)[0], exact)


@given(value=st.floats(2.0**-126, 2.0**126, width=32), negative=st.booleans())
def test_tf32_keeps_ten_mantissa_bits_and_rounds_to_nearest_even(value: float, negative: bool) -> None:
    values = torch.tensor([-value if negative else value])
    np.testing.assert_array_equal(tensor_cores.round_to_tf32(values).numpy(), tf32_oracle(values.numpy()))


@given(value=st.floats(2.0**-100, 2.0**100, width=32))
def test_tf32_values_stay_and_ties_go_to_even(value: float) -> None:
    even = tensor_cores.round_to_tf32(torch.tensor([value])).view(torch.int32) & ~0x2000
    numbers = torch.cat([even, even + 0x1000, even + 0x2000, even + 0x3000]).view(FP32)
    expected = torch.cat([even, even, even + 0x2000, even + 0x4000]).view(FP32)
    assert torch.equal(tensor_cores.round_to_tf32(numbers), expected)


def test_tf32_keeps_infinities_and_every_nan() -> None:
    bits = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32)
    rounded = tensor_cores.round_to_tf32(bits.view(FP32))
    assert rounded[:2].tolist() == [float("inf"), -float("inf")]
    assert rounded[2:].isnan().all()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("side", [8, 64])
def test_each_layout_stays_within_the_bound_of_fp32_sums(layout: str, dtype: torch.dtype, side: int) -> None:
    A, B = factors(layout, dtype, n=side + 3, m=side, k=side + 5)
    if dtype == FP32:
        A, B = (torch.from_numpy(tf32_oracle(factor.numpy())).float() for factor in (A, B))
    exact, sizes = in_fp64(A, B, layout), in_fp64(A.abs(), B.abs(), layout)
    bound = (side + 5) * UNIT_ROUNDOFF[FP32] * 1.01 * sizes + UNIT_ROUNDOFF[dtype] * 1.01 * exact.abs() + 1e-7
    result = run(*factors(layout, dtype, n=side + 3, m=side, k=side + 5), layout=layout)[0]
    assert result.dtype == dtype
    assert ((result.double() - exact).abs() <= bound).all()


def test_fp32_operands_are_rounded_to_tf32() -> None:
    A, B = torch.full((1, 1), 1 + 2**-12), torch.full((1, 1), 1 + 2**-10)
    assert run(A, B)[0].item() == 1 + 2**-10


@pytest.mark.parametrize("side", [SMALL, LARGE])
def test_a_bf16_product_with_fp32_output_is_not_rounded(side: int) -> None:
    A, B = factors("NT", BF16, side, side, side)
    D = torch.zeros(side, side)
    run(A, B, "NT", FP32, D=D)
    torch.testing.assert_close(D.double(), in_fp64(A, B, "NT"), rtol=0, atol=side * 2.0**-24 * 64)


def test_leading_dimensions_of_b_are_kept() -> None:
    A, B = torch.randn(5, 16), torch.randn(2, 3, 16)
    assert run(A, B)[0].shape == (2, 3, 5)
    assert run(torch.randn(2, 3, 5), B, "NT")[0].shape == (16, 5)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("side", [SMALL, LARGE])
@pytest.mark.parametrize("addend", ["bias", "accumulate", "both"])
def test_bias_and_old_result_are_added_before_the_only_rounding(dtype: torch.dtype, side: int, addend: str) -> None:
    tie = 1 / UNIT_ROUNDOFF[dtype] + 1  # rounds down to the even neighbour; tie + 1 is a number of the dtype
    A, B = torch.zeros(side, side, dtype=dtype), torch.zeros(side, side, dtype=dtype)
    A[:, 0], A[:, 1], B[:, 0], B[:, 1] = 1, 1, tie - 1, 1
    bias, old = {"bias": (1.0, None), "accumulate": (None, 1.0), "both": (2.0, -1.0)}[addend]
    options: dict[str, Any] = {}
    if bias is not None:
        options["bias"] = torch.full((side,), bias, dtype=dtype)
    if old is not None:
        options |= {"D": torch.full((side, side), old, dtype=dtype), "accumulate": True}
    assert run(A, B)[0].double().unique().tolist() == [tie - 1]
    assert run(A, B, **options)[0].double().unique().tolist() == [tie + 1]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("side", [SMALL, LARGE])
def test_alpha_scales_the_product_and_beta_the_old_result(dtype: torch.dtype, side: int) -> None:
    ones = torch.ones(side, side, dtype=dtype)
    D = torch.full((side, side), 3.0, dtype=dtype)
    result = run(ones, ones, D=D, accumulate=True, alpha=0.25, beta=2.0)[0]
    assert result is D
    assert D.unique().tolist() == [side / 4 + 6]


def test_old_contents_do_not_matter_without_accumulation() -> None:
    A, B = factors("TN", BF16, LARGE, LARGE, LARGE)
    D = torch.full((LARGE, LARGE), float("nan"), dtype=BF16)
    assert torch.equal(run(A, B, D=D)[0], run(A, B)[0])


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_bias_gradient_sums_b_over_the_inner_dimension_and_leaves_d_unbiased(dtype: torch.dtype) -> None:
    A, B = factors("NT", dtype)
    D, bias_grad, _, _ = run(A, B, "NT", bias=torch.full((24,), 100.0, dtype=dtype), grad=True)
    assert torch.equal(D, run(A, B, "NT")[0])
    torch.testing.assert_close(bias_grad, B.double().sum(0).to(dtype), rtol=UNIT_ROUNDOFF[dtype] * 2, atol=1e-5)
    assert bias_grad.dtype == dtype


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gelu_takes_the_unrounded_sum_and_its_input_is_returned_rounded(dtype: torch.dtype) -> None:
    A, B = factors("TN", dtype)
    A, B = tensor_cores.round_to_tf32(A.float()).to(dtype), tensor_cores.round_to_tf32(B.float()).to(dtype)
    bias = torch.randn(40).to(dtype)
    result, _, before, _ = run(A, B, bias=bias, gelu=True)
    exact = in_fp64(A, B, "TN") + bias.double()
    rtol = UNIT_ROUNDOFF[dtype] * 1.01
    torch.testing.assert_close(before.double(), exact, rtol=rtol, atol=2e-5)
    torch.testing.assert_close(result.double(), gelu(exact, approximate="tanh"), rtol=rtol, atol=2e-5)
    assert before.dtype == result.dtype == dtype


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_gradient_of_gelu_multiplies_the_sum(dtype: torch.dtype) -> None:
    A, B = factors("NN", dtype)
    A, B = tensor_cores.round_to_tf32(A.float()).to(dtype), tensor_cores.round_to_tf32(B.float()).to(dtype)
    before = torch.randn(24, 40).to(dtype)
    exact = before.double().requires_grad_()
    gelu(exact, approximate="tanh").backward(in_fp64(A, B, "NN"))
    assert exact.grad is not None
    result = run(A, B, "NN", gelu=True, grad=True, gelu_in=before)[0]
    torch.testing.assert_close(result.double(), exact.grad, rtol=1e-5 + UNIT_ROUNDOFF[dtype], atol=2e-5)


def test_with_fp8_operands_the_input_of_gelu_has_the_dtype_of_the_bias(te_module: ModuleType) -> None:
    operand, bias = codes(te_module, torch.ones(16, 16)), torch.full((16,), 1 + 2**-7, dtype=BF16)
    result, _, before, _ = run(operand, operand, dtype=FP32, bias=bias, bias_type=DType.kBFloat16, gelu=True)
    assert (result.dtype, before.dtype) == (FP32, BF16)
    torch.testing.assert_close(result, gelu(torch.full((16, 16), 17 + 2**-7), approximate="tanh"))
    assert before.unique().tolist() == [17.0]


def test_a_bias_gradient_of_fp8_codes_is_scaled(te_module: ModuleType) -> None:
    A, B = codes(te_module, torch.ones(16, 16)), codes(te_module, torch.full((16, 16), 3.0), scale=4.0)
    assert run(A, B, "NT", BF16, bias=torch.ones(16, dtype=BF16), grad=True)[1].tolist() == [48.0] * 16


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("side", [16, 48])
def test_fp8_values_are_multiplied_and_the_sum_scaled(
    te_module: ModuleType, layout: str, dtype: torch.dtype, side: int
) -> None:
    A, B = factors(layout, FP32, side, side, side)
    left, right = codes(te_module, A, scale=3.0), codes(te_module, B, scale=0.7)
    A, B = (float8.decode(tensor._data, torch.float8_e4m3fn) for tensor in (left, right))
    scale = left._scale_inv.double() * right._scale_inv.double()
    exact, sizes = in_fp64(A, B, layout) * scale, in_fp64(A.abs(), B.abs(), layout) * scale
    result = run(left, right, layout, dtype)[0]
    bound = (side + 2) * UNIT_ROUNDOFF[FP32] * sizes + UNIT_ROUNDOFF[dtype] * 1.01 * exact.abs() + 1e-7
    assert ((result.double() - exact).abs() <= bound).all()


def test_an_fp8_sum_that_a_scale_makes_a_tie_is_rounded_once(te_module: ModuleType) -> None:
    A = torch.zeros(LARGE, LARGE)
    A[:, 0], A[:, 1] = 16.0, 1.0
    B = torch.zeros(LARGE, LARGE)
    B[:, 0], B[:, 1] = 16.0, 1.0
    left, right = codes(te_module, A), codes(te_module, B, scale=4.0)
    bias = torch.full((LARGE,), 1.0, dtype=BF16)
    assert run(left, right, dtype=BF16)[0].double().unique().tolist() == [256.0]
    assert run(left, right, dtype=BF16, bias=bias)[0].double().unique().tolist() == [258.0]


def test_a_delayed_output_scale_casts_the_unrounded_fp8_product(te_module: ModuleType) -> None:
    A, B = torch.zeros(16, 16), torch.zeros(16, 16)
    A[:, 0], A[:, 1], B[:, 0], B[:, 1] = 1.0, 2**-6, 17.0 - 1.0, 2**-6
    A[:, 2], B[:, 2] = 1.0, 1.0
    quantizer = te_module.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)
    result = run(codes(te_module, A), codes(te_module, B), dtype=BF16, quantizer=quantizer)[0]
    assert result.dequantize(dtype=FP32).unique().tolist() == [18.0]  # 17 + 2**-12; 17 is a tie, which goes to 16
    assert quantizer.amax.item() == 17 + 2**-12
    from_bf16 = run(A.bfloat16(), B.bfloat16(), quantizer=quantizer)[0]
    assert from_bf16.dequantize(dtype=FP32).unique().tolist() == [16.0]


@pytest.mark.parametrize(("layout", "name"), [("NN", "A"), ("NT", "A"), ("TN", "B")])
def test_a_missing_direction_of_an_fp8_operand_is_named(te_module: ModuleType, layout: str, name: str) -> None:
    present, absent = codes(te_module, torch.ones(16, 16)), codes(te_module, torch.ones(16, 16), columnwise=False)
    if layout == "TN":
        absent = codes(te_module, torch.ones(16, 16))
        absent.update_usage(rowwise_usage=False)
    A, B = (absent, present) if name == "A" else (present, absent)
    with pytest.raises(RuntimeError, match=f"operand {name} .* holds no"):
        run(A, B, layout, BF16)


@pytest.mark.parametrize(
    ("layout", "shapes", "summed"),
    [
        ("TN", ((16, 24), (32, 24)), "the layer's input features"),
        ("NN", ((24, 16), (32, 24)), "the layer's output features"),
        ("NT", ((24, 16), (24, 32)), "the rows .tokens. that the layer is given"),
    ],
)
def test_fp8_operands_have_to_be_padded(te_module: ModuleType, layout: str, shapes: Any, summed: str) -> None:
    A, B = (codes(te_module, torch.ones(*shape)) for shape in shapes)
    with pytest.raises(RuntimeError, match=f"inner dimension of 24, {summed}"):
        run(A, B, layout, BF16)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    A, B = torch.randn(8, 16).to(dtype), torch.empty(0, 4, 16, dtype=dtype)
    assert run(A, B, bias=torch.ones(8, dtype=dtype))[0].shape == (0, 4, 8)


def test_an_empty_inner_dimension_gives_zeros_or_leaves_the_old_result() -> None:
    A, B = torch.empty(0, 8), torch.empty(0, 4)
    bias = torch.ones(4)
    D, bias_grad, _, _ = run(A, B, "NT", bias=bias, grad=True)
    assert torch.equal(D, torch.zeros(4, 8))
    assert torch.equal(bias_grad, torch.zeros(4))
    assert torch.equal(run(A, B, "NT", D=torch.ones(4, 8), accumulate=True)[0], torch.ones(4, 8))


def test_empty_fp8_operands_give_empty_results(te_module: ModuleType) -> None:
    A, B = codes(te_module, torch.ones(16, 32)), codes(te_module, torch.empty(0, 32))
    assert run(A, B, dtype=BF16)[0].shape == (0, 16)
    assert torch.equal(run(B, codes(te_module, torch.empty(0, 16)), "NT", BF16)[0], torch.zeros(16, 32, dtype=BF16))


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        (((4, 16), (16, 4)), {"layout": "TT"}, "both operands transposed"),
        (((4, 16), (4, 8)), {}, "inner dimensions differ"),
        (((4, 16), (3, 16)), {"D": torch.empty(4, 3)}, r"D has shape \(4, 3\), the product has \(3, 4\)"),
        (((4, 16), (3, 16)), {"D": torch.empty(3, 4), "dtype": BF16}, "output_dtype is torch.bfloat16"),
        (((4, 16), (3, 16)), {"beta": 1.0}, "without accumulate"),
        (((4, 16), (3, 16)), {"accumulate": True}, "there is no D"),
    ],
)
def test_misfits_are_told(
    operands: tuple[tuple[int, int], tuple[int, int]], options: dict[str, Any], message: str
) -> None:
    A, B = torch.ones(operands[0]), torch.ones(operands[1])
    with pytest.raises(ValueError, match=message):
        run(A, B, **options)


def test_a_quantized_result_cannot_be_accumulated(te_module: ModuleType) -> None:
    quantizer = te_module.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)
    old = codes(te_module, torch.ones(16, 16))
    with pytest.raises(ValueError, match="quantized D"):
        run(old, old, dtype=BF16, D=old, quantizer=quantizer, accumulate=True)


def test_operands_of_two_dtypes_are_refused(te_module: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"A torch\.float8_e4m3fn, B torch\.bfloat16"):
        run(codes(te_module, torch.ones(16, 16)), torch.ones(16, 16, dtype=BF16), dtype=BF16)
