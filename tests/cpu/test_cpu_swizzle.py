"""Scales in the order that cuBLAS reads: the order itself, and that all kernels read the same values from them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from gemm_oracle import product
from packaging.version import Version
from torch import Tensor

from parity import te
from te_on_cpu import cast, recipe
from te_on_cpu.enums import DType

ROWS, COLUMNS = 192, 320


def quantizer_of(engine: ModuleType, name: str, **options: Any) -> Any:
    if name == "mxfp8":
        return engine.MXFP8Quantizer(DType.kFloat8E4M3, **options)
    return engine.NVFP4Quantizer(**options)


def values_of(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Return values whose magnitude differs from block to block."""
    torch.manual_seed(0)
    return (torch.randn(rows, columns) * torch.exp(torch.randn(rows, columns))).bfloat16()


def as_cublas_reads(scales: Tensor) -> Tensor:
    """Put each scale of ``[outer, blocks]`` at the place that TE's ``gemm_swizzled_scale_idx`` gives it."""
    outer, blocks = scales.shape
    place = torch.empty(outer * blocks, dtype=scales.dtype)
    for row in range(outer):
        for column in range(blocks):
            tile = row // 128 * (blocks // 4) + column // 4
            place[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4] = scales[row, column]
    return place


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_scales_lie_as_cublas_reads_them_once_the_quantizer_or_a_call_has_swizzled_them(
    blackwell: ModuleType, name: str
) -> None:
    quantizer, values = quantizer_of(blackwell, name), values_of()
    plain, later = quantizer(values), quantizer(values)
    for _ in ("swizzled", "left as they are"):
        recipe.swizzle_scales_for_gemm_(later)
    quantizer.optimize_for_gemm = True
    refilled = quantizer.update_quantized(values, quantizer.make_empty(values.shape))
    for swizzled in (later, quantizer(values), refilled):
        assert swizzled._with_gemm_swizzled_scales
        assert not plain._with_gemm_swizzled_scales
        for direction in ("_rowwise", "_columnwise"):
            assert torch.equal(getattr(swizzled, f"{direction}_data"), getattr(plain, f"{direction}_data"))
            scales, stored = (getattr(tensor, f"{direction}_scale_inv") for tensor in (plain, swizzled))
            across = scales.t() if (name, direction) == ("mxfp8", "_columnwise") else scales
            assert stored.shape == scales.shape
            assert torch.equal(stored.flatten(), as_cublas_reads(across))


@pytest.mark.parametrize(
    ("options", "shape", "is_swizzled"),
    [
        ({"with_rht": True, "with_post_rht_amax": True}, (64, 128), True),
        ({"with_rht": True, "with_post_rht_amax": True}, (48, 128), False),
        ({"with_rht": True, "with_post_rht_amax": True}, (64, 144), False),
        ({"with_2d_quantization": True}, (128, 128), True),
        ({"with_2d_quantization": True}, (64, 128), False),
        ({}, (128, 128), False),
    ],
)
def test_an_empty_nvfp4_tensor_says_whether_the_kernel_that_casts_swizzles_too(
    blackwell: ModuleType, options: dict[str, Any], shape: tuple[int, int], is_swizzled: bool
) -> None:
    quantizer = quantizer_of(blackwell, "nvfp4", **options)
    quantizer.optimize_for_gemm = True
    if Version(te.version()) < Version("2.16"):
        is_swizzled = False  # its make_empty allocates in Python (nvfp4_tensor.py:373) and asks no kernel
    assert quantizer.make_empty(shape, dtype=torch.bfloat16)._with_gemm_swizzled_scales == is_swizzled
    assert quantizer(values_of(*shape))._with_gemm_swizzled_scales


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_kernels_read_the_same_from_swizzled_scales(blackwell: ModuleType, name: str, layout: str) -> None:
    quantizer, values = quantizer_of(blackwell, name), values_of(256, 256)
    plain = quantizer(values)
    quantizer.optimize_for_gemm = True
    swizzled = quantizer(values)
    assert torch.equal(swizzled.dequantize(), plain.dequantize())
    of_both = [product(swizzled, swizzled, layout, torch.float32), product(swizzled, plain, layout, torch.float32)]
    for found in of_both:
        assert torch.equal(found, product(plain, plain, layout, torch.float32))


def test_tensors_are_swizzled_in_one_direction_and_marked_by_the_caller(blackwell: ModuleType) -> None:
    quantizer, values = quantizer_of(blackwell, "mxfp8"), values_of()
    plain, tensor = quantizer(values), quantizer(values)
    recipe.multi_tensor_swizzle_scales_for_gemm_([tensor], False, True)
    assert not tensor._with_gemm_swizzled_scales
    assert torch.equal(tensor._rowwise_scale_inv, plain._rowwise_scale_inv)
    assert torch.equal(tensor._columnwise_scale_inv.flatten(), as_cublas_reads(plain._columnwise_scale_inv.t()))
    with pytest.raises(RuntimeError, match="takes one of rowwise_usage and columnwise_usage"):
        recipe.multi_tensor_swizzle_scales_for_gemm_([tensor], True, True)


def test_groups_are_swizzled_each_by_itself(blackwell: ModuleType) -> None:
    quantizer, values, sizes = quantizer_of(blackwell, "mxfp8"), values_of(384, 128), torch.tensor([128, 256])
    later = cast.group_quantize(values, quantizer, 2, sizes)
    decoded = cast.group_dequantize(later, DType.kBFloat16).rowwise_data
    recipe.grouped_swizzle_for_gemm(later, True, True)
    quantizer.optimize_for_gemm = True
    at_once = cast.group_quantize(values, quantizer, 2, sizes)
    alone = [quantizer(part) for part in values.split(sizes.tolist())]
    for grouped in (later, at_once):
        assert grouped._with_gemm_swizzled_scales
        assert torch.equal(cast.group_dequantize(grouped, DType.kBFloat16).rowwise_data, decoded)
        for name, single in (("scale_inv", "_rowwise_scale_inv"), ("columnwise_scale_inv", "_columnwise_scale_inv")):
            expected = torch.cat([getattr(tensor, single).flatten() for tensor in alone])
            assert torch.equal(getattr(grouped, name).flatten(), expected)
    once_more = cast.group_quantize(values, quantizer_of(blackwell, "mxfp8"), 2, sizes)
    recipe.grouped_swizzle_for_gemm(once_more, True, False)
    assert once_more.columnwise_scale_inv is None


def test_swizzled_groups_are_not_requantized(blackwell: ModuleType) -> None:
    quantizer, sizes = quantizer_of(blackwell, "mxfp8", columnwise=False), torch.tensor([128, 256])
    grouped = cast.group_quantize(values_of(384, 128), quantizer, 2, sizes)
    arguments = (2, sizes, DType.kBFloat16)
    with pytest.raises(RuntimeError, match="keeps the FP8 dtype"):
        cast.group_requantize_inplace(grouped, blackwell.MXFP8Quantizer(DType.kFloat8E5M2), *arguments)
    recipe.grouped_swizzle_for_gemm(grouped, True, False)
    assert cast.group_requantize_inplace(grouped, quantizer, *arguments) is None
    with pytest.raises(RuntimeError, match="cannot be rebuilt"):
        cast.group_requantize_inplace(grouped, quantizer_of(blackwell, "mxfp8"), *arguments)
    with pytest.raises(RuntimeError, match="cannot be decoded"):
        cast.group_requantize_inplace(grouped, quantizer, *arguments, return_dequantized=True)


@pytest.mark.parametrize(
    ("name", "direction", "used"),
    [
        ("mxfp8_rowwise", "_rowwise", (160, 3)),
        ("mxfp8_columnwise", "_columnwise", (5, 96)),
        ("nvfp4", "_rowwise", (160, 6)),
    ],
)
def test_scales_of_discrete_weights_lie_in_one_buffer_without_those_of_padding(
    blackwell: ModuleType, name: str, direction: str, used: tuple[int, int]
) -> None:
    quantizer = quantizer_of(blackwell, name.partition("_")[0])
    weights = [quantizer(scale * values_of(160, 96)) for scale in (1.0, 2.0, 3.0)]
    data, scales = ([getattr(one, f"{direction}_{kind}") for one in weights] for kind in ("data", "scale_inv"))
    for one in scales:
        one[used[0] :], one[:, used[1] :] = 0, 0
    expected = torch.cat([as_cublas_reads(one.t() if "columnwise" in name else one) for one in scales])
    for one in scales:
        one[used[0] :], one[:, used[1] :] = 255, 255
    of_tensors = recipe.swizzle_scales_and_pack_ptrs_for_discrete_weights
    codes_at, scales_at, buffer = of_tensors(data, scales, name, torch.device("cpu"))
    assert torch.equal(buffer, expected)
    assert codes_at.tolist() == [one.data_ptr() for one in data]
    assert scales_at.tolist() == [buffer.data_ptr() + i * scales[0].numel() for i in range(3)]
    assert [one.numel() for one in of_tensors([], [], name, torch.device("cpu"))] == [0, 0, 0]
    with pytest.raises(RuntimeError, match="matching sizes"):
        of_tensors(data, scales[1:], name, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="Unsupported swizzle type"):
        of_tensors(data, scales, "mxfp8", torch.device("cpu"))
