"""TE's fusible operations (``te.ops``) on the CPU kernels, forward and backward, in FP32, BF16 and FP16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusible import (
    BF16,
    FP16,
    FP32,
    ROWS,
    WIDTH,
    clamped_swiglu,
    compare,
    fused_sequences,
    gated,
    operations,
    quick_gelu,
    situglu,
    squared_relu,
    tanh_gelu,
)
from torch import Tensor
from torch.nn.functional import layer_norm, linear, normalize, relu, rms_norm, silu

from parity import te

DTYPES = [FP32, BF16, FP16]

WITHOUT_PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": tanh_gelu,
    "GEGLU": gated(tanh_gelu),
    "GLU": gated(torch.sigmoid),
    "QGELU": quick_gelu,
    "QGEGLU": gated(quick_gelu),
    "ReLU": relu,
    "ReGLU": gated(relu),
    "SReLU": squared_relu,
    "SReGLU": gated(squared_relu),
    "SiLU": silu,
    "SwiGLU": gated(silu),
    "Identity": lambda x: x,
    "L2Normalization": lambda x: normalize(x, eps=1e-6),
    "ClampedSwiGLU": clamped_swiglu,
    "SiTUGLU": situglu,
}
# What is scaled: options, and the function that a factor for each row multiplies.
SCALED: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "ScaledSwiGLU": ({}, gated(silu)),
    "ScaledSReLU": ({}, squared_relu),
    "ScaledTanhSReLU": ({"tanh_clamp_scale": 2.0}, lambda x: (2 * (relu(x) / 2).tanh()).square()),
    "ScaledSiTUGLU": ({}, situglu),
    "ScaledClampedQGeGLU": ({"limit": 1.0}, lambda x: clamped_swiglu(x, 1.0)),
}


def operation(name: str, **options: Any) -> Any:
    if not hasattr(operations(), name):
        pytest.skip(f"TransformerEngine {te.version()} has no operation {name}")
    return getattr(operations(), name)(**options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITHOUT_PARAMETERS)
def test_an_operation_without_parameters_is_its_formula(name: str, dtype: torch.dtype) -> None:
    compare([operation(name)], WITHOUT_PARAMETERS[name], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_activation_multiplies_each_row(name: str, dtype: torch.dtype) -> None:
    options, function = SCALED[name]
    scales = torch.rand(ROWS, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    compare([operation(name, **options)], lambda x, s: function(x) * s[:, None], dtype, scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_linear_and_bias_are_their_formulas(dtype: torch.dtype) -> None:
    ops, options = operations(), {"device": "cpu", "dtype": dtype}
    compare([ops.LayerNorm(WIDTH, **options)], lambda x, w, b: layer_norm(x, (WIDTH,), w, b, 1e-5), dtype)
    compare([ops.RMSNorm(WIDTH, **options)], lambda x, w: rms_norm(x, (WIDTH,), w, 1e-5), dtype)
    compare([ops.Linear(WIDTH, 48, **options)], linear, dtype)
    compare([ops.BasicLinear(WIDTH, 48, **options)], linear, dtype)
    compare([ops.Bias(WIDTH, **options)], lambda x, b: x + b, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_that_move_and_scale_are_their_formulas(dtype: torch.dtype) -> None:
    ops = operations()
    other = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    compare([ops.ConstantScale(0.5)], lambda x: 0.5 * x, dtype)
    compare([ops.Reshape((-1, 16))], lambda x: x.view(-1, 16), dtype)
    compare([ops.AddExtraInput()], lambda x, e: x + e, dtype, other)
    compare([ops.MakeExtraOutput()], lambda x: (x, x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_linear_is_a_linear_for_each_group(dtype: torch.dtype) -> None:
    splits = torch.tensor([16, 0, 16])
    module = operations().GroupedLinear(3, WIDTH, 48, device="cpu", dtype=dtype)
    names = [name for name, _ in module.named_parameters()]

    def formula(x: Tensor, *rest: Tensor) -> Tensor:
        p = dict(zip(names, rest, strict=False))
        parts = enumerate(x.split(splits.tolist()))
        return torch.cat([linear(part, p[f"weight{i}"], p[f"bias{i}"]) for i, part in parts])

    compare([module], formula, dtype, splits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", fused_sequences(FP32))
def test_fused_sequences_are_their_formulas(name: str, dtype: torch.dtype) -> None:
    ops, formula, extras = fused_sequences(dtype)[name]
    inputs = [torch.randn(ROWS, WIDTH).to(dtype).requires_grad_() for _ in range(extras)]
    compare(ops, formula, dtype, *inputs)
