"""TE's ``GroupedLinear``, ``Fp8Padding`` and ``Fp8Unpadding`` on the CPU kernels, forward and backward."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity import te
from parity.cpu import gemm, permutation

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
IN, OUT = 32, 48
RECIPES = [None, "DelayedScaling", "Float8CurrentScaling"]


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


def grad_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def make_recipe(name: str | None) -> Any:
    from transformer_engine.common import recipe as recipes

    return None if name is None else getattr(recipes, name)()


def make_experts(te_module: ModuleType, dtype: torch.dtype, experts: int, **options: Any) -> tuple[Any, list[Any]]:
    """A ``GroupedLinear``, and one ``Linear`` with the same weights for each expert."""
    torch.manual_seed(0)
    grouped = te_module.GroupedLinear(experts, IN, OUT, params_dtype=dtype, device="cpu", **options)
    options.pop("delay_wgrad_compute", None)
    single = [te_module.Linear(IN, OUT, params_dtype=dtype, device="cpu", **options) for _ in range(experts)]
    for i, linear in enumerate(single):
        linear.weight.data.copy_(getattr(grouped, f"weight{i}"))
        if linear.use_bias:
            linear.bias.data.copy_(getattr(grouped, f"bias{i}"))
    return grouped, single


def run(
    te_module: ModuleType, module: Any, x: Tensor, grad: Tensor, recipe: Any, *splits: Any
) -> tuple[Tensor, Tensor]:
    """Output and input gradient."""
    x = x.clone().requires_grad_()
    with te_module.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, *splits)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_grouped_linear_is_a_linear_for_each_expert(
    te_module: ModuleType, recipe_name: str | None, dtype: torch.dtype, bias: bool
) -> None:
    splits = [16, 48, 32]
    grouped, single = make_experts(te_module, dtype, len(splits), bias=bias)
    recipe, other_recipe = make_recipe(recipe_name), make_recipe(recipe_name)
    for gain in (1.0, 100.0, 0.1):
        x, grad = (gain * torch.randn(sum(splits), IN)).to(dtype), torch.randn(sum(splits), OUT).to(dtype)
        grouped.zero_grad()
        y, x_grad = run(te_module, grouped, x, grad, recipe, splits)
        parts = zip(single, x.split(splits), grad.split(splits), y.split(splits), x_grad.split(splits), strict=True)
        for i, (linear, x_i, grad_i, y_i, x_grad_i) in enumerate(parts):
            linear.zero_grad()
            expected = run(te_module, linear, x_i, grad_i, other_recipe)
            assert torch.equal(y_i, expected[0])
            assert torch.equal(x_grad_i, expected[1])
            assert torch.equal(getattr(grouped, f"weight{i}").grad, linear.weight.grad)
            if bias:
                torch.testing.assert_close(getattr(grouped, f"bias{i}").grad, linear.bias.grad)


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_an_expert_without_tokens_gets_a_gradient_of_zeros(te_module: ModuleType, recipe_name: str | None) -> None:
    splits = [0, 32, 0]
    grouped, single = make_experts(te_module, BF16, len(splits), bias=True)
    x, grad = torch.randn(32, IN).to(BF16), torch.randn(32, OUT).to(BF16)
    y, _ = run(te_module, grouped, x, grad, make_recipe(recipe_name), splits)
    assert torch.equal(y, run(te_module, single[1], x, grad, make_recipe(recipe_name))[0])
    for i in (0, 2):
        assert not getattr(grouped, f"weight{i}").grad.any()
        assert not getattr(grouped, f"bias{i}").grad.any()


def test_weight_gradients_can_be_added_to_main_grad(te_module: ModuleType) -> None:
    splits = [16, 32]
    grouped, _ = make_experts(te_module, BF16, 2, bias=False)
    fused, _ = make_experts(te_module, BF16, 2, bias=False, fuse_wgrad_accumulation=True)
    x, grad = torch.randn(48, IN).to(BF16), torch.randn(48, OUT).to(BF16)
    for i in range(2):
        getattr(fused, f"weight{i}").main_grad = torch.full((OUT, IN), 2.0)
    run(te_module, grouped, x, grad, None, splits)
    run(te_module, fused, x, grad, None, splits)
    for i in range(2):
        accumulated, plain = getattr(fused, f"weight{i}").main_grad, getattr(grouped, f"weight{i}").grad
        exact = grad.split(splits)[i].double().t() @ x.split(splits)[i].double()
        torch.testing.assert_close(accumulated.double(), 2.0 + exact, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(accumulated - 2.0, plain.float(), rtol=2.0**-7, atol=1e-3)


def test_weight_gradients_can_wait(te_module: ModuleType) -> None:
    splits = [16, 32]
    grouped, _ = make_experts(te_module, BF16, 2, bias=True)
    delayed, _ = make_experts(te_module, BF16, 2, bias=True, delay_wgrad_compute=True)
    x, grad = torch.randn(48, IN).to(BF16), torch.randn(48, OUT).to(BF16)
    expected = run(te_module, grouped, x, grad, None, splits)
    assert torch.equal(expected[1], run(te_module, delayed, x, grad, None, splits)[1])
    delayed.backward_dw()
    for name, parameter in grouped.named_parameters():
        torch.testing.assert_close(delayed.get_parameter(name).grad, parameter.grad)


def test_grouped_gemm_applies_gelu_and_hands_back_its_input() -> None:
    a, b = [torch.randn(8, 16), torch.randn(8, 16)], [torch.randn(4, 16), torch.zeros(0, 16)]
    bias = [torch.randn(8), torch.randn(8)]
    outputs = [torch.empty(4, 8), torch.empty(0, 8)]
    inputs = [torch.empty(4, 8), torch.empty(0, 8)]
    gemm.te_general_grouped_gemm(
        a, True, b, False, outputs, 4, None, bias, 4, False, inputs, False, [torch.empty(0)], 0, False, False, 0
    )
    torch.testing.assert_close(inputs[0], b[0] @ a[0].t() + bias[0], rtol=1e-2, atol=1e-2)
    assert torch.equal(outputs[0], torch.nn.functional.gelu(inputs[0], approximate="tanh"))


rows = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(rows, st.sampled_from([FP32, BF16, torch.uint8]))
def test_padding_puts_zeros_after_each_part_and_unpadding_takes_them_away(
    parts: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    sizes = [size for size, _ in parts]
    padded_sizes = [size + extra if size else 0 for size, extra in parts]
    x = torch.randint(1, 100, (sum(sizes), 3)).to(dtype)
    padded = torch.full((sum(padded_sizes), 3), 77).to(dtype)
    permutation.fused_multi_row_padding(x, padded, sizes, padded_sizes)
    for part, padded_part in zip(x.split(sizes), padded.split(padded_sizes), strict=True):
        assert torch.equal(padded_part[: len(part)], part)
        assert not padded_part[len(part) :].any()
    back = torch.empty_like(x)
    permutation.fused_multi_row_unpadding(padded, back, padded_sizes, sizes)
    assert torch.equal(back, x)


def test_padding_needs_a_size_for_each_part() -> None:
    with pytest.raises(ValueError, match="2 parts of the input but 1 of the output"):
        permutation.fused_multi_row_padding(torch.zeros(4, 2), torch.zeros(8, 2), [2, 2], [8])


def test_te_pads_experts_for_fp8_and_drops_the_padding_again(te_module: ModuleType) -> None:
    splits = [5, 16, 3]
    pad, unpad = te_module.Fp8Padding(3, align_size=16), te_module.Fp8Unpadding(3, align_size=16)
    x = torch.randn(sum(splits), IN, requires_grad=True)
    padded, padded_splits = pad(x, splits)
    assert padded_splits == [16, 16, 16]
    y = unpad(2 * padded, splits)
    assert torch.equal(y, 2 * x)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.equal(grad_of(x), 2 * grad)
