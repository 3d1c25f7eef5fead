"""Residual streams: branches in another order or in parallel, gates and factors of terms, and sums with a norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.port import Port
from lab.corpus.small import Host, normal, twins
from parity import reference

WIDTH = 64

# Branches in the wrong order or in parallel.

SEQ = 32
Order = Literal["right", "exchanged", "beside"]


class Mixer(nn.Module):
    """Two branches, one of which mixes tokens and the other channels."""

    def __init__(self, linear: Any, order: Order) -> None:
        super().__init__()
        self.order = order
        self.of_tokens, self.of_channels = linear(SEQ, SEQ), linear(WIDTH, WIDTH)

    def tokens(self, x: Tensor) -> Tensor:
        return self.of_tokens(F.silu(x).mT).mT

    def channels(self, x: Tensor) -> Tensor:
        return self.of_channels(F.gelu(x, approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "beside":
            return x + self.tokens(x) + self.channels(x)
        if self.order == "exchanged":
            x = x + self.channels(x)
            return x + self.tokens(x)
        x = x + self.tokens(x)
        return x + self.channels(x)


def build_mixers(linear: Any, order: Order = "right") -> nn.Module:
    return nn.Sequential(*(Mixer(linear, order) for _ in range(2)))


MIXERS = twins(build_mixers, normal((2, SEQ, WIDTH)), "mixers")
TOKENS_FIRST = (
    "compute the branch that ends with the 1st 'linear' of 0.of_tokens before the branch that ends with the 1st "
    "'linear' of 0.of_channels, as the reference does, and so for 1 more"
)


# Branches scaled by a gate, the first factor, before they are added, as in Llama 3.2's cross-attention layers.


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


class Gated(nn.Module):
    """Two gated branches; ``mistake`` names the port's mistake."""

    def __init__(self, linear: Any, mistake: str) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(linear(WIDTH, 2 * WIDTH), nn.SiLU(), linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.gates = nn.ParameterList(nn.Parameter(torch.rand(1) + 0.4) for _ in self.branches)
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        squashed = {"no tanh": lambda gate: gate, "sigmoid": torch.sigmoid}.get(self.mistake, torch.tanh)
        for i, (branch, gate) in enumerate(zip(self.branches, self.gates, strict=True)):
            y = branch(x)
            if self.mistake == "norm before the gate" and i == 0:
                y = rms_norm(y)
            y = squashed(gate) * y
            x = y if self.mistake == "no residual" and i == 1 else y + x
            if self.mistake == "norm after the sum" and i == 1:
                x = rms_norm(x)
        return x


def build_gated(linear: Any, first: str = "", second: str = "") -> nn.Module:
    return nn.Sequential(Gated(linear, first), Gated(linear, second))


GATED = twins(build_gated, normal((2, 24, WIDTH)), "gated_branches")


# A factor of one term of a sum, which the port applies to the other term.


class LayerScale(nn.Module):
    """CaiT's LayerScale: a gain on each branch."""

    def __init__(self, linear: Any, of_stream: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(2))
        self.gains = nn.ParameterList(nn.Parameter(torch.rand(WIDTH) + 0.2) for _ in self.layers)
        self.of_stream = of_stream

    def forward(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = x * gain + layer(x) if self.of_stream else x + gain * layer(x)
        return x


class Highway(nn.Module):
    """Srivastava's highway gate between a layer's result and its input."""

    def __init__(self, linear: Any, of_stream: bool = False) -> None:
        super().__init__()
        self.layer, self.gate, self.of_stream = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), of_stream

    def forward(self, x: Tensor) -> Tensor:
        gate, y = self.gate(x).sigmoid(), self.layer(x).tanh()
        return gate * x + (1 - gate) * y if self.of_stream else gate * y + (1 - gate) * x


LAYER_SCALE, HIGHWAY = (twins(module, normal((2, 24, WIDTH))) for module in (LayerScale, Highway))


# Terms of a sum that a port multiplies by another number, or leaves out.


class SharedExpert(nn.Module):
    """A routed MLP and a shared one, as in mixtures of experts; returns the sum or its mean square."""

    def __init__(self, linear: Any, shared: float = 1.0, routed: float = 1.0, loss: bool = False) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 96, bias=False), linear(96, WIDTH, bias=False)
        self.shared_up, self.shared_down = linear(WIDTH, 96, bias=False), linear(96, WIDTH, bias=False)
        self.shared, self.routed, self.loss = shared, routed, loss

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.silu(self.up(x)))
        y = y if self.routed == 1.0 else y * self.routed
        if self.shared:
            z = self.shared_down(F.silu(self.shared_up(x)))
            y = y + (z if self.shared == 1.0 else z * self.shared)
        return y.square().mean() if self.loss else y


SHARED = twins(SharedExpert, normal((64, WIDTH)))
SHARED_LOSS = twins(SharedExpert, normal((64, WIDTH)), "shared_expert_with_loss", settings=dict(loss=True))


class LowRank(nn.Module):
    """A linear layer with a scaled low-rank addition."""

    def __init__(self, linear: Any, scale: float) -> None:
        super().__init__()
        self.base, self.a, self.b = linear(WIDTH, WIDTH), linear(WIDTH, 16), linear(16, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * self.scale


LOW_RANK = twins(LowRank, normal((2, 32, WIDTH)), settings=dict(scale=2.0))


class Multiplied(nn.Module):
    """Branches that are multiplied by one number before they are added to the stream, as in Granite."""

    def __init__(self, linear: Any, layers: int, residual: float) -> None:
        super().__init__()
        self.layers, self.residual = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(layers)), residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * self.residual
        return x


# FP8's noise in the outputs hides so small a difference.
OF_TWO, OF_THREE = (
    twins(Multiplied, normal((512, WIDTH)), f"multiplied_branches_{layers}", settings=settings)
    for layers, residual in ((2, 0.25), (3, 0.4))
    if (settings := dict(layers=layers, residual=residual))
)


# Sums that skip a norm.


class PostNormLayer(nn.Module):
    """A layer like BERT's, whose norms come after the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = reference.Attention(WIDTH, 4, 4, bias=True, rope=False)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.last_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.attention(x))
        return self.last_norm(x + self.down(nn.functional.gelu(self.up(x), approximate="tanh")))


def map_post_norm() -> Mapping[Any, Any]:
    names = {f"attention.{name[0]}_proj.": f"self_attention.qkv.{name}_" for name in ("query", "key", "value")}
    names |= {"norm.": "layernorm_mlp.layer_norm_", "up.": "layernorm_mlp.fc1_", "down.": "layernorm_mlp.fc2_"}
    names |= {"attention.o_proj.": "self_attention.proj.", "last_norm.": "layernorm."}
    return {left + kind: right + kind for left, right in names.items() for kind in ("weight", "bias")}


POST_NORM = Host(
    "post_norm_layer",
    PostNormLayer,
    lambda te, after_norm=True: te.TransformerLayer(
        WIDTH,
        96,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        output_layernorm=True,
        apply_residual_connection_post_layernorm=after_norm,
    ),
    normal((2, SEQ, WIDTH)),
    weights=map_post_norm(),
)

PORTS: tuple[Port, ...] = (
    *(host.right() for host in (MIXERS, GATED, LAYER_SCALE, HIGHWAY, LOW_RANK, POST_NORM)),
    MIXERS.wrong("operation", TOKENS_FIRST, order="exchanged"),
    MIXERS.wrong("parallel-block", "both are computed from one input", order="beside"),
    GATED.wrong("operation", "the 1st 'tanh' of 0 and of 3 more like it", first="no tanh", second="no tanh"),
    GATED.wrong("operation", "it is sigmoid", first="sigmoid", second="sigmoid"),
    GATED.wrong("norm-missing", "a RMSNorm comes before in 0 (sum 1)", first="norm before the gate"),
    GATED.wrong("norm-missing", "a RMSNorm comes after it in 0 (sum 2)", first="norm after the sum"),
    GATED.wrong("residual-placement", "return the branch alone", first="no residual"),
    LAYER_SCALE.wrong("operation", "in the port, each has the other's factor", of_stream=True),
    HIGHWAY.wrong("operation", "in the port, each has the other's factor", of_stream=True),
    SHARED.wrong("factor", "the port multiplies it by 0.5", shared=0.5),
    SHARED.wrong("factor", "the port's is 2.5 times that", routed=2.5, precisions=("fp16",)),
    SHARED_LOSS.wrong("factor", shared=0.5, precisions=("bf16",)),
    SHARED_LOSS.wrong("factor", routed=2.5, precisions=("fp8_current",)),
    SHARED.wrong(
        "branch-missing",
        "shared_down.weight, shared_up.weight",
        shared=0.0,
        precisions=("fp32", "fp8_current"),
        others=True,
    ),
    LOW_RANK.wrong("factor", "multiply by 2, as the reference does; in all, the port multiplies by 1", scale=1.0),
    LOW_RANK.wrong("factor", "multiply by 2, as the reference does; in all, the port multiplies by 2.2", scale=2.2),
    OF_TWO.wrong("factor", "the port multiplies by 0.24", residual=0.24, precisions=("fp8_current",)),
    OF_THREE.wrong("factor", "the port multiplies by 0.42", residual=0.42, precisions=("fp8_current",)),
    POST_NORM.wrong("residual-placement", after_norm=False),
)
