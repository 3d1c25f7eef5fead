"""A norm and an MLP: fused in one TE module, and composed of two where TE has no such activation."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from parity import reference
from parity.case.case import Pair
from parity.case.weight_map import WeightMap, stack
from parity.lab.zoo.hosts.case import host
from parity.lab.zoo.planting import construct

SMALL = dict(batch=2, seq=32, hidden=64, ffn=128)
LARGE = dict(batch=2, seq=128, hidden=256, ffn=512)
# Of the first layer's weights where activations must reach the limit of a clamped SwiGLU, 7.
CLAMPING_GAIN = 10.0

PLAIN_WEIGHTS: WeightMap = {
    "norm.weight": "layer_norm_weight",
    "norm.bias": "layer_norm_bias",
    "up_proj.weight": "fc1_weight",
    "up_proj.bias": "fc1_bias",
    "down_proj.weight": "fc2_weight",
    "down_proj.bias": "fc2_bias",
}
GATED_WEIGHTS: WeightMap = {
    "norm.weight": "layer_norm_weight",
    stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
    "down_proj.weight": "fc2_weight",
}


class ErfMLP(nn.Module):
    """``down(gelu(up(layer_norm(x))))`` with PyTorch's default GELU, as in BERT."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up_proj = nn.Linear(hidden, ffn)
        self.down_proj = nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same."""
        return self.down_proj(F.gelu(self.up_proj(self.norm(x))))


class ComposedMLP(nn.Module):
    """TE's two linear layers with any activation between them."""

    def __init__(self, te: ModuleType, hidden: int, ffn: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1 = te.LayerNormLinear(hidden, ffn)
        self.fc2 = te.Linear(ffn, hidden)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same."""
        return self.fc2(self.activation(self.fc1(x)))


@host("gelu_mlp", SMALL, LARGE)
def gelu_mlp(te: ModuleType, hidden: int, ffn: int, **_: Any) -> Pair:
    return Pair(
        reference=reference.MLP(hidden, ffn, "gelu"),
        candidate=construct(te.LayerNormMLP, hidden, ffn),
        weights=PLAIN_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@host("erf_gelu_mlp", SMALL, LARGE)
def erf_gelu_mlp(te: ModuleType, hidden: int, ffn: int, **_: Any) -> Pair:
    return Pair(
        reference=ErfMLP(hidden, ffn),
        candidate=ComposedMLP(te, hidden, ffn, F.gelu),
        weights={
            "norm.weight": "fc1.layer_norm_weight",
            "norm.bias": "fc1.layer_norm_bias",
            "up_proj.weight": "fc1.weight",
            "up_proj.bias": "fc1.bias",
            "down_proj.weight": "fc2.weight",
            "down_proj.bias": "fc2.bias",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@host("swiglu_mlp", SMALL, LARGE)
def swiglu_mlp(te: ModuleType, hidden: int, ffn: int, **_: Any) -> Pair:
    return Pair(
        reference=reference.SwiGLUMLP(hidden, ffn),
        candidate=construct(te.LayerNormMLP, hidden, ffn, normalization="RMSNorm", activation="swiglu", bias=False),
        weights=GATED_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@host("clamped_swiglu_mlp", SMALL, LARGE)
def clamped_swiglu_mlp(te: ModuleType, hidden: int, ffn: int, **_: Any) -> Pair:
    mlp = reference.GatedMLP(hidden, ffn, "clamped_swiglu")
    for projection in (mlp.gate_proj, mlp.up_proj):
        projection.weight.data.mul_(CLAMPING_GAIN)
    return Pair(
        reference=mlp,
        candidate=construct(
            te.LayerNormMLP, hidden, ffn, normalization="RMSNorm", activation="clamped_swiglu", bias=False
        ),
        weights=GATED_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


HOSTS = (gelu_mlp, erf_gelu_mlp, swiglu_mlp, clamped_swiglu_mlp)
