"""Models some of whose layers have a window and another base of RoPE, or norms whose gain is stored less 1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.reference import RotaryEmbedding

HIDDEN, HEADS, SEQ, WINDOW = 64, 4, 24, 6
BASES = (1e4, 1e6)


class Norm(nn.Module):
    """RMSNorm that stores its gain less 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


class Layer(nn.Module):
    """Gemma 3's attention: queries and keys are normalised."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.norm, self.q_norm, self.k_norm = map(Norm, (HIDDEN, 16, 16))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.qkv.weight.data *= 2
        self.rope = RotaryEmbedding(16, base)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.unbind(-3)
        query, key = self.rope(self.q_norm(query)), self.rope(self.k_norm(key))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.out(context.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A layer with a window, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, BASES))
        distance = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
        self.register_buffer("causal", distance >= 0)
        self.register_buffer("local", (distance >= 0) & (distance < WINDOW))

    def forward(self, x: Tensor) -> Tensor:
        for layer, mask in zip(self.layers, (self.local, self.causal), strict=True):
            x = layer(x, mask)
        return x


class TELayer(nn.Module):
    def __init__(self, te, base, window, zero_centered) -> None:
        super().__init__()
        of_queries, of_stream = (dict(eps=1e-6, zero_centered_gamma=centered) for centered in zero_centered)
        self.qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, bias=False, normalization="RMSNorm", **of_stream)
        self.q_norm, self.k_norm = (te.RMSNorm(16, **of_queries) for _ in range(2))
        self.core = te.DotProductAttention(HEADS, 16, qkv_format="bshd", attention_dropout=0.0, window_size=window)
        self.out = te.Linear(HIDDEN, HIDDEN, bias=False)
        self.rope = [RotaryEmbedding(16, base)]  # no submodule: it stays in FP32

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        query, key = self.q_norm(query.contiguous()), self.k_norm(key.contiguous())
        query, key = self.rope[0](query).to(x.dtype), self.rope[0](key).to(x.dtype)
        return x + self.out(self.core(query, key, value.contiguous(), attn_mask_type="causal"))


WINDOWS = ((WINDOW - 1, 0), (-1, 0))


def findings(bases=BASES, windows=WINDOWS, zero_centered=(True, True), precision="bf16"):
    """Titles and messages; ``zero_centered`` of queries' and keys' norms, and of the stream's."""

    def factory(te, **_):
        pairs = zip(bases, windows, strict=True)
        own = {"norm.weight": "qkv.layer_norm_weight", "qkv.weight": "qkv.weight", "out.weight": "out.weight"}
        own |= {name: name for name in ("q_norm.weight", "k_norm.weight")}
        return parity.Pair(
            Model(),
            nn.Sequential(*(TELayer(te, *pair, zero_centered) for pair in pairs)),
            inputs=lambda rng, batch: rng.normal(batch, SEQ, HIDDEN),
            weights={
                left: right.removeprefix("layers.")
                for i in range(2)
                for left, right in parity.under(own, f"layers.{i}.").items()
            },
        )

    (result,) = parity.compare(parity.Case("two_kinds", factory, sizes=(dict(batch=2),)), [precision])
    return [(finding.title, finding.message) for finding in result.findings] or result.status


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_right_ports_pass(precision):
    assert findings(precision=precision) == "passed"


def test_windows_of_the_other_layers_are_told():
    ((title, message),) = findings(windows=WINDOWS[::-1])
    assert title == "window"
    assert "it has that of the other layers" in message


@pytest.mark.parametrize(
    ("bases", "told"),
    [
        ((1e4, 1e4), "give TE rotary_base=1e+06; it rotates with base 1e+04 in layers.1"),
        ((1e6, 1e6), "give TE rotary_base=10000; it rotates with base 1e+06 in layers.0"),
    ],
)
def test_the_base_of_one_kind_of_layers_that_all_have_is_told(bases, told):
    ((title, message),) = findings(bases)
    assert title == "rope-base"
    assert told in message


@pytest.mark.parametrize(
    ("zero_centered", "told", "not_told"),
    [((False, True), "1.k_norm.weight", "layer_norm"), ((True, False), "1.qkv.layer_norm_weight", "k_norm")],
)
def test_a_gain_less_1_that_one_kind_of_norms_does_not_know_is_told_of_these_alone(zero_centered, told, not_told):
    ((title, message),) = findings(zero_centered=zero_centered)
    assert title == "gamma-shift"
    assert told in message
    assert not_told not in message
