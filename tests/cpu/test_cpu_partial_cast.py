"""Quantized weights from a distributed optimizer's master weights: whole, and part by part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_gpu import emulated
from torch import Tensor

from parity.cpu import cast, cuda, float4, partial_cast
from parity.cpu.enums import DType

BF16 = torch.bfloat16
ROWS, COLUMNS = 160, 288


@pytest.fixture(scope="module")
def one_process() -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def te_module() -> Iterator[ModuleType]:
    with emulated(cuda.BLACKWELL) as module:
        yield module


def values_of(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(ROWS, COLUMNS, generator=generator) * torch.randn(ROWS, 1, generator=generator).exp()
    values[16:32, 32:48] = 0
    return values


def quantizer_of(te_module: ModuleType, name: str) -> Any:
    if name == "block":
        return te_module.Float8BlockQuantizer(
            DType.kFloat8E4M3, rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=2
        )
    if name == "mxfp8":
        return te_module.MXFP8Quantizer(DType.kFloat8E4M3)
    if name == "nvfp4":
        return te_module.NVFP4Quantizer(with_2d_quantization=True)
    if name == "delayed":
        return te_module.Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1), DType.kFloat8E4M3)
    return te_module.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"))


def buffers_of(tensor: Any) -> dict[str, Tensor]:
    names = ("data", "scale_inv", "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    names += ("amax_rowwise", "amax_columnwise")
    found = {name: getattr(tensor, f"_{name}", None) for name in names}
    return {name: buffer for name, buffer in found.items() if buffer is not None}


def weight_from_master(quantizer: Any, master: Tensor, group: Any) -> Any:
    """A weight that held other values before."""
    from transformer_engine.pytorch.tensor.utils import post_all_gather_processing, quantize_master_weights

    weight = quantizer(values_of(seed=0).to(BF16))
    quantize_master_weights([weight], [master.flatten()], [0], group)
    post_all_gather_processing([weight])
    return weight


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
def test_a_weight_from_its_whole_master_is_the_master_quantized(
    te_module: ModuleType, one_process: Any, name: str
) -> None:
    """TE casts the master to the weight's dtype first."""
    quantizer, master = quantizer_of(te_module, name), values_of(seed=1)
    actual = buffers_of(weight_from_master(quantizer, master, one_process))
    expected = buffers_of(quantizer(master.to(BF16)))
    assert actual.keys() == expected.keys()
    for buffer, values in expected.items():
        if name == "block" and "scale_inv" in buffer:  # the amax of padding is 0, and its scale 1
            actual[buffer] = actual[buffer].where(values != 0, 0.0)
        assert torch.equal(actual[buffer], values), buffer


def test_an_nvfp4_weight_from_its_master_differs_where_a_scale_rounds_the_other_way(
    te_module: ModuleType, one_process: Any
) -> None:
    """The kernel for parts divides the block's amax by 6, the one for whole tensors divides the tensor's scale."""
    quantizer, master = quantizer_of(te_module, "nvfp4"), values_of(seed=1)
    actual = buffers_of(weight_from_master(quantizer, master, one_process))
    expected = buffers_of(quantizer(master.to(BF16)))
    assert torch.equal(actual["amax_rowwise"], expected["amax_rowwise"])
    scales = [buffers["rowwise_scale_inv"][:ROWS, : COLUMNS // 16].int() for buffers in (actual, expected)]
    assert (scales[0] - scales[1]).abs().max() <= 1
    same = scales[0] == scales[1]
    assert same.float().mean() > 0.95
    codes = [float4.unpack(buffers["rowwise_data"]) for buffers in (actual, expected)]
    assert torch.equal(codes[0][same.repeat_interleave(16, 1)], codes[1][same.repeat_interleave(16, 1)])


SPLITS = [0, 1000, 1001, 1001 + 32 * COLUMNS, ROWS * COLUMNS]


def parts_of(values: Tensor) -> list[tuple[int, Tensor]]:
    """Consecutive elements, not cut where blocks or bytes end, with the index of the first."""
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


def test_mxfp8_is_cast_part_by_part(te_module: ModuleType) -> None:
    values = values_of().to(BF16)
    tensor = quantizer_of(te_module, "mxfp8")(values)
    outputs = torch.zeros(2, ROWS * COLUMNS, dtype=torch.uint8)
    scales = tensor._rowwise_scale_inv, tensor._columnwise_scale_inv
    for start, part in parts_of(values):
        rowwise, columnwise = outputs[:, start : start + part.numel()]
        partial_cast.mxfp8_scaling_partial_cast(part, rowwise, columnwise, *scales, ROWS, COLUMNS, start)
    assert torch.equal(outputs[0].view(ROWS, COLUMNS), tensor._rowwise_data)
    assert torch.equal(outputs[1].view(ROWS, COLUMNS), tensor._columnwise_data)


def test_nvfp4_is_cast_part_by_part_and_leaves_the_other_half_of_a_byte(te_module: ModuleType) -> None:
    values = values_of().to(BF16)
    tensor = quantizer_of(te_module, "nvfp4")(values)
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
    assert float4.unpack(packed[None]).any()


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


def test_columnwise_nvfp4_follows_from_rowwise(te_module: ModuleType) -> None:
    tensor = quantizer_of(te_module, "nvfp4")(values_of().to(BF16))
    data, scales = torch.empty_like(tensor._columnwise_data), torch.empty_like(tensor._columnwise_scale_inv)
    partial_cast.nvfp4_2d_multi_tensor_transpose(
        [tensor._rowwise_data], [data], [tensor._rowwise_scale_inv], [scales], [ROWS], [COLUMNS]
    )
    assert torch.equal(data, tensor._columnwise_data)
    assert torch.equal(scales, tensor._columnwise_scale_inv)
    assert torch.equal(cast.nvfp4_data_transpose(tensor._rowwise_data), data)
