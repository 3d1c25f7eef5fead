"""Test that TE's fused projection of MLA's queries gives the bits of its own layers, RoPE and quantizer one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_gpu import emulated
from torch import Tensor

from te_on_cpu import cuda, mla_projection, versions

pytestmark = pytest.mark.skipif(versions.installed_version().release[:2] < (2, 20), reason="new in TE 2.20")

SEQUENCE, BATCH, HEADS, WIDTH = 128, 2, 2, 256
FEATURES, ROTATED = 192, 64
EPS = 1e-6


@pytest.fixture
def te() -> Iterator[ModuleType]:
    with emulated(cuda.BLACKWELL) as module:
        yield module


def angles() -> Tensor:
    """Return FP32 ``[sequence, 1, 1, rotated]``, whose halves are equal."""
    half = torch.outer(torch.arange(SEQUENCE).float(), 1e4 ** (-torch.arange(0, ROTATED, 2) / ROTATED))
    return torch.cat([half, half], -1)[:, None, None]


def rotate(queries: Tensor) -> Tensor:
    """Return BF16 queries, ``[sequence, batch, heads, features]``, rotated in FP32 with tables in BF16."""
    cos, sin = (table.bfloat16().float()[..., : ROTATED // 2] for table in (angles().cos(), angles().sin()))
    plain, rotated = queries.float().split([FEATURES - ROTATED, ROTATED], -1)
    even, odd = rotated[..., ::2], rotated[..., 1::2]
    return torch.cat([plain, even * cos - odd * sin, even * sin + odd * cos], -1)


def quantizer() -> Any:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    return MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3, rowwise=True, columnwise=True)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_outputs_and_gradients_are_those_of_a_layer_and_rope(te: ModuleType, is_fp8: bool) -> None:
    from transformer_engine.common.recipe import MXFP8BlockScaling

    torch.manual_seed(0)
    x = torch.randn(SEQUENCE, BATCH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    layer = te.LayerNormLinear(
        WIDTH, HEADS * FEATURES, eps=EPS, normalization="RMSNorm", bias=False, params_dtype=torch.bfloat16
    )
    with torch.no_grad():
        layer.layer_norm_weight.mul_(1 + 0.1 * torch.randn(WIDTH).bfloat16())
    of_output = torch.randn(SEQUENCE, BATCH, HEADS, FEATURES).bfloat16()
    weight = layer.weight.detach().clone()
    leaves = (x, layer.layer_norm_weight, layer.weight)
    with te.autocast(recipe=MXFP8BlockScaling()) if is_fp8 else nullcontext():
        expected = rotate(layer(x).view(of_output.shape))
    of_expected = torch.autograd.grad(expected, leaves, of_output.float())
    stored = quantizer()(expected.detach().view(SEQUENCE * BATCH, -1))

    weight = (quantizer()(weight) if is_fp8 else weight).requires_grad_()
    sizes = (HEADS, FEATURES, FEATURES - ROTATED, ROTATED, SEQUENCE, BATCH)
    actual = te.FusedMLAQUpProjFunction.apply(
        x, leaves[1], weight, angles().cos(), angles().sin(), None, False, *sizes, None, False, EPS, "RMSNorm", False
    )
    of_actual = torch.autograd.grad(actual, (x, leaves[1], weight), of_output.clone())  # TE overwrites it
    assert torch.equal(actual._rowwise_data.view(torch.uint8).view(-1), stored._rowwise_data.view(-1))
    assert torch.equal(actual._columnwise_data.view(torch.uint8).view(-1), stored._columnwise_data.view(-1))
    for name, rows in (("_rowwise_scale_inv", SEQUENCE * BATCH), ("_columnwise_scale_inv", SEQUENCE * BATCH // 32)):
        scales = getattr(actual, name).reshape(rows, -1)
        assert torch.equal(scales, getattr(stored, name)[:rows, : scales.shape[1]])
    for one, other in zip(of_actual, of_expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_te_offers_it_on_a_blackwell(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    is_supported = vars(te.FusedMLAQUpProjRopeQuant)["is_supported"].__func__
    for gpu, right in ((cuda.HOPPER, False), (cuda.BLACKWELL, True)):
        with emulated(gpu):
            is_supported.cache_clear()
            assert te.FusedMLAQUpProjRopeQuant.is_supported() == right
    monkeypatch.setenv("NVTE_FUSED_MLA_Q_UPROJ", "0")
    is_supported.cache_clear()
    assert not te.FusedMLAQUpProjRopeQuant.is_supported()
    is_supported.cache_clear()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(tokens=96), "multiple of TILE_M"),
        (dict(outputs=200), "multiple of HEAD_DIM"),
        (dict(rotated=32), "cos must be"),
        (dict(outputs=FEATURES, is_fp8=True), "must be even"),
        (dict(blocks=WIDTH // 32 + 4, is_fp8=True), "x_scale must be"),
    ],
)
def test_sizes_that_the_kernel_does_not_take_are_refused(sizes: dict[str, int], message: str) -> None:
    tokens, outputs = sizes.get("tokens", 128), sizes.get("outputs", 2 * FEATURES)
    dtype = torch.float8_e4m3fn if sizes.get("is_fp8") else torch.bfloat16
    x, w = (torch.ones(rows, WIDTH).to(dtype) for rows in (tokens, outputs))
    table = torch.ones(tokens, sizes.get("rotated", ROTATED)).bfloat16()
    blocks = sizes.get("blocks", WIDTH // 32)
    scales = [torch.ones(len(each), blocks, dtype=torch.uint8) if sizes.get("is_fp8") else None for each in (x, w)]
    with pytest.raises(ValueError, match=message):
        mla_projection.gemm_proj_rope_mxfp8_wrapper_sm100(x, w, table, table, *scales)
