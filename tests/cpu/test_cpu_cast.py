"""Casts with one scale per tensor, FP8's codes, and weights cast from a distributed optimizer's parts of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from parity import te
from te_on_cpu import cast, float8, partial_cast
from te_on_cpu.enums import DType

# Casts with one scale per tensor: FP8's codes (OCP 8-bit floating point, 2023), delayed and current scaling.


TE = te.kernels("cpu").te
BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ML_DTYPE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
FP32_MAX = torch.finfo(torch.float32).max
ONE = torch.ones(1)
BOTH = pytest.mark.parametrize("dtype", [E4M3, E5M2])


def nearest_codes(values: Tensor, dtype: torch.dtype) -> list[int]:
    """Return the codes nearest to FP32 values as ``ml_dtypes`` rounds: the even one in a tie, the largest beyond it."""
    limited = np.clip(values.numpy(), -LIMIT[dtype], LIMIT[dtype]).astype(np.float32)
    return limited.astype(ML_DTYPE[dtype]).view(np.uint8).tolist()


def encode(values: Tensor, dtype: torch.dtype, scale: Tensor = ONE) -> list[int]:
    return float8.encode(values, scale, dtype).data.tolist()


@BOTH
@pytest.mark.parametrize("to", [torch.float32, BF16])
def test_every_code_decodes_to_its_value(dtype: torch.dtype, to: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.numpy().view(ML_DTYPE[dtype]).astype(np.float64)
    np.testing.assert_array_equal(float8.decode(codes, dtype, to).double().numpy(), expected)


@BOTH
def test_any_number_goes_to_its_nearest_code_the_even_one_in_a_tie_and_saturates(dtype: torch.dtype) -> None:
    finite = float8.decode(torch.arange(0x7C if dtype == E5M2 else 0x7F, dtype=torch.uint8), dtype)
    ties = (finite[1:] + finite[:-1]) / 2
    around = [ties, ties.nextafter(torch.zeros(())), ties.nextafter(torch.tensor(1e9))]
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(0))
    drawn = bits.int().view(torch.float32)
    positive = torch.cat([finite, *around, torch.tensor([1e6, math.inf]), drawn[~drawn.isnan()]])
    values = torch.cat([positive, -positive])
    codes = encode(values, dtype)
    assert codes == nearest_codes(values, dtype)
    expected = float8.decode(torch.tensor(codes, dtype=torch.uint8), dtype)
    assert torch.equal(float8.rounded(values.clone(), dtype), expected)


@BOTH
def test_every_nan_becomes_the_canonical_nan(dtype: torch.dtype) -> None:
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert encode(nan, dtype) == [0x7F, 0x7F, 0x7F, *nearest_codes(torch.ones(1), dtype)]
    assert float8.rounded(nan.clone(), dtype).isnan().tolist() == [True, True, True, False]


def test_bf16_values_are_scaled_in_fp32() -> None:
    value, scale = torch.tensor([1.0078125], dtype=BF16), torch.tensor([1.055])
    product = value.float() * scale
    assert encode(value, E4M3, scale) == nearest_codes(product, E4M3) == [0x39]
    assert encode(product.bfloat16(), E4M3) == [0x38], "the example is one where rounding to BF16 first would differ"
    assert torch.equal(float8.encode(value, scale, E4M3).scale_inv, 1 / scale)


@pytest.mark.parametrize(
    ("values", "amax"),
    [([1.0, -5.0], 5.0), ([math.nan, 2.0, -3.0], 3.0), ([math.nan, -math.inf], math.inf), ([], 0.0), ([math.nan], 0.0)],
)
def test_amax_is_the_largest_magnitude_and_passes_over_nans(values: list[float], amax: float) -> None:
    assert float8.amax_of(torch.tensor(values)).item() == amax


def test_a_transpose_puts_the_last_dimension_first() -> None:
    codes = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    result, out = float8.transpose(codes), torch.zeros(4, 2, 3, dtype=torch.uint8)
    assert result.is_contiguous()
    assert torch.equal(result, codes.permute(2, 0, 1))
    assert cast.fp8_transpose(codes, DType.kFloat8E4M3, out=out) is out
    assert torch.equal(out, result)


def delayed(scale: float = 1.0, amax: float = 0.0, **usages: bool) -> Any:
    return TE.Float8Quantizer(torch.tensor([scale]), torch.tensor([amax]), DType.kFloat8E4M3, **usages)


def current(dtype: DType = DType.kFloat8E4M3, **options: Any) -> Any:
    return TE.Float8CurrentScalingQuantizer(dtype, torch.device("cpu"), **options)


@pytest.mark.parametrize(("kept", "after"), [(0.0, 5.0), (7.0, 7.0)])
def test_delayed_scaling_casts_with_the_scale_it_was_given_and_only_raises_the_amax(kept: float, after: float) -> None:
    quantizer = delayed(scale=4.0, amax=kept)
    result = cast.quantize(torch.tensor([[3.0, -5.0]]), quantizer)
    assert isinstance(result, TE.Float8Tensor)
    assert torch.equal(float8.decode(result._data, E4M3), torch.tensor([[12.0, -20.0]]))
    assert result._scale_inv.tolist() == [0.25]
    assert torch.equal(result.dequantize(), torch.tensor([[3.0, -5.0]]))
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


def test_an_output_is_filled_in_place_and_loses_the_direction_that_is_not_asked_for() -> None:
    quantizer = delayed()
    output = cast.create_empty_quantized_tensor(quantizer, [4, 8], BF16)
    data, columnwise = output._data, output._transpose
    assert cast.quantize(torch.randn(4, 8, dtype=BF16), quantizer, output) is output
    assert output._data is data
    assert output._transpose is columnwise
    assert torch.equal(columnwise, data.t())
    assert not output._transpose_invalid
    cast.quantize(torch.randn(4, 8), delayed(columnwise=False), output)
    assert output._transpose is None
    assert output._transpose_invalid


def test_columnwise_usage_adds_the_transposed_codes() -> None:
    result = cast.quantize(torch.randn(2, 3, 4), current())
    assert torch.equal(result._transpose, result._data.permute(2, 0, 1))
    assert cast.quantize(torch.randn(2, 3, 4), current(columnwise=False))._transpose is None


def test_columnwise_data_alone_is_refused_as_by_the_gpu_kernel() -> None:
    with pytest.raises(RuntimeError, match="Quantizing in only the columnwise direction not supported yet!"):
        cast.quantize(torch.randn(4, 8), current(rowwise=False))


def test_internal_quantizers_make_bare_storages() -> None:
    quantizer = current()
    quantizer.internal = True
    result = cast.quantize(torch.randn(4, 8, dtype=BF16), quantizer)
    assert type(result).__name__ == "Float8TensorStorage"
    assert result.dequantize().dtype == BF16


def test_other_quantizers_are_refused_by_name() -> None:
    class HomemadeQuantizer:
        pass

    with pytest.raises(NotImplementedError, match=r"quantize .* TransformerEngine \d.* HomemadeQuantizer"):
        cast.quantize(torch.randn(32, 32), HomemadeQuantizer())


@pytest.mark.parametrize("dtype", [DType.kFloat8E4M3, DType.kFloat8E5M2])
def test_current_scaling_takes_the_amax_to_the_largest_code(dtype: DType) -> None:
    result = cast.quantize(torch.tensor([[0.1, -0.7]]), current(dtype))
    limit = LIMIT[float8.fp8_dtype(result)]
    assert float8.decode(result._data, float8.fp8_dtype(result))[0, 1].item() == -limit
    assert result._scale_inv.item() == (1 / (torch.tensor(limit) / torch.tensor(0.7))).item()


@pytest.mark.parametrize(
    ("amax", "options", "scale"),
    [
        (0.7, {}, (torch.tensor(448.0) / torch.tensor(0.7)).item()),  # the FP32 quotient
        (3.0, {"power_of_two": True}, 128.0),  # the largest power of two that does not exceed it
        (1.75, {"power_of_two": True}, 256.0),
        (2.0**-126, {}, FP32_MAX),  # what exceeds FP32 is its largest number
        (2.0**-126, {"power_of_two": True}, 2.0**127),
        *((amax, {"power_of_two": flag}, 1.0) for amax in (0.0, math.inf, math.nan) for flag in (False, True)),
        *((amax, {"epsilon": 0.5}, scale) for amax, scale in ((0.25, 896.0), (0.0, 896.0), (2.0, 224.0))),
    ],
)
def test_the_scale_is_that_of_the_amax_and_1_where_there_is_none(
    amax: float, options: dict[str, Any], scale: float
) -> None:
    assert float8.scale_from_amax(torch.tensor(amax), 448.0, **options).item() == scale


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0,)])
def test_empty_tensors_stay_empty_and_leave_the_amax(shape: tuple[int, ...]) -> None:
    quantizer = delayed(amax=3.0)
    assert cast.quantize(torch.empty(shape), quantizer).shape == shape
    assert quantizer.amax.tolist() == [3.0]


def test_a_bias_gradient_is_summed_before_the_cast_and_rounded_once() -> None:
    grad = torch.randn(4, 64, 16, dtype=BF16)
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
    exact = float8.decode(tensor._data, E4M3).double() * tensor._scale_inv.double()
    assert torch.equal(cast.dequantize(tensor, DType.kBFloat16), exact.float().bfloat16())


def test_store_without_a_quantizer_rounds_once() -> None:
    values, output = torch.randn(4, 8), torch.empty(4, 8, dtype=torch.float16)
    assert torch.equal(cast.store(values, None, BF16), values.bfloat16())
    assert cast.store(values, None, torch.float16, output) is output
    assert torch.equal(output, values.half())


def test_store_casts_the_unrounded_values_with_delayed_scaling_and_the_rounded_ones_with_current_scaling() -> None:
    values = torch.tensor([[17.0 + 2**-10, 448.0]])  # just above the tie between 16 and 18; BF16 rounds it to the tie
    quantizer = delayed()
    stored = cast.store(values[:, :1], quantizer, BF16)
    assert stored.dequantize(dtype=torch.float32).item() == 18.0
    assert stored.dtype == BF16
    assert quantizer.amax.item() == values[0, 0].item()
    assert cast.store(values, current(), BF16).dequantize(dtype=torch.float32)[0, 0].item() == 16.0


@pytest.mark.parametrize(("before_rounding", "amax"), [(True, 1 + 2**-9), (False, 1.0)])
def test_store_with_current_scaling_can_take_the_amax_before_rounding(before_rounding: bool, amax: float) -> None:
    values = torch.tensor([[1 + 2**-9]])
    stored = cast.store(values, current(), BF16, amax_before_rounding=before_rounding)
    scale = float8.scale_from_amax(torch.tensor(amax), 448.0)
    assert stored._scale_inv.item() == scale.reciprocal().item()


# Quantized weights cast from a distributed optimizer's master weights, as a whole or part by part.


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


QUANTIZERS = {
    "delayed": lambda: TE.Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1), DType.kFloat8E4M3),
    "current": current,
    "block": lambda: TE.Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2),
    "mxfp8": lambda: TE.MXFP8Quantizer(DType.kFloat8E4M3),
    "nvfp4": lambda: TE.NVFP4Quantizer(with_2d_quantization=True),
}
BUFFERS = ("data", "scale_inv", "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def buffers_of(tensor: Any) -> dict[str, Tensor]:
    found = {name: getattr(tensor, f"_{name}", None) for name in (*BUFFERS, "amax_rowwise", "amax_columnwise")}
    return {name: buffer for name, buffer in found.items() if buffer is not None}


def weight_from_master(quantizer: Any, master: Tensor, group: Any) -> Any:
    """Cast the master weights into a quantized weight that held other values before, and return it."""
    from transformer_engine.pytorch.tensor.utils import post_all_gather_processing, quantize_master_weights

    weight = quantizer(values_of(seed=0).to(BF16))
    quantize_master_weights([weight], [master.flatten()], [0], group)
    post_all_gather_processing([weight])
    return weight


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_weight_from_its_whole_master_is_the_master_quantized(
    blackwell: ModuleType, one_process: Any, name: str
) -> None:
    """Expect the codes of the master in the weight's dtype, because TE casts it to that dtype first."""
    quantizer, master = QUANTIZERS[name](), values_of(seed=1)
    actual = buffers_of(weight_from_master(quantizer, master, one_process))
    expected = buffers_of(quantizer(master.to(BF16)))
    assert actual.keys() == expected.keys()
    for buffer, values in expected.items():
        if name == "block" and "scale_inv" in buffer:  # the amax of padding is 0, and its scale 1
            actual[buffer] = actual[buffer].where(values != 0, 0.0)
        assert torch.equal(actual[buffer], values), buffer


@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_inference_mode_has_made_is_written_to_outside_of_it(blackwell: ModuleType, name: str) -> None:
    quantizer, values = QUANTIZERS[name](), values_of(seed=1).to(BF16)
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
    tensor = QUANTIZERS["mxfp8"]()(values)
    outputs = torch.zeros(2, ROWS * COLUMNS, dtype=torch.uint8)
    scales = tensor._rowwise_scale_inv, tensor._columnwise_scale_inv
    for start, part in parts_of(values):
        rowwise, columnwise = outputs[:, start : start + part.numel()]
        partial_cast.mxfp8_scaling_partial_cast(part, rowwise, columnwise, *scales, ROWS, COLUMNS, start)
    assert torch.equal(outputs[0].view(ROWS, COLUMNS), tensor._rowwise_data)
    assert torch.equal(outputs[1].view(ROWS, COLUMNS), tensor._columnwise_data)


def test_nvfp4_is_cast_part_by_part_and_leaves_the_other_half_of_a_byte(blackwell: ModuleType) -> None:
    values = values_of().to(BF16)
    tensor = QUANTIZERS["nvfp4"]()(values)
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
