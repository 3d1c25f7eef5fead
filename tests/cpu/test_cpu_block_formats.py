"""Float8BlockQuantizer, MXFP8Quantizer and their tensors, used through TE's own objects, block by block."""

from __future__ import annotations

import inspect
import io
import math
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from gemm_oracle import in_fp64, operands, product
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity import te
from te_on_cpu import activation, cast, mxfp8
from te_on_cpu.enums import DType

TE = te.kernels("cpu").te
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ML_DTYPE = {DType.kFloat8E4M3: ml_dtypes.float8_e4m3fn, DType.kFloat8E5M2: ml_dtypes.float8_e5m2}
LIMIT = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
ROWS, COLUMNS = 130, 260


def quantizer_of(dtype: Any = DType.kFloat8E4M3, **options: Any) -> Any:
    return TE.Float8BlockQuantizer(dtype, **({"rowwise": True, "columnwise": True} | options))


def values_of(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return values whose magnitude differs from block to block, with a row of zeros."""
    torch.manual_seed(0)
    values = torch.randn(shape) * torch.exp(4 * torch.randn(shape))
    values[0] = 0
    return values.to(dtype)


def encoded(
    values: np.ndarray, dtype: DType, power_of_two: bool, epsilon: float = 0.0
) -> tuple[np.ndarray, np.float32]:
    """Return the codes of one block and its scale_inv, computed with NumPy's FP32 and ``ml_dtypes``' rounding."""
    amax = max(np.float32(np.abs(values).max()), np.float32(epsilon))
    scale = np.float32(LIMIT[dtype]) / amax if amax else np.float32(1)
    if power_of_two:
        scale = np.float32(2.0 ** math.floor(math.log2(scale)))
    scaled = np.clip(values * scale, -LIMIT[dtype], LIMIT[dtype])
    return scaled.astype(ML_DTYPE[dtype]).view(np.uint8), np.float32(1) / scale


def by_blocks(
    values: Tensor, block: tuple[int, int], dtype: DType, power_of_two: bool, epsilon: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of a matrix and a scale_inv for each block, computed block by block."""
    matrix = values.float().numpy()
    down, across = (-(-size // length) for size, length in zip(matrix.shape, block, strict=True))
    codes, scale_inv = np.zeros(matrix.shape, np.uint8), np.zeros((down, across), np.float32)
    for i in range(down):
        for j in range(across):
            where = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            codes[where], scale_inv[i, j] = encoded(matrix[where], dtype, power_of_two, epsilon)
    return codes, scale_inv


def assert_stored(stored: Tensor, scale_inv: np.ndarray) -> None:
    """Assert that the scales are at the top left, in rows padded with zeros to a multiple of 4."""
    down, across = scale_inv.shape
    assert stored.shape == (down, -(-across // 4) * 4)
    assert np.array_equal(stored[:, :across].numpy(), scale_inv)
    assert not stored[:, across:].any()


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("source", [FP32, BF16, FP16])
def test_each_row_has_a_scale_for_every_128_columns(dtype: DType, power_of_two: bool, source: torch.dtype) -> None:
    values = values_of(ROWS, COLUMNS, dtype=source)
    values = values.clamp(-6e4, 6e4)
    tensor = quantizer_of(dtype, block_scaling_dim=1, force_pow_2_scales=power_of_two)(values)
    codes, scale_inv = by_blocks(values, (1, 128), dtype, power_of_two)
    assert np.array_equal(tensor._rowwise_data.numpy(), codes)
    assert_stored(tensor._rowwise_scale_inv, scale_inv.T)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_columnwise_data_are_the_transpose_quantized_by_its_own_rows(power_of_two: bool) -> None:
    values = values_of(ROWS, COLUMNS)
    tensor = quantizer_of(block_scaling_dim=1, force_pow_2_scales=power_of_two)(values)
    codes, scale_inv = by_blocks(values.t(), (1, 128), DType.kFloat8E4M3, power_of_two)
    assert np.array_equal(tensor._columnwise_data.numpy(), codes)
    assert_stored(tensor._columnwise_scale_inv, scale_inv.T)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_square_blocks_have_the_same_codes_in_both_directions(power_of_two: bool) -> None:
    values = values_of(ROWS, COLUMNS)
    tensor = quantizer_of(block_scaling_dim=2, force_pow_2_scales=power_of_two)(values)
    codes, scale_inv = by_blocks(values, (128, 128), DType.kFloat8E4M3, power_of_two)
    assert np.array_equal(tensor._rowwise_data.numpy(), codes)
    assert np.array_equal(tensor._columnwise_data.numpy(), codes.T)
    assert_stored(tensor._rowwise_scale_inv, scale_inv)
    assert_stored(tensor._columnwise_scale_inv, scale_inv.T)


def test_buffers_have_the_shapes_that_te_states() -> None:
    for dimensions in (1, 2):
        quantizer = quantizer_of(block_scaling_dim=dimensions)
        for shape in ((256, 384), (3, 5, 136), (7, 130)):
            for tensor in (quantizer(values_of(*shape)), quantizer.make_empty(shape, dtype=BF16, device="cpu")):
                assert tensor.shape == tensor._rowwise_data.shape == shape
                assert tensor._columnwise_data.shape == (shape[-1], *shape[:-1])
                assert tensor._rowwise_scale_inv.shape == quantizer.get_scale_shape(shape, columnwise=False)
                assert tensor._columnwise_scale_inv.shape == quantizer.get_scale_shape(shape, columnwise=True)


def test_an_amax_below_epsilon_counts_as_epsilon() -> None:
    values = values_of(64, 128, dtype=FP32)
    tensor = quantizer_of(block_scaling_dim=1, force_pow_2_scales=False, amax_epsilon=2.0)(values)
    codes, scale_inv = by_blocks(values, (1, 128), DType.kFloat8E4M3, False, epsilon=2.0)
    assert np.array_equal(tensor._rowwise_data.numpy(), codes)
    assert scale_inv.min() == np.float32(1) / np.float32(224)


def test_blocks_of_zeros_have_the_scale_1() -> None:
    tensor = quantizer_of(block_scaling_dim=1)(torch.zeros(4, 128))
    assert (tensor._rowwise_scale_inv == 1).all()
    assert not tensor._rowwise_data.any()


@pytest.mark.parametrize(("source", "scale"), [(FP32, torch.finfo(FP32).max), (BF16, torch.finfo(BF16).max)])
def test_a_scale_beyond_fp32_is_the_largest_number_of_the_values_dtype(source: torch.dtype, scale: float) -> None:
    quantizer = quantizer_of(block_scaling_dim=1, force_pow_2_scales=False)
    tensor = quantizer(torch.full((4, 128), 2.0**-125, dtype=source))
    assert tensor._rowwise_scale_inv[0, 0].item() == (torch.ones(()) / torch.tensor(scale)).item()


def test_nan_and_infinity_stay_in_their_block() -> None:
    values = torch.ones(1, 384)
    values[0, 0], values[0, 128] = math.nan, -math.inf
    tensor = quantizer_of(block_scaling_dim=1, columnwise=False)(values)
    assert tensor._rowwise_data[0, 0] == 0x7F
    assert tensor._rowwise_data[0, 128] == 0xFE  # -448
    assert tensor._rowwise_scale_inv[:, 0].tolist() == [1 / 256, 1.0, 1 / 256]
    decoded = tensor.dequantize()
    assert (decoded[0, 1:128] == 1).all()
    assert (decoded[0, 256:] == 1).all()


@settings(max_examples=40)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=140), st.booleans())
def test_a_decoded_value_is_within_the_spacing_of_e4m3(numbers: list[float], power_of_two: bool) -> None:
    values = torch.tensor([numbers])
    quantizer = quantizer_of(block_scaling_dim=1, columnwise=False, force_pow_2_scales=power_of_two)
    decoded = quantizer(values).dequantize()
    amax = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in values.split(128, dim=1)], 1)
    # Half a spacing: 2**-4 of the value, or half of a subnormal step, where amax is at least 224 * 2**9 such steps.
    bound = torch.maximum(values.abs() * 2.0**-4, amax * 2.0**-16) * 1.0001 + 1e-37
    assert ((decoded - values).abs() <= bound).all()


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_the_kernels_decode_as_te_s_python_does(dimensions: int, power_of_two: bool) -> None:
    quantizer = quantizer_of(block_scaling_dim=dimensions, force_pow_2_scales=power_of_two)
    for usages in ({"columnwise": False}, {"rowwise": False}):
        quantizer.set_usage(rowwise=True, columnwise=True)
        quantizer.set_usage(**usages)
        tensor = quantizer(values_of(ROWS, COLUMNS, dtype=FP32))
        assert torch.equal(cast.dequantize(tensor, DType.kFloat32), tensor.dequantize())


def test_noop_leaves_everything_as_it_is() -> None:
    quantizer = quantizer_of(block_scaling_dim=2)
    tensor = quantizer(values_of(128, 128))
    codes = tensor._rowwise_data.clone()
    quantizer.update_quantized(torch.ones(128, 128, dtype=BF16), tensor, noop_flag=torch.ones(1))
    assert torch.equal(tensor._rowwise_data, codes)


def test_update_usage_drops_a_direction_and_makes_the_columns_of_square_blocks() -> None:
    quantizer = quantizer_of(block_scaling_dim=2)
    both = quantizer(values_of(256, 128))
    quantizer.set_usage(columnwise=False)
    tensor = quantizer(values_of(256, 128))
    tensor.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert torch.equal(tensor._columnwise_data, both._columnwise_data)
    assert torch.equal(tensor._columnwise_scale_inv[:, :2], both._columnwise_scale_inv[:, :2])
    tensor.update_usage(rowwise_usage=False)
    assert tensor._rowwise_data is None
    assert torch.equal(tensor.dequantize(), both.dequantize())


def test_an_internal_quantizer_makes_a_storage() -> None:
    quantizer = quantizer_of(block_scaling_dim=1)
    quantizer.internal = True
    tensor = quantizer(values_of(128, 128))
    assert type(tensor).__name__ == "Float8BlockwiseQTensorStorage"
    assert tensor.dequantize().dtype == BF16


def test_a_block_quantizer_writes_into_block_scaled_tensors_only() -> None:
    other = TE.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)(torch.ones(128, 128))
    with pytest.raises(TypeError, match=r"Float8BlockQuantizer writes into a Float8BlockwiseQTensor.* Float8Tensor"):
        cast.quantize(torch.ones(128, 128), quantizer_of(), other)


def test_a_gemm_names_the_operand_that_lacks_a_direction() -> None:
    a = quantizer_of(block_scaling_dim=1, columnwise=False)(torch.ones(128, 128))
    with pytest.raises(RuntimeError, match=r"operand A .* Float8BlockwiseQTensor without columnwise data"):
        product(a, a, "NN", FP32)


def mxfp8_values(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return values_of(*shape, dtype=FP32).clamp(-6e4, 6e4).to(dtype)


def exponent_of(amax: float, limit: float) -> int:
    """Return the E8M0 byte of ``amax / limit``, which is computed as a product in FP32 and rounded up."""
    quotient = float(np.float32(amax) * np.float32(1 / limit))
    if quotient == 0:
        return 0
    mantissa, exponent = math.frexp(quotient)  # quotient = mantissa * 2**exponent, 0.5 <= mantissa < 1
    return min(max(exponent - (mantissa == 0.5) + 127, 0), 254)


def mxfp8_blocks(values: Tensor, block: tuple[int, int], dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of a matrix and the E8M0 byte of each block, computed block by block in FP64."""
    matrix = values.double().numpy()
    down, across = (size // length for size, length in zip(matrix.shape, block, strict=True))
    codes, exponents = np.zeros(matrix.shape, np.uint8), np.zeros((down, across), np.uint8)
    for i in range(down):
        for j in range(across):
            where = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            exponents[i, j] = exponent_of(np.abs(matrix[where]).max(), LIMIT[dtype])
            scaled = np.clip(matrix[where] * 2.0 ** (127 - int(exponents[i, j])), -LIMIT[dtype], LIMIT[dtype])
            codes[where] = scaled.astype(np.float32).astype(ML_DTYPE[dtype]).view(np.uint8)
    return codes, exponents


def assert_mxfp8_stored(stored: Tensor, exponents: np.ndarray, multiples: tuple[int, int]) -> None:
    down, across = exponents.shape
    assert stored.shape == tuple(-(-size // m) * m for size, m in zip(exponents.shape, multiples, strict=True))
    assert np.array_equal(stored[:down, :across].numpy(), exponents)
    assert not stored[down:].any()
    assert not stored[:, across:].any()


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("source", [FP32, BF16, FP16])
def test_rows_and_columns_have_a_scale_for_each_32_values(
    blackwell: ModuleType, dtype: DType, source: torch.dtype
) -> None:
    values = mxfp8_values(96, 160, dtype=source)
    tensor = blackwell.MXFP8Quantizer(dtype)(values)
    codes, exponents = mxfp8_blocks(values, (1, 32), dtype)
    assert np.array_equal(tensor._rowwise_data.numpy(), codes)
    assert_mxfp8_stored(tensor._rowwise_scale_inv, exponents, (128, 4))
    codes, exponents = mxfp8_blocks(values, (32, 1), dtype)
    assert np.array_equal(tensor._columnwise_data.numpy(), codes)
    assert_mxfp8_stored(tensor._columnwise_scale_inv, exponents, (4, 128))


def test_square_blocks_repeat_their_scale(blackwell: ModuleType) -> None:
    if "with_2d_quantization" not in inspect.signature(blackwell.MXFP8Quantizer).parameters:
        pytest.skip("this TransformerEngine has no square MXFP8 blocks")
    values = mxfp8_values(96, 160)
    tensor = blackwell.MXFP8Quantizer(DType.kFloat8E4M3, with_2d_quantization=True)(values)
    codes, exponents = mxfp8_blocks(values, (32, 32), DType.kFloat8E4M3)
    assert np.array_equal(tensor._rowwise_data.numpy(), codes)
    assert np.array_equal(tensor._columnwise_data.numpy(), codes)
    assert_mxfp8_stored(tensor._rowwise_scale_inv, exponents.repeat(32, 0), (128, 4))
    assert_mxfp8_stored(tensor._columnwise_scale_inv, exponents.repeat(32, 1), (4, 128))


def test_mxfp8_buffers_have_the_shapes_that_te_states(blackwell: ModuleType) -> None:
    quantizer = blackwell.MXFP8Quantizer(DType.kFloat8E4M3)
    for shape in ((256, 384), (2, 48, 64)):
        for tensor in (quantizer(mxfp8_values(*shape)), quantizer.make_empty(shape, dtype=BF16, device="cpu")):
            assert tensor.shape == tensor._rowwise_data.shape == tensor._columnwise_data.shape == shape
            assert tensor._rowwise_scale_inv.shape == quantizer.get_scale_shape(shape, columnwise=False)
            assert tensor._columnwise_scale_inv.shape == quantizer.get_scale_shape(shape, columnwise=True)


def test_every_e8m0_byte_decodes_to_its_power_of_two() -> None:
    decoded = mxfp8.from_e8m0(torch.arange(256, dtype=torch.uint8))
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(decoded.numpy(), expected, equal_nan=True)


def test_every_power_of_two_encodes_to_its_byte_and_anything_above_to_the_next() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    powers = mxfp8.from_e8m0(codes)
    assert torch.equal(mxfp8.to_e8m0(powers), codes)
    above = torch.nextafter(powers, torch.tensor(math.inf))
    assert torch.equal(mxfp8.to_e8m0(above), (codes.int() + 1).clamp(max=254).to(torch.uint8))


@pytest.mark.parametrize(("value", "code"), [(0.0, 0), (1e-45, 0), (math.inf, 254), (3.4e38, 254), (math.nan, 255)])
def test_e8m0_of_what_it_cannot_hold(value: float, code: int) -> None:
    assert mxfp8.to_e8m0(torch.tensor([value])).item() == code


@given(st.floats(0, width=32, allow_infinity=False))
def test_e8m0_rounds_up(value: float) -> None:
    code = mxfp8.to_e8m0(torch.tensor([value])).item()
    assert code == 254 or value <= 2.0 ** (code - 127)
    assert code == 0 or value > 2.0 ** (code - 128)


def test_nan_and_infinity_stay_in_their_mxfp8_block(blackwell: ModuleType) -> None:
    values = torch.ones(32, 96)
    values[0, 0], values[0, 32] = math.nan, -math.inf
    tensor = blackwell.MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False)(values)
    assert tensor._rowwise_scale_inv[0, :3].tolist() == [exponent_of(1, 448), 254, exponent_of(1, 448)]
    assert tensor._rowwise_data[0, 0] == 0x7F
    assert tensor._rowwise_data[0, 32] == 0xFE  # -448
    assert (tensor.dequantize()[0, 64:] == 1).all()


def test_sizes_that_are_no_multiples_of_32_are_refused(blackwell: ModuleType) -> None:
    quantizer = blackwell.MXFP8Quantizer(DType.kFloat8E4M3)
    for shape in ((32, 48), (33, 64)):
        with pytest.raises(RuntimeError, match=r"MXFP8 needs tensors .* divisible by 32"):
            quantizer(torch.ones(shape))


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_dequantize_multiplies_codes_and_scales(blackwell: ModuleType, direction: str, dtype: torch.dtype) -> None:
    values = mxfp8_values(96, 160, dtype=dtype)
    usages = {name: name == direction for name in ("rowwise", "columnwise")}
    tensor = blackwell.MXFP8Quantizer(DType.kFloat8E4M3, **usages)(values)
    block = (1, 32) if direction == "rowwise" else (32, 1)
    codes, exponents = mxfp8_blocks(values, block, DType.kFloat8E4M3)
    scales = 2.0 ** (exponents.repeat(block[0], 0).repeat(block[1], 1).astype(np.float64) - 127)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    assert torch.equal(tensor.dequantize(), torch.from_numpy(expected).to(dtype))


def test_a_bias_gradient_is_summed_before_the_gradient_is_rounded(blackwell: ModuleType) -> None:
    torch.manual_seed(0)
    grad, x = torch.randn(64, 32, dtype=BF16), torch.randn(64, 32, dtype=BF16)
    bias_grad, dx = activation.dbias_dsrelu(grad, x, blackwell.MXFP8Quantizer(DType.kFloat8E4M3))
    exact = grad.double() * 2 * x.double().clamp(min=0)
    assert torch.equal(bias_grad, exact.sum(0).to(BF16))
    rounded = blackwell.MXFP8Quantizer(DType.kFloat8E4M3)(exact.to(BF16))
    assert torch.equal(dx._rowwise_data, rounded._rowwise_data)


def test_the_gemm_reads_a_tensor_that_te_asked_to_swizzle_for_it(blackwell: ModuleType) -> None:
    quantizer = blackwell.MXFP8Quantizer(DType.kFloat8E4M3)
    values = mxfp8_values(64, 64)
    plain = product(quantizer(values), quantizer(values), dtype=FP32)
    import transformer_engine_torch

    quantizer.optimize_for_gemm = True
    swizzled = quantizer(values)
    transformer_engine_torch.swizzle_scales_for_gemm_(swizzled)
    assert torch.equal(product(swizzled, quantizer(values), dtype=FP32), plain)


# Both formats.


FORMATS = {
    "block": lambda dimensions=1: quantizer_of(block_scaling_dim=dimensions),
    "block, any scale": lambda dimensions=1: quantizer_of(block_scaling_dim=dimensions, force_pow_2_scales=False),
    "mxfp8": lambda dimensions=1: TE.MXFP8Quantizer(DType.kFloat8E4M3),
}


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_quantizing_again_fills_the_same_buffers(name: str) -> None:
    quantizer = FORMATS[name]()
    tensor, other = quantizer(values_of(128, 128)), values_of(128, 128).t().contiguous()
    before = tensor._rowwise_data
    tensor.copy_(other)
    assert tensor._rowwise_data is before
    assert torch.equal(tensor.dequantize(), quantizer(other).dequantize())


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_a_tensor_can_be_viewed_cloned_saved_and_reduced_to_a_direction(name: str) -> None:
    tensor = FORMATS[name]()(values_of(2, 64, 128))
    assert torch.equal(tensor.view(128, 128).dequantize(), tensor.dequantize().view(128, 128))
    assert torch.equal(tensor.clone().dequantize(), tensor.dequantize())
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).dequantize(), tensor.dequantize())
    tensor.update_usage(rowwise_usage=False)
    assert tensor._rowwise_data is None
    assert tensor._columnwise_data is not None


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_gemm_multiplies_the_values_that_the_codes_along_its_inner_dimension_stand_for(
    name: str, layout: str
) -> None:
    vectors, squares = (FORMATS[name](dimensions) for dimensions in (1, 2))
    left, right = operands(layout, 96, 96, 256)
    a, b = (vectors if layout == "NT" else squares)(left), vectors(right)
    result = product(a, b, layout, FP32, use_split_accumulator=True)
    a.update_usage(rowwise_usage=layout[0] == "T", columnwise_usage=layout[0] != "T")
    b.update_usage(rowwise_usage=layout[1] == "N", columnwise_usage=layout[1] != "N")
    exact = in_fp64(a.dequantize(), b.dequantize(), layout)
    assert (result - exact).abs().max() < 2e-5 * exact.abs().max()
