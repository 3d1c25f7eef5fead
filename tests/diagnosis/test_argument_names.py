"""A finding names an argument as the TE modules do that the port builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity import under

WIDTH, HEADS = 64, 4
HEAD_DIM = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self, eps: float, scale: float | None) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH, eps), scale
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(context.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, eps: float, scale: float | None) -> None:
        super().__init__()
        self.attention, self.norm = Attention(eps, scale), nn.LayerNorm(WIDTH, eps)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


ATTENTION = {
    parity.interleaved_qkv("q.weight", "k.weight", "v.weight", groups=HEADS, head_dim=HEAD_DIM): "layernorm_qkv.weight",
    parity.interleaved_qkv("q.bias", "k.bias", "v.bias", groups=HEADS, head_dim=HEAD_DIM): "layernorm_qkv.bias",
    "norm.weight": "layernorm_qkv.layer_norm_weight",
    "norm.bias": "layernorm_qkv.layer_norm_bias",
    "out.weight": "proj.weight",
    "out.bias": "proj.bias",
}
LAYER = {
    **under(ATTENTION, "attention.", "self_attention."),
    "norm.weight": "layernorm_mlp.layer_norm_weight",
    "norm.bias": "layernorm_mlp.layer_norm_bias",
    "up.weight": "layernorm_mlp.fc1_weight",
    "up.bias": "layernorm_mlp.fc1_bias",
    "down.weight": "layernorm_mlp.fc2_weight",
    "down.bias": "layernorm_mlp.fc2_bias",
}


def layer(te: Any, eps: float, scale: float | None, **options: Any) -> parity.Pair:
    options = dict(attn_input_format="bshd", fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0) | options
    port = te.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, **options)
    return parity.Pair(Layer(eps, scale), port, inputs, LAYER)


def attention(te: Any, eps: float, scale: float | None, **options: Any) -> parity.Pair:
    options = dict(attn_mask_type="causal", qkv_format="bshd", input_layernorm=True, fuse_qkv_params=True) | options
    port = te.MultiheadAttention(WIDTH, HEADS, attention_dropout=0.0, **options)
    return parity.Pair(Attention(eps, scale), port, inputs, ATTENTION)


def inputs(rng: Any) -> Tensor:
    return rng.normal(2, 32, WIDTH)


def message(build: Callable[..., parity.Pair], eps: float = 1e-5, scale: float | None = None, **options: Any) -> str:
    case = parity.Case("port", lambda te, **_: build(te, eps, scale, **options), sizes=({},))
    (one,) = parity.compare(case, ["fp32"])
    return one.findings[0].message


@pytest.mark.parametrize(
    ("build", "mistake", "told"),
    [
        (layer, dict(self_attn_mask_type="no_mask"), "it is self_attn_mask_type of TransformerLayer"),
        (layer, dict(eps=1e-6), "it is layernorm_epsilon of TransformerLayer"),
        (layer, dict(scale=0.3), "TransformerLayer has no softmax_scale: multiply the query's weight"),
        (attention, dict(eps=1e-6), "it is layernorm_epsilon of MultiheadAttention"),
        (attention, dict(scale=0.3), "MultiheadAttention has no softmax_scale: multiply the query's weight"),
    ],
)
def test_an_argument_is_named_as_the_ports_module_does(build, mistake, told):
    assert told in message(build, **mistake)


def test_a_name_that_fits_already_is_not_explained():
    assert message(attention, attn_mask_type="no_mask").endswith("later keys are attended to")
