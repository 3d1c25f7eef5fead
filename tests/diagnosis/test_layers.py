"""Layers in another order, left out, or of two kinds; mistakes in some layers are reported with their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, decoders, tells, tells_only
from torch import Tensor, nn

import parity
from lab.corpus.decoder import BATCH, VOCABULARY, LanguageModel, Options
from lab.corpus.small import Expert, normal
from parity.reference import RotaryEmbedding

# Layers that the map fills, or the port calls, in another order.


def ordered(order: tuple[int, ...], called: tuple[int, ...], precision: str) -> parity.Result:
    """Compare three layers with a port that fills them in this order and calls them in that one."""
    options = Options(layers=3, loss=False)
    plain = lambda: LanguageModel(nn.Linear, lambda width: nn.RMSNorm(width, eps=1e-5), options)  # noqa: E731

    def call(model: LanguageModel, ids: Tensor) -> Tensor:
        x = model.tokens(ids)
        for number in called:
            x = model.layers[number](x)
        return model.head(model.norm(x))

    def filled(name: str) -> str:
        parts = name.split(".")
        return ".".join([parts[0], str(order[int(parts[1])]), *parts[2:]]) if parts[0] == "layers" else name

    with torch.device("meta"):
        names = [name for name, _ in plain().named_parameters()]
    return compared(
        plain,
        lambda te: LanguageModel(te.Linear, te.RMSNorm, options),
        lambda rng: rng.integers(BATCH, 16, high=VOCABULARY),
        precision,
        {name: filled(name) for name in names},
        call_candidate=call,
    )


IN_ORDER = (0, 1, 2)


@pytest.mark.parametrize(
    ("order", "called", "precision", "title", "phrase"),
    [
        ((2, 0, 1), IN_ORDER, "bf16", "layers-permuted", "they hold its layers in the order 1, 2, 0."),
        ((1, 0, 2), IN_ORDER, "bf16", "layers-permuted", "they hold its layers in the order 1, 0, 2."),
        (IN_ORDER, (2, 1, 0), "fp32", "layers-permuted", ""),
        (IN_ORDER, (0, 1, 1), "bf16", "layer-repeated", "call TE's layers.2; the port calls layers.1 again instead"),
    ],
)
def test_layers_that_are_filled_or_called_in_another_order_are_told(order, called, precision, title, phrase):
    tells(ordered(order, called, precision), title, phrase)


# A decoder with mistakes in some of its layers.


@pytest.mark.parametrize(
    ("layers", "port", "title", "phrase"),
    [
        (2, dict(scales=(1.0, 1 / 2)), "softmax-scale", ""),  # divided by each layer's number
        (2, dict(shift=1), "cache-step", ""),  # keys and values come from the previous position
        (2, dict(skipped=(1,)), "branch-missing", "layers.1"),  # recognised by the parameters without gradients
    ],
)
def test_a_scale_by_layer_a_shifted_cache_and_a_layer_that_is_left_out_are_told(layers, port, title, phrase):
    tells(decoders(Options(layers=layers, loss=False), "bf16", **port), title, phrase)


# Experts with wrong activations beside a correct one that all tokens share.

WIDTH, EXPERTS = 64, 3


class Experts(nn.Module):
    """Route each token to one expert besides a shared one; ``act`` is the activation of the routed experts."""

    def __init__(self, linear: Any, act: Any = F.silu) -> None:
        super().__init__()
        self.act = act
        self.experts = nn.ModuleList(Expert(linear, act) for _ in range(EXPERTS))
        self.shared = Expert(linear, F.silu)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [expert(x[number::EXPERTS]) for number, expert in enumerate(self.experts)]
        return torch.stack(outputs, 1).flatten(0, 1) + self.shared(x)


def test_an_activation_of_all_experts_but_the_shared_one_is_told():
    result = compared(lambda: Experts(nn.Linear), lambda te: Experts(te.Linear, F.gelu), normal((16 * EXPERTS, WIDTH)))
    tells(result, "activation", "in experts.0 and 2 more like it")


# Layers of two kinds: some have a window and another RoPE base. All norms store their gain less 1.

HEADS, SEQ, WINDOW = 4, 24, 6
BASES = (1e4, 1e6)


class Norm(nn.Module):
    """RMSNorm that stores its gain less 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


class Layer(nn.Module):
    """Gemma 3's attention, with norms of queries and keys."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.norm, self.q_norm, self.k_norm = map(Norm, (WIDTH, 16, 16))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
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
        self.qkv = te.LayerNormLinear(WIDTH, 3 * WIDTH, bias=False, normalization="RMSNorm", **of_stream)
        self.q_norm, self.k_norm = (te.RMSNorm(16, **of_queries) for _ in range(2))
        self.core = te.DotProductAttention(HEADS, 16, qkv_format="bshd", attention_dropout=0.0, window_size=window)
        self.out = te.Linear(WIDTH, WIDTH, bias=False)
        self.rope = [RotaryEmbedding(16, base)]  # not a submodule, so that it stays in FP32

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        query, key = self.q_norm(query.contiguous()), self.k_norm(key.contiguous())
        query, key = self.rope[0](query).to(x.dtype), self.rope[0](key).to(x.dtype)
        return x + self.out(self.core(query, key, value.contiguous(), attn_mask_type="causal"))


WINDOWS = ((WINDOW - 1, 0), (-1, 0))


def of_two_kinds(
    bases: tuple[float, ...] = BASES,
    windows: tuple[tuple[int, int], ...] = WINDOWS,
    zero_centered: tuple[bool, bool] = (True, True),
    precision: str = "bf16",
) -> parity.Result:
    """Compare both layers with TE's; ``zero_centered`` is for norms of queries and keys, and for the stream's."""
    own = {"norm.weight": "qkv.layer_norm_weight", "qkv.weight": "qkv.weight", "out.weight": "out.weight"}
    own |= {name: name for name in ("q_norm.weight", "k_norm.weight")}
    return compared(
        Model,
        lambda te: nn.Sequential(
            *(TELayer(te, base, window, zero_centered) for base, window in zip(bases, windows, strict=True))
        ),
        normal((2, SEQ, WIDTH)),
        precision,
        {f"layers.{i}.{left}": f"{i}.{right}" for i in range(2) for left, right in own.items()},
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_layers_of_two_kinds_pass(precision):
    assert of_two_kinds(precision=precision).passed


@pytest.mark.parametrize(
    ("port", "title", "phrase", "not_told"),
    [
        (dict(windows=WINDOWS[::-1]), "window", "the port has that of the other layers", "None"),
        (
            dict(bases=(1e4, 1e4)),
            "rope-base",
            "give TE rotary_base=1000000; it rotates with base 10000 in layers.1",
            "layers.0",
        ),
        (
            dict(bases=(1e6, 1e6)),
            "rope-base",
            "give TE rotary_base=10000; it rotates with base 1000000 in layers.0",
            "layers.1",
        ),
        (dict(zero_centered=(False, True)), "gamma-shift", "{i}.k_norm.weight", "layer_norm"),
        (dict(zero_centered=(True, False)), "gamma-shift", "{i}.qkv.layer_norm_weight", "k_norm"),
    ],
)
def test_what_one_kind_of_layers_has_of_the_other_is_told_of_this_kind_alone(port, title, phrase, not_told):
    result = of_two_kinds(**port)
    tells_only(result, title, phrase)
    assert not_told not in result.findings[0].message
