"""TE's own ``Linear`` and ``LayerNormMLP`` on the CPU's GEMMs and casts, forward and backward."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from parity import te

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNIT_ROUNDOFF = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}
IN, OUT, TOKENS = 64, 32, 48


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


def recipe(name: str, **options: Any) -> Any:
    from transformer_engine.common import recipe as recipes

    return getattr(recipes, name)(**options)


def make_linear(te_module: ModuleType, dtype: torch.dtype, bias: bool = True) -> Any:
    torch.manual_seed(0)
    return te_module.Linear(IN, OUT, bias=bias, params_dtype=dtype, device="cpu")


def step(te_module: ModuleType, module: Any, fp8_recipe: Any = None, gain: float = 1.0) -> tuple[Tensor, ...]:
    """One forward and backward pass: input, output, output gradient and input gradient."""
    x = (gain * torch.randn(TOKENS, IN)).to(next(module.parameters()).dtype).requires_grad_()
    with te_module.autocast(enabled=fp8_recipe is not None, recipe=fp8_recipe):
        y = module(x)
    grad = torch.randn_like(y)
    module.zero_grad()
    y.backward(grad)
    assert x.grad is not None
    return x.detach(), y.detach(), grad, x.grad


def fp8(values: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """The FP64 values that a tensor's FP8 codes stand for; its own amax gives the scale if there is none."""
    limit = torch.finfo(dtype).max
    scale = torch.tensor(limit) / values.abs().max().float() if scale is None else scale
    return (values.float() * scale).clamp(-limit, limit).to(dtype).double() / scale.double()


def assert_product(result: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, tf32: bool = False) -> None:
    """``result = left @ right`` up to its own rounding, FP32 sums, and that of both factors to TF32 if so asked."""
    exact, sizes = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    factors = 2.01 * 2.0**-11 if tf32 else 0.0
    bound = (factors + 2.0**-18) * sizes + 1.01 * UNIT_ROUNDOFF[dtype] * exact.abs() + 1e-6
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_stays_within_the_roundings_of_its_precision(
    te_module: ModuleType, dtype: torch.dtype, bias: bool
) -> None:
    module = make_linear(te_module, dtype, bias)
    x, y, grad, x_grad = step(te_module, module)
    tf32 = dtype == FP32
    ones = torch.ones(TOKENS, 1)
    inputs, weights = (x, module.weight.t())
    if bias:
        inputs, weights = torch.cat([x, ones], 1), torch.cat([module.weight.t(), module.bias[None]])
    assert_product(y, inputs, weights, dtype, tf32)
    assert_product(x_grad, grad, module.weight, dtype, tf32)
    assert_product(module.weight.grad, grad.t(), x, dtype, tf32)
    if bias:
        assert_product(module.bias.grad[None], ones.t(), grad, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_current_scaling_multiplies_the_codes_of_this_step(te_module: ModuleType, dtype: torch.dtype) -> None:
    module = make_linear(te_module, dtype, bias=False)
    for gain in (1.0, 300.0, 0.01):
        x, y, grad, x_grad = step(te_module, module, recipe("Float8CurrentScaling"), gain)
        assert_product(y, fp8(x, E4M3), fp8(module.weight, E4M3).t(), dtype)
        assert_product(x_grad, fp8(grad, E5M2), fp8(module.weight, E4M3), dtype)
        assert_product(module.weight.grad, fp8(grad, E5M2).t(), fp8(x, E4M3), dtype)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_delayed_scaling_casts_with_scales_of_earlier_steps(
    te_module: ModuleType, dtype: torch.dtype, algorithm: str
) -> None:
    module = make_linear(te_module, dtype, bias=False)
    delayed = recipe("DelayedScaling", amax_history_len=3, amax_compute_algo=algorithm)
    x_amaxes: list[Tensor] = []
    grad_amaxes: list[Tensor] = []

    def scale(limit: float, amaxes: list[Tensor]) -> Tensor:
        if not amaxes:
            return torch.tensor(1.0)
        return torch.tensor(limit) / (amaxes[-1] if algorithm == "most_recent" else max(amaxes[-3:]))

    for gain in (1.0, 8.0, 2.0, 0.5, 0.25, 4.0):
        x, y, grad, x_grad = step(te_module, module, delayed, gain)
        x_scale, grad_scale = scale(448.0, x_amaxes), scale(57344.0, grad_amaxes)
        w_scale = scale(448.0, [module.weight.abs().max().float()] if x_amaxes else [])
        x_codes, grad_codes = fp8(x, E4M3, x_scale), fp8(grad, E5M2, grad_scale)
        assert_product(y, x_codes, fp8(module.weight, E4M3, w_scale).t(), dtype)
        assert_product(x_grad, grad_codes, fp8(module.weight, E4M3, w_scale), dtype)
        assert_product(module.weight.grad, grad_codes.t(), x_codes, dtype)
        x_amaxes.append(x.detach().abs().max().float())
        grad_amaxes.append(grad.abs().max().float())


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_bias_gradient_of_an_fp8_linear_is_not_quantized(
    te_module: ModuleType, dtype: torch.dtype, name: str
) -> None:
    module = make_linear(te_module, dtype)
    _, _, grad, _ = step(te_module, module, recipe(name))
    assert_product(module.bias.grad[None], torch.ones(1, TOKENS), grad, dtype)


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling"])
def test_fp8_parameters_are_trained(te_module: ModuleType, name: str) -> None:
    with te_module.quantized_model_init(enabled=True, recipe=recipe(name)):
        module = make_linear(te_module, BF16, bias=False)
    assert isinstance(module.weight, te_module.Float8Tensor)
    before = module.weight.dequantize().detach()
    amax_at_start = module.weight._quantizer.amax.clone() if name == "DelayedScaling" else None
    step(te_module, module, recipe(name))
    torch.optim.SGD(module.parameters(), lr=0.01).step()
    moved = torch.add(before, module.weight.grad, alpha=-0.01)
    amax = moved.abs().max().float() if amax_at_start is None else amax_at_start
    expected = fp8(moved, E4M3, torch.tensor(448.0) / amax)
    assert not torch.equal(moved, before)
    torch.testing.assert_close(module.weight.dequantize(dtype=FP32).double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bias_gelu_fusion", ["0", "1"])
def test_gelu_in_the_epilogue_of_the_first_gemm_is_the_tanh_form(
    te_module: ModuleType, monkeypatch: pytest.MonkeyPatch, bias_gelu_fusion: str
) -> None:
    monkeypatch.setenv("NVTE_BIAS_GELU_NVFUSION", bias_gelu_fusion)
    torch.manual_seed(0)
    module = te_module.LayerNormMLP(IN, 2 * IN, params_dtype=FP32, device="cpu")
    x, y, grad, x_grad = step(te_module, module)
    p = {name: parameter.detach().double().requires_grad_() for name, parameter in module.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    hidden = linear(
        layer_norm(x64, (IN,), p["layer_norm_weight"], p["layer_norm_bias"]), p["fc1_weight"], p["fc1_bias"]
    )
    expected = linear(gelu(hidden, approximate="tanh"), p["fc2_weight"], p["fc2_bias"])
    expected.backward(grad.double())
    # Each of the two GEMMs in a row moves what it computes by about 2**-11 of its size.
    torch.testing.assert_close(y.double(), expected.detach(), rtol=0.0, atol=2.0**-9 * expected.abs().max().item())
    for actual, exact in [(x_grad, x64.grad), *((v.grad, p[n].grad) for n, v in module.named_parameters())]:
        assert (actual.double() - exact).norm() <= 2.0**-9 * exact.norm()
