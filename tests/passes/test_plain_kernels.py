"""Test that PyTorch's own layers in a port sum in FP32 without a GPU, as they do on one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.passes.modes import sums_in_fp32

TOKENS, WIDTH = 4096, 32
IDS = torch.zeros(TOKENS, dtype=torch.int64)

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(WIDTH), (TOKENS, WIDTH)),
    "layer norm without parameters": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), (TOKENS, WIDTH)),
    "embedding": (lambda: nn.Embedding(4, WIDTH), (TOKENS,)),
}


def gradients(layer: nn.Module, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    """Return the gradients of the parameters, or of the input if there are none."""
    x = x.clone().requires_grad_(x.is_floating_point())
    layer(x).backward(cotangent)
    return [parameter.grad.double() for parameter in layer.parameters()] or [x.grad.double()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_over_many_tokens_are_rounded_once(name, dtype):
    make, shape = LAYERS[name]
    layer, cotangent = make().to(dtype), torch.randn(TOKENS, WIDTH).to(dtype)
    x = IDS if len(shape) == 1 else torch.randn(shape).to(dtype)
    with sums_in_fp32():
        found = gradients(layer, x, cotangent)
        assert layer(x).dtype is dtype
    layer.zero_grad()
    exact = gradients(layer.double(), x.double() if x.is_floating_point() else x, cotangent.double())
    for one, right in zip(found, exact, strict=True):
        assert torch.linalg.vector_norm(one - right) < 4 * torch.finfo(dtype).eps * torch.linalg.vector_norm(right)


def test_other_dtypes_are_left_alone_and_pytorch_s_functions_come_back():
    layer_norm, x = torch.layer_norm, torch.randn(4, WIDTH, dtype=torch.float64)
    with sums_in_fp32(), sums_in_fp32():
        assert torch.equal(torch.layer_norm(x, (WIDTH,)), layer_norm(x, (WIDTH,)))
    assert torch.layer_norm is layer_norm


class Block(nn.Module):
    def __init__(self, linear: Callable[..., nn.Module], bias: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(8, WIDTH), linear(WIDTH, WIDTH)
        self.norm, self.down = nn.LayerNorm(WIDTH), linear(WIDTH, WIDTH)
        self.bias = bias

    def forward(self, ids: Tensor) -> Tensor:
        y = self.norm(self.up(self.embedding(ids)))
        lost = (y * self.norm.bias).sum() * self.bias  # reaches only the bias's gradient
        return self.down(y) + lost - lost.detach()


@pytest.mark.parametrize(("bias", "passes"), [(0.0, True), (0.02, False)])
def test_a_layer_norm_s_gradient_over_many_tokens_is_judged_as_on_a_gpu(bias, passes):
    def pair(te):
        right, port = Block(nn.Linear), Block(te.Linear, bias)
        names = {name: name for name, _ in right.named_parameters()}
        return parity.Pair(right, port, weights=names, inputs=lambda rng: rng.integers(4, 2048, high=8))

    (result,) = parity.compare(parity.Case("block", pair, sizes=({},)), ["bf16"])
    assert result.passed == passes, (result.margin, result.findings)
    assert not result.notes
