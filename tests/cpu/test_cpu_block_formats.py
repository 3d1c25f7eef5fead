"""Float8BlockQuantizer, MXFP8Quantizer and their tensors, used through TE's own objects, block by block."""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from emulated_gpu import emulated
from gemm_oracle import in_fp64, operands, product
from torch import Tensor

from parity import te
from te_on_cpu import activation, cast, cuda, mxfp8
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


Encoder = Callable[[np.ndarray], tuple[np.ndarray, Any]]


def by_fp32_scales(dtype: DType, power_of_two: bool, epsilon: float = 0.0) -> Encoder:
    """Return a function that gives a block's codes and its scale_inv, with NumPy's FP32 and ``ml_dtypes``' rounding."""

    def encode(values: np.ndarray) -> tuple[np.ndarray, np.float32]:
        amax = max(np.float32(np.abs(values).max()), np.float32(epsilon))
        scale = np.float32(LIMIT[dtype]) / amax if amax else np.float32(1)
        if power_of_two:
            scale = np.float32(2.0 ** math.floor(math.log2(scale)))
        return rounded(values * scale, dtype), np.float32(1) / scale

    return encode


def by_e8m0_scales(dtype: DType) -> Encoder:
    """Return a function that gives a block's codes and the E8M0 byte of its scale_inv."""

    def encode(values: np.ndarray) -> tuple[np.ndarray, int]:
        exponent = exponent_of(np.abs(values).max(), LIMIT[dtype])
        return rounded(values.astype(np.float64) * 2.0 ** (127 - exponent), dtype), exponent

    return encode


def rounded(scaled: np.ndarray, dtype: DType) -> np.ndarray:
    limited = np.clip(scaled, -LIMIT[dtype], LIMIT[dtype]).astype(np.float32)
    return limited.astype(ML_DTYPE[dtype]).view(np.uint8)


def exponent_of(amax: float, limit: float) -> int:
    """Return the E8M0 byte of ``amax / limit``, which is computed as a product in FP32 and rounded up."""
    quotient = float(np.float32(amax) * np.float32(1 / limit))
    if quotient == 0:
        return 0
    mantissa, exponent = math.frexp(quotient)  # quotient = mantissa * 2**exponent, 0.5 <= mantissa < 1
    return min(max(exponent - (mantissa == 0.5) + 127, 0), 254)


def by_blocks(values: Tensor, block: tuple[int, int], encode: Encoder) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of a matrix and a scale for each block, computed block by block."""
    matrix = values.float().numpy()
    codes, scales = np.zeros(matrix.shape, np.uint8), []
    for top in range(0, matrix.shape[0], block[0]):
        scales.append([])
        for left in range(0, matrix.shape[1], block[1]):
            where = np.s_[top : top + block[0], left : left + block[1]]
            codes[where], scale = encode(matrix[where])
            scales[-1].append(scale)
    return codes, np.array(scales)


def assert_stored(stored: Tensor, scales: np.ndarray, multiples: tuple[int, int] = (1, 4)) -> None:
    """Assert that the scales are at the top left, padded with zeros to multiples of these sizes."""
    down, across = scales.shape
    assert stored.shape == tuple(-(-size // m) * m for size, m in zip(scales.shape, multiples, strict=True))
    assert np.array_equal(stored[:down, :across].numpy(), scales)
    assert not stored[down:].any()
    assert not stored[:, across:].any()


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("source", [FP32, BF16, FP16])
def test_each_row_has_a_scale_for_every_128_columns_and_so_has_the_transpose(
    dtype: DType, power_of_two: bool, source: torch.dtype
) -> None:
    values = values_of(ROWS, COLUMNS, dtype=source).clamp(-6e4, 6e4)
    tensor = quantizer_of(dtype, block_scaling_dim=1, force_pow_2_scales=power_of_two)(values)
    for direction, matrix in (("rowwise", values), ("columnwise", values.t())):
        codes, scale_inv = by_blocks(matrix, (1, 128), by_fp32_scales(dtype, power_of_two))
        assert np.array_equal(getattr(tensor, f"_{direction}_data").numpy(), codes)
        assert_stored(getattr(tensor, f"_{direction}_scale_inv"), scale_inv.T)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_square_blocks_have_the_same_codes_in_both_directions(power_of_two: bool) -> None:
    values = values_of(ROWS, COLUMNS)
    tensor = quantizer_of(block_scaling_dim=2, force_pow_2_scales=power_of_two)(values)
    codes, scale_inv = by_blocks(values, (128, 128), by_fp32_scales(DType.kFloat8E4M3, power_of_two))
    assert np.array_equal(tensor._rowwise_data.numpy(), codes)
    assert np.array_equal(tensor._columnwise_data.numpy(), codes.T)
    assert_stored(tensor._rowwise_scale_inv, scale_inv)
    assert_stored(tensor._columnwise_scale_inv, scale_inv.T)


def test_an_amax_below_epsilon_counts_as_epsilon() -> None:
    values = values_of(64, 128, dtype=FP32)
    tensor = quantizer_of(block_scaling_dim=1, force_pow_2_scales=False, amax_epsilon=2.0)(values)
    codes, scale_inv = by_blocks(values, (1, 128), by_fp32_scales(DType.kFloat8E4M3, False, epsilon=2.0))
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


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("source", [FP32, BF16, FP16])
def test_rows_and_columns_have_a_scale_for_each_32_values(
    blackwell: ModuleType, dtype: DType, source: torch.dtype
) -> None:
    values = mxfp8_values(96, 160, dtype=source)
    tensor = blackwell.MXFP8Quantizer(dtype)(values)
    for direction, block, multiples in (("rowwise", (1, 32), (128, 4)), ("columnwise", (32, 1), (4, 128))):
        codes, exponents = by_blocks(values, block, by_e8m0_scales(dtype))
        assert np.array_equal(getattr(tensor, f"_{direction}_data").numpy(), codes)
        assert_stored(getattr(tensor, f"_{direction}_scale_inv"), exponents, multiples)


def test_square_blocks_repeat_their_scale(blackwell: ModuleType) -> None:
    if "with_2d_quantization" not in inspect.signature(blackwell.MXFP8Quantizer).parameters:
        pytest.skip("this TransformerEngine has no square MXFP8 blocks")
    values = mxfp8_values(96, 160)
    tensor = blackwell.MXFP8Quantizer(DType.kFloat8E4M3, with_2d_quantization=True)(values)
    codes, exponents = by_blocks(values, (32, 32), by_e8m0_scales(DType.kFloat8E4M3))
    assert np.array_equal(tensor._rowwise_data.numpy(), codes)
    assert np.array_equal(tensor._columnwise_data.numpy(), codes)
    assert_stored(tensor._rowwise_scale_inv, exponents.repeat(32, 0), (128, 4))
    assert_stored(tensor._columnwise_scale_inv, exponents.repeat(32, 1), (4, 128))


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


def test_nan_and_infinity_stay_in_their_mxfp8_block(blackwell: ModuleType) -> None:
    values = torch.ones(32, 96)
    values[0, 0], values[0, 32] = math.nan, -math.inf
    tensor = blackwell.MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False)(values)
    assert tensor._rowwise_scale_inv[0, :3].tolist() == [exponent_of(1, 448), 254, exponent_of(1, 448)]
    assert tensor._rowwise_data[0, 0] == 0x7F
    assert tensor._rowwise_data[0, 32] == 0xFE  # -448
    assert (tensor.dequantize()[0, 64:] == 1).all()


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_dequantize_multiplies_codes_and_scales(blackwell: ModuleType, direction: str, dtype: torch.dtype) -> None:
    values = mxfp8_values(96, 160, dtype=dtype)
    usages = {name: name == direction for name in ("rowwise", "columnwise")}
    tensor = blackwell.MXFP8Quantizer(DType.kFloat8E4M3, **usages)(values)
    block = (1, 32) if direction == "rowwise" else (32, 1)
    codes, exponents = by_blocks(values, block, by_e8m0_scales(DType.kFloat8E4M3))
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


# All formats, with NVFP4.


FORMATS = {
    "block": lambda dimensions=1: quantizer_of(block_scaling_dim=dimensions),
    "block, any scale": lambda dimensions=1: quantizer_of(block_scaling_dim=dimensions, force_pow_2_scales=False),
    "mxfp8": lambda dimensions=1: TE.MXFP8Quantizer(DType.kFloat8E4M3),
    "nvfp4": lambda dimensions=1: TE.NVFP4Quantizer(),
}
ON_BLACKWELL = pytest.mark.usefixtures("blackwell")
EACH = pytest.mark.parametrize("name", ["block", "mxfp8", "nvfp4"])


@ON_BLACKWELL
@pytest.mark.parametrize(
    ("name", "dimensions", "shapes"),
    [
        *(("block", dimensions, [(3, 5, 136), (7, 130)]) for dimensions in (1, 2)),
        ("mxfp8", 1, [(256, 384), (2, 48, 64)]),
        ("nvfp4", 1, [(64, 48), (2, 24, 32)]),
    ],
)
def test_buffers_have_the_shapes_that_te_states(name: str, dimensions: int, shapes: list[tuple[int, ...]]) -> None:
    quantizer = FORMATS[name](dimensions)
    for shape in shapes:
        *leading, last = shape
        of_rows = (*leading, last // 2) if name == "nvfp4" else shape
        of_columns = shape if name == "mxfp8" else (last, *leading)
        for tensor in (quantizer(values_of(*shape)), quantizer.make_empty(shape, dtype=BF16, device="cpu")):
            assert tensor.shape == shape
            assert tensor._rowwise_data.shape == of_rows
            if name == "nvfp4":  # two rows of the values to a byte
                assert tensor._columnwise_data.numel() == math.prod(shape) // 2
            else:
                assert tensor._columnwise_data.shape == of_columns
            assert tensor._rowwise_scale_inv.shape == quantizer.get_scale_shape(shape, columnwise=False)
            assert tensor._columnwise_scale_inv.shape == quantizer.get_scale_shape(shape, columnwise=True)


@ON_BLACKWELL
@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        *(("mxfp8", shape, "MXFP8 needs tensors .* divisible by 32") for shape in ((32, 48), (33, 64))),
        *(("nvfp4", shape, "NVFP4 needs tensors .* divisible by 16") for shape in ((16, 24), (17, 32))),
    ],
)
def test_sizes_that_are_no_multiples_of_a_block_are_refused(name: str, shape: tuple[int, int], error: str) -> None:
    with pytest.raises(RuntimeError, match=error):
        FORMATS[name]()(torch.ones(shape))


@ON_BLACKWELL
@EACH
def test_a_tensor_can_be_filled_again_viewed_cloned_saved_and_reduced_to_a_direction(name: str) -> None:
    quantizer = FORMATS[name]()
    tensor, other = quantizer(values_of(2, 64, 128)), -values_of(2, 64, 128)
    before = tensor._rowwise_data
    tensor.copy_(other)
    assert tensor._rowwise_data is before
    assert torch.equal(tensor.dequantize(), quantizer(other).dequantize())
    assert torch.equal(tensor.view(128, 128).dequantize(), tensor.dequantize().view(128, 128))
    assert torch.equal(tensor.clone().dequantize(), tensor.dequantize())
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).dequantize(), tensor.dequantize())
    tensor.update_usage(rowwise_usage=False)
    assert tensor._rowwise_data is None
    assert tensor._columnwise_data is not None


@ON_BLACKWELL
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("name", ["block", "block, any scale", "mxfp8"])
def test_a_gemm_multiplies_the_values_that_the_codes_along_its_inner_dimension_stand_for(
    name: str, layout: str
) -> None:
    # A Blackwell multiplies blocks as MXFP8, so it reads only powers of two from their scales.
    with emulated(cuda.HOPPER if name == "block, any scale" else cuda.BLACKWELL):
        vectors, squares = (FORMATS[name](dimensions) for dimensions in (1, 2))
        left, right = operands(layout, 96, 96, 256)
        a, b = (vectors if layout == "NT" else squares)(left), vectors(right)
        result = product(a, b, layout, FP32, use_split_accumulator=True)
    a.update_usage(rowwise_usage=layout[0] == "T", columnwise_usage=layout[0] != "T")
    b.update_usage(rowwise_usage=layout[1] == "N", columnwise_usage=layout[1] != "N")
    exact = in_fp64(a.dequantize(), b.dequantize(), layout)
    assert (result - exact).abs().max() < 2e-5 * exact.abs().max()
