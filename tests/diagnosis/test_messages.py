"""Test what a message says: arguments by the port's names, errors before and after, and a section for each code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from ports import compared
from torch import Tensor, nn

import parity
from lab.corpus.small import normal
from parity import reference, under
from parity.mistakes.codes import CODES

# Arguments, under the names that the port's TE modules have for them.

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


def layer(te: Any, **options: Any) -> nn.Module:
    options = dict(attn_input_format="bshd", fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0) | options
    return te.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, **options)


def attention(te: Any, **options: Any) -> nn.Module:
    options = dict(attn_mask_type="causal", qkv_format="bshd", input_layernorm=True, fuse_qkv_params=True) | options
    return te.MultiheadAttention(WIDTH, HEADS, attention_dropout=0.0, **options)


@pytest.mark.parametrize(
    ("module", "port", "weights", "right", "options", "told"),
    [
        (
            Layer,
            layer,
            LAYER,
            {},
            dict(self_attn_mask_type="no_mask"),
            "in TransformerLayer, this argument is called self_attn",
        ),
        (Layer, layer, LAYER, dict(eps=1e-6), {}, "in TransformerLayer, this argument is called layernorm"),
        (
            Layer,
            layer,
            LAYER,
            dict(scale=0.3),
            {},
            "TransformerLayer has no softmax_scale: multiply the query's weight",
        ),
        (
            Attention,
            attention,
            ATTENTION,
            dict(eps=1e-6),
            {},
            "in MultiheadAttention, this argument is called layernorm",
        ),
        (
            Attention,
            attention,
            ATTENTION,
            dict(scale=0.3),
            {},
            "MultiheadAttention has no softmax_scale: multiply the query's weight",
        ),
        (
            Attention,
            attention,
            ATTENTION,
            dict(scale=0.125),
            {},
            "softmax_scale=0.125, 1/sqrt(64), as the reference has; the port's is 1/sqrt(head_dim), 0.25;",
        ),
        # A name that already fits is not explained.
        (Attention, attention, ATTENTION, {}, dict(attn_mask_type="no_mask"), "the port attends to later keys."),
    ],
)
def test_an_argument_is_named_as_the_ports_module_does(module, port, weights, right, options, told):
    result = compared(
        lambda: module(**dict(eps=1e-5, scale=None) | right),
        lambda te: port(te, **options),
        normal((2, 32, WIDTH)),
        "fp32",
        weights,
    )
    assert told in f"{result.findings[0].message}."


# Errors before and after the repair, and the code to write.

SWAPPED = {
    parity.stack("up_proj.weight", "gate_proj.weight"): "fc1_weight",
    "norm.weight": "layer_norm_weight",
    "down_proj.weight": "fc2_weight",
}


def swapped() -> parity.Case:
    def factory(te: Any, **_: Any) -> parity.Pair:
        options = dict(normalization="RMSNorm", activation="swiglu", bias=False)
        port = te.LayerNormMLP(128, 256, **options)
        return parity.Pair(reference.SwiGLUMLP(128, 256), port, normal((2, 32, 128)), SWAPPED)

    return parity.Case("swapped", factory, sizes=({},))


def test_the_message_tells_the_error_before_and_after_and_what_to_write():
    (result,) = parity.compare(swapped(), ["fp32"])
    message = result.findings[0].message
    assert 'stack("gate_proj.weight", "up_proj.weight") to "fc1_weight"' in message
    words = message.replace(",", " ").split()
    before, after = (float(words[words.index(word) + 1]) for word in ("from", "to"))
    assert before > 100 * after


def test_diagnosis_leaves_the_reference_as_it_was_for_the_next_precision():
    case = swapped()
    (alone,) = parity.compare(case, ["fp8_current"])
    _, after_bf16 = parity.compare(case, ["bf16", "fp8_current"])
    assert alone.tensors == after_bf16.tensors


# The sections of docs/findings.md.

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"


def test_every_code_and_title_has_its_section_and_every_section_its_code():
    sections = {
        (code, title)
        for code, titles in re.findall(r"^## (PAR\d+) (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for title in titles.split(", ")
    }
    assert sections == {(code, title) for title, code in CODES.items()}
