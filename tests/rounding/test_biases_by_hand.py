"""A bias that TE hands out and the port adds is rounded where the port adds it, and that is expected of the port."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.numerics.formats import Rounding
from parity.numerics.freedom import UNFUSED
from parity.numerics.plain import ADDED_BIAS, ADDED_TO_SUM, plain_calls
from parity.numerics.rounding import rounded

WIDTH = 64
SUMS = {
    "before the sum": (lambda x, product, bias: x + (product + bias), {"add", ADDED_BIAS}),
    "in place": (lambda x, product, bias: x + product.add_(bias), {"add", "add_", ADDED_BIAS}),
    "after the sum": (lambda x, product, bias: x + product + bias, {"add", ADDED_BIAS, ADDED_TO_SUM}),
}


@pytest.mark.parametrize(("residual_sum", "names"), SUMS.values(), ids=SUMS)
def test_the_model_rounds_where_the_port_adds_the_bias(residual_sum, names):
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, 16, WIDTH).bfloat16()
    layer.bfloat16()
    with plain_calls(torch.bfloat16) as seen:
        right = residual_sum(x.requires_grad_(), F.linear(x, layer.weight), layer.bias)
    assert names <= seen
    layer.float()
    with rounded(
        Rounding(torch.bfloat16),
        layer.parameters(),
        dataclasses.replace(UNFUSED, plain=tuple(names), splits_of_k=1),
        plain=layer.parameters(),
    ):
        assert torch.equal(x.float() + layer(x.detach().float()), right.float())


def test_what_is_added_to_activations_and_is_no_vector_that_is_trained_is_no_bias():
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with plain_calls(torch.bfloat16) as seen:
        x + torch.ones(WIDTH, dtype=torch.bfloat16)
        x + x
        x + 0.5
    assert seen == {"add"}


class PostNormMLP(nn.Module):
    """BLOOM's second half: the residual connection starts at the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(80), nn.Linear(80, 112), nn.Linear(112, 80)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + self.down(F.gelu(self.up(y), approximate="tanh"))


def handed_out(te, width=80, **_):
    def call_candidate(module, x):
        product, bias, normed = module(x)
        return normed + product + bias

    names = {"norm": "layer_norm", "up": "fc1", "down": "fc2"}
    return parity.Pair(
        PostNormMLP(),
        te.LayerNormMLP(width, 112, return_layernorm_output=True, return_bias=True),
        inputs=lambda rng: rng.normal(3, 16, width),
        weights={f"{left}.{kind}": f"{right}_{kind}" for left, right in names.items() for kind in ("weight", "bias")},
        call_candidate=call_candidate,
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_port_that_adds_the_bias_after_the_residual_connection_passes(precision):
    results = parity.compare(parity.Case("handed_out", handed_out, sizes=({},)), [precision], seeds=range(8))
    assert [result.margin for result in results if not result.passed] == []
