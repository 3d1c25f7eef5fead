"""Casts with one scale per tensor, FP8's bit fields, and weights cast from a distributed optimizer's parts of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parity import te
from te_on_cpu import cast, float8, nvfp4, partial_cast
from te_on_cpu.enums import DType

# Casts with one scale per tensor: FP8's bit fields (OCP 8-bit floating point, 2023), delayed and current scaling.


TE = te.kernels("cpu").te
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MANTISSA_BITS_AND_BIAS = {E4M3: (3, 7), E5M2: (2, 15)}
NAN_CODES = {E4M3: {0x7F, 0xFF}, E5M2: {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}}
INFINITY_CODES: dict[torch.dtype, set[int]] = {E4M3: set(), E5M2: {0x7C, 0xFC}}
ONE = torch.ones(1)


def value_of(code: int, dtype: torch.dtype) -> float:
    mantissa_bits, bias = MANTISSA_BITS_AND_BIAS[dtype]
    if code in NAN_CODES[dtype]:
        return float("nan")
    sign = -1.0 if code & 0x80 else 1.0
    if code in INFINITY_CODES[dtype]:
        return sign * float("inf")
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def finite_codes(dtype: torch.dtype) -> list[int]:
    return [code for code in range(256) if np.isfinite(value_of(code, dtype))]


def nearest_code(value: float, dtype: torch.dtype) -> int:
    """Return the code nearest to ``value``: the even one in a tie, and the largest one beyond the range."""
    sign = 0x80 if np.signbit(value) else 0
    magnitudes = [code for code in finite_codes(dtype) if code < 0x80]
    size = min(abs(value), value_of(magnitudes[-1], dtype))
    return sign | min(magnitudes, key=lambda code: (abs(size - value_of(code, dtype)), code % 2))


def encode(values: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor = ONE) -> list[int]:
    return float8.encode(values, scale, dtype).data.tolist()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
def test_every_code_decodes_to_the_value_of_its_bit_fields(dtype: torch.dtype, to: torch.dtype) -> None:
    decoded = float8.decode(torch.arange(256, dtype=torch.uint8), dtype, to).double().numpy()
    expected = np.array([value_of(code, dtype) for code in range(256)])
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_finite_code_survives_decoding_and_encoding(dtype: torch.dtype) -> None:
    codes = torch.tensor(finite_codes(dtype), dtype=torch.uint8)
    assert encode(float8.decode(codes, dtype), dtype) == codes.tolist()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_between_two_codes_go_to_the_nearest_and_ties_to_the_even_one(dtype: torch.dtype) -> None:
    magnitudes = sorted(value_of(code, dtype) for code in finite_codes(dtype) if code < 0x80)
    middles = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(magnitudes)])
    around = torch.cat([middles, middles.nextafter(torch.zeros(())), middles.nextafter(torch.tensor(1e9))])
    values = torch.cat([around, -around])
    assert encode(values, dtype) == [nearest_code(value, dtype) for value in values.tolist()]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_finite_number_goes_to_its_nearest_code(dtype: torch.dtype, value: float) -> None:
    assert encode(torch.tensor([value]), dtype) == [nearest_code(value, dtype)]


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 0x7E), (E5M2, 0x7B)])
def test_what_exceeds_the_range_saturates_infinities_too(dtype: torch.dtype, largest: int) -> None:
    values = torch.tensor([1e6, float("inf"), -1e6, -float("inf")])
    assert encode(values, dtype) == [largest, largest, largest | 0x80, largest | 0x80]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_nan_becomes_the_canonical_nan(dtype: torch.dtype) -> None:
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert encode(nan, dtype)[:3] == [0x7F, 0x7F, 0x7F]
    assert encode(nan, dtype)[3] == nearest_code(1.0, dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_gives_what_the_codes_of_a_cast_stand_for(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(0))
    magnitudes = torch.tensor(sorted(value_of(code, dtype) for code in finite_codes(dtype)))
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    values = torch.cat([bits.int().view(torch.float32), torch.randn(1 << 16), magnitudes, ties, torch.tensor([1e9])])
    expected = float8.decode(float8.cast(values.clone(), dtype), dtype)
    is_number = ~values.isnan()
    actual = float8.rounded(values.clone(), dtype)
    assert torch.equal(actual[is_number], expected[is_number])
    assert actual[~is_number].isnan().all()


def test_zeros_keep_their_sign() -> None:
    assert encode(torch.tensor([0.0, -0.0]), E4M3) == [0x00, 0x80]


def test_bf16_values_are_scaled_in_fp32() -> None:
    value, scale = torch.tensor([1.0078125], dtype=torch.bfloat16), torch.tensor([1.055])
    product = value.float() * scale
    assert encode(value, E4M3, scale) == [nearest_code(product.item(), E4M3)] == [0x39]
    assert encode(product.bfloat16(), E4M3) == [0x38], "the example is one where rounding to BF16 first would differ"


def test_scale_inv_is_the_fp32_reciprocal_of_the_scale() -> None:
    scale = torch.tensor([1.055])
    assert torch.equal(float8.encode(torch.ones(2, 2), scale, E4M3).scale_inv, 1 / scale)


@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
    nans=st.integers(0, 3),
)
def test_amax_is_the_largest_magnitude_and_passes_over_nans(values: list[float], nans: int) -> None:
    tensor = torch.tensor([float("nan")] * nans + values)
    assert float8.amax_of(tensor).item() == max(abs(value) for value in values)


def test_amax_of_nothing_is_zero() -> None:
    assert float8.amax_of(torch.empty(0, 16)).item() == 0.0


def test_a_transpose_puts_the_last_dimension_first() -> None:
    codes = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    result = float8.transpose(codes)
    assert result.is_contiguous()
    assert torch.equal(result, codes.permute(2, 0, 1))


LIMIT = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
FP32_MAX = torch.finfo(torch.float32).max


def delayed(scale: float = 1.0, amax: float = 0.0, **usages: bool) -> Any:
    return TE.Float8Quantizer(torch.tensor([scale]), torch.tensor([amax]), DType.kFloat8E4M3, **usages)


def current(dtype: DType = DType.kFloat8E4M3, **options: Any) -> Any:
    return TE.Float8CurrentScalingQuantizer(dtype, torch.device("cpu"), **options)


def test_delayed_scaling_casts_with_the_scale_it_was_given() -> None:
    result = cast.quantize(torch.tensor([[3.0, -5.0]]), delayed(scale=4.0))
    assert isinstance(result, TE.Float8Tensor)
    assert torch.equal(float8.decode(result._data, torch.float8_e4m3fn), torch.tensor([[12.0, -20.0]]))
    assert result._scale_inv.tolist() == [0.25]
    assert torch.equal(result.dequantize(), torch.tensor([[3.0, -5.0]]))


@pytest.mark.parametrize(("kept", "after"), [(0.0, 5.0), (7.0, 7.0)])
def test_delayed_scaling_only_raises_the_amax(kept: float, after: float) -> None:
    quantizer = delayed(amax=kept)
    cast.quantize(torch.tensor([[3.0, -5.0]]), quantizer)
    assert quantizer.amax.tolist() == [after]


def test_a_set_noop_flag_leaves_output_and_amax_alone() -> None:
    quantizer = delayed()
    output = cast.quantize(torch.full((16, 16), 2.0), quantizer)
    before = output._data.clone()
    cast.quantize(torch.full((16, 16), 9.0), quantizer, output, torch.ones(1))
    assert torch.equal(output._data, before)
    assert quantizer.amax.tolist() == [2.0]
    cast.quantize(torch.full((16, 16), 9.0), quantizer, output, torch.zeros(1))
    assert torch.equal(output.dequantize(), torch.full((16, 16), 9.0))


def test_an_output_is_filled_in_place() -> None:
    quantizer = delayed()
    output = cast.create_empty_quantized_tensor(quantizer, [4, 8], torch.bfloat16)
    data, columnwise = output._data, output._transpose
    values = torch.randn(4, 8, dtype=torch.bfloat16)
    assert cast.quantize(values, quantizer, output) is output
    assert output._data is data
    assert output._transpose is columnwise
    assert torch.equal(columnwise, data.t())
    assert not output._transpose_invalid


def test_an_output_loses_the_direction_that_is_not_asked_for() -> None:
    output = cast.quantize(torch.randn(4, 8), delayed())
    cast.quantize(torch.randn(4, 8), delayed(columnwise=False), output)
    assert output._transpose is None
    assert output._transpose_invalid


@pytest.mark.parametrize("columnwise", [True, False])
def test_columnwise_usage_adds_the_transposed_codes(columnwise: bool) -> None:
    result = cast.quantize(torch.randn(2, 3, 4), current(columnwise=columnwise))
    if columnwise:
        assert torch.equal(result._transpose, result._data.permute(2, 0, 1))
    else:
        assert result._transpose is None


def test_columnwise_data_alone_is_refused_as_by_the_gpu_kernel() -> None:
    with pytest.raises(NotImplementedError, match="asks only for columnwise data"):
        cast.quantize(torch.randn(4, 8), current(rowwise=False))


def test_internal_quantizers_make_bare_storages() -> None:
    quantizer = current()
    quantizer.internal = True
    result = cast.quantize(torch.randn(4, 8, dtype=torch.bfloat16), quantizer)
    assert type(result).__name__ == "Float8TensorStorage"
    assert result.dequantize().dtype == torch.bfloat16


def test_other_quantizers_are_refused_by_name() -> None:
    class HomemadeQuantizer:
        pass

    with pytest.raises(NotImplementedError, match=r"quantize .* TransformerEngine \d.* HomemadeQuantizer"):
        cast.quantize(torch.randn(32, 32), HomemadeQuantizer())


def test_current_scaling_takes_the_amax_to_the_largest_code() -> None:
    for dtype, limit in LIMIT.items():
        result = cast.quantize(torch.tensor([[0.1, -0.7]]), current(dtype))
        assert float8.decode(result._data, float8.fp8_dtype(result))[0, 1].item() == -limit
        assert result._scale_inv.item() == (1 / (torch.tensor(limit) / torch.tensor(0.7))).item()


@given(amax=st.floats(2.0**-126, FP32_MAX, width=32), limit=st.sampled_from([448.0, 57344.0]))
def test_the_current_scale_is_the_fp32_quotient_or_the_largest_fp32(amax: float, limit: float) -> None:
    quotient = (torch.tensor(limit) / torch.tensor(amax)).item()
    assert float8.scale_from_amax(torch.tensor(amax), limit).item() == min(quotient, FP32_MAX)


@given(amax=st.floats(2.0**-126, 2.0**127, width=32))
def test_a_power_of_two_scale_is_the_largest_that_does_not_exceed_the_scale(amax: float) -> None:
    exact = float8.scale_from_amax(torch.tensor(amax), 448.0).item()
    scale = float8.scale_from_amax(torch.tensor(amax), 448.0, power_of_two=True).item()
    assert torch.frexp(torch.tensor(scale)).mantissa.item() == 0.5
    assert scale <= exact < 2 * scale


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_an_amax_that_gives_no_scale_counts_as_scale_one(amax: float, power_of_two: bool) -> None:
    assert float8.scale_from_amax(torch.tensor(amax), 448.0, power_of_two=power_of_two).item() == 1.0


def test_epsilon_is_the_least_amax() -> None:
    assert float8.scale_from_amax(torch.tensor(0.25), 448.0, epsilon=0.5).item() == 896.0
    assert float8.scale_from_amax(torch.tensor(0.0), 448.0, epsilon=0.5).item() == 896.0
    assert float8.scale_from_amax(torch.tensor(2.0), 448.0, epsilon=0.5).item() == 224.0


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0,)])
def test_empty_tensors_stay_empty_and_leave_the_amax(shape: tuple[int, ...]) -> None:
    quantizer = delayed(amax=3.0)
    assert cast.quantize(torch.empty(shape), quantizer).shape == shape
    assert quantizer.amax.tolist() == [3.0]


def test_a_bias_gradient_is_summed_before_the_cast_and_rounded_once() -> None:
    grad = torch.randn(4, 64, 16, dtype=torch.bfloat16)
    bias_grad, codes = cast.bgrad_quantize(grad, current())
    assert torch.equal(bias_grad, grad.float().sum((0, 1)).bfloat16())
    assert torch.equal(codes._data, cast.quantize(grad, current())._data)


def test_split_quantize_gives_each_part_its_own_scale() -> None:
    tensor = torch.cat([torch.ones(2, 16), torch.full((3, 16), 100.0), torch.empty(0, 16)])
    parts = cast.split_quantize(tensor, [2, 3, 0], [current() for _ in range(3)])
    assert [tuple(part.shape) for part in parts] == [(2, 16), (3, 16), (0, 16)]
    assert [part._data.unique().tolist() for part in parts[:2]] == [[0x7E], [0x7E]]
    with pytest.raises(ValueError, match="2 sections but 1 quantizers"):
        cast.split_quantize(tensor, [2, 3], [current()])


def test_dequantizing_rounds_once_to_the_dtype() -> None:
    tensor = cast.quantize(torch.randn(8, 16), current())
    exact = float8.decode(tensor._data, torch.float8_e4m3fn).double() * tensor._scale_inv.double()
    assert torch.equal(cast.dequantize(tensor, DType.kBFloat16), exact.float().bfloat16())


def test_fp8_transpose_fills_out() -> None:
    codes = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    out = torch.zeros(4, 2, 3, dtype=torch.uint8)
    assert cast.fp8_transpose(codes, DType.kFloat8E4M3, out=out) is out
    assert torch.equal(out, codes.permute(2, 0, 1))


def test_store_without_a_quantizer_rounds_once() -> None:
    values = torch.randn(4, 8)
    assert torch.equal(cast.store(values, None, torch.bfloat16), values.bfloat16())
    output = torch.empty(4, 8, dtype=torch.float16)
    assert cast.store(values, None, torch.float16, output) is output
    assert torch.equal(output, values.half())


def test_store_with_delayed_scaling_casts_the_unrounded_values() -> None:
    values = torch.tensor([[17.0 + 2**-10, 1.0]])  # just above the tie between 16 and 18; BF16 rounds it to the tie
    quantizer = delayed()
    stored = cast.store(values, quantizer, torch.bfloat16)
    assert stored.dequantize(dtype=torch.float32)[0, 0].item() == 18.0
    assert stored.dtype == torch.bfloat16
    assert quantizer.amax.item() == values[0, 0].item()


def test_store_with_current_scaling_casts_the_rounded_values() -> None:
    values = torch.tensor([[17.0 + 2**-10, 448.0]])
    stored = cast.store(values, current(), torch.bfloat16)
    assert stored.dequantize(dtype=torch.float32)[0, 0].item() == 16.0


@pytest.mark.parametrize(("before_rounding", "amax"), [(True, 1 + 2**-9), (False, 1.0)])
def test_store_with_current_scaling_can_take_the_amax_before_rounding(before_rounding: bool, amax: float) -> None:
    values = torch.tensor([[1 + 2**-9]])
    stored = cast.store(values, current(), torch.bfloat16, amax_before_rounding=before_rounding)
    scale = float8.scale_from_amax(torch.tensor(amax), 448.0)
    assert stored._scale_inv.item() == scale.reciprocal().item()


# Quantized weights cast from a distributed optimizer's master weights, as a whole or part by part.


BF16 = torch.bfloat16
ROWS, COLUMNS = 160, 288


@pytest.fixture(scope="module")
def one_process() -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def values_of(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(ROWS, COLUMNS, generator=generator) * torch.randn(ROWS, 1, generator=generator).exp()
    values[16:32, 32:48] = 0
    return values


def quantizer_of(name: str) -> Any:
    if name == "block":
        return TE.Float8BlockQuantizer(
            DType.kFloat8E4M3, rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=2
        )
    if name == "mxfp8":
        return TE.MXFP8Quantizer(DType.kFloat8E4M3)
    if name == "nvfp4":
        return TE.NVFP4Quantizer(with_2d_quantization=True)
    if name == "delayed":
        return TE.Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1), DType.kFloat8E4M3)
    return TE.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"))


def buffers_of(tensor: Any) -> dict[str, Tensor]:
    names = ("data", "scale_inv", "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    names += ("amax_rowwise", "amax_columnwise")
    found = {name: getattr(tensor, f"_{name}", None) for name in names}
    return {name: buffer for name, buffer in found.items() if buffer is not None}


def weight_from_master(quantizer: Any, master: Tensor, group: Any) -> Any:
    """Cast the master weights into a quantized weight that held other values before, and return it."""
    from transformer_engine.pytorch.tensor.utils import post_all_gather_processing, quantize_master_weights

    weight = quantizer(values_of(seed=0).to(BF16))
    quantize_master_weights([weight], [master.flatten()], [0], group)
    post_all_gather_processing([weight])
    return weight


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_a_weight_from_its_whole_master_is_the_master_quantized(
    blackwell: ModuleType, one_process: Any, name: str
) -> None:
    """Expect the codes of the master in the weight's dtype, because TE casts it to that dtype first."""
    quantizer, master = quantizer_of(name), values_of(seed=1)
    actual = buffers_of(weight_from_master(quantizer, master, one_process))
    expected = buffers_of(quantizer(master.to(BF16)))
    assert actual.keys() == expected.keys()
    for buffer, values in expected.items():
        if name == "block" and "scale_inv" in buffer:  # the amax of padding is 0, and its scale 1
            actual[buffer] = actual[buffer].where(values != 0, 0.0)
        assert torch.equal(actual[buffer], values), buffer


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_what_inference_mode_has_made_is_written_to_outside_of_it(blackwell: ModuleType, name: str) -> None:
    quantizer, values = quantizer_of(name), values_of(seed=1).to(BF16)
    with torch.inference_mode():
        made = quantizer(values_of().to(BF16))
    quantizer.update_quantized(values, made)
    for buffer, expected in buffers_of(quantizer(values)).items():
        assert torch.equal(buffers_of(made)[buffer], expected), buffer


SPLITS = [0, 1000, 1001, 1001 + 32 * COLUMNS, ROWS * COLUMNS]


def parts_of(values: Tensor) -> list[tuple[int, Tensor]]:
    """Return parts of the flat values, each with the index of its first element, cut within blocks and bytes."""
    flat = values.flatten()
    return [(begin, flat[begin:end]) for begin, end in itertools.pairwise(SPLITS)]


def test_amaxes_of_parts_are_those_of_the_whole_once_they_are_reduced() -> None:
    values = values_of()
    whole, reduced = torch.zeros(2, 4), torch.zeros(2, 4)
    partial_cast.fp8_block_scaling_compute_partial_amax(values.flatten(), whole, ROWS, COLUMNS, 0, 128)
    for start, part in parts_of(values):
        amax = torch.full((2, 4), 7.0)
        partial_cast.fp8_block_scaling_compute_partial_amax(part, amax, ROWS, COLUMNS, start, 128)
        reduced = torch.maximum(reduced, amax)
    assert torch.equal(reduced, whole)
    assert whole[1, 2] == values[128:, 256:].abs().max()
    assert not whole[:, 3].any()


def test_fp8_blocks_are_cast_part_by_part() -> None:
    values, scale = values_of(), torch.tensor([[2.0, 4.0, 8.0, 0.0], [1.0, 0.5, 16.0, 0.0]])
    whole, by_parts = (torch.zeros(ROWS * COLUMNS, dtype=torch.uint8) for _ in range(2))
    size = (ROWS, COLUMNS)
    partial_cast.fp8_block_scaling_partial_cast(values.flatten(), whole, scale, *size, 0, 128, DType.kFloat8E5M2)
    for start, part in parts_of(values):
        out = by_parts[start : start + part.numel()]
        partial_cast.fp8_block_scaling_partial_cast(part, out, scale, *size, start, 128, DType.kFloat8E5M2)
    assert torch.equal(by_parts, whole)
    corner = (values[128:, 256:] * 16.0).clamp(-57344, 57344).to(torch.float8_e5m2)
    assert torch.equal(whole.view(ROWS, COLUMNS)[128:, 256:], corner.view(torch.uint8))


def test_mxfp8_is_cast_part_by_part(blackwell: ModuleType) -> None:
    values = values_of().to(BF16)
    tensor = quantizer_of("mxfp8")(values)
    outputs = torch.zeros(2, ROWS * COLUMNS, dtype=torch.uint8)
    scales = tensor._rowwise_scale_inv, tensor._columnwise_scale_inv
    for start, part in parts_of(values):
        rowwise, columnwise = outputs[:, start : start + part.numel()]
        partial_cast.mxfp8_scaling_partial_cast(part, rowwise, columnwise, *scales, ROWS, COLUMNS, start)
    assert torch.equal(outputs[0].view(ROWS, COLUMNS), tensor._rowwise_data)
    assert torch.equal(outputs[1].view(ROWS, COLUMNS), tensor._columnwise_data)


def test_nvfp4_is_cast_part_by_part_and_leaves_the_other_half_of_a_byte(blackwell: ModuleType) -> None:
    values = values_of().to(BF16)
    tensor = quantizer_of("nvfp4")(values)
    scales = tensor._rowwise_scale_inv[:ROWS:16, : COLUMNS // 16].view(torch.float8_e4m3fn).float()
    global_scale = torch.empty(1)
    partial_cast.nvfp4_compute_global_scale(tensor._amax_rowwise, global_scale)
    packed = torch.zeros(ROWS * COLUMNS // 2, dtype=torch.uint8)
    for start, part in reversed(parts_of(values)):
        out = packed[start // 2 : (start + part.numel() + 1) // 2]
        partial_cast.nvfp4_multi_tensor_2d_partial_cast(
            [part], [out], [scales], [global_scale], [ROWS], [COLUMNS], [start]
        )
    assert torch.equal(packed.view(ROWS, -1), tensor._rowwise_data)
    assert SPLITS[2] % 2 == 1
    assert nvfp4.unpack(packed[None]).any()


@pytest.mark.parametrize(("amax", "scale"), [(0.0, 1.0), (1.0, 2688.0), (2688.0, 1.0), (1e-45, 3.4028235e38)])
def test_the_global_scale_takes_the_amax_to_the_largest_number(amax: float, scale: float) -> None:
    result = torch.empty(1)
    partial_cast.nvfp4_compute_global_scale(torch.tensor([amax]), result)
    assert result.item() == pytest.approx(scale, rel=2**-23)


def test_e8m0_scales_round_up_and_take_bf16_alone() -> None:
    amaxes = torch.tensor([448.0, 449.0, 0.0, 896.0]).to(BF16)
    scale_inv = torch.empty(4, dtype=torch.uint8)
    partial_cast.multi_tensor_compute_scale_inv_e8m0(0, None, [[amaxes], [scale_inv]])
    assert scale_inv.tolist() == [127, 127, 0, 128]
    with pytest.raises(RuntimeError, match="takes BF16 amaxes"):
        partial_cast.multi_tensor_compute_scale_inv_e8m0(0, None, [[amaxes.float()], [scale_inv]])


def test_columnwise_nvfp4_follows_from_rowwise(blackwell: ModuleType) -> None:
    tensor = quantizer_of("nvfp4")(values_of().to(BF16))
    data, scales = torch.empty_like(tensor._columnwise_data), torch.empty_like(tensor._columnwise_scale_inv)
    partial_cast.nvfp4_2d_multi_tensor_transpose(
        [tensor._rowwise_data], [data], [tensor._rowwise_scale_inv], [scales], [ROWS], [COLUMNS]
    )
    assert torch.equal(data, tensor._columnwise_data)
    assert torch.equal(scales, tensor._columnwise_scale_inv)
    assert torch.equal(cast.nvfp4_data_transpose(tensor._rowwise_data), data)
