"""Quantizers of delayed and current scaling, as TE's own objects ask for them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity import te
from parity.cpu import cast, float8
from parity.cpu.enums import DType

LIMIT = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
FP32_MAX = torch.finfo(torch.float32).max


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


def delayed(te_module: ModuleType, scale: float = 1.0, amax: float = 0.0, **usages: bool) -> Any:
    return te_module.Float8Quantizer(torch.tensor([scale]), torch.tensor([amax]), DType.kFloat8E4M3, **usages)


def current(te_module: ModuleType, dtype: DType = DType.kFloat8E4M3, **options: Any) -> Any:
    return te_module.Float8CurrentScalingQuantizer(dtype, torch.device("cpu"), **options)


def test_delayed_scaling_casts_with_the_scale_it_was_given(te_module: ModuleType) -> None:
    result = cast.quantize(torch.tensor([[3.0, -5.0]]), delayed(te_module, scale=4.0))
    assert isinstance(result, te_module.Float8Tensor)
    assert torch.equal(float8.decode(result._data, torch.float8_e4m3fn), torch.tensor([[12.0, -20.0]]))
    assert result._scale_inv.tolist() == [0.25]
    assert torch.equal(result.dequantize(), torch.tensor([[3.0, -5.0]]))


@pytest.mark.parametrize(("kept", "after"), [(0.0, 5.0), (7.0, 7.0)])
def test_delayed_scaling_only_raises_the_amax(te_module: ModuleType, kept: float, after: float) -> None:
    quantizer = delayed(te_module, amax=kept)
    cast.quantize(torch.tensor([[3.0, -5.0]]), quantizer)
    assert quantizer.amax.tolist() == [after]


def test_a_set_noop_flag_leaves_output_and_amax_alone(te_module: ModuleType) -> None:
    quantizer = delayed(te_module)
    output = cast.quantize(torch.full((16, 16), 2.0), quantizer)
    before = output._data.clone()
    cast.quantize(torch.full((16, 16), 9.0), quantizer, output, torch.ones(1))
    assert torch.equal(output._data, before)
    assert quantizer.amax.tolist() == [2.0]
    cast.quantize(torch.full((16, 16), 9.0), quantizer, output, torch.zeros(1))
    assert torch.equal(output.dequantize(), torch.full((16, 16), 9.0))


def test_an_output_is_filled_in_place(te_module: ModuleType) -> None:
    quantizer = delayed(te_module)
    output = cast.create_empty_quantized_tensor(quantizer, [4, 8], torch.bfloat16)
    data, columnwise = output._data, output._transpose
    values = torch.randn(4, 8, dtype=torch.bfloat16)
    assert cast.quantize(values, quantizer, output) is output
    assert output._data is data
    assert output._transpose is columnwise
    assert torch.equal(columnwise, data.t())
    assert not output._transpose_invalid


def test_an_output_loses_the_direction_that_is_not_asked_for(te_module: ModuleType) -> None:
    output = cast.quantize(torch.randn(4, 8), delayed(te_module))
    cast.quantize(torch.randn(4, 8), delayed(te_module, columnwise=False), output)
    assert output._transpose is None
    assert output._transpose_invalid


@pytest.mark.parametrize("columnwise", [True, False])
def test_columnwise_usage_adds_the_transposed_codes(te_module: ModuleType, columnwise: bool) -> None:
    result = cast.quantize(torch.randn(2, 3, 4), current(te_module, columnwise=columnwise))
    if columnwise:
        assert torch.equal(result._transpose, result._data.permute(2, 0, 1))
    else:
        assert result._transpose is None


def test_columnwise_data_alone_is_refused_as_by_the_gpu_kernel(te_module: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="columnwise usage only"):
        cast.quantize(torch.randn(4, 8), current(te_module, rowwise=False))


def test_internal_quantizers_make_bare_storages(te_module: ModuleType) -> None:
    quantizer = current(te_module)
    quantizer.internal = True
    result = cast.quantize(torch.randn(4, 8, dtype=torch.bfloat16), quantizer)
    assert type(result).__name__ == "Float8TensorStorage"
    assert result.dequantize().dtype == torch.bfloat16


def test_other_quantizers_are_refused_by_name(te_module: ModuleType) -> None:
    class HomemadeQuantizer:
        pass

    with pytest.raises(NotImplementedError, match=r"quantize .* HomemadeQuantizer.* TransformerEngine \d"):
        cast.quantize(torch.randn(32, 32), HomemadeQuantizer())


def test_current_scaling_takes_the_amax_to_the_largest_code(te_module: ModuleType) -> None:
    for dtype, limit in LIMIT.items():
        result = cast.quantize(torch.tensor([[0.1, -0.7]]), current(te_module, dtype))
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
def test_empty_tensors_stay_empty_and_leave_the_amax(te_module: ModuleType, shape: tuple[int, ...]) -> None:
    quantizer = delayed(te_module, amax=3.0)
    assert cast.quantize(torch.empty(shape), quantizer).shape == shape
    assert quantizer.amax.tolist() == [3.0]


def test_a_bias_gradient_is_summed_before_the_cast_and_rounded_once(te_module: ModuleType) -> None:
    grad = torch.randn(4, 64, 16, dtype=torch.bfloat16)
    bias_grad, codes = cast.bgrad_quantize(grad, current(te_module))
    assert torch.equal(bias_grad, grad.float().sum((0, 1)).bfloat16())
    assert torch.equal(codes._data, cast.quantize(grad, current(te_module))._data)


def test_split_quantize_gives_each_part_its_own_scale(te_module: ModuleType) -> None:
    tensor = torch.cat([torch.ones(2, 16), torch.full((3, 16), 100.0), torch.empty(0, 16)])
    parts = cast.split_quantize(tensor, [2, 3, 0], [current(te_module) for _ in range(3)])
    assert [tuple(part.shape) for part in parts] == [(2, 16), (3, 16), (0, 16)]
    assert [part._data.unique().tolist() for part in parts[:2]] == [[0x7E], [0x7E]]
    with pytest.raises(ValueError, match="2 sections but 1 quantizers"):
        cast.split_quantize(tensor, [2, 3], [current(te_module)])


def test_dequantizing_rounds_once_to_the_dtype(te_module: ModuleType) -> None:
    tensor = cast.quantize(torch.randn(8, 16), current(te_module))
    exact = float8.decode(tensor._data, torch.float8_e4m3fn).double() * tensor._scale_inv.double()
    assert torch.equal(cast.dequantize(tensor, DType.kBFloat16), exact.float().bfloat16())


def test_fp8_transpose_fills_out(te_module: ModuleType) -> None:
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


def test_store_with_delayed_scaling_casts_the_unrounded_values(te_module: ModuleType) -> None:
    values = torch.tensor([[17.0 + 2**-10, 1.0]])  # above the tie between 16 and 18; rounded to BF16 it is the tie
    quantizer = delayed(te_module)
    stored = cast.store(values, quantizer, torch.bfloat16)
    assert stored.dequantize(dtype=torch.float32)[0, 0].item() == 18.0
    assert stored.dtype == torch.bfloat16
    assert quantizer.amax.item() == values[0, 0].item()


def test_store_with_current_scaling_casts_the_rounded_values(te_module: ModuleType) -> None:
    values = torch.tensor([[17.0 + 2**-10, 448.0]])
    stored = cast.store(values, current(te_module), torch.bfloat16)
    assert stored.dequantize(dtype=torch.float32)[0, 0].item() == 16.0


@pytest.mark.parametrize(("before_rounding", "amax"), [(True, 1 + 2**-9), (False, 1.0)])
def test_store_with_current_scaling_can_take_the_amax_before_rounding(
    te_module: ModuleType, before_rounding: bool, amax: float
) -> None:
    values = torch.tensor([[1 + 2**-9]])
    stored = cast.store(values, current(te_module), torch.bfloat16, amax_before_rounding=before_rounding)
    scale = float8.scale_from_amax(torch.tensor(amax), 448.0)
    assert stored._scale_inv.item() == scale.reciprocal().item()
