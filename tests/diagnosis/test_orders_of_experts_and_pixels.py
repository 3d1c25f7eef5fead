"""Weights that a map puts in another order: experts of one of a mixture's layers, pixels of a patch embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

EXPERTS, WIDTH, INNER, ROWS = 4, 32, 48, 16


class Experts(nn.Module):
    """Each expert's rows through two layers of its own, as a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        each = zip(x.chunk(EXPERTS), self.up, self.down, strict=True)
        return torch.cat([down(F.relu(up(rows))) for rows, up, down in each])


class Grouped(nn.Module):
    def __init__(self, te: Any) -> None:
        super().__init__()
        self.fc1 = te.GroupedLinear(EXPERTS, WIDTH, INNER, bias=False)
        self.fc2 = te.GroupedLinear(EXPERTS, INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        splits = [len(x) // EXPERTS] * EXPERTS
        return self.fc2(F.relu(self.fc1(x, splits)), splits)


@pytest.mark.parametrize("order", [(1, 2, 3, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize("layer", ["up", "down"])
def test_experts_of_one_grouped_layer_in_another_order_are_told_with_that_layer(layer, order):
    def factory(te: Any) -> parity.Pair:
        grouped, own = {"up": "fc1", "down": "fc2"}, tuple(range(EXPERTS))
        weights = {
            f"{name}.{expert}.weight": f"{grouped[name]}.weight{(order if name == layer else own)[expert]}"
            for name in grouped
            for expert in own
        }
        return parity.Pair(Experts(), Grouped(te), lambda rng: rng.normal(EXPERTS * ROWS, WIDTH), weights)

    (result,) = parity.compare(parity.Case("experts", factory, sizes=({},)), ["bf16"])
    (finding,) = result.findings
    assert finding.title == "experts-permuted"
    assert f"experts of {'fc1' if layer == 'up' else 'fc2'} in the reference's order" in finding.message


class Patches(nn.Module):
    """A linear layer of 2 x 2 patches, whose values lie channels first or last."""

    def __init__(self, linear: nn.Module, channels_last: bool) -> None:
        super().__init__()
        self.linear, self.channels_last = linear, channels_last

    def forward(self, image: Tensor) -> Tensor:
        patches = image.unflatten(2, (-1, 2)).unflatten(4, (-1, 2))  # [batch, channels, y, 2, x, 2]
        order = (0, 2, 4, 3, 5, 1) if self.channels_last else (0, 2, 4, 1, 3, 5)
        return self.linear(patches.permute(order).flatten(3).flatten(1, 2))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, WIDTH, 2, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        return self.patch(image).flatten(2).transpose(1, 2)


def compared_patches(channels_last: bool, precision: str) -> parity.Result:
    def factory(te: Any) -> parity.Pair:
        return parity.Pair(
            Convolution(),
            Patches(te.Linear(16, WIDTH), channels_last),
            lambda rng: rng.normal(2, 4, 8, 8),
            {parity.rearrange("patch.weight", "o c h w -> o (c h w)"): "linear.weight", "patch.bias": "linear.bias"},
        )

    (result,) = parity.compare(parity.Case("patches", factory, sizes=({},)), [precision])
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_patches_in_the_order_of_the_convolutions_weight_pass(precision):
    assert compared_patches(False, precision).passed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_patches_whose_pixels_lie_in_another_order_are_told_with_that_order(precision):
    (finding,) = compared_patches(True, precision).findings
    assert finding.title == "weight-transposed"
    assert 'rearrange("patch.weight", "a b c d -> a (c d b)")' in finding.message
