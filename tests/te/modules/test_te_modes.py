"""TE's modules under PyTorch's modes (autocast, no_grad, inference_mode, eval) and with inputs of every kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from agreement import te_on_cpu
from torch import Tensor, nn

HIDDEN, FFN, HEADS = 64, 96, 4
SHAPE = (4, 8, HIDDEN)
BF16 = torch.bfloat16
BUILD: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda te, **options: te.Linear(HIDDEN, HIDDEN, **options),
    "LayerNorm": lambda te, **options: te.LayerNorm(HIDDEN, **options),
    "RMSNorm": lambda te, **options: te.RMSNorm(HIDDEN, **options),
    "LayerNormLinear": lambda te, **options: te.LayerNormLinear(HIDDEN, HIDDEN, **options),
    "LayerNormMLP": lambda te, **options: te.LayerNormMLP(HIDDEN, FFN, **options),
    "MultiheadAttention": lambda te, **options: te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, **options),
    "TransformerLayer": lambda te, **options: te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, **options
    ),
}
EACH_MODULE = pytest.mark.parametrize("name", BUILD)
TOKENWISE = pytest.mark.parametrize("name", ["Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP"])
WITH_GEMM = pytest.mark.parametrize(
    "name", ["Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"]
)


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return BUILD[name](te_on_cpu(), params_dtype=dtype)


def training_step(module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the output, the input's gradient and the parameters' gradients."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    output = module(x)
    output.backward(gradient)
    assert x.grad is not None
    return output.detach(), x.grad, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@WITH_GEMM
def test_autocast_computes_in_its_dtype_and_keeps_fp32_parameters_and_gradients(name: str) -> None:
    module, x, gradient = build(name), torch.randn(SHAPE), torch.randn(SHAPE)
    output, x_gradient, gradients = training_step(module, x, gradient)
    with torch.autocast("cpu", BF16):
        cast_output, cast_x_gradient, cast_gradients = training_step(module, x, gradient.to(BF16))
    assert cast_output.dtype == BF16
    assert cast_x_gradient.dtype == torch.float32
    assert relative_error(cast_output, output) < 0.02
    assert relative_error(cast_x_gradient, x_gradient) < 0.02
    for parameter, expected in gradients.items():
        assert cast_gradients[parameter].dtype == torch.float32
        assert (cast_gradients[parameter] - expected).norm() < 0.02 * expected.norm() + 1e-2, parameter


@WITH_GEMM
def test_autocast_computes_what_a_module_of_its_dtype_computes(name: str) -> None:
    module, x = build(name), torch.randn(SHAPE)
    low = build(name, BF16)
    low.load_state_dict(module.state_dict())
    with torch.no_grad(), torch.autocast("cpu", BF16):
        autocast = module(x)
    with torch.no_grad():
        expected = low(x.to(BF16))
    assert autocast.dtype == expected.dtype == BF16
    assert relative_error(autocast, expected) < 2.0**-8


@EACH_MODULE
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_without_gradients_the_output_is_that_of_training(
    name: str, context: Callable[[], AbstractContextManager[Any]], dtype: torch.dtype
) -> None:
    module, x = build(name, dtype), torch.randn(SHAPE, dtype=dtype)
    trained = module(x).detach()
    with context():
        output = module(x)
    if name != "TransformerLayer":  # it adds its last bias with gradients enabled, whatever the mode (transformer.py)
        assert not output.requires_grad
    torch.testing.assert_close(output.detach(), trained, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@EACH_MODULE
def test_eval_mode_still_gives_gradients(name: str) -> None:
    module, x, gradient = build(name), torch.randn(SHAPE), torch.randn(SHAPE)
    trained, x_gradient, gradients = training_step(module, x, gradient)
    output, eval_x_gradient, eval_gradients = training_step(module.eval(), x, gradient)
    torch.testing.assert_close(output, trained)
    torch.testing.assert_close(eval_x_gradient, x_gradient)
    for parameter, expected in gradients.items():
        torch.testing.assert_close(eval_gradients[parameter], expected)


@EACH_MODULE
def test_frozen_parameters_get_no_gradient_and_others_the_same(name: str) -> None:
    module, x, gradient = build(name), torch.randn(SHAPE), torch.randn(SHAPE)
    _, x_gradient, gradients = training_step(module, x, gradient)
    for frozen in gradients:
        parameter = module.get_parameter(frozen).requires_grad_(False)
        parameter.grad = None
        _, partial_x_gradient, partial = training_step(module, x, gradient)
        assert partial.keys() >= gradients.keys() - {frozen, bias_of(frozen)}
        assert frozen not in partial
        assert torch.equal(partial_x_gradient, x_gradient)
        for other, expected in partial.items():
            assert torch.equal(expected, gradients[other]), (frozen, other)
        parameter.requires_grad_()


def bias_of(weight: str) -> str:
    """Return the bias whose gradient TE computes only together with its weight's (linear.py, ``requires_wgrad``)."""
    return weight.removesuffix("weight") + "bias"


@EACH_MODULE
def test_a_frozen_module_passes_the_gradient_on(name: str) -> None:
    module, x, gradient = build(name), torch.randn(SHAPE), torch.randn(SHAPE)
    _, x_gradient, _ = training_step(module, x, gradient)
    _, through_frozen, gradients = training_step(module.requires_grad_(False), x, gradient)
    assert torch.equal(through_frozen, x_gradient)
    assert not gradients


@EACH_MODULE
def test_an_input_without_gradient_leaves_the_parameters_theirs(name: str) -> None:
    module, x, gradient = build(name), torch.randn(SHAPE), torch.randn(SHAPE)
    _, _, gradients = training_step(module, x, gradient)
    module.zero_grad()
    module(x).backward(gradient)
    for parameter, expected in gradients.items():
        actual = module.get_parameter(parameter).grad
        assert actual is not None
        assert torch.equal(actual, expected), parameter


@EACH_MODULE
def test_inputs_and_output_gradients_may_lie_in_memory_in_any_order(name: str) -> None:
    module, x, gradient = build(name), torch.randn(SHAPE), torch.randn(SHAPE)
    expected = training_step(module, x, gradient)
    strided_x, strided_gradient = (strided(tensor) for tensor in (x, gradient))
    assert not strided_x.is_contiguous()
    actual = training_step(module, strided_x, strided_gradient)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def strided(tensor: Tensor) -> Tensor:
    """Return equal values with gaps between elements and the first two dimensions exchanged in memory."""
    storage = tensor.new_zeros(tensor.shape[1], tensor.shape[0], 2 * tensor.shape[2])
    view = storage.transpose(0, 1)[..., ::2]
    return view.copy_(tensor)


@EACH_MODULE
def test_gradients_accumulate_over_passes(name: str) -> None:
    module, x, gradient = build(name), torch.randn(SHAPE), torch.randn(SHAPE)
    _, _, once = training_step(module, x, gradient)
    once = {parameter: value.clone() for parameter, value in once.items()}
    module(x).backward(gradient)
    for parameter, value in once.items():
        torch.testing.assert_close(module.get_parameter(parameter).grad, 2 * value)


@TOKENWISE
@pytest.mark.parametrize("shape", [(0, HIDDEN), (0, 4, HIDDEN)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    module = build(name, dtype)
    output, x_gradient, gradients = training_step(
        module, torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    )
    assert output.shape == x_gradient.shape == shape
    for parameter, value in gradients.items():
        assert torch.equal(value, torch.zeros_like(value)), parameter


@EACH_MODULE
def test_meta_parameters_can_be_filled_later(name: str) -> None:
    # TE's Linear does not split parameters on the meta device.
    fused = {"fuse_qkv_params": True} if name in ("MultiheadAttention", "TransformerLayer") else {}
    module, expected = (BUILD[name](te_on_cpu(), device=device, **fused) for device in ("meta", "cpu"))
    assert all(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device="cpu")
    module.load_state_dict(expected.state_dict())
    x = torch.randn(SHAPE)
    assert torch.equal(module(x), expected(x))
