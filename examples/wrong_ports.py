"""Ports that are wrong on purpose, some beside a right port, to see how a report shows failures.

docs/reading-a-report.md has pictures of the report of ``parity run examples/wrong_ports.py -p fp32,bf16``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

import parity
from parity.reference import LlamaLayer, SwiGLUMLP

MLP = [dict(batch=2, seq=64, hidden=128, ffn=384)]
MODEL = [dict(layers=6, batch=2, seq=32, hidden=64, ffn=128, heads=4, groups=2)]


@parity.pair("norm_linear_eps", sizes=[dict(tokens=64, hidden=128)])
def norm_linear_eps(te: ModuleType, hidden: int, **_: Any) -> parity.Pair:
    """Return a wrong port with TE's default eps, 1e-5, although the model has 1e-6."""
    return parity.Pair(
        reference=nn.Sequential(nn.RMSNorm(hidden, eps=1e-6), nn.Linear(hidden, hidden, bias=False)),
        candidate=te.LayerNormLinear(hidden, hidden, normalization="RMSNorm", bias=False),
        weights={"0.weight": "layer_norm_weight", "1.weight": "weight"},
        inputs=lambda rng, tokens: rng.normal(tokens, hidden),
    )


def _mlp(te: ModuleType, hidden: int, ffn: int, halves: tuple[str, str]) -> parity.Pair:
    return parity.Pair(
        reference=SwiGLUMLP(hidden, ffn),
        candidate=te.LayerNormMLP(hidden, ffn, normalization="RMSNorm", activation="swiglu", bias=False),
        weights={
            "norm.weight": "layer_norm_weight",
            parity.stack(*halves): "fc1_weight",
            "down_proj.weight": "fc2_weight",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@parity.pair("mlp", sizes=MLP)
def mlp(te: ModuleType, hidden: int, ffn: int, **_: Any) -> parity.Pair:
    """Return a right port of an MLP."""
    return _mlp(te, hidden, ffn, ("gate_proj.weight", "up_proj.weight"))


@parity.pair("mlp_halves_exchanged", sizes=MLP)
def mlp_halves_exchanged(te: ModuleType, hidden: int, ffn: int, **_: Any) -> parity.Pair:
    """Return a wrong port, in which the gate's rows come after those of the other half."""
    return _mlp(te, hidden, ffn, ("up_proj.weight", "gate_proj.weight"))


class Model(nn.Module):
    """Layers one after the other, each of which gets all further arguments."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, **given)
        return x


LAYER = {
    "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "attention.q_proj.weight": "self_attention.layernorm_qkv.query_weight",
    "attention.k_proj.weight": "self_attention.layernorm_qkv.key_weight",
    "attention.v_proj.weight": "self_attention.layernorm_qkv.value_weight",
    "attention.o_proj.weight": "self_attention.proj.weight",
    "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
    parity.stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
    "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
}


def _model(te: ModuleType, wrong: dict[int, dict[str, Any]], **size: int) -> parity.Pair:
    layers, hidden, ffn, heads, groups = (size[name] for name in ("layers", "hidden", "ffn", "heads", "groups"))
    rope = te.RotaryPositionEmbedding(hidden // heads)
    right = dict(normalization="RMSNorm", activation="swiglu", bias=False, hidden_dropout=0.0, attention_dropout=0.0)
    right |= dict(num_gqa_groups=groups, attn_input_format="bshd", self_attn_mask_type="causal")
    return parity.Pair(
        reference=Model([LlamaLayer(hidden, ffn, heads, groups) for _ in range(layers)]),
        candidate=Model([te.TransformerLayer(hidden, ffn, heads, **right | wrong.get(i, {})) for i in range(layers)]),
        weights={
            f"layers.{i}.{ours}"
            if isinstance(ours, str)
            else parity.stack(f"layers.{i}.mlp.gate_proj.weight", f"layers.{i}.mlp.up_proj.weight"): f"layers.{i}.{tes}"
            for i in range(layers)
            for ours, tes in LAYER.items()
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
        call_candidate=lambda model, x: model(x, rotary_pos_emb=rope(x.shape[1])),
    )


@parity.pair("model", sizes=MODEL)
def model(te: ModuleType, **size: int) -> parity.Pair:
    """Return a right port of six layers."""
    return _model(te, {}, **size)


@parity.pair("model_window_in_a_layer", sizes=MODEL)
def model_window_in_a_layer(te: ModuleType, **size: int) -> parity.Pair:
    """Return a wrong port, in which the fifth layer sees only the 16 tokens before each token."""
    return _model(te, {4: dict(window_size=(16, 0))}, **size)
