"""Norms that a port alone has in some places: of queries and keys, after a branch, after a sum, in one layer or all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HIDDEN, HEADS, FFN, SEQ, BATCH, LAYERS = 48, 4, 96, 12, 2, 3


def normed(x: Tensor, kind: str) -> Tensor:
    if kind == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], eps=1e-5)
    return F.normalize(x, dim=-1, eps=1e-6) if kind == "L2" else F.rms_norm(x, x.shape[-1:], eps=1e-5)


class Layer(nn.Module):
    """``norms``: kinds of what is normed besides, by ``qk``, ``branch``, ``up`` and ``sum``."""

    def __init__(self, linear: Any, norm: Any, norms: Mapping[str, str]) -> None:
        super().__init__()
        self.norm, self.norms = norm(HIDDEN, eps=1e-5), norms
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = linear(HIDDEN, FFN, bias=False), linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.extra("qk", q), self.extra("qk", k)
        scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        scores = scores.masked_fill(torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1), -math.inf)
        x = x + self.extra("branch", self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        return self.extra("sum", x + self.down(F.gelu(self.up(self.extra("up", x)))))

    def extra(self, where: str, x: Tensor) -> Tensor:
        return normed(x, self.norms[where]) if where in self.norms else x


def told(precision: str, where: str, kind: str, layers: tuple[int, ...], **more: Any) -> tuple[str, str]:
    """Title and message of the first finding about a port with such norms in these layers."""

    def factory(te: Any, **_: Any) -> parity.Pair:
        plain = nn.Sequential(*(Layer(nn.Linear, nn.RMSNorm, {}) for _ in range(LAYERS)))
        port = [Layer(te.Linear, te.RMSNorm, {where: kind} if i in layers else {}) for i in range(LAYERS)]
        names = {name: name for name, _ in plain.named_parameters()}
        inputs = lambda rng: 3.0 * rng.normal(BATCH, SEQ, HIDDEN)  # noqa: E731
        return parity.Pair(plain, nn.Sequential(*port), inputs, names)

    (one,) = parity.compare(parity.Case("layers", factory, sizes=({},)), [precision], **more)
    return (one.findings[0].title, one.findings[0].message) if one.status == "failed" else (one.status, "")


@pytest.mark.parametrize(("layers", "place"), [((0, 1, 2), ""), ((0,), " in 0"), ((2,), " in 2"), ((0, 2), " in 0, 2")])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2"])
def test_a_norm_of_queries_and_keys_is_told_with_its_kind_and_the_layers_that_have_it(kind, layers, place):
    title, message = told("fp32", "qk", kind, layers)
    assert title == "norm-missing"
    kind = "L2Normalization" if kind == "L2" else kind
    assert message.endswith(f"qk_norm_type=None; they go through a {kind}{place}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("where", "layers", "end"),
    [
        ("qk", (0,), "they go through a LayerNorm in 0"),
        ("branch", (0, 1, 2), "a LayerNorm comes before the sum in each layer (sum 1)"),
        ("branch", (1,), "a LayerNorm comes before the sum in 1 (sum 1)"),
        ("sum", (0, 1, 2), "a LayerNorm comes after it in each layer (sum 2)"),
        ("sum", (2,), "a LayerNorm comes after it in 2 (sum 2)"),
    ],
)
def test_an_extra_norm_is_told_with_its_place(where, layers, end, precision):
    title, message = told(precision, where, "LayerNorm", layers)
    assert title == "norm-missing"
    assert message.endswith(end)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_norm_before_a_linear_layer_of_one_layer_is_told_with_the_layer(layer, kind, precision):
    title, message = told(precision, "up", kind, (layer,))
    assert title == "norm-missing"
    assert f"leave out the norm before the 1st 'linear' of {layer}.up, as the reference does" in message
    assert message.endswith(f"a {kind} comes before")


def test_norms_before_linear_layers_of_some_layers_are_told_with_these():
    title, message = told("fp32", "up", "RMSNorm", (0, 2))
    assert title == "norm-missing"
    assert message.endswith("in 0.up, 2.up")
