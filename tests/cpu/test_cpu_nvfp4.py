"""E2M1 over all codes, and NVFP4Quantizer and its tensors against TE's own pure-Python NVFP4, bit for bit."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import nvfp4_reference
import pytest
import torch
from gemm_oracle import in_fp64, operands, product
from torch import Tensor

from parity import te
from te_on_cpu import cast, nvfp4

TE = te.kernels("cpu").te
pytestmark = pytest.mark.usefixtures("blackwell")
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = torch.tensor(MAGNITUDES + [-magnitude for magnitude in MAGNITUDES])


def test_all_codes_decode_to_their_values_and_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(nvfp4.values_of(nvfp4.pack(codes)), VALUES)
    assert torch.equal(nvfp4.codes_of(VALUES), codes)


@pytest.mark.parametrize("encode", [nvfp4.codes_of, nvfp4.codes_at_random])
@pytest.mark.parametrize(("value", "code"), [(6.5, 7), (-1e30, 15), (math.inf, 7), (-math.inf, 15), (math.nan, 7)])
def test_values_beyond_6_saturate_and_nan_is_6(encode: Callable[[Tensor], Tensor], value: float, code: int) -> None:
    assert encode(torch.tensor([value])).item() == code


def test_a_nan_has_no_sign() -> None:
    assert nvfp4.codes_of(torch.tensor([-math.nan]).copysign(torch.tensor(-1.0))).item() == 7


@pytest.mark.parametrize("low_bits", [0x0000, 0x0001, 0xFFFF])
def test_values_on_a_tie_and_around_it_and_all_others_round_as_ml_dtypes_does(low_bits: int) -> None:
    values = ((torch.arange(1 << 16, dtype=torch.int32) << 16) | low_bits).view(torch.float32)
    values = values[~values.isnan()]
    expected = values.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(nvfp4.codes_of(values).numpy(), expected)


def test_the_first_of_a_pair_lies_in_the_low_bits() -> None:
    codes = torch.tensor([[1, 15, 8, 2]], dtype=torch.uint8)
    packed = nvfp4.pack(codes)
    assert packed.tolist() == [[0xF1, 0x28]]
    assert torch.equal(nvfp4.unpack(packed), codes)


@pytest.mark.parametrize("transpose", [nvfp4.transpose, cast.nvfp4_data_transpose])
def test_transpose_is_that_of_the_codes(transpose: Callable[[Tensor], Tensor]) -> None:
    codes = torch.randint(16, (6, 8), dtype=torch.uint8)
    assert torch.equal(nvfp4.unpack(transpose(nvfp4.pack(codes))), codes.t())


@pytest.mark.parametrize(("sign", "sign_bit"), [(1, 0), (-1, 8)])
def test_stochastic_rounding_has_the_value_as_its_mean_between_any_two_neighbours(sign: int, sign_bit: int) -> None:
    torch.manual_seed(0)
    draws, fractions = 4000, torch.arange(1, 16) / 16
    for code, (low, high) in enumerate(itertools.pairwise(MAGNITUDES), sign_bit):
        codes = nvfp4.codes_at_random(sign * (low + fractions * (high - low)).repeat(draws, 1))
        assert set(codes.unique().tolist()) == {code, code + 1}
        # Six standard deviations of the mean of a variable that is 0 or 1.
        assert ((codes == code + 1).float().mean(0) - fractions).abs().max() < 6 * 0.5 / math.sqrt(draws)


def test_stochastic_rounding_is_seeded_by_pytorch() -> None:
    values = torch.linspace(-6, 6, 1000)
    torch.manual_seed(1)
    first = nvfp4.codes_at_random(values)
    second = nvfp4.codes_at_random(values)
    torch.manual_seed(1)
    assert torch.equal(nvfp4.codes_at_random(values), first)
    assert not torch.equal(first, second)


def test_stochastic_rounding_leaves_representable_values() -> None:
    assert torch.equal(nvfp4.codes_at_random(VALUES), torch.arange(16, dtype=torch.uint8))


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS, COLUMNS = 80, 96


def values_of(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return values whose magnitude differs from block to block, with a row of zeros."""
    torch.manual_seed(0)
    values = (torch.randn(shape) * torch.exp(2 * torch.randn(shape))).clamp(-6e4, 6e4)
    values[0] = 0
    return values.to(dtype)


def without_signed_zeros(packed: Tensor) -> Tensor:
    """Return the codes with 0 for -0, as the reference has it; the GPU's conversion keeps -0."""
    codes = nvfp4.unpack(packed)
    return codes.masked_fill(codes == 8, 0)


def assert_equal_to_reference(tensor: Any, reference: Any) -> None:
    """Assert that packed codes, scales (with zeros around them) and amaxes are the reference's, in both directions."""
    stored = (
        (tensor._rowwise_data, tensor._rowwise_scale_inv, tensor._amax_rowwise),
        (tensor._columnwise_data, tensor._columnwise_scale_inv, tensor._amax_columnwise),
    )
    expected = (
        (reference.data, reference.scale, reference.global_amax_row),
        (reference.data_t, reference.scale_t, reference.global_amax_col),
    )
    for (data, scales, amax), (data_ref, scales_ref, amax_ref) in zip(stored, expected, strict=True):
        if data is None and data_ref is None:
            continue
        assert torch.equal(without_signed_zeros(data.view(data_ref.shape)), without_signed_zeros(data_ref))
        down, across = scales_ref.shape
        assert torch.equal(scales[:down, :across], nvfp4_reference.bytes_of(scales_ref))
        assert not scales[down:].any()
        assert not scales[:, across:].any()
        assert torch.equal(amax, amax_ref.view(-1))


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_codes_scales_and_amaxes_equal_the_reference(dtype: torch.dtype, square: bool) -> None:
    values = values_of(ROWS, COLUMNS, dtype=dtype)
    tensor = TE.NVFP4Quantizer(with_2d_quantization=square)(values)
    assert_equal_to_reference(tensor, nvfp4_reference.quantizer(with_2d_quantization=square).quantize(values))


@pytest.mark.parametrize("signs", [True, False])
def test_columns_are_quantized_after_a_hadamard_transform(signs: bool) -> None:
    options = {"with_rht": True}
    if nvfp4_reference.knows(nvfp4_reference.module().NVFP4QuantizerRef, "with_random_sign_mask"):
        options["with_random_sign_mask"] = signs
    elif not signs:
        pytest.skip("this TransformerEngine's reference has no such option")
    values = values_of(ROWS, COLUMNS)
    tensor = TE.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=signs)(values)
    assert_equal_to_reference(tensor, nvfp4_reference.quantizer(**options).quantize(values))


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-40, 1e-36, 1.0, 3e38])
def test_extreme_amaxes_equal_the_reference(amax: float) -> None:
    values = torch.linspace(-1, 1, 256).view(16, 16) * amax
    assert_equal_to_reference(TE.NVFP4Quantizer()(values), nvfp4_reference.quantizer().quantize(values))


def test_fast_math_is_warned_of_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer, values = TE.NVFP4Quantizer(), values_of(ROWS, COLUMNS)
    plain = quantizer(values)
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    nvfp4._warn_of_fast_math.cache_clear()
    with pytest.warns(UserWarning, match="NVTE_USE_FAST_MATH is set, and the CPU kernels quantize"):
        fast = quantizer(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantizer(values)
    assert torch.equal(fast._rowwise_data, plain._rowwise_data)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("mode", ["MAE", "MSE"])
@pytest.mark.parametrize("limit", [256, 448])
@pytest.mark.parametrize(
    "more", [{}, {"with_2d_quantization": True}, {"row_scaled_nvfp4": True, "columnwise": False}], ids=str
)
def test_4over6_takes_the_scale_that_the_reference_takes(
    more: dict[str, Any], limit: int, mode: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"nvfp4_4over6_err_mode": mode, "nvfp4_e4m3_max": limit, **more}
    if not nvfp4_reference.knows(TE.NVFP4Quantizer, "nvfp4_use_4over6"):
        pytest.skip("this TransformerEngine has no 4over6")
    fast = {"nvfp4_4over6_err_use_fast_math": True} if is_fast else {}
    if not nvfp4_reference.knows(nvfp4_reference.module().NVFP4QuantizerRef, *fast):
        pytest.skip("this TransformerEngine has no fast errors of 4over6")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", str(int(is_fast)))
    torch.manual_seed(0)
    values = torch.randn(1024, 256).to(BF16)  # in some blocks, the two ways to add errors disagree
    tensor = TE.NVFP4Quantizer(nvfp4_use_4over6=True, **options)(values)
    reference = nvfp4_reference.quantizer(nvfp4_use_4over6=True, **fast, **options).quantize(values)
    assert_equal_to_reference(tensor, reference)


def test_row_scaling_has_an_amax_for_each_row() -> None:
    if not nvfp4_reference.knows(TE.NVFP4Quantizer, "row_scaled_nvfp4"):
        pytest.skip("this TransformerEngine has no row scaling")
    values = values_of(ROWS, COLUMNS)
    tensor = TE.NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)(values)
    reference = nvfp4_reference.quantizer(row_scaled_nvfp4=True, columnwise=False).quantize(values)
    assert torch.equal(tensor._rowwise_data, reference.data)
    assert torch.equal(tensor._amax_rowwise, values.float().abs().amax(1))
    relative_error = (tensor.dequantize().float() - values.float()).norm() / values.float().norm()
    assert relative_error < 0.15


def test_stochastic_rounding_has_the_scales_of_the_nearest_and_neighbouring_codes() -> None:
    values = values_of(ROWS, COLUMNS)
    nearest = TE.NVFP4Quantizer()(values)
    torch.manual_seed(0)
    random = TE.NVFP4Quantizer(stochastic_rounding=True)(values)
    assert torch.equal(random._rowwise_scale_inv, nearest._rowwise_scale_inv)
    assert torch.equal(random._amax_rowwise, nearest._amax_rowwise)
    magnitudes = [nvfp4.unpack(tensor._rowwise_data).int() & 7 for tensor in (random, nearest)]
    distance = (magnitudes[0] - magnitudes[1]).abs()
    assert distance.max() == 1
    assert 0.05 < distance.float().mean() < 0.5


def test_dequantize_multiplies_code_scale_and_amax() -> None:
    tensor = TE.NVFP4Quantizer()(values_of(ROWS, COLUMNS, dtype=FP32))
    codes = nvfp4.values_of(tensor._rowwise_data).double()
    scales = tensor._rowwise_scale_inv[:ROWS, : COLUMNS // 16].view(torch.float8_e4m3fn).double()
    exact = codes * scales.repeat_interleave(16, 1) * tensor._amax_rowwise.double() / (6 * 448)
    torch.testing.assert_close(tensor.dequantize().double(), exact, rtol=4e-7, atol=0)


def test_update_usage_makes_the_columns_of_square_blocks() -> None:
    quantizer = TE.NVFP4Quantizer(with_2d_quantization=True)
    both = quantizer(values_of(ROWS, COLUMNS))
    quantizer.set_usage(columnwise=False)
    tensor = quantizer(values_of(ROWS, COLUMNS))
    tensor.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert torch.equal(tensor._columnwise_data, both._columnwise_data)
    assert torch.equal(tensor._columnwise_scale_inv[:COLUMNS, : ROWS // 16], both._columnwise_scale_inv[:COLUMNS, :5])
    assert torch.equal(tensor._amax_columnwise, both._amax_columnwise)
    tensor.update_usage(rowwise_usage=False)
    assert tensor._rowwise_data is None


def test_a_hadamard_transform_takes_bf16_alone() -> None:
    with pytest.raises(RuntimeError, match=r"random Hadamard transform takes bfloat16 .* torch\.float32"):
        TE.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)(torch.ones(16, 16))


def test_the_hadamard_transform_keeps_inner_products() -> None:
    matrix = TE.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True).rht_matrix
    assert torch.equal(matrix.double() @ matrix.double().t(), torch.eye(16, dtype=torch.float64))
    torch.manual_seed(0)
    x, y = torch.randn(4, 64, dtype=BF16), torch.randn(4, 64, dtype=BF16)
    rotated = nvfp4.transform(x, matrix).double() @ nvfp4.transform(y, matrix).double().t()
    torch.testing.assert_close(rotated, x.double() @ y.double().t(), rtol=0, atol=0.15)


TRANSFORMED = {"with_rht": True, "with_post_rht_amax": True}


@pytest.mark.parametrize(("layout", "options"), [("TN", {}), ("NN", {}), ("NT", {}), ("NT", TRANSFORMED)])
def test_a_gemm_is_as_exact_as_four_bits_allow_and_transforms_of_both_factors_cancel(
    layout: str, options: dict[str, Any]
) -> None:
    a, b = operands(layout, 96, 96, 128, BF16)
    quantizer = TE.NVFP4Quantizer(**options)
    result = product(quantizer(a), quantizer(b), layout, FP32, use_split_accumulator=True)
    exact = in_fp64(a, b, layout)
    assert 0.05 < (result - exact).norm() / exact.norm() < 0.17


def test_a_gemm_multiplies_the_decoded_values() -> None:
    quantizer = TE.NVFP4Quantizer(columnwise=False)
    torch.manual_seed(0)
    a, b = quantizer(torch.randn(96, 128)), quantizer(torch.randn(64, 128))
    result = product(a, b, dtype=FP32, use_split_accumulator=True)
    exact = in_fp64(a.dequantize(dtype=FP32), b.dequantize(dtype=FP32))
    assert (result - exact).abs().max() < 1e-6 * exact.abs().max()
