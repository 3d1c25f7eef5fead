"""Convolutions whose patches lie side by side are linear layers, also to the rounding model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.numerics.plain import are_patches, backward, forward, from_rows, rows_of

SHAPES = [
    ((2, 3, 8), (4,)),
    ((2, 3, 8, 12), (4, 2)),
    ((2, 3, 9, 11), (4, 5)),
    ((2, 2, 4, 4, 6), (2, 4, 3)),
    ((2, 5, 7), (1,)),
]
CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left @ right if bias is None else left @ right + bias


@pytest.mark.parametrize(("shape", "kernel"), SHAPES)
def test_rows_of_patches_and_back_give_the_pixels_that_patches_hold(shape, kernel):
    x = torch.randn(shape)
    covered = (..., *(slice(size // width * width) for size, width in zip(shape[2:], kernel, strict=True)))
    expected = torch.zeros_like(x)
    expected[covered] = x[covered]
    assert torch.equal(from_rows(rows_of(x, kernel), shape, kernel), expected)


@pytest.mark.parametrize(("shape", "kernel"), SHAPES)
def test_results_and_gradients_are_those_of_the_convolution(shape, kernel):
    x, weight, bias = torch.randn(shape), torch.randn(6, shape[1], *kernel), torch.randn(6)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    right = CONVOLUTIONS[len(kernel)](x, weight, bias, stride=kernel)
    gradient = torch.randn_like(right)
    right.backward(gradient)
    with torch.no_grad():
        patches = rows_of(x, kernel)
        torch.testing.assert_close(forward(x, weight, bias, patches, product), right)
        gradients = backward(gradient, x, weight, patches, (True, True, True), product)
    for found, tensor in zip(gradients, (x, weight, bias), strict=True):
        torch.testing.assert_close(found, tensor.grad)


def test_a_convolution_that_reads_a_pixel_twice_or_not_at_all_has_no_patches():
    weight = torch.randn(6, 3, 2, 2)
    usual = ([2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    assert are_patches(weight, *usual)
    for place, other in ((0, [1, 1]), (1, [1, 1]), (2, [2, 2]), (3, True), (5, 3)):
        assert not are_patches(weight, *usual[:place], other, *usual[place + 1 :])


class Embedding(nn.Module):
    """Of patches, as in ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, stride=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.patches(x).flatten(2).transpose(1, 2)


class LinearEmbedding(nn.Module):
    """The same with TE's linear layer."""

    def __init__(self, te) -> None:
        super().__init__()
        self.patches = te.Linear(3 * 8 * 8, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(2, (-1, 8)).unflatten(4, (-1, 8)).permute(0, 2, 4, 1, 3, 5)
        return self.patches(x.flatten(3).flatten(1, 2))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current", "fp8_block"])
def test_a_right_port_to_a_linear_layer_passes_on_every_seed(precision):
    def factory(te, **_):
        weights = {parity.rearrange("patches.weight", "o c p q -> o (c p q)"): "patches.weight"}
        return parity.Pair(
            reference=Embedding(),
            candidate=LinearEmbedding(te),
            inputs=lambda rng, batch: rng.normal(batch, 3, 32, 32),
            weights=weights | {"patches.bias": "patches.bias"},
        )

    results = parity.compare(parity.Case("patches", factory, sizes=(dict(batch=4),)), [precision], seeds=range(4))
    assert {result.status for result in results} == {"passed"}
